"""The Muon optimizer (Jordan et al. 2024), which moves matrices along their orthogonalised momentum."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from decoding.dtypes import parse_dtype

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of a Newton-Schulz step: small singular values grow fastest, and all end between 0.5 and 1.5."""
_ITERATIONS = 5
_LEAST_NORM = 1e-7


class Muon(Optimizer):
    """`torch.optim.Muon` with ``adjust_lr_fn="match_rms_adamw"`` and a choice of dtype, for 2-D parameters.

    `torch.optim.Muon` always orthogonalises in bf16. On a processor without bf16 products, this took 15 times as long
    as the rest of a training step. ``dtype`` None means the device's fast dtype.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, weight_decay: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype or parse_dtype("fast")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure here
        """Step every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - _MOMENTUM)
                update = orthogonal(parameter.grad.lerp(momentum, _MOMENTUM).to(self._dtype))  # Nesterov's momentum
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                size_of_adamw = 0.2 * max(parameter.shape) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * size_of_adamw)


def orthogonal(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """Bring the singular values of a matrix near 1 by Newton-Schulz iterations, in its dtype."""
    a, b, c = _COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    wide = matrix.T if tall else matrix
    wide = wide / wide.norm().clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide
