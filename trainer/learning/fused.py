"""A linear layer fused with its loss, chunk by chunk, without a (tokens, vocabulary) tensor.

Losses are sums. The loop divides them by counts over all processes and micro batches, to make accumulation and data
parallelism exact.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from decoding.errors import UserError
from trainer.learning.losses import KnownLogits, LossMix, Teacher, TokenDivergences
from trainer.learning.products import Product, blocks, chunks, product_dtype, scale, wide_dtype


class Bias(NamedTuple):
    """A second product added to the logits, ``hidden @ weight.T``: see `decoding.model.markov.MarkovBias`."""

    hidden: Float[Tensor, "tokens rank"]
    weight: Float[Tensor, "outputs rank"]


class FusedLoss(NamedTuple):
    """Loss and hits summed over the tokens, and the acceptance at each token."""

    loss: Float[Tensor, ""]
    correct: Int[Tensor, ""]
    """Tokens whose argmax is the label."""
    accepted: Float[Tensor, " tokens"]
    """Each token's Σ min(p, q) at the mix's temperature: its probability of acceptance; 0 without a teacher. No
    gradient.
    """


def fused_loss(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "outputs hidden"],
    labels: Int[Tensor, " tokens"],
    mix: LossMix,
    teacher: Teacher | None = None,
    *,
    bias: Bias | None = None,
    tokens: Int[Tensor, " outputs"] | None = None,
    soft_cap: float | None = None,
    chunk: int | None = None,
) -> FusedLoss:
    """Return ``mix``'s weighted terms for the logits ``hidden @ weight.T``, summed over tokens, with hits.

    ``bias`` adds a second product to the logits. With ``soft_cap`` c they are c tanh(logits / c), as in Gemma-2.

    ``cross_entropy`` is taken at ``labels``; the other terms are `TokenDivergences` between ``teacher`` and the logits.
    The teacher and frozen weights get no gradient.

    Row i of ``weight`` writes the target's token ``tokens[i]``, by default token i. Labels are target tokens too; a
    label that no row writes adds nothing to the cross entropy.

    At most ``chunk`` rows of logits exist at a time, and as many of the teacher's: a chunk's gradient overwrites its
    logits. Nothing is computed twice. Products run in autocast's dtype, the softmax in fp32. Raises UserError for a
    divergence without a fitting teacher. After Liger Kernel (2410.10989, section 3.2).
    """
    if teacher is None and mix.soft:
        raise UserError(f"the loss has {', '.join(mix.weights)} but no teacher to compare with: give a teacher")
    layer = _Outputs(len(weight), tokens, soft_cap)
    if not torch.is_grad_enabled():  # always False inside `apply`
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else Bias(bias.hidden.detach(), bias.weight.detach())
    pairs = (hidden, weight, *(bias or (None, None)))
    return FusedLoss(*_FusedLoss.apply(*pairs, labels, mix, teacher, layer, chunk))  # type: ignore[no-untyped-call]  # torch's


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias_hidden: Tensor | None,
        bias_weight: Tensor | None,
        labels: Tensor,
        mix: LossMix,
        teacher: Teacher | None,
        layer: "_Outputs",
        chunk: int | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype, width = product_dtype(hidden), 0 if teacher is None else teacher.width
        wide, device = wide_dtype(dtype), hidden.device
        loss, correct = torch.zeros((), dtype=wide, device=device), torch.zeros((), dtype=torch.long, device=device)
        accepted = torch.zeros(len(hidden), dtype=wide, device=device)
        pairs = [Product(hidden, weight, dtype, *ctx.needs_input_grad[:2])]
        if bias_hidden is not None and bias_weight is not None:
            pairs.append(Product(bias_hidden, bias_weight, dtype, *ctx.needs_input_grad[2:4]))
        with torch.autocast(hidden.device.type, enabled=False):
            for rows, logits in chunks(pairs, width, chunk):
                target = None
                if teacher is not None:
                    target = teacher.known_logits(rows.start, rows.stop, mix.temperature).to(hidden.device)
                found = _turn_into_gradient(logits, labels[rows], mix, target, layer)
                loss += found.loss
                correct += found.correct
                accepted[rows] = found.accepted
                for pair in pairs:
                    pair.take(rows, logits)
        ctx.save_for_backward(*(gradient for pair in pairs for gradient in pair.gradients()))
        ctx.mark_non_differentiable(correct, accepted)
        return loss, correct, accepted

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # In place, so backward works once: copying a weight's gradient would cost as much as a product.
        scaled = [None if saved is None else scale(saved, loss_gradient) for saved in ctx.saved_tensors]
        return *scaled, *(None,) * (9 - len(scaled))


def _turn_into_gradient(
    logits: Float[Tensor, "rows outputs"],
    labels: Int[Tensor, " rows"],
    mix: LossMix,
    target: KnownLogits | None,
    layer: "_Outputs",
) -> FusedLoss:
    """Overwrite a linear layer's products with the loss's gradient in them; return the loss."""
    loss = torch.zeros((), dtype=wide_dtype(logits.dtype), device=logits.device)
    accepted = torch.zeros(len(logits), dtype=loss.dtype, device=logits.device)
    correct = torch.zeros((), dtype=torch.long, device=logits.device)
    written = layer.outputs_of(labels)
    for block in blocks(logits, 0 if target is None else target.logits.shape[1]):
        scores, right = layer.scores(logits[block]), written[block]
        correct += _hits(scores, right)
        known = None if target is None else target.block(block)
        block_loss, block_accepted, gradient = _mixed(scores, right, mix, known, layer)
        logits[block] = layer.through_cap(gradient, scores)
        loss += block_loss
        accepted[block] = block_accepted
    return FusedLoss(loss, correct, accepted)


def _mixed(
    scores: Float[Tensor, "rows outputs"],
    right: Int[Tensor, " rows"],
    mix: LossMix,
    target: KnownLogits | None,
    layer: "_Outputs",
) -> tuple[Float[Tensor, ""], Float[Tensor, " rows"], Float[Tensor, "rows outputs"]]:
    """Return the loss of fp32 or fp64 logits, each row's Σ min(p, q), and the gradient in the logits."""
    accepted, gradient, log_q, q = scores.new_zeros(len(scores)), None, None, None
    losses = scores.new_zeros(len(scores))
    if target is not None:
        log_q = (scores if mix.temperature == 1 else scores / mix.temperature).log_softmax(-1)
        q = log_q.exp()
        sides, to_logits = layer.compare(target, log_q, q, mix.temperature)
        accepted = sides.overlap
        if mix.soft:
            losses, pull = _divergences(sides, mix)
            gradient = to_logits(pull)
            if mix.temperature != 1:
                gradient.div_(mix.temperature)
    if "cross_entropy" in mix.weights:
        factor = mix.weights["cross_entropy"] * (right >= 0)[:, None].to(scores.dtype)
        label = right.clamp(min=0)[:, None]
        if log_q is None or q is None or mix.temperature != 1:
            log_label, q = _softmaxed(scores, label)
        else:
            log_label = log_q.gather(1, label)
        losses = losses - (factor * log_label)[:, 0]
        hard = q.mul_(factor).scatter_add_(1, label, -factor)
        gradient = hard if gradient is None else gradient.add_(hard)
    assert gradient is not None, "a mix without divergences is a cross entropy"
    return losses.sum(), accepted, gradient


