"""Taps: the residual stream after selected layers of a model, before any norm."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.errors import UserError
from decoding.model.lm_head import hooked, replaced_forward


def layers_of(model: nn.Module, count: int) -> nn.ModuleList:
    """Return a model's list of ``count`` layers, under any name; raise UserError if there is none.

    The text decoder is searched first, because a vision tower may have as many layers.
    """
    decoder = model.get_decoder() if isinstance(model, PreTrainedModel) else None
    parts = (model,) if decoder is None else (decoder, model)
    modules = (module for part in parts for module in part.modules())
    for module in modules:  # lists inside a layer, such as experts, come after the list of layers
        if isinstance(module, nn.ModuleList) and len(module) == count:
            return module  # stop early, because every step searches
    raise UserError(f"{type(model).__name__} does not keep its {count} layers in a list: give another target")


@contextmanager
def capture_taps(
    model: nn.Module, count: int, taps: Sequence[int]
) -> Iterator[list[Float[Tensor, "batch positions taps"]]]:
    """Collect the outputs of layers ``taps`` (increasing, from 0) out of ``count``, in this thread's forwards.

    The outputs equal transformers' ``hidden_states[tap + 1]``, except for the last layer, whose entry in transformers
    is taken after the final norm. Each forward in the context adds one tensor in which each position's states are
    concatenated. Without taps nothing is collected.
    """
    found: list[Tensor] = []
    parts: dict[int, Tensor] = {}
    thread = get_ident()

    def hook_of(tap: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            if get_ident() != thread:  # another thread's forward of the same model
                return
            parts[tap] = output if isinstance(output, Tensor) else output[0]
            if parts[tap].ndim > 3:
                raise UserError(
                    f"layers of {type(model).__name__} output several streams: train heads or an ordinary draft on it"
                )
            if tap == taps[-1]:
                place = parts[tap].device  # layers may be on several devices
                found.append(torch.cat([parts[each].to(place) for each in taps], -1))
                parts.clear()

        return hook

    with ExitStack() as hooks:
        layers = layers_of(model, count) if taps else ()
        for tap in taps:
            hooks.enter_context(hooked(layers[tap].register_forward_hook, hook_of(tap)))
        yield found


@contextmanager
def begun_behind(
    model: nn.Module, count: int, tap: int, states: Float[Tensor, "batch positions hidden"], in_tuple: bool = False
) -> Iterator[None]:
    """Skip the layers up to ``tap`` (of ``count``) in the context's forwards, which start from ``states`` instead.

    ``in_tuple``: layers of this family return their states in a tuple.
    """
    output = (states, None) if in_tuple else states
    with ExitStack() as skipped:
        for layer in layers_of(model, count)[: tap + 1]:
            skipped.enter_context(replaced_forward(layer, lambda *args, **kwargs: output))
        yield
