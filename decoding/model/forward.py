"""One forward pass of a transformers model over this project's cache: access to the model's two ends, taps on its
layers, and the outputs.

The two ends are the embedding of the input tokens, and the lm_head with the last hidden state. Every architecture names
these layers (`get_input_embeddings`, `get_output_embeddings`), so no family-specific code is needed. Decoding and
training access them only through this module. A tap is the residual stream after a selected layer, before any norm.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from threading import get_ident
from typing import Any, NamedTuple, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from decoding.errors import UserError

_GROUPED = "headstart"
_LAID_OUT: ContextVar[dict[int, tuple[Tensor, Tensor]] | None] = ContextVar("laid_out", default=None)
"""Maps ids of the current pass's masks to the mask and its repeated form; layers of one kind share a mask."""

Result = TypeVar("Result")


class OutputLayer(nn.Linear):
    """Linear layer from hidden states to the vocabulary, with the interface that training uses."""

    def forward(self, hidden: Tensor, read: Callable[[Tensor, Tensor], Any] = F.linear) -> Any:
        """Return ``read(hidden, weight)``: by default the logits.

        A loss that needs the weight is passed as ``read``: sharded training gathers the weight for this call only.
        """
        return read(hidden, self.weight)


def without_gaps(hidden: Float[Tensor, "*rows hidden"]) -> Float[Tensor, "*rows hidden"]:
    """Return the input of a product with a large frozen weight, without gaps between its rows.

    If a dimension of a strided slice has size 1, `contiguous` keeps its stride. With such a stride torch copies the
    whole weight for each product, which takes far longer than the product.
    """
    return hidden.reshape(-1, hidden.shape[-1]).contiguous().view(hidden.shape)


def unscaled_embeddings(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the embeddings of tokens, on the tokens' device, without the factor by which some families scale them."""
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]  # nn.Module's getattr
    return F.embedding(tokens.to(weight.device), weight).to(tokens.device)


def _lm_head(model: nn.Module) -> nn.Linear:
    layer: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]  # nn.Module's getattr
    return layer


@contextmanager
def capture_lm_head_input(model: nn.Module, select: Callable[[Tensor], Tensor] | None = None) -> Iterator[list[Tensor]]:
    """While the context lasts, collect the input of the lm_head, of shape (batch, positions, hidden), whenever this
    thread runs the model.

    With ``select``, the lm_head reads only ``select(hidden)``, so that no unneeded logits are computed. The captured
    tensor is always the whole input.
    """
    captured: list[Tensor] = []
    thread = get_ident()

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if get_ident() != thread:  # another thread's pass of the same model
            return None
        captured.append(args[0])
        return (without_gaps(select(args[0])), *args[1:]) if select else None

    with hooked(_lm_head(model).register_forward_pre_hook, hook):
        yield captured


@contextmanager
def hooked(register: Callable[[Any], Any], hook: Callable[..., Any]) -> Iterator[None]:
    """Register a hook inside the context.

    The hook is removed even after an interrupt, because otherwise it would spoil later passes.
    """
    handle = None
    try:
        handle = register(hook)
        yield
    finally:
        try:
            if handle is not None:
                handle.remove()
        finally:  # an interrupt may have prevented the removal
            if handle is not None:
                handle.remove()


@contextmanager
def replaced_forward(layer: Any, forward: Callable[..., Any]) -> Iterator[None]:
    """Replace a layer's ``forward`` inside the context."""
    own = vars(layer).get("forward")  # a launcher may have set a ``forward`` on the instance
    layer.forward = forward
    try:
        yield
    finally:
        if own is None:
            del layer.forward
        else:
            layer.forward = own


def last_position(hidden: Float[Tensor, "batch positions hidden"]) -> Float[Tensor, "batch 1 hidden"]:
    """Select the last position of each row."""
    return hidden[:, -1:]


def lm_head_input(model: nn.Module, inputs: Mapping[str, Any]) -> Float[Tensor, "batch positions hidden"]:
    """Run ``model(**inputs)`` without a cache; return the input of its lm_head, on the lm_head's device.

    The lm_head computes the logits of the last position only.
    """
    with capture_lm_head_input(model, last_position) as captured:
        model(**inputs, use_cache=False)
    return captured[0]


def run_in_lm_head(model: nn.Module, hidden: Tensor, work: Callable[[Tensor, Tensor], Result]) -> Result:
    """Call the lm_head on ``hidden``, but replace its ``forward`` by ``work(hidden, weight)``; return the result of
    ``work``.

    A loss that is computed from the lm_head's weight must be the result of the layer itself. Launchers shard the weight
    and gather it around the layer's forward pass; in the backward pass DeepSpeed's ZeRO-3 gathers it only for the
    gradient of this result.
    """
    layer: Any = _lm_head(model)
    with replaced_forward(layer, lambda hidden: work(hidden, layer.weight)):
        result: Result = layer(hidden)
    return result


