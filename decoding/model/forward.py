"""One pass of a transformers model over this project's cache, and its outputs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from decoding.model.attention import copy_free_attention
from decoding.model.lm_head import capture_lm_head_input
from decoding.model.taps import capture_taps


class ModelOutput(NamedTuple):
    """Outputs of a pass. ``hidden``: the input of the lm_head. ``logits``: its output.

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

    Only the model's own flag is checked, so this costs nothing for a model in eval mode.
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
    """Run ``tokens`` at ``positions``, both (rows, size), into the block that the cache has begun.

    ``positions`` is None if the model takes none. ``cache`` is a cache, or maps the model's argument name to one.
    ``mask`` is an additive mask (rows, 1, size, keys), a dict of masks by layer type, or None for `transformers`' own.
    ``select`` picks the positions, (rows, some, hidden), for the lm_head and the output (None: all). ``taps`` are the
    layers whose outputs are returned as ``states``, at all positions (`capture_taps`). Outputs are on the tokens'
    device.
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
