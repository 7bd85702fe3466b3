"""The place where a model embeds the tokens that it reads: add something to the embeddings there.

The input embeddings are, beside the output embeddings (`decoding.model.lm_head`), the one layer that every architecture
names (`get_input_embeddings`), so nothing here knows a family.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from jaxtyping import Float
from torch import Tensor, nn


@contextmanager
def added_to_embeddings(model: nn.Module, addition: Float[Tensor, "batch positions width"] | None) -> Iterator[None]:
    """Add ``addition`` (None: nothing) to the input embeddings in this thread's forwards of the model in the context.

    The sum is in the embeddings' dtype, on their device. Gradients flow to the addition.
    """
    if addition is None:
        yield
        return

    thread = get_ident()

    def hook(module: nn.Module, args: tuple[Any, ...], embedded: Tensor) -> Tensor:
        return embedded + addition.to(embedded) if get_ident() == thread else embedded

    handle = None
    try:  # from here on: a hook that an interrupt left behind would spoil every later forward
        handle = input_embeddings(model).register_forward_hook(hook)
        yield
    finally:
        if handle is not None:
            handle.remove()


def input_embeddings(model: nn.Module) -> nn.Embedding:
    """Return the layer that embeds the tokens."""
    layer: nn.Embedding = model.get_input_embeddings()  # type: ignore[operator]  # nn.Module's getattr
    return layer
