"""Teachers give the divergences the target's distribution, a chunk of tokens at a time."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor


class KnownLogits(NamedTuple):
    """The known logits of the target at some positions: all of them, or those of some tokens with their log total."""

    logits: Float[Tensor, "rows known"]
    tokens: Int[Tensor, "rows known"] | None = None
    """Tokens of the logits; None: the logits are those of the whole vocabulary, in its order."""
    log_total: Float[Tensor, " rows"] | None = None
    """Logsumexp over the whole vocabulary, given with ``tokens``."""
    drawn: int = 0
    """The last ``drawn`` of ``tokens`` are a sample of all but the others of ``tokens``, drawn with replacement with
    the target's probabilities."""

    def block(self, rows: slice) -> "KnownLogits":
        """Return some of these rows."""
        return self._each(lambda part: part[rows])

    def to(self, device: torch.device) -> "KnownLogits":
        """Move these rows to a device."""
        return self._each(lambda part: part.to(device))

    def _each(self, change: Callable[[Tensor], Tensor]) -> "KnownLogits":
        logits, tokens, log_total, drawn = self
        return KnownLogits(
            change(logits),
            None if tokens is None else change(tokens),
            None if log_total is None else change(log_total),
            drawn,
        )

    def log_p(self, temperature: float, dtype: torch.dtype) -> Float[Tensor, "rows outcomes"]:
        """Return log probabilities of the outcomes: every token, or ``tokens`` in their order.

        Logits with a total are at the loss's temperature already. The log of a probability of 0 is the smallest finite
        number, so that its product with a probability of 0 is 0.
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
    """Gives the target's distribution for the divergences of `fused_loss`, a chunk of tokens at a time."""

    @property
    def width(self) -> int:
        """Logits that the teacher gives for a token."""

    def known_logits(self, start: int, stop: int, temperature: float) -> KnownLogits:
        """Return the logits at tokens ``start`` to ``stop``; the loss will divide them by ``temperature``."""

    def rows(self, index: Int[Tensor, " chosen"]) -> "Teacher":
        """Return the teacher of some of these tokens, in the order of ``index``."""


class HiddenTeacher(NamedTuple):
    """The target's hidden states and lm_head: soft targets without a [tokens, vocab] tensor.

    A chunk's logits are ``transform(hidden @ weight.T)`` in the weight's dtype and on its device; ``transform`` is the
    model's own step behind its lm_head (a scale, a soft cap).
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

    def rows(self, index: Int[Tensor, " chosen"]) -> "HiddenTeacher":
        return self._replace(hidden=self.hidden[index])


class SampledTailTeacher(NamedTuple):
    """The target's best logits, and a sample of the rest that leaves losses and gradients unbiased.

    The k best tokens are exact. From the others, the tail, n tokens were drawn with replacement with the target's
    probabilities. A drawn token of probability p stands for P / (n p) tokens, where P is the tail's whole probability.
    So every sum over the vocabulary is estimated without bias: ``forward_kl`` (its gradient is q - p' with Σ p' = 1),
    ``reverse_kl``, ``jsd`` and all their gradients. ``acceptance`` is a function of such a sum, and
    comes close as P falls or n grows; so does the value of ``forward_kl``, though not its gradient, where the draft
    writes only some of the tokens. For ``reverse_kl`` the estimate is useless all the same: a token that the draft
    favours and the target does not weighs q / p, which has no bound. The bias of top-k alone, and this remedy, are in
    Sparse Logit Sampling, 2503.16870.

    Logits are divided by ``temperature`` already, which must equal the loss's; ``log_total`` is the logsumexp over all
    of them. Only a k of the whole vocabulary needs no sample.
    """

    tokens: Int[Tensor, "tokens k"]
    logits: Float[Tensor, "tokens k"]
    log_total: Float[Tensor, " tokens"]
    tail_tokens: Int[Tensor, "tokens n"]
    tail_logits: Float[Tensor, "tokens n"]
    temperature: float = 1.0

    @property
    def width(self) -> int:
        return self.tokens.shape[1] + self.tail_tokens.shape[1]

    def known_logits(self, start: int, stop: int, temperature: float) -> KnownLogits:
        """Return the best and the sample of these tokens; ValueError at another temperature than theirs."""
        if temperature != self.temperature:
            raise ValueError(
                f"the loss has temperature {temperature:g} but the target's logits were stored at "
                f"{self.temperature:g}: set the temperature to {self.temperature:g}, or store them anew"
            )
        rows = slice(start, stop)
        return KnownLogits(
            torch.cat((self.logits[rows], self.tail_logits[rows]), 1),
            torch.cat((self.tokens[rows], self.tail_tokens[rows]), 1),
            self.log_total[rows],
            self.tail_tokens.shape[1],
        )

    def rows(self, index: Int[Tensor, " chosen"]) -> "SampledTailTeacher":
        tokens, logits, log_total, tail_tokens, tail_logits = (part[index] for part in self[:5])
        return SampledTailTeacher(tokens, logits, log_total, tail_tokens, tail_logits, self.temperature)
