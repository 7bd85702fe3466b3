"""The loss terms of drafts and heads, with gradients in closed form; the teachers; and the groups of rows that share a
label.

The tests compare `TokenDivergences` with readable formulas.

- ``forward_kl``: KL(p‖q) of the target's p and the draft's q.
- ``acceptance``: -log Σ min(p, q) (LK losses, 2602.23881).
- ``total_variation``: 1 - Σ min(p, q), half of DSpark's L1 distance (2607.05147).

Terms are not scaled by temperature squared. If the draft can write only a set S of tokens, sums run over S and p is not
renormalised: ``forward_kl`` is p(S) KL(p_S‖q), with p_S the target's distribution on S. The other terms count the
probability of tokens outside S as lost.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from decoding.errors import UserError
from trainer.recipe.common import Divergence, LossSection, Term


class LabelGroups(NamedTuple):
    """The rows of hidden states, grouped by label: each label is predicted by one or more consecutive rows."""

    ends: Int[np.ndarray, " groups"]
    """The number of rows up to and including each group.

    The array is on the host, because chunk sizes must not wait for a GPU.
    """
    of_rows: Int[Tensor, " rows"]
    """The group of each row, in increasing order."""

    @staticmethod
    def of(positions: Int[Tensor, " rows"]) -> "tuple[Int[Tensor, ' rows'], Int[Tensor, ' groups'], LabelGroups]":
        """Return an order of the rows in which rows with the same position are neighbours, the distinct positions, and
        the groups.
        """
        order = positions.argsort(stable=True)
        distinct, of_rows, repeats = positions[order].unique_consecutive(return_inverse=True, return_counts=True)
        return order, distinct, LabelGroups(repeats.cumsum(0).numpy(force=True), of_rows)


class GroupedRows:
    """The rows of a loss, with the group and weight of each row and the label of each group."""

    def __init__(
        self, labels: Int[Tensor, " groups"], groups: LabelGroups | None, weights: Float[Tensor, " rows"] | None
    ) -> None:
        self.labels, self.weights, self._groups = labels, weights, groups
        self.ends = np.arange(1, len(labels) + 1) if groups is None else groups.ends

    def spans(self, most: int, groups: slice | None = None) -> Iterator[tuple[slice, slice]]:
        """Yield slices of consecutive groups and of their rows: at most ``most`` rows, or all rows of one group."""
        first, stop = (0, len(self.ends)) if groups is None else (groups.start, groups.stop)
        while first < stop:
            row = int(self.ends[first - 1]) if first else 0
            last = min(stop, max(first + 1, int(self.ends.searchsorted(row + most, "right"))))
            yield slice(first, last), slice(row, int(self.ends[last - 1]))
            first = last

    def repeat(self, of_groups: Tensor, groups: slice, rows: slice) -> Tensor:
        """Repeat the value of each of these groups for each row of the group."""
        if self._groups is None:
            return of_groups
        return of_groups.index_select(0, self._groups.of_rows[rows] - groups.start)

    def summed(self, of_rows: Float[Tensor, "rows outputs"], groups: slice, rows: slice) -> Tensor:
        """Return the sum over each group's rows.

        A product is used, because `index_add` on a GPU adds in random order.
        """
        if self._groups is None:
            return of_rows
        group = torch.arange(groups.start, groups.stop, device=of_rows.device)
        return (group[:, None] == self._groups.of_rows[rows]).to(of_rows) @ of_rows


@dataclass(frozen=True)
class LossMix:
    """Weights and temperature of a loss's terms on the logits, already checked by the recipe."""

    weights: Mapping[Term, float]
    temperature: float = 1.0
    """Divides the logits of target and draft in the divergences, but not in the cross entropy."""

    @staticmethod
    def of(section: LossSection) -> "LossMix":
        """Return the weights and the temperature that a recipe sets."""
        return LossMix(section.mix, section.temperature)

    @property
    def soft(self) -> bool:
        """True if a term needs the target's distribution."""
        return self.weights.keys() != {"cross_entropy"}


class Pulled(NamedTuple):
    """The value of a loss term at each token, with the pulls of the term: -q ∂term/∂q at each outcome.

    The gradient of the logits of q is q Σ pull - pull.
    """

    value: Float[Tensor, " rows"]
    pull: Float[Tensor, "rows outcomes"]


