"""From logits to probabilities, and from probabilities to tokens: one copy for the target and the draft.

The controls are applied in the order `transformers` applies them: repetition penalty, temperature, top-k, top-p, min-p.
Probabilities are fp32 (or wider, if the logits are), whatever the dtype of the model.
"""

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from decoding.tree import TokenTree


@dataclass(frozen=True)
class SamplingConfig:
    """Sampling controls, with `transformers`' meanings. Temperature 0 is greedy decoding."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        if self.temperature < 0:
            raise ValueError(f"temperature is {self.temperature}: give 0 for greedy decoding, or a positive number")
        if self.top_k < 0:
            raise ValueError(f"top_k is {self.top_k}: give 0 to switch it off, or a positive number of tokens")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}: give a share of probability in (0, 1]")
        if not 0 <= self.min_p < 1:
            raise ValueError(f"min_p is {self.min_p}: give a share of the best token's probability in [0, 1)")
        if self.repetition_penalty <= 0:
            raise ValueError(f"repetition_penalty is {self.repetition_penalty}: give a positive number, 1 for none")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalises(self) -> bool:
        """Whether the distribution depends on which tokens came before, beyond what the model reads."""
        return self.repetition_penalty != 1


def seen_tokens(prefix_seen: Bool[Tensor, " vocab"], tree: TokenTree) -> Bool[Tensor, "nodes vocab"]:
    """For each node, the tokens seen when the token after it is chosen: the prefix and the path, the node included."""
    seen = prefix_seen.repeat(len(tree), 1)
    for node, parent in enumerate(tree.shape.parents):
        if parent >= 0:
            seen[node] |= seen[parent]
        seen[node, tree.token_list[node]] = True
    return seen


def penalised_logits(
    logits: Float[Tensor, "rows vocab"], sampling: SamplingConfig, seen: Bool[Tensor, "rows vocab"] | None
) -> Float[Tensor, "rows vocab"]:
    """Logits after the penalties, which is what greedy decoding takes its argmax of. ``seen`` as in `seen_tokens`."""
    if not sampling.penalises:
        return logits
    assert seen is not None, "a repetition penalty needs the tokens seen"
    logits = logits if logits.dtype == torch.float64 else logits.float()
    penalty = sampling.repetition_penalty
    return torch.where(seen, torch.where(logits < 0, logits * penalty, logits / penalty), logits)


def probabilities(
    logits: Float[Tensor, "rows vocab"], sampling: SamplingConfig, seen: Bool[Tensor, "rows vocab"] | None = None
) -> Float[Tensor, "rows vocab"]:
    """The distribution each row is sampled from, after every control; at temperature 0 all mass is on the argmax."""
    logits = penalised_logits(logits, sampling, seen)
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if sampling.greedy:
        one_hot = torch.zeros_like(logits)
        return one_hot.scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / sampling.temperature if sampling.temperature != 1 else logits
    if 0 < sampling.top_k < logits.shape[-1]:
        kth_best = logits.topk(sampling.top_k).values[..., -1:]
        logits = logits.masked_fill(logits < kth_best, -torch.inf)
    if sampling.top_p < 1:
        logits = _nucleus(logits, sampling.top_p)
    if sampling.min_p > 0:
        shares = logits.softmax(-1)
        logits = logits.masked_fill(shares < sampling.min_p * shares.amax(-1, keepdim=True), -torch.inf)
    return logits.softmax(-1)


def _nucleus(logits: Float[Tensor, "rows vocab"], top_p: float) -> Float[Tensor, "rows vocab"]:
    """Keep the smallest set of most probable tokens whose mass reaches ``top_p`` (always at least one)."""
    ascending, order = logits.sort(descending=False)
    dropped = ascending.softmax(-1).cumsum(-1) <= 1 - top_p
    dropped[..., -1] = False
    return logits.masked_fill(dropped.scatter(-1, order, dropped), -torch.inf)


@runtime_checkable
class RandomSource(Protocol):
    """Where chance comes from: a generator when decoding, an enumerator of every outcome in the proofs."""

    def accept(self, probability: float) -> bool:
        """True with ``min(1, probability)``; never true at 0."""

    def draw(self, weights: Float[Tensor, " vocab"]) -> int:
        """An index drawn in proportion to ``weights``, which need not sum to 1; never one of weight 0."""


class GeneratorSource:
    """Chance from a `torch.Generator` on the host, so that a seed gives the same tokens on every device."""

    def __init__(self, generator: torch.Generator) -> None:
        self._generator = generator

    def _uniform(self) -> float:
        return torch.rand((), generator=self._generator, dtype=torch.float64).item()

    def accept(self, probability: float) -> bool:
        return self._uniform() < probability

    def draw(self, weights: Float[Tensor, " vocab"]) -> int:
        # On the host: the same tokens on every device, and a sum that never falls from one entry to the next.
        cumulative = weights.to("cpu", torch.float64).cumsum(-1)
        # right=True finds the first entry strictly above the threshold, which cannot have weight 0.
        threshold = cumulative[-1] * self._uniform()
        return int(torch.searchsorted(cumulative, threshold, right=True))


def draw_without_replacement(
    weights: Float[Tensor, " vocab"], count: int, source: RandomSource
) -> Int[Tensor, " drawn"]:
    """Up to ``count`` distinct indices in draw order, each drawn from what is left; fewer when the mass runs out."""
    weights = weights.clone()
    drawn: list[int] = []
    while len(drawn) < count and bool((weights > 0).any()):
        drawn.append(source.draw(weights))
        weights[drawn[-1]] = 0
    return torch.tensor(drawn, dtype=torch.long)