def _softmaxed(
    scores: Float[Tensor, "rows outputs"], label: Int[Tensor, "rows 1"]
) -> tuple[Float[Tensor, "rows 1"], Float[Tensor, "rows outputs"]]:
    """Return the label's log probability and the softmax, with one exponential per logit (log_softmax needs two)."""
    best = scores.amax(-1, keepdim=True)
    q = (scores - best).exp_()
    total = q.sum(-1, keepdim=True)
    return scores.gather(1, label) - best - total.log(), q.div_(total)


def _hits(scores: Float[Tensor, "rows outputs"], right: Int[Tensor, " rows"]) -> Int[Tensor, ""]:
    """Count the rows whose argmax is ``right``. On a CPU argmax is slow and runs only on rows that may hit."""
    if scores.device.type == "cpu":
        likely = scores.gather(1, right.clamp(min=0)[:, None])[:, 0] == scores.amax(-1)
        scores, right = scores[likely], right[likely]
    return (scores.argmax(-1) == right).sum()


def _divergences(
    sides: TokenDivergences, mix: LossMix
) -> tuple[Float[Tensor, " rows"], Float[Tensor, "rows outcomes"]]:
    """Return the weighted sums of ``mix``'s divergences and of their pulls (see `losses.Pulled`)."""
    losses, pull = torch.zeros_like(sides.overlap), None
    for kind, factor in mix.weights.items():
        if kind != "cross_entropy":
            value, part = sides.term(kind)
            losses = losses + factor * value
            # Not in place: other terms may read the same pull.
            pull = (part if factor == 1 else part * factor) if pull is None else pull.add(part, alpha=factor)
    assert pull is not None, "a soft mix has a divergence"
    return losses, pull


