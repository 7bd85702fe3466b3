"""Losses as sums over the trained tokens, chunked over tokens so that no [heads, tokens, vocabulary] tensor exists.

Sums, not means: the loop divides by the count over the whole batch of all processes and accumulation steps, which is
what makes accumulation and data parallelism exact.

`fused_loss` is what trains: a linear layer and a mix of losses, with closed-form gradients. `divergence` is the same
mathematics written for the reader, which the tests hold it against.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple, Protocol, get_args

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Divergence = Literal["forward_kl", "reverse_kl", "jsd", "tvd", "acceptance"]
Term = Literal["cross_entropy", Divergence]

CHUNK_BYTES = 128 * 2**20
"""Logits of a chunk: fewer make the products with the weight slow, more make the memory grow and nothing faster."""
_BLOCK_BYTES = 2 * 2**20
"""fp32 rows that are softmaxed together on a CPU: what stays in its cache."""


class TargetRows(NamedTuple):
    """What is known of the target's logits at some tokens: all of them, or the best ``tokens`` and their total."""

    logits: Float[Tensor, "rows known"]
    tokens: Int[Tensor, "rows known"] | None = None
    log_total: Float[Tensor, " rows"] | None = None

    def block(self, rows: slice) -> "TargetRows":
        """Some of these rows."""
        return TargetRows(*(None if part is None else part[rows] for part in self))  # type: ignore[arg-type]

    def log_p(self, temperature: float, dtype: torch.dtype) -> Float[Tensor, "rows outcomes"]:
        """Log probabilities of the outcomes: every token, or ``tokens`` in their order and then all others together.

        What is impossible is given the smallest finite number, so that it times a probability of 0 is 0.
        """
        scores = self.logits.to(dtype) / temperature
        if self.log_total is not None:
            scores = scores - self.log_total.to(dtype)[:, None]
            # What the best leave is known up to rounding: never nothing, or reverse_kl would be infinite by chance.
            known = scores.exp().sum(-1, keepdim=True).clamp(max=1 - torch.finfo(dtype).eps)
            scores = torch.cat((scores, torch.log1p(-known)), 1)
        return scores.log_softmax(-1).clamp_(min=torch.finfo(dtype).min)


class Teacher(Protocol):
    """Gives the target's distribution for the divergences of `fused_loss`, a chunk of tokens at a time."""

    def rows(self, start: int, stop: int, temperature: float) -> TargetRows:
        """For tokens ``start`` to ``stop``; ``temperature`` is the one the loss will divide the logits by."""
        ...


class HiddenTeacher(NamedTuple):
    """The target's hidden states and lm_head: soft targets without a [tokens, vocab] tensor.

    A chunk's logits are ``transform(hidden @ weight.T)`` in the weight's dtype; ``transform`` is for what a model does
    after its lm_head (a scale, a soft cap).
    """

    hidden: Float[Tensor, "tokens hidden"]
    weight: Float[Tensor, "vocab hidden"]
    transform: Callable[[Tensor], Tensor] | None = None

    def rows(self, start: int, stop: int, temperature: float) -> TargetRows:
        """Every logit of these tokens."""
        logits = self.hidden[start:stop].to(self.weight.dtype) @ self.weight.T
        return TargetRows(logits if self.transform is None else self.transform(logits))


class TopKTeacher(NamedTuple):
    """The target's best logits at each token and the logsumexp over all: the best are exact, the rest is one outcome.

    Divergences are then those between distributions over k+1 outcomes: the tokens kept, and "any other". Merging
    outcomes loses information, so every term is a lower bound of the term over the whole vocabulary (for ``tvd`` and
    ``acceptance``: the overlap is overrated); equal to it where draft and target share out the rest alike. Within the
    rest the draft keeps its own proportions. The tokens of a row are distinct, and fewer than the vocabulary.

    The total at another temperature cannot be told from this one: the loss's temperature must be 1.
    """

    tokens: Int[Tensor, "tokens k"]
    logits: Float[Tensor, "tokens k"]
    log_total: Float[Tensor, " tokens"]

    def rows(self, start: int, stop: int, temperature: float) -> TargetRows:
        """The best of these tokens; ValueError at a temperature."""
        if temperature != 1:
            raise ValueError(
                f"the loss has temperature {temperature:g} but the best logits were stored with their total at 1: "
                "set the temperature to 1, or store no top_k so that the target's lm_head is used"
            )
        return TargetRows(self.logits, self.tokens, self.log_total).block(slice(start, stop))


