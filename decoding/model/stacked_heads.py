"""Heads for decoding: all of them at once, one product per layer."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from decoding.model.heads import MedusaHead, MedusaHeads


class StackedHeads:
    """All heads of a target run at once, for decoding: one product per layer of blocks, one for a shared lm_head.

    The blocks' weights are stored side by side, and the given heads become views of them: no weight is held twice, even
    if the heads are stacked again. Heads that are later moved to another device or dtype are no longer those that run
    here. A Markov bias is left out: it is added where the tokens are chosen.
    """

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads: list[MedusaHead] = list(heads.heads)  # type: ignore[arg-type]  # ModuleList's items
        self._like = next(heads.parameters())
        self._layers: list[tuple[Tensor, Tensor]] = []
        for layer in range(heads.config.num_layers):
            linears: list[nn.Linear] = [head.blocks[layer].linear for head in self._heads]  # type: ignore[misc]
            weight = _side_by_side([linear.weight for linear in linears])
            bias = _side_by_side([linear.bias for linear in linears])
            self._layers.append((weight, bias[:, None]))

    def __call__(
        self, hidden: Float[Tensor, "rows hidden"], count: int, lm_head: nn.Module | None = None
    ) -> Float[Tensor, "count rows vocab"]:
        """Return the logits of the first ``count`` heads, on the device of their output layers.

        ``lm_head``: the target's, for heads that share it.
        """
        x = hidden.to(self._like).expand(count, -1, -1)
        for weight, bias in self._layers:
            x = x + F.silu(torch.baddbmm(bias[:count], x, weight[:count].mT))
        if self._heads[0].lm_head is None:
            return self._heads[0].written(x, lm_head)
        return torch.stack([head.written(x[k], None) for k, head in enumerate(self._heads[:count])])


def _side_by_side(parameters: Sequence[Tensor]) -> Tensor:
    """Make the parameters views of one tensor (parameters, ...) and return it; nothing moves if they already are."""
    first, size = parameters[0].detach(), parameters[0].numel()
    storage = first.untyped_storage().data_ptr()
    if all(
        part.untyped_storage().data_ptr() == storage and part.storage_offset() == first.storage_offset() + k * size
        for k, part in enumerate(parameters)
    ):
        return first.as_strided((len(parameters), *first.shape), (size, *first.stride()))
    stacked = torch.stack([part.detach() for part in parameters])
    for part, view in zip(parameters, stacked, strict=True):
        part.data = view
    return stacked
