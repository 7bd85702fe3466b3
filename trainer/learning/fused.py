"""A linear layer fused with its loss, chunk by chunk, without a (tokens, vocabulary) tensor.

Losses are sums. The loop divides them by counts over all processes and micro batches, to make accumulation and data
parallelism exact.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from decoding.errors import UserError
from trainer.learning.losses import KnownLogits, LossMix, Teacher, TokenDivergences


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


# --- matrix products: chunks of logits sized for the device, and their gradients --------------------------------------

CHUNK_BYTES = 128 * 2**20
"""Size of a chunk's logits on a CPU: smaller ones slow down products, larger ones only take memory."""
_GPU_CHUNK_BYTES = 2**30
_GPU_ROWS, _GPU_COMPARED_ROWS = 4096, 1024
"""Rows per chunk that keep a GPU busy: without and with a teacher's logits."""
_BLOCK_BYTES, _GPU_BLOCK_BYTES = 2 * 2**20, 256 * 2**20
"""Size of rows softmaxed together: small enough for a CPU's cache, and for a GPU's memory."""


def chunk_rows(width: int, itemsize: int, device: torch.device, compared: bool) -> int:
    """Return how many rows of ``width`` logits fit in a chunk; ``compared`` if a teacher has as many."""
    if device.type != "cuda":
        return _rows_within(CHUNK_BYTES, width, itemsize)
    rows = _GPU_COMPARED_ROWS if compared else _GPU_ROWS
    return min(rows, _rows_within(_GPU_CHUNK_BYTES, width, itemsize))


def block_rows(width: int, itemsize: int, device: torch.device) -> int:
    """Return how many rows of ``width`` logits of ``itemsize`` bytes to softmax together."""
    return _rows_within(_BLOCK_BYTES if device.type == "cpu" else _GPU_BLOCK_BYTES, width, itemsize)


def _rows_within(size: int, width: int, itemsize: int) -> int:
    return max(1, size // (width * itemsize))


class Product:
    """One product of the logits: its input and weight, and their accumulated gradients."""

    def __init__(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype, learns_hidden: bool, learns: bool) -> None:
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self._dtype = weight.dtype
        self._of_hidden = torch.empty_like(hidden) if learns_hidden else None
        self._of_weight = torch.empty_like(weight, dtype=wide_dtype(dtype)) if learns else None
        if self._of_weight is not None and not len(hidden):
            self._of_weight.zero_()

    def take(self, rows: slice, gradient: Float[Tensor, "rows outputs"]) -> None:
        """Accumulate from a chunk's gradient in the logits; the first chunk starts the sums."""
        if self._of_hidden is not None:
            self._of_hidden[rows] = gradient @ self.weight
        if self._of_weight is not None:
            add_product(self._of_weight, gradient.T, self.hidden[rows], onto=rows.start > 0)

    def gradients(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the gradients of input and weight, each in its tensor's dtype."""
        return self._of_hidden, None if self._of_weight is None else self._of_weight.to(self._dtype)


def add_product(
    sums: Float[Tensor, "outputs hidden"],
    left: Float[Tensor, "outputs rows"],
    right: Float[Tensor, "rows hidden"],
    onto: bool,
) -> None:
    """Add ``left @ right`` to fp32 or fp64 sums, or overwrite them unless ``onto``.

    Half-precision products are summed in fp32, without rounding them first if the device supports it.
    """
    if left.dtype == sums.dtype:
        torch.addmm(sums, left, right, beta=int(onto), out=sums)
    elif _sums_products(sums.device):
        torch.addmm(sums, left, right, out_dtype=sums.dtype, beta=int(onto), out=sums)
    else:  # split by rows, this product takes a sixth longer
        product = left @ right
        _ = sums.add_(product) if onto else sums.copy_(product)


def _sums_products(device: torch.device) -> bool:
    """Return True if the device adds half-precision products directly to fp32 sums (sm80 and later)."""
    on_nvidia = device.type == "cuda" and torch.version.cuda is not None
    return on_nvidia and torch.cuda.get_device_capability(device) >= (8, 0)


def scale(gradient: Tensor, factor: Float[Tensor, ""]) -> Tensor:
    """Multiply a gradient in place by a factor in fp32 or fp64 and return it.

    The factor keeps its dtype: rounding it to bf16 would put a whole term's gradient off by up to 0.4%.
    """
    if gradient.dtype == factor.dtype:
        return gradient.mul_(factor)
    for rows in gradient.split(block_rows(gradient[:1].numel() or 1, factor.itemsize, gradient.device)):
        rows.copy_(rows.to(factor.dtype).mul_(factor))
    return gradient


def product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def chunks(
    pairs: Sequence[Product], width: int, chunk: int | None
) -> Iterator[tuple[slice, Float[Tensor, "rows outputs"]]]:
    """Yield the logits of ``chunk`` tokens at a time, always in the same memory.

    ``width`` is the teacher's number of logits per token; they count towards a chunk's memory.
    """
    hidden, weight = pairs[0].hidden, pairs[0].weight
    chunk = chunk or chunk_rows(max(len(weight), width), weight.itemsize, hidden.device, compared=width > 0)
    held = torch.empty(min(chunk, len(hidden)), len(weight), dtype=weight.dtype, device=hidden.device)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, min(start + chunk, len(hidden)))
        logits = torch.mm(hidden[rows], weight.T, out=held[: rows.stop - start])
        for pair in pairs[1:]:
            logits.addmm_(pair.hidden[rows], pair.weight.T)
        yield rows, logits


def blocks(logits: Float[Tensor, "rows outputs"], width: int) -> Iterator[slice]:
    """Yield the rows to softmax together."""
    size = block_rows(max(logits.shape[1], width), wide_dtype(logits.dtype).itemsize, logits.device)
    return (slice(start, start + size) for start in range(0, len(logits), size))