def fused_loss(
    hidden: Float[Tensor, "tokens hidden"],
    weight: Float[Tensor, "vocab hidden"],
    labels: Int[Tensor, " tokens"],
    mix: Mapping[Term, float],
    teacher: Teacher | None = None,
    temperature: float = 1.0,
    chunk: int | None = None,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Sum over tokens of ``mix``'s weighted terms for logits ``hidden @ weight.T``, and how many argmaxes are right.

    ``cross_entropy`` is at ``labels``; the others are `divergence`'s, between the logits and ``teacher``'s, both
    divided by ``temperature``, which ``cross_entropy`` knows nothing of. The teacher and a frozen weight get no
    gradient.

    Gradients of a chunk are formed while its logits exist, in their place: at most ``chunk`` rows of logits are ever
    held (as many of the teacher's besides), and nothing is computed twice. Products run in autocast's dtype, the
    softmax in fp32. Raises ValueError for an unknown term, and for a divergence without a teacher.
    After Liger Kernel, 2410.10989, section 3.2.
    """
    if not mix or not mix.keys() <= set(get_args(Term)):
        raise ValueError(f"the loss is mixed of {list(mix)}: give one or more of {', '.join(get_args(Term))}")
    if teacher is None and mix.keys() != {"cross_entropy"}:
        raise ValueError(f"the loss is mixed of {', '.join(mix)}, which needs a teacher: give one")
    if mix.keys() == {"cross_entropy"}:
        teacher = None  # has nothing to say
    if not torch.is_grad_enabled():  # inside apply nobody could tell
        hidden, weight = hidden.detach(), weight.detach()
    loss, correct = _FusedLoss.apply(hidden, weight, labels, mix, teacher, temperature, chunk)  # type: ignore[no-untyped-call]  # torch's
    return loss, correct


class _FusedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        mix: Mapping[Term, float],
        teacher: Teacher | None,
        temperature: float,
        chunk: int | None,
    ) -> tuple[Tensor, Tensor]:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        chunk = chunk or _rows_within(CHUNK_BYTES, len(weight), dtype)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        correct = torch.zeros((), dtype=torch.long, device=hidden.device)
        hidden_gradient = torch.empty_like(hidden) if ctx.needs_input_grad[0] else None
        weight_gradient = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        with torch.autocast(device, enabled=False):
            compute_hidden, compute_weight = hidden.to(dtype), weight.to(dtype)
            held = torch.empty(min(chunk, len(hidden)), len(weight), dtype=dtype, device=hidden.device)
            for start in range(0, len(hidden), chunk):
                rows = slice(start, min(start + chunk, len(hidden)))
                logits = torch.mm(compute_hidden[rows], compute_weight.T, out=held[: rows.stop - start])
                target = None if teacher is None else teacher.rows(start, rows.stop, temperature)
                chunk_loss, hits = _turn_into_gradient(logits, labels[rows], mix, target, temperature)
                loss += chunk_loss
                correct += hits
                if hidden_gradient is not None:
                    hidden_gradient[rows] = logits @ compute_weight
                if weight_gradient is not None:
                    weight_gradient += logits.T @ compute_hidden[rows]
        ctx.save_for_backward(hidden_gradient, None if weight_gradient is None else weight_gradient.to(weight.dtype))
        ctx.mark_non_differentiable(correct)
        return loss, correct

    @staticmethod
    def backward(ctx: Any, loss_gradient: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        scaled = (None if saved is None else saved * loss_gradient.to(saved.dtype) for saved in ctx.saved_tensors)
        return *scaled, None, None, None, None, None


def _rows_within(size: int, vocabulary: int, dtype: torch.dtype) -> int:
    return max(1, size // (vocabulary * dtype.itemsize))


def _turn_into_gradient(
    logits: Float[Tensor, "rows vocab"],
    labels: Int[Tensor, " rows"],
    mix: Mapping[Term, float],
    target: TargetRows | None,
    temperature: float,
) -> tuple[Float[Tensor, ""], Int[Tensor, ""]]:
    """Overwrite logits with the loss's gradient with respect to them; the loss and the number of hits."""
    wide = torch.float64 if logits.dtype == torch.float64 else torch.float32
    # A processor's cache holds a few rows: softmax them there. A GPU is quicker with few and large operations.
    size = _rows_within(_BLOCK_BYTES, logits.shape[1], wide) if logits.device.type == "cpu" else len(logits)
    loss = torch.zeros((), dtype=wide, device=logits.device)
    hits = torch.zeros((), dtype=torch.long, device=logits.device)
    for start in range(0, len(logits), size):
        block = slice(start, start + size)
        scores = logits[block].to(wide)
        hits += (scores.argmax(-1) == labels[block]).sum()
        known = None if target is None else target.block(block)
        block_loss, logits[block] = _mixed(scores, labels[block], mix, known, temperature)
        loss += block_loss
    return loss, hits


def _mixed(
    scores: Float[Tensor, "rows vocab"],
    labels: Int[Tensor, " rows"],
    mix: Mapping[Term, float],
    target: TargetRows | None,
    temperature: float,
) -> tuple[Float[Tensor, ""], Float[Tensor, "rows vocab"]]:
    """The loss of wide logits and its gradient with respect to them."""
    log_q = scores.log_softmax(-1)
    loss, gradient = scores.new_zeros(()), None
    if target is not None:
        tempered = log_q if temperature == 1 else (scores / temperature).log_softmax(-1)
        loss, gradient = _against(target.log_p(temperature, scores.dtype), tempered, target.tokens, mix)
        gradient.div_(temperature)
    if "cross_entropy" in mix:
        factor, right = mix["cross_entropy"], labels[:, None]
        loss = loss - factor * log_q.gather(1, right).sum()
        hard = log_q.exp_().scatter_add_(1, right, log_q.new_full(right.shape, -1)).mul_(factor)
        gradient = hard if gradient is None else gradient.add_(hard)
    assert gradient is not None, "a mix without a teacher is a cross entropy"
    return loss, gradient


def _against(
    log_p: Float[Tensor, "rows outcomes"],
    log_q: Float[Tensor, "rows vocab"],
    tokens: Int[Tensor, "rows known"] | None,
    mix: Mapping[Term, float],
) -> tuple[Float[Tensor, ""], Float[Tensor, "rows vocab"]]:
    """The divergences in ``mix`` and their gradient with respect to logits whose softmax q is.

    The outcomes are ``tokens`` and all others together, or without ``tokens`` the whole vocabulary.
    """
    if tokens is None:
        return _divergences(log_p, log_q, mix)
    others = log_q.exp().scatter_(1, tokens, 0.0)
    rest = others.sum(-1, keepdim=True).clamp_(min=torch.finfo(log_q.dtype).tiny)
    merged = torch.cat((log_q.gather(1, tokens), rest.log()), 1)
    loss, gradient = _divergences(log_p, merged, mix)
    # The rest's logit is the logsumexp of its tokens' logits, so each of these gets its share of the gradient.
    return loss, others.mul_(gradient[:, -1:] / rest).scatter_(1, tokens, gradient[:, :-1])


def _divergences(
    log_p: Float[Tensor, "rows outcomes"], log_q: Float[Tensor, "rows outcomes"], mix: Mapping[Term, float]
) -> tuple[Float[Tensor, ""], Float[Tensor, "rows outcomes"]]:
    """The divergences in ``mix`` and their gradient with respect to logits whose softmax q is."""
    p, q = log_p.exp(), log_q.exp()
    loss, gradient = log_q.new_zeros(()), torch.zeros_like(log_q)
    for kind, factor in mix.items():
        if kind == "cross_entropy":
            continue
        value, slope = _divergence_with_slope(kind, log_p, log_q, p, q)
        loss += factor * value
        gradient.add_(slope, alpha=factor)
    return loss, gradient


def _divergence_with_slope(
    kind: Divergence, log_p: Tensor, log_q: Tensor, p: Tensor, q: Tensor
) -> tuple[Tensor, Tensor]:
    """Sum over rows of a divergence, and its gradient with respect to the logits.

    A slope g with respect to q becomes q * (g - Σ q g) with respect to the logits whose softmax q is.
    """
    if kind == "forward_kl":
        return (p * (log_p - log_q)).sum(), q - p
    if kind == "acceptance":
        smaller = torch.minimum(log_p, log_q)
        log_accepted = smaller.logsumexp(-1, keepdim=True)
        # Where both are equal the minimum has two slopes: their mean. In logs, for no q is too small for a quotient.
        lacking = (smaller - log_accepted).exp_() * ((log_p - log_q).sign_().add_(1) / 2)
        return -log_accepted.sum(), q * lacking.sum(-1, keepdim=True) - lacking
    if kind == "tvd":
        difference = q - p
        value, slope = difference.abs().sum() / 2, difference.sign_() / 2
    elif kind == "reverse_kl":
        slope = log_q - log_p
        value = (q * slope).sum()
    else:
        log_middle = torch.logaddexp(log_p, log_q) - math.log(2)
        slope = (log_q - log_middle) / 2
        value = (q * slope).sum() + (p * (log_p - log_middle)).sum() / 2
    return value, q * (slope - (q * slope).sum(-1, keepdim=True))


def divergence(
    draft_logits: Float[Tensor, "tokens vocab"],
    target_logits: Float[Tensor, "tokens vocab"],
    kind: Divergence,
    temperature: float = 1.0,
) -> Float[Tensor, ""]:
    """Sum over tokens of the divergence between the target's p and the draft's q, both softmaxed in fp32.

    ``forward_kl`` KL(p‖q) · ``jsd`` the mean of both KLs to the midpoint ·
    ``reverse_kl`` KL(q‖p), beyond all bounds where the target excludes a token that the draft does not ·
    ``tvd`` half the L1 distance, which is 1 - acceptance of token rejection (DistillSpec, 2310.08461, section 3.2) ·
    ``acceptance`` -log of that acceptance, -log Σ min(p, q) (LK losses, 2602.23881).
    Not scaled by temperature squared.
    """
    wide = torch.float64 if draft_logits.dtype == torch.float64 else torch.float32
    # Of what is impossible the log is the smallest finite number: times a probability of 0, that is 0 and not nan.
    lowest = torch.finfo(wide).min
    log_q = (draft_logits.to(wide) / temperature).log_softmax(-1).clamp(min=lowest)
    log_p = (target_logits.to(wide) / temperature).log_softmax(-1).clamp(min=lowest)
    if kind == "forward_kl":
        return (log_p.exp() * (log_p - log_q)).sum()
    if kind == "reverse_kl":
        return (log_q.exp() * (log_q - log_p)).sum()
    if kind == "acceptance":
        return -torch.minimum(log_p, log_q).logsumexp(-1).sum()
    p, q = log_p.exp(), log_q.exp()
    if kind == "tvd":
        return (p - q).abs().sum() / 2
    log_middle = torch.logaddexp(log_p, log_q) - math.log(2)
    return ((p * (log_p - log_middle)).sum() + (q * (log_q - log_middle)).sum()) / 2


def chunked_divergence(
    draft_logits: Float[Tensor, "tokens vocab"],
    target_logits: Float[Tensor, "tokens vocab"],
    kind: Divergence,
    temperature: float = 1.0,
    chunk: int = 1024,
) -> Float[Tensor, ""]:
    """`divergence` with its fp32 copies made for one chunk at a time, and made again in the backward pass."""
    # A sum over no rows is 0 and yet hangs on the draft, so a batch without a labelled token can be differentiated too.
    total = draft_logits[:0].sum(dtype=torch.promote_types(draft_logits.dtype, torch.float32))
    # split, not slices: the gradients of slices are each as large as the whole.
    for draft_rows, target_rows in zip(draft_logits.split(chunk), target_logits.split(chunk), strict=True):
        total = total + checkpoint(divergence, draft_rows, target_rows, kind, temperature, use_reentrant=False)
    return total


def acceptance_rate(
    draft_logits: Float[Tensor, "tokens vocab"], target_logits: Float[Tensor, "tokens vocab"], chunk: int = 1024
) -> Float[Tensor, ""]:
    """Sum over tokens of Σ min(p, q): what token rejection would accept at T=1."""
    total = draft_logits.new_zeros((), dtype=torch.promote_types(draft_logits.dtype, torch.float32))
    for draft_rows, target_rows in zip(draft_logits.split(chunk), target_logits.split(chunk), strict=True):
        total += torch.minimum(target_rows.to(total.dtype).softmax(-1), draft_rows.to(total.dtype).softmax(-1)).sum()
    return total
