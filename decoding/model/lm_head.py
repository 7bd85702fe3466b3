"""A model's two ends: the embedding of its input tokens, and its lm_head with the last hidden state.

Every architecture names these layers (`get_input_embeddings`, `get_output_embeddings`), so this module needs no
family-specific code. Decoding and training access the two ends only through this module.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any, TypeVar

from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

Result = TypeVar("Result")


class OutputLayer(nn.Linear):
    """Linear layer from hidden states to the vocabulary, for anything trained on a target."""

    def forward(self, hidden: Tensor, read: Callable[[Tensor, Tensor], Any] = F.linear) -> Any:
        """Return ``read(hidden, weight)``: by default the logits.

        A loss that needs the weight is passed as ``read``: sharded training gathers the weight for this call only.
        """
        return read(hidden, self.weight)


def unscaled_embeddings(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the embeddings of tokens, on the tokens' device, without the factor by which some families scale them."""
    weight: Tensor = model.get_input_embeddings().weight  # type: ignore[operator]  # nn.Module's getattr
    return F.embedding(tokens.to(weight.device), weight).to(tokens.device)


def _lm_head(model: nn.Module) -> nn.Linear:
    layer: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]  # nn.Module's getattr
    return layer


@contextmanager
def capture_lm_head_input(model: nn.Module, select: Callable[[Tensor], Tensor] | None = None) -> Iterator[list[Tensor]]:
    """Collect the lm_head's input, (batch, positions, hidden), in this thread's forwards of the model in the context.

    With ``select`` the lm_head reads only ``select(hidden)``, to save unneeded logits. The captured tensor is always
    the whole input.
    """
    captured: list[Tensor] = []
    thread = get_ident()

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        if get_ident() != thread:  # another thread's forward of the same model
            return None
        captured.append(args[0])
        # Contiguous: torch multiplies a strided slice by a frozen weight in batches over copies of it, far more slowly.
        return (select(args[0]).contiguous(), *args[1:]) if select else None

    with hooked(_lm_head(model).register_forward_pre_hook, hook):
        yield captured


@contextmanager
def hooked(register: Callable[[Any], Any], hook: Callable[..., Any]) -> Iterator[None]:
    """Register a hook inside the context, and remove it even if interrupted: else it would spoil later forwards."""
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
    """Replace a layer's forward inside the context."""
    own = vars(layer).get("forward")  # a launcher may have set one on the instance
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
    """Call the lm_head on ``hidden`` with ``work(hidden, weight)`` instead of its forward; return the work's result.

    A loss computed from the lm_head's weight must be the layer's own result. Launchers shard the weight and gather it
    around the layer's forward; in the backward pass DeepSpeed's ZeRO-3 gathers it only for that result's gradient.
    """
    layer: Any = _lm_head(model)
    with replaced_forward(layer, lambda hidden: work(hidden, layer.weight)):
        result: Result = layer(hidden)
    return result