class Softmax(NamedTuple):
    """The softmax of some rows, with one exponential per logit (log_softmax needs a second exponential)."""

    scores: Float[Tensor, "rows outcomes"]
    q: Float[Tensor, "rows outcomes"]
    log_total: Float[Tensor, "rows 1"]
    """Logsumexp over all outputs; the outcomes may be only some of the outputs."""

    @staticmethod
    def of(scores: Float[Tensor, "rows outputs"]) -> "Softmax":
        q = scores.softmax(-1)
        return Softmax(scores, q, scores.amax(-1, keepdim=True) - q.amax(-1, keepdim=True).log())

    def at(self, outputs: Int[Tensor, "rows chosen"]) -> "Softmax":
        """Return the same softmax, restricted to some outputs of each row."""
        return self._replace(scores=self.scores.gather(1, outputs), q=self.q.gather(1, outputs))

    @property
    def log_q(self) -> Float[Tensor, "rows outcomes"]:
        return self.scores - self.log_total


class TokenDivergences:
    """The loss terms of some tokens, computed from p and q on the outcomes. Shared parts are computed once.

    Without ``weights`` the outcomes are all tokens that the draft can write. With ``weights`` the outcomes are a sample
    with repeats, whose weighted sums estimate sums over all tokens without bias. With a sample, ``forward_kl`` (up to a
    constant in p(S)) and its gradient are unbiased; ``acceptance``, which is a function of such a sum, converges as the
    sample grows.
    """

    def __init__(
        self,
        log_p: Float[Tensor, "groups outcomes"],
        soft: Softmax,
        repeat: Callable[[Tensor], Tensor] = lambda of_groups: of_groups,
        weights: Float[Tensor, "groups outcomes"] | None = None,
        whole: bool = False,
    ) -> None:
        """Compare p with q.

        ``repeat`` is a function that repeats the values of groups for the rows of q. ``whole`` means that the draft can
        write every token and that p sums to 1.
        """
        p = log_p.exp()
        # Σ p log p and Σ p, both without the tokens that the draft cannot write.
        pull = p if weights is None else p * weights
        self._negative_entropy, self._covered = repeat((pull * log_p).sum(-1)), repeat(pull.sum(-1))
        self.p, self.soft, self.whole = repeat(p), soft, whole
        self._log_p, self._repeat = log_p, repeat
        self.weights = None if weights is None else repeat(weights)

    def term(self, kind: Divergence) -> Pulled:
        """Return the value of the loss term ``kind`` at each token, with its pulls."""
        if kind == "forward_kl":
            pull = self._weighted(self.p)
            value = self._negative_entropy - torch.linalg.vecdot(pull, self.soft.scores)
            value += self._covered * self.soft.log_total[:, 0]
            if not self.whole:
                value -= torch.special.xlogy(self._covered, self._covered)
            return Pulled(value, pull)
        if kind == "acceptance":
            return self._acceptance()
        return Pulled(1 - self.overlap, self._weighted(self._smaller) * self._lacking)

    def _weighted(self, per_outcome: Tensor) -> Tensor:
        return per_outcome if self.weights is None else per_outcome * self.weights

    @cached_property
    def overlap(self) -> Float[Tensor, " rows"]:
        """Σ min(p, q), the per-position acceptance."""
        return self._weighted(self._smaller).sum(-1)

    @property
    def _smaller(self) -> Float[Tensor, "rows outcomes"]:
        return torch.minimum(self.p, self.soft.q)

    @cached_property
    def _log_sides(self) -> tuple[Float[Tensor, "rows outcomes"], Float[Tensor, "rows outcomes"]]:
        return self._repeat(self._log_p), self.soft.log_q

    def _acceptance(self) -> Pulled:
        smaller = torch.minimum(*self._log_sides)  # in logs, to avoid underflow
        if self.weights is not None:
            smaller = smaller + self.weights.log()
        log_overlap = smaller.logsumexp(-1, keepdim=True)
        # A sample without any token that the draft can write carries no information on the overlap.
        log_overlap.masked_fill_(log_overlap.isneginf(), 0.0)
        return Pulled(-log_overlap[:, 0], (smaller - log_overlap).exp_().mul_(self._lacking))

    @property
    def _lacking(self) -> Float[Tensor, "rows outcomes"]:
        """The slope of min(p, q) in q: 1 for q < p, 0 for q > p, and 1/2 for q = p.

        Booleans would be slower on a CPU.
        """
        log_p, log_q = self._log_sides
        return (log_p - log_q).sign_().add_(1).div_(2)


# --- teachers ---------------------------------------------------------------------------------------------------------


