"""What new heads and drafts get from the target and the data: the tokens that they can write, and fitted initial
weights.

First weights of heads and Markov biases are fitted by least squares to the target's own states. An lm_head predicts
well from inputs that resemble the target's own last states. Therefore this regression is already a speculator: y = A_k
x + a_k + T[b] for head k, where y is the state from which the target predicts a token, x is the state that the head
reads, and b is the token before the predicted token. Measured on SmolLM2-135M-Instruct, the regression's acceptance at
the first token is 0.35 after one pass over 58,000 tokens, whereas 90 steps of gradient descent from the identity reach
0.27. Training starts from this regression. T is the same for all heads. If the rank of T is r, T becomes a
`decoding.model.markov.MarkovBias` when the lm_head is applied.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids
from decoding.model.markov import MarkovBias
from decoding.model.vocabulary import most_frequent_tokens
from trainer.data.batch import Example, collate, flat_rows
from trainer.processes import Process
from trainer.target.loading import HiddenStates

# --- vocabularies -----------------------------------------------------------------------------------------------------


def most_frequent_trained(
    count: int,
    known: int,
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    setting: str = "draft.vocabulary",
) -> tuple[int, ...]:
    """Return ``count`` tokens below ``known``: all tokens that end a text, and the most frequent tokens of the training
    answers.

    ``setting`` is the recipe's key for ``count``, which messages name.
    """
    if count > known:
        raise UserError(f"{setting} is {count} but target and drafter share only {known} tokens: lower this value")
    ends = {*eos_token_ids(target.model, tokenizer)}
    if tokenizer.eos_token_id is not None:
        ends.add(tokenizer.eos_token_id)
    always = sorted(token for token in ends if token < known)
    if count < len(always):
        raise UserError(f"{setting} is {count}: set it above {len(always)}, because so many tokens can end a text")
    texts = [predicted[predicted < known].tolist() for predicted in map(Example.predicted, examples)]
    if not any(texts):
        raise UserError(f"{setting} chooses tokens from answers, but the data has only prompts: omit this key")
    return most_frequent_tokens(texts, count, known, always)


def say_coverage(
    process: Process, drafter: str, examples: Sequence[Example], tokens: Int[Tensor, " outputs"] | None
) -> None:
    """If a drafter has a reduced vocabulary, print what share of the tokens in the training answers it can write."""
    if tokens is not None and process.is_first:
        written = [np.isin(example.predicted(), tokens.cpu().numpy()) for example in examples]
        count = sum(map(len, written))
        share = sum(int(marks.sum()) for marks in written) / count if count else 1.0
        process.say(f"{drafter} can write {len(tokens):,} tokens, which cover {share:.1%} of the tokens to be learned")


# --- least squares ----------------------------------------------------------------------------------------------------

_TOGETHER = 4096
"""Number of tokens that run together, enough to keep a GPU busy."""
_RIDGE = 0.1
"""Penalty on A, relative to the mean variance of x, because few tokens have to fit a square matrix."""
_SPREAD = 3.0
"""Root mean square of the embedding of a fitted bias, the same as in a random bias (`MedusaHeads`)."""


class Start(NamedTuple):
    """Initial weights, on the CPU: the weights of the heads' linear maps, and T as a product of two matrices."""

    maps: Float[Tensor, "heads hidden hidden"]
    """A_k, from x (columns) to y (rows)."""
    shifts: Float[Tensor, "heads hidden"]
    tokens: Int[Tensor, " known"]
    """The previous tokens b that occur, in increasing order."""
    coefficients: Float[Tensor, "known rank"]
    """The rows of T's first factor for these tokens; the first column is the same for all tokens."""
    directions: Float[Tensor, "hidden rank"]


class Fit(NamedTuple):
    """The coefficients of the regression, in fp32."""

    maps: Float[Tensor, "heads hidden hidden"]
    shifts: Float[Tensor, "heads hidden"]
    tokens: Int[Tensor, " known"]
    counts: Float[Tensor, " known"]
    means: Float[Tensor, "known hidden"]
    """T[b]."""

    def start(self, rank: int) -> Start:
        """Approximate T by a matrix of this rank. One direction is the mean of T's rows, and the others are their
        principal components.
        """
        share = (self.counts / self.counts.sum().clamp(min=1))[:, None]
        mean = (share * self.means).sum(0)
        apart = self.means - mean
        components = torch.linalg.eigh((share * apart).T @ apart).eigenvectors.flip(1)[:, : rank - 1]
        length = mean.norm().clamp(min=1e-6)
        coefficients = torch.cat((length.expand(len(apart), 1), apart @ components), 1)
        factor = _SPREAD / coefficients.square().mul(share).sum(0).mean().sqrt().clamp(min=1e-6)
        directions = torch.cat((mean[:, None] / length, components), 1) / factor
        return Start(
            *(tensor.cpu() for tensor in (self.maps, self.shifts, self.tokens, coefficients * factor, directions))
        )


