"""A linear layer fused with its loss, chunk by chunk, without a (tokens, vocabulary) tensor.

Losses are sums. The training loop divides each sum by the number of labels in all processes and micro batches, so
gradient accumulation and data parallelism do not change the result.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from decoding.errors import UserError
from trainer.learning.losses import GroupedRows, KnownLogits, LabelGroups, LossMix, Softmax, Teacher, TokenDivergences


class Bias(NamedTuple):
    """A second product added to the logits, ``hidden @ weight.T``: see `decoding.model.markov.MarkovBias`."""

    hidden: Float[Tensor, "tokens rank"]
    weight: Float[Tensor, "outputs rank"]


class FusedLoss(NamedTuple):
    """The loss of some rows of hidden states, and figures of each row; the figures have no gradient."""

    loss: Float[Tensor, ""]
    """The weighted sum of the rows' losses."""
    losses: Float[Tensor, " rows"]
    """The loss of each row, without its weight."""
    correct: Bool[Tensor, " rows"]
    """True if the row's argmax is the label."""
    accepted: Float[Tensor, " rows"]
    """Σ min(p, q) of each row at the mix's temperature: the probability of acceptance; 0 without a teacher."""


def fused_loss(
    hidden: Float[Tensor, "rows hidden"],
    weight: Float[Tensor, "outputs hidden"],
    labels: Int[Tensor, " groups"],
    mix: LossMix,
    teacher: Teacher | None = None,
    *,
    groups: LabelGroups | None = None,
    row_weights: Float[Tensor, " rows"] | None = None,
    bias: Bias | None = None,
    tokens: Int[Tensor, " outputs"] | None = None,
    soft_cap: float | None = None,
    chunk: int | None = None,
) -> FusedLoss:
    """Sum the weighted terms of ``mix`` over the rows of the logits ``hidden @ weight.T``, and count the hits.

    ``labels``, ``teacher`` and ``bias`` have a row for each of ``groups``. Whatever depends only on the position in the
    text is therefore computed once for all rows of ``hidden`` that predict the token after this position. By default
    each row has a separate group. ``row_weights`` (default 1) multiply the rows' losses. ``bias`` adds a second product
    to the logits. With ``soft_cap`` c the logits become c tanh(logits / c), as in Gemma-2.

    ``cross_entropy`` is taken at ``labels``; the other terms are `TokenDivergences` between ``teacher`` and the logits.
    The teacher and frozen weights get no gradient.

    The product with row i of ``weight`` is the logit of the target's token ``tokens[i]`` (without ``tokens``, of token
    i). Labels are token ids of the target. A label for which there is no row adds nothing to the cross entropy.

    At most ``chunk`` rows of logits exist at a time (more if one group has more rows), with as many rows of the teacher
    and the bias; the gradient of a chunk overwrites its logits. Nothing is computed twice. Products run in autocast's
    dtype, and the softmax runs in fp32. Raises UserError if a divergence has no suitable teacher. The method follows
    Liger Kernel (2410.10989, section 3.2).
    """
    if teacher is None and mix.soft:
        raise UserError(f"the loss has {', '.join(mix.weights)} but no teacher to compare with: pass a teacher")
    rows = GroupedRows(labels, groups, row_weights)
    assert rows.ends[-1:].sum() == len(hidden), "every row of hidden states has a group"
    layer = _Outputs(len(weight), tokens, soft_cap)
    if not torch.is_grad_enabled():  # grad mode is always off inside `apply`
        hidden, weight = hidden.detach(), weight.detach()
        bias = None if bias is None else Bias(bias.hidden.detach(), bias.weight.detach())
    pairs = (hidden, weight, *(bias or (None, None)))
    return FusedLoss(*_FusedLoss.apply(*pairs, rows, mix, teacher, layer, chunk))  # type: ignore[no-untyped-call]  # torch's


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias_hidden: Tensor | None,
        bias_weight: Tensor | None,
        rows: GroupedRows,
        mix: LossMix,
        teacher: Teacher | None,
        layer: "_Outputs",
        chunk: int | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dtype, width = product_dtype(hidden), 0 if teacher is None else teacher.width
        wide, device = wide_dtype(dtype), hidden.device
        losses, accepted = (torch.zeros(len(hidden), dtype=wide, device=device) for _ in range(2))
        correct = torch.zeros(len(hidden), dtype=torch.bool, device=device)
        own, bias = Product(hidden, weight, dtype, *ctx.needs_input_grad[:2]), None
        if bias_hidden is not None and bias_weight is not None:
            bias = Product(bias_hidden, bias_weight, dtype, *ctx.needs_input_grad[2:4])
        with torch.autocast(device.type, enabled=False):
            chunk = chunk or chunk_rows(max(len(weight), width), dtype.itemsize, device, bool(width or bias))
            for groups, of_chunk in rows.spans(chunk):
                logits, taught = own.logits(of_chunk), None
                added = None if bias is None else bias.logits(groups)
                if teacher is not None:
                    taught = teacher.known_logits(groups.start, groups.stop, mix.temperature).to(device)
                figures = _turn_into_gradient(logits, added, rows, groups, mix, taught, layer)
                losses[of_chunk], correct[of_chunk], accepted[of_chunk] = figures
                own.take(of_chunk, logits)
                if bias is not None and added is not None:
                    bias.take(groups, added)
        ctx.save_for_backward(*own.gradients(), *((None, None) if bias is None else bias.gradients()))
        ctx.mark_non_differentiable(losses, correct, accepted)
        return (losses if rows.weights is None else losses * rows.weights).sum(), losses, correct, accepted

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        # The gradients are scaled in place, because a copy of a weight's gradient would cost as much as a product. So
        # backward works only once.
        scaled = [None if saved is None else scale(saved, loss_gradient) for saved in ctx.saved_tensors]
        return *scaled, *(None,) * 5