class _Outputs:
    """An lm_head's outputs: the target token that each writes, and the soft cap on its products."""

    def __init__(self, count: int, tokens: Int[Tensor, " outputs"] | None, soft_cap: float | None) -> None:
        assert tokens is None or len(tokens) == count, "one token for each row of the weight"
        self._count, self._tokens, self.soft_cap = count, tokens, soft_cap
        self._sorted = None if tokens is None else tokens.sort()

    def scores(self, products: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows outputs"]:
        """Return the logits of products, in fp32 or fp64."""
        scores = products.to(wide_dtype(products.dtype))
        return scores if self.soft_cap is None else (scores / self.soft_cap).tanh_().mul_(self.soft_cap)

    def through_cap(
        self, gradient: Float[Tensor, "rows outputs"], scores: Float[Tensor, "rows outputs"]
    ) -> Float[Tensor, "rows outputs"]:
        return gradient if self.soft_cap is None else gradient.mul_(1 - (scores / self.soft_cap).square_())

    def outputs_of(self, tokens: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Return the output that writes each target token, or -1."""
        if self._sorted is None:
            return tokens.where(tokens < self._count, -1)
        known, order = self._sorted
        place = torch.searchsorted(known, tokens).clamp_(max=self._count - 1)
        return order[place].where(known[place] == tokens, -1)

    def compare(
        self,
        target: KnownLogits,
        log_q: Float[Tensor, "rows outputs"],
        q: Float[Tensor, "rows outputs"],
        temperature: float,
    ) -> tuple[TokenDivergences, Callable[[Tensor], Tensor]]:
        """Return p and q on the known outcomes, and a function from pulls to the gradient in all logits."""
        log_p = target.log_p(temperature, q.dtype)
        if target.tokens is None:
            whole = self._tokens is None and self._count == log_p.shape[1]
            return TokenDivergences(self._columns(log_p), log_q, q, whole=whole), partial(_of_all, q)
        weights = target.weights(log_p)
        rows = self.outputs_of(target.tokens)
        weights = weights.masked_fill_(rows < 0, 0.0)
        rows = rows.clamp_(min=0)
        sides = TokenDivergences(log_p, log_q.gather(1, rows), q.gather(1, rows), weights, whole=False)
        return sides, partial(_of_sample, q, rows)

    def _columns(self, log_p: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows outputs"]:
        if self._tokens is not None:
            return log_p[:, self._tokens]
        if self._count > log_p.shape[1]:
            raise UserError(
                f"the draft writes {self._count} tokens but the target has {log_p.shape[1]}: "
                f"give the first {log_p.shape[1]} rows of the draft's lm_head"
            )
        return log_p[:, : self._count]


def _of_all(q: Tensor, pull: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows outputs"]:
    """Return the gradient if every output is an outcome."""
    return (q * pull.sum(-1, keepdim=True)).sub_(pull)


def _of_sample(q: Tensor, rows: Tensor, pull: Float[Tensor, "rows outcomes"]) -> Float[Tensor, "rows outputs"]:
    """Return the gradient if the outcomes are some of the outputs, possibly repeated."""
    return (q * pull.sum(-1, keepdim=True)).scatter_add_(1, rows, -pull)