class KnownLogits(NamedTuple):
    """The target's logits at some positions: either for the whole vocabulary, or for some of its tokens together with
    the logsumexp of all tokens.
    """

    logits: Float[Tensor, "rows known"]
    tokens: Int[Tensor, "rows known"] | None = None
    """Tokens of the logits; None means the whole vocabulary, in order."""
    log_total: Float[Tensor, " rows"] | None = None
    """Logsumexp over the whole vocabulary; present if ``tokens`` is present."""
    drawn: int = 0
    """The last ``drawn`` of ``tokens`` are a sample, drawn with replacement by the target's probabilities from all
    tokens that do not come earlier in ``tokens``.
    """

    def block(self, rows: slice) -> "KnownLogits":
        """Return some of these rows."""
        return self._map(lambda part: part[rows])

    def to(self, device: torch.device) -> "KnownLogits":
        """Move these rows to a device."""
        return self._map(lambda part: part.to(device))

    def _map(self, change: Callable[[Tensor], Tensor]) -> "KnownLogits":
        logits, tokens, log_total, drawn = self
        return KnownLogits(
            change(logits),
            None if tokens is None else change(tokens),
            None if log_total is None else change(log_total),
            drawn,
        )

    def log_p(self, temperature: float, dtype: torch.dtype) -> Float[Tensor, "rows outcomes"]:
        """Return log probabilities of the outcomes: every token, or ``tokens`` in order.

        Logits stored with their ``log_total`` are already divided by the loss's temperature. For the log of 0 the
        lowest finite number is used, because 0 times that number is 0.
        """
        lowest = torch.finfo(dtype).min
        if self.log_total is None:
            wide = self.logits.to(dtype)
            return (wide if temperature == 1 else wide / temperature).log_softmax(-1).clamp_(min=lowest)
        scores = self.logits.to(dtype) - self.log_total.to(dtype)[:, None]
        return scores.clamp_(min=lowest)

    def weights(self, log_p: Float[Tensor, "rows outcomes"]) -> Float[Tensor, "rows outcomes"]:
        """Return the weight of each of ``tokens`` in a sum over all tokens."""
        p = log_p.exp()
        best, sample = p.split((p.shape[1] - self.drawn, self.drawn), 1)
        left = (1 - best.sum(-1, keepdim=True)).clamp_(min=0)
        share = left / max(self.drawn, 1) / sample.clamp(min=torch.finfo(p.dtype).tiny)
        return torch.cat((torch.ones_like(best), share), 1)


class Teacher(Protocol):
    """Source of the target's distribution for `fused_loss`, one chunk of tokens at a time."""

    @property
    def width(self) -> int:
        """Number of logits per token."""

    def known_logits(self, start: int, stop: int, temperature: float) -> KnownLogits:
        """Return the logits at tokens ``start`` to ``stop``, which the loss will divide by ``temperature``."""


class HiddenTeacher(NamedTuple):
    """The target's hidden states and lm_head, which provide soft targets without a (tokens, vocab) tensor.

    A chunk's logits are ``transform(hidden @ weight.T)`` in the weight's dtype and on its device. ``transform`` is the
    function that the model applies after its lm_head (a scale, a soft cap).
    """

    hidden: Float[Tensor, "tokens hidden"]
    weight: Float[Tensor, "vocab hidden"]
    transform: Callable[[Tensor], Tensor] | None = None

    @property
    def width(self) -> int:
        return len(self.weight)

    def known_logits(self, start: int, stop: int, temperature: float) -> KnownLogits:
        """Return every logit of these tokens."""
        logits = self.hidden[start:stop].to(self.weight) @ self.weight.T
        return KnownLogits(logits if self.transform is None else self.transform(logits))


class SampledTailTeacher(NamedTuple):
    """The target's k best logits, and a sample of the other logits that keeps losses and gradients unbiased.

    The k best tokens are exact. From the other tokens, called the tail, n tokens were drawn with replacement by the
    target's probabilities. A drawn token of probability p has weight P / (n p), where P is the total probability of the
    tail. With these weights, sums over the vocabulary are unbiased, and so are ``forward_kl`` and its gradient q - p',
    with Σ p' = 1. ``acceptance``, which is a function of such a sum, converges as P falls or n grows. If the draft can
    write only some tokens, the value of ``forward_kl`` also converges, but its gradient does not. Sparse Logit Sampling
    (2503.16870) explains why the k best logits alone are biased. The ``known`` logits, with the sampled logits last,
    are already divided by ``temperature``, which must equal the temperature of the loss.
    """

    known: KnownLogits
    temperature: float = 1.0

    @property
    def width(self) -> int:
        return self.known.logits.shape[1]

    def known_logits(self, start: int, stop: int, temperature: float) -> KnownLogits:
        """Return the best and sampled logits of these tokens; raise UserError for any other temperature."""
        if temperature != self.temperature:
            raise UserError(
                f"the loss has temperature {temperature:g} but the target's logits were stored at "
                f"{self.temperature:g}: set the temperature to {self.temperature:g}, or store the logits again"
            )
        return self.known.block(slice(start, stop))