def _turn_into_gradient(
    logits: Float[Tensor, "rows outputs"],
    added: Float[Tensor, "groups outputs"] | None,
    rows: GroupedRows,
    groups: slice,
    mix: LossMix,
    taught: KnownLogits | None,
    layer: "_Outputs",
) -> list[Tensor]:
    """Overwrite the products of some groups with the gradient of the loss; return the figures of each row for
    `FusedLoss`. ``added``, the part of the logits that the bias added, is overwritten with the gradients summed over
    the rows of each group. ``taught`` contains the teacher's logits.
    """
    figures, done = [], 0
    most = block_rows(max(logits.shape[1], 0 if taught is None else taught.logits.shape[1]), logits)
    for part, its_rows in rows.spans(most, groups):
        inside, of_part = slice(part.start - groups.start, part.stop - groups.start), logits[done:]
        of_part = of_part[: its_rows.stop - its_rows.start]
        done += len(of_part)
        repeat = partial(rows.repeat, groups=part, rows=its_rows)
        products = of_part.to(wide_dtype(logits.dtype))
        if added is not None:
            products += repeat(added[inside].to(products.dtype))
        scores, right = layer.scores(products), repeat(layer.outputs_of(rows.labels[part]))
        correct = _hits(scores, right)
        known = None if taught is None else taught.block(inside)
        losses, accepted, gradient = _mixed(scores, right, mix, known, layer, repeat)
        if layer.soft_cap is not None:
            gradient.mul_(1 - (scores / layer.soft_cap).square_())
        if rows.weights is not None:
            gradient *= rows.weights[its_rows, None].to(gradient.dtype)
        of_part.copy_(gradient)
        if added is not None:
            added[inside] = rows.summed(gradient, part, its_rows).to(added.dtype)
        figures.append((losses, correct, accepted))
    return [torch.cat(parts) for parts in zip(*figures, strict=True)]


def _mixed(
    scores: Float[Tensor, "rows outputs"],
    right: Int[Tensor, " rows"],
    mix: LossMix,
    taught: KnownLogits | None,
    layer: "_Outputs",
    repeat: Callable[[Tensor], Tensor],
) -> tuple[Float[Tensor, " rows"], Float[Tensor, " rows"], Float[Tensor, "rows outputs"]]:
    """Return, for each row of fp32 or fp64 logits, the loss, Σ min(p, q), and the gradient of the logits.

    ``repeat`` is a function that repeats the values of groups for the rows of these groups.
    """
    losses, accepted, gradient, hard = scores.new_zeros(len(scores)), scores.new_zeros(len(scores)), None, None
    if taught is not None:
        soft = Softmax.of(scores if mix.temperature == 1 else scores / mix.temperature)
        sides, to_logits = layer.compare(taught, soft, mix.temperature, repeat)
        accepted = sides.overlap
        if mix.soft:
            losses, pull = _divergences(sides, mix)
            gradient = to_logits(pull)
            if mix.temperature != 1:
                gradient.div_(mix.temperature)
        hard = soft if mix.temperature == 1 else None
    if "cross_entropy" in mix.weights:
        factor = mix.weights["cross_entropy"] * (right >= 0)[:, None].to(scores.dtype)
        label = right.clamp(min=0)[:, None]
        hard = hard or Softmax.of(scores)
        losses = losses - (factor * hard.at(label).log_q)[:, 0]
        pulled = hard.q.mul_(factor).scatter_add_(1, label, -factor)
        gradient = pulled if gradient is None else gradient.add_(pulled)
    assert gradient is not None, "a mix without divergences is a cross entropy"
    return losses, accepted, gradient