@torch.no_grad()
def fit_states(states: HiddenStates, examples: Sequence[Example], heads: int, most: int) -> Fit:
    """Fit ``heads`` heads on evenly spaced examples with at most about ``most`` tokens; with 0 heads, fit only T.

    T[b] is shrunk towards the mean over all tokens, as if every token had been seen once more with this mean. Each
    state is read once. Only sums are kept: for each head, two sums of shape (hidden, hidden) and two sums of shape
    (known tokens, hidden).
    """
    size, device = sum(len(example.tokens) for example in examples), states.lm_head.device
    chosen = range(0, len(examples), max(1, -(-size // most)))
    written = np.unique(np.concatenate([examples[index].tokens for index in chosen]))
    tokens, sums, rows = torch.from_numpy(written).long().to(device), list[_Sums](), list[int]()
    for index in chosen:
        rows.append(index)
        if sum(len(examples[row].tokens) for row in rows) < _TOGETHER and index != chosen[-1]:
            continue
        on_host = collate([examples[row] for row in rows], rows)
        rows, batch = [], on_host.to(device)
        hidden = states.hidden(batch).float()
        sums = sums or [_Sums(len(tokens), hidden.shape[-1], device) for _ in range(max(heads, 1))]
        for head, of_head in enumerate(sums):
            at = on_host.label_positions(head + 2).to(device)
            before = torch.searchsorted(tokens, batch.tokens.flatten()[at + head + 1])
            of_head.add(flat_rows(hidden, at), flat_rows(hidden, at + head + 1), before)
    within = sums[0].map_within_tokens() if heads else torch.zeros_like(sums[0].xx)
    means = sums[0].residual_means(within)
    maps, shifts = within.new_zeros(heads, *within.shape), within.new_zeros(heads, len(within))
    for head, of_head in enumerate(sums[:heads]):
        maps[head], shifts[head] = of_head.map_given(means)
    return Fit(maps, shifts, tokens, sums[0].counts, means)


class _Sums:
    """Sums of one head over its pairs (x, y), overall and for each previous token."""

    def __init__(self, tokens: int, hidden: int, device: torch.device) -> None:
        self.xx, self.xy = (torch.zeros(hidden, hidden, device=device) for _ in range(2))
        self.x, self.y = (torch.zeros(tokens, hidden, device=device) for _ in range(2))
        self.counts = torch.zeros(tokens, device=device)

    def add(self, x: Tensor, y: Tensor, before: Tensor) -> None:
        self.xx.addmm_(x.T, x)
        self.xy.addmm_(x.T, y)
        self.x.index_add_(0, before, x)
        self.y.index_add_(0, before, y)
        self.counts += before.bincount(minlength=len(self.counts))

    def map_within_tokens(self) -> Float[Tensor, "hidden hidden"]:
        """Return A (x A = y) with a free mean for each token: a regression of deviations from the tokens' means."""
        means = self.x / self.counts.clamp(min=1)[:, None]
        return _ridge(self.xx - means.T @ self.x, self.xy - means.T @ self.y)

    def residual_means(self, of_x: Float[Tensor, "hidden hidden"]) -> Float[Tensor, "tokens hidden"]:
        """Return each token's mean of y - x A, shrunk towards the mean over all tokens."""
        rest = self.y - self.x @ of_x
        overall = rest.sum(0) / self.counts.sum().clamp(min=1)
        return (rest + overall) / (self.counts + 1)[:, None]

    def map_given(self, means: Float[Tensor, "tokens hidden"]) -> tuple[Tensor, Tensor]:
        """Return A and a of the regression of y - T[b] on x."""
        count = self.counts.sum().clamp(min=1)
        x, y = self.x.sum(0) / count, (self.y.sum(0) - self.counts @ means) / count
        of_x = _ridge(self.xx - count * torch.outer(x, x), self.xy - self.x.T @ means - count * torch.outer(x, y))
        return of_x.T, y - x @ of_x


def _ridge(xx: Float[Tensor, "hidden hidden"], xy: Float[Tensor, "hidden hidden"]) -> Float[Tensor, "hidden hidden"]:
    penalty = _RIDGE * xx.diagonal().mean().clamp(min=torch.finfo(xx.dtype).tiny)
    damped = (xx + penalty * torch.eye(len(xx), device=xx.device)).double()
    solved: Tensor = torch.linalg.solve(damped, xy.double())
    return solved.float()


@torch.no_grad()
def start_bias(bias: MarkovBias, start: Start, lm_head: Float[Tensor, "outputs hidden"]) -> None:
    """Set a bias to T mapped by ``lm_head``; tokens that never occurred get the mean over all tokens."""
    columns, weight = start.coefficients.shape[1], bias.embedding.weight
    bias.output.weight[:, :columns] = (lm_head.float() @ start.directions.to(lm_head.device)).to(bias.output.weight)
    weight[:, 0], weight[:, 1:columns] = float(start.coefficients[0, 0]), 0.0
    weight[start.tokens.to(weight.device), :columns] = start.coefficients.to(weight)
