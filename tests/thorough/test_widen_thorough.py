"""Stand-ins compute what their source computes, and every added weight is there to be paid for."""

from functools import partial

import pytest
import torch
from test_widen import FAMILIES, TEXT, source
from tiny_models import full_forward
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.measure.widen import widened


def in_double(model: PreTrainedModel) -> PreTrainedModel:
    """The model in fp64, its norms too, which transformers always computes in fp32."""

    def norm(module: nn.Module, hidden: Tensor) -> Tensor:
        mean_square = hidden.pow(2).mean(-1, keepdim=True)
        return module.weight * hidden * torch.rsqrt(mean_square + module.variance_epsilon)

    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.forward = partial(norm, module)
    return model.double()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("width", "extra_layers"), [(4, 0), (1, 3), (4, 3), (16, 1)])
def test_a_stand_in_has_the_logits_of_its_source(family: str, width: int, extra_layers: int) -> None:
    model = source(family)
    wide = widened(model, width, extra_layers)
    assert torch.allclose(full_forward(wide, TEXT), full_forward(model, TEXT), rtol=1e-5, atol=1e-5)
    exact = full_forward(in_double(model), TEXT)
    assert exact.std() > 0.1
    assert (full_forward(in_double(wide), TEXT) - exact).abs().max() < 1e-9