def _hits(scores: Float[Tensor, "rows outputs"], right: Int[Tensor, " rows"]) -> Bool[Tensor, " rows"]:
    """Mark the rows whose argmax is the output ``right``.

    On a CPU argmax is slow, so it runs only on rows whose argmax may be ``right``.
    """
    if scores.device.type != "cpu":
        return scores.argmax(-1) == right
    likely = scores.gather(1, right.clamp(min=0)[:, None])[:, 0] == scores.amax(-1)
    hits = torch.zeros_like(likely)
    hits[likely] = scores[likely].argmax(-1) == right[likely]
    return hits


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
    """The outputs of an lm_head: the target's token for each output, and the soft cap on the products."""

    def __init__(self, count: int, tokens: Int[Tensor, " outputs"] | None, soft_cap: float | None) -> None:
        assert tokens is None or len(tokens) == count, "one token for each row of the weight"
        self._count, self._tokens, self.soft_cap = count, tokens, soft_cap
        self._sorted = None if tokens is None else tokens.sort()

    def scores(self, products: Float[Tensor, "rows outputs"]) -> Float[Tensor, "rows outputs"]:
        """Return the logits of products in fp32 or fp64."""
        return products if self.soft_cap is None else (products / self.soft_cap).tanh_().mul_(self.soft_cap)

    def outputs_of(self, tokens: Int[Tensor, "..."]) -> Int[Tensor, "..."]:
        """Return, for each of these token ids of the target, the index of the output that stands for it, or -1 if no
        output stands for it.
        """
        if self._sorted is None:
            return tokens.where(tokens < self._count, -1)
        known, order = self._sorted
        index = torch.searchsorted(known, tokens).clamp_(max=self._count - 1)
        return order[index].where(known[index] == tokens, -1)

    def compare(
        self, taught: KnownLogits, soft: Softmax, temperature: float, repeat: Callable[[Tensor], Tensor]
    ) -> tuple[TokenDivergences, Callable[[Tensor], Tensor]]:
        """Return p and q on the outcomes that the teacher knows, and a function that turns pulls into the gradient of
        all logits.

        ``repeat`` is a function that repeats the values of groups for the rows of ``soft``.
        """
        log_p = taught.log_p(temperature, soft.q.dtype)
        if taught.tokens is None:
            whole = self._tokens is None and self._count == log_p.shape[1]
            return TokenDivergences(self._columns(log_p), soft, repeat, whole=whole), partial(_gradient, soft.q, None)
        rows = self.outputs_of(taught.tokens)
        weights = taught.weights(log_p).masked_fill_(rows < 0, 0.0)
        rows = repeat(rows.clamp_(min=0))
        return TokenDivergences(log_p, soft.at(rows), repeat, weights), partial(_gradient, soft.q, rows)

    def _columns(self, log_p: Float[Tensor, "rows vocab"]) -> Float[Tensor, "rows outputs"]:
        if self._tokens is not None:
            return log_p[:, self._tokens]
        if self._count > log_p.shape[1]:
            raise UserError(
                f"the draft can write {self._count} tokens, but the target has only {log_p.shape[1]}: "
                f"use the first {log_p.shape[1]} rows of the draft's lm_head"
            )
        return log_p[:, : self._count]


def _gradient(q: Tensor, outputs: Tensor | None, pull: Float[Tensor, "rows outcomes"]) -> Tensor:
    """Return the gradient, of shape (rows, outputs).

    ``outputs``: the outputs of the outcomes, possibly repeated; None means all outputs.
    """
    gradient = q * pull.sum(-1, keepdim=True)
    return gradient.sub_(pull) if outputs is None else gradient.scatter_add_(1, outputs, -pull)