def layers_of(model: nn.Module, count: int) -> nn.ModuleList:
    """Return a model's list of ``count`` layers, under any name; raise UserError if the model has no such list.

    The function looks in the text decoder first, because a vision tower may have the same number of layers.
    """
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else None
    parts = (model,) if decoder is None else (decoder, model)
    modules = (module for part in parts for module in part.modules())
    for module in modules:  # lists inside a layer, such as experts, come after the list of layers
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module  # stop early, because every step makes this search
    raise UserError(f"{type(model).__name__} does not keep its {count} layers in a list: use another target")


@contextmanager
def capture_taps(
    model: nn.Module, count: int, taps: Sequence[int]
) -> Iterator[list[Float[Tensor, "batch positions taps"]]]:
    """Collect the outputs of layers ``taps`` (increasing, from 0) out of ``count`` layers, in this thread's passes.

    The outputs equal transformers' ``hidden_states[tap + 1]``, except for the last layer, whose entry in transformers
    is taken after the final norm. Each pass inside the context adds one tensor, in which the states of each position
    are concatenated. Without taps nothing is collected.
    """
    captured: list[Tensor] = []
    parts: dict[int, Tensor] = {}
    thread = get_ident()

    def hook_of(tap: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if get_ident() != thread:  # another thread's pass of the same model
                return
            parts[tap] = output if isinstance(output, Tensor) else output[0]
            if parts[tap].ndim > 3:
                raise UserError(
                    f"layers of {type(model).__name__} output several streams: train heads or an ordinary draft instead"
                )
            if tap == taps[-1]:
                device = parts[tap].device  # layers may be on several devices
                captured.append(torch.cat([parts[layer].to(device) for layer in taps], -1))
                parts.clear()

        return hook

    with ExitStack() as hooks:
        layers = layers_of(model, count) if taps else ()
        for tap in taps:
            hooks.enter_context(hooked(layers[tap].register_forward_hook, hook_of(tap)))
        yield captured


@contextmanager
def begun_behind(
    model: nn.Module, count: int, tap: int, states: Float[Tensor, "batch positions hidden"], in_tuple: bool = False
) -> Iterator[None]:
    """While the context lasts, passes skip the layers up to ``tap`` (of ``count``) and start from ``states`` instead.

    ``in_tuple``: layers of this family return their states in a tuple.
    """
    output = (states, None) if in_tuple else states
    with ExitStack() as skipped:
        for layer in layers_of(model, count)[: tap + 1]:
            skipped.enter_context(replaced_forward(layer, lambda *args, **kwargs: output))
        yield


class ModelOutput(NamedTuple):
    """Outputs of a pass. ``hidden``: the input of the lm_head. ``logits``: the output of the lm_head.

    ``states``: for each row, the states of its positions after the requested layers, concatenated.
    """

    hidden: Float[Tensor, "*positions hidden"]
    logits: Float[Tensor, "*positions vocab"]
    states: tuple[Float[Tensor, "positions taps"], ...] = ()

    @staticmethod
    def cat(parts: Sequence["ModelOutput"]) -> "ModelOutput":
        """Join the rows of several passes."""
        return ModelOutput(
            torch.cat([part.hidden for part in parts]),
            torch.cat([part.logits for part in parts]),
            tuple(states for part in parts for states in part.states),
        )


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch a training model to eval mode inside this context, and restore each module's mode afterwards.

    Only the flag of the model itself is checked, so this takes no time for a model in eval mode.
    """
    if not model.training:
        yield
        return
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def run_model(
    model: PreTrainedModel,
    tokens: Tensor,
    positions: Tensor | None,
    cache: Cache | Mapping[str, Any],
    mask: Any,
    select: Callable[[Tensor], Tensor] | None = None,
    taps: Sequence[int] = (),
) -> ModelOutput:
    """Run ``tokens`` at ``positions``, both (rows, size); keys and values go into the block that the cache has begun.

    ``positions`` is None if the model does not take positions. ``cache`` is a cache, or a dict from the model's
    argument name to a cache. ``mask`` is an additive mask (rows, 1, size, keys), a dict of masks by layer type, or None
    for the masks of `transformers`. ``select`` picks the positions, (rows, some, hidden), for the lm_head and the
    output (None: all). ``taps`` are the layers whose outputs are returned as ``states``, at all positions (see
    `capture_taps`). Outputs are on the tokens' device.
    """
    layers = model.config.get_text_config(decoder=True).num_hidden_layers if taps else 0
    with (
        in_eval_mode(model),
        capture_lm_head_input(model, select) as captured,
        copy_free_attention(model) if isinstance(cache, Cache) else nullcontext(),
        capture_taps(model, layers, taps) as tapped,
    ):
        held = cache if isinstance(cache, Mapping) else {"past_key_values": cache}
        placed = {} if positions is None else {"position_ids": positions}
        output = model(input_ids=tokens, attention_mask=mask, use_cache=bool(held), **placed, **held)
    hidden = captured[0] if select is None else select(captured[0])
    states = tuple(tapped[0].to(tokens.device)) if taps else ()
    return ModelOutput(hidden.to(tokens.device), output.logits.to(tokens.device), states)


# --- attention without copies of the cache ----------------------------------------------------------------------------
#
# With grouped-query models, `transformers`' sdpa repeats keys and values for every query head if there is a mask or
# more than one query. This copies the whole prefix, in every layer and every step. `grouped_attention` instead treats
# the query heads of a group as more queries of one head, and reads the cache in place.


def leave_out_cudnn() -> None:
    """Switch off cuDNN's attention in this whole process, and so also for decoding by transformers.

    On recent GPUs torch tries cuDNN first. cuDNN builds a plan for every new number of keys: in each step of a growing
    text, and for each new padded length of a batch. Building a plan takes tens of milliseconds.
    """
    torch.backends.cuda.enable_cudnn_sdp(False)


@contextmanager
def copy_free_attention(model: PreTrainedModel) -> Iterator[None]:
    """Let a model with sdpa attention use `grouped_attention` inside the context.

    Models that do not look up their attention in `transformers`' interface (such as Falcon) are left unchanged, because
    with an unknown name they would use eager attention with masks made for sdpa.
    """
    if not model._supports_attention_backend or model.config._attn_implementation != "sdpa":
        yield
        return
    try:
        model.config._attn_implementation = _GROUPED
        with one_copy_of_masks():
            yield
    finally:
        model.config._attn_implementation = "sdpa"


@contextmanager
def one_copy_of_masks() -> Iterator[None]:
    """Inside the context, let layers that share a mask share the mask's copy for all heads of a group as well."""
    laid_out = _LAID_OUT.set({})
    try:
        yield
    finally:
        _LAID_OUT.reset(laid_out)


def grouped_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention with `transformers`' signature: query (batch, heads, queries, dim), key (batch, groups, keys, dim).

    This function calls `transformers`' sdpa if there is no mask (a prefill), if heads do not share keys, or if there
    are options other than a mask; sdpa rejects options that it does not know. Returns (batch, queries, heads, dim) and
    None.
    """
    batch, heads, queries, dim = query.shape
    groups = key.shape[1]
    plain = not any(kwargs.get(name) is not None for name in ("position_bias", "softcap"))
    if attention_mask is None or heads == groups or attention_mask.shape[1] != 1 or not plain:
        attended, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
        return attended, None
    shared = heads // groups
    packed = query.reshape(batch, groups, shared * queries, dim)
    mask = _for_each_head(attention_mask, shared)
    attended = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, dropout_p=dropout, scale=scaling)
    return attended.reshape(batch, heads, queries, -1).transpose(1, 2).contiguous(), None


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool = False
) -> Tensor:
    """Attend in a draft's layer, with shapes as in `grouped_attention`; ``is_causal`` is read only if there is no mask.

    A mask is copied for all heads of a group because, according to its source, torch has no fused kernel for
    ``enable_gqa`` with a mask.
    """
    if mask is not None:
        wide = mask if mask.shape[2] == query.shape[2] else mask.expand(-1, -1, query.shape[2], -1)
        return grouped_attention(module, query, key, value, wide)[0]
    grouped = query.shape[1] != key.shape[1]
    return F.scaled_dot_product_attention(query, key, value, is_causal=is_causal, enable_gqa=grouped).transpose(1, 2)


def _for_each_head(mask: Tensor, shared: int) -> Tensor:
    """Repeat a mask for a group's ``shared`` query heads: (rows, 1, queries, keys) becomes (rows, 1, all queries,
    keys).

    Inside `one_copy_of_masks` this happens once for each mask.
    """
    known = _LAID_OUT.get()
    if known is not None and id(mask) in known:
        return known[id(mask)][1]
    rows, _, queries, keys = mask.shape
    repeated = mask[:, :, None].expand(-1, -1, shared, -1, -1).reshape(rows, 1, shared * queries, keys)
    if known is not None:
        known[id(mask)] = mask, repeated  # as long as the mask exists, its id is not reused
    return repeated


AttentionInterface.register(_GROUPED, grouped_attention)
AttentionMaskInterface.register(_GROUPED, sdpa_mask)