# --- matrix products: chunks of logits sized for the device, and their gradients --------------------------------------

CHUNK_BYTES = 128 * 2**20
"""Size of a chunk's logits on a CPU: smaller chunks slow down products, and larger chunks only take more memory."""
_GPU_CHUNK_BYTES = 2**30
_GPU_ROWS, _GPU_COMPARED_ROWS = 4096, 1024
"""Rows per chunk that keep a GPU busy, without and with a teacher's logits."""
_BLOCK_BYTES, _GPU_BLOCK_BYTES = 2 * 2**20, 256 * 2**20
"""Size of the rows in one softmax: small enough for the cache of a CPU and for the memory of a GPU."""


def chunk_rows(width: int, itemsize: int, device: torch.device, compared: bool) -> int:
    """Return how many rows of ``width`` logits fit in a chunk; ``compared`` means that a teacher has as many logits."""
    if device.type != "cuda":
        return _rows_within(CHUNK_BYTES, width, itemsize)
    rows = _GPU_COMPARED_ROWS if compared else _GPU_ROWS
    return min(rows, _rows_within(_GPU_CHUNK_BYTES, width, itemsize))


def block_rows(width: int, logits: Tensor) -> int:
    """Return how many rows of ``width`` logits go into one softmax in fp32 or fp64."""
    size = _BLOCK_BYTES if logits.device.type == "cpu" else _GPU_BLOCK_BYTES
    return _rows_within(size, width, wide_dtype(logits.dtype).itemsize)


def _rows_within(size: int, width: int, itemsize: int) -> int:
    return max(1, size // (width * itemsize))


class Product:
    """One of the products that add up to the logits: its input and weight, and their accumulated gradients."""

    def __init__(self, hidden: Tensor, weight: Tensor, dtype: torch.dtype, learns_hidden: bool, learns: bool) -> None:
        self.hidden, self.weight = hidden.to(dtype), weight.to(dtype)
        self._dtype = weight.dtype
        self._held = hidden.new_empty(0)
        self._of_hidden = torch.empty_like(hidden) if learns_hidden else None
        self._of_weight = torch.empty_like(weight, dtype=wide_dtype(dtype)) if learns else None
        if self._of_weight is not None and not len(hidden):
            self._of_weight.zero_()

    def logits(self, rows: slice) -> Float[Tensor, "rows outputs"]:
        """Return the products of some rows, always in the same memory."""
        count = rows.stop - rows.start
        if len(self._held) < count:
            self._held = self.hidden.new_empty(count, len(self.weight))
        return torch.mm(self.hidden[rows], self.weight.T, out=self._held[:count])

    def take(self, rows: slice, gradient: Float[Tensor, "rows outputs"]) -> None:
        """Add the gradients that follow from a chunk's gradient of the logits; the first chunk starts the sums."""
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
    """Add ``left @ right`` to fp32 or fp64 sums if ``onto``; otherwise overwrite the sums.

    Half-precision products are summed in fp32. If the device supports this, they are not rounded before they are
    summed.
    """
    if left.dtype == sums.dtype:
        torch.addmm(sums, left, right, beta=int(onto), out=sums)
    elif sums.is_cuda and torch.version.cuda is not None and torch.cuda.get_device_capability(sums.device) >= (8, 0):
        # The device adds half-precision products directly to fp32 sums.
        torch.addmm(sums, left, right, out_dtype=sums.dtype, beta=int(onto), out=sums)
    else:  # split by rows, this product would take a sixth longer
        product = left @ right
        _ = sums.add_(product) if onto else sums.copy_(product)


def scale(gradient: Tensor, factor: Float[Tensor, ""]) -> Tensor:
    """Multiply a gradient in place by a factor in fp32 or fp64 and return it.

    The factor keeps its dtype, because rounding it to bf16 would change the gradient of a whole term by up to 0.4%.
    """
    if gradient.dtype == factor.dtype:
        return gradient.mul_(factor)
    for rows in gradient.split(block_rows(gradient[:1].numel() or 1, gradient)):
        rows.copy_(rows.to(factor.dtype).mul_(factor))
    return gradient


def product_dtype(hidden: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
