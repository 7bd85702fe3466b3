"""The target's hidden states, for heads that are trained on a frozen target: here from the target itself.

`trainer.target.features` has them from disk. From an lm_head's products to logits: the scales and caps of the
families that the trainer knows.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from decoding.model.causal_lm import CausalLM
from decoding.model.lm_head import capture_lm_head_input, lm_head_input
from decoding.model.taps import capture_taps
from trainer.data.batch import Batch
from trainer.learning.spans import span

LogitTransform = Callable[[Tensor], Tensor]


class HiddenStates(Protocol):
    """Tensors of a frozen target for heads that are trained on it."""

    transform: LogitTransform | None
    """From the lm_head's products to the target's logits; None where a family's logits are the products."""

    @property
    def lm_head(self) -> Float[Tensor, "vocab hidden"]:
        """The weight of the target's lm_head."""

    def read(self, batch: Batch) -> Float[Tensor, "batch positions hidden"] | None:
        """Return the states that are on a disk for a batch, on its device; None: the target is to be run."""

    def hidden(self, batch: Batch) -> Float[Tensor, "batch positions hidden"]:
        """Return what the lm_head reads, on the batch's device, by a run of the target."""


class OnlineTarget:
    """The target itself, run without gradients on every batch."""

    def __init__(self, target: CausalLM) -> None:
        check_logits(target.model)
        self._model, self._layers = target.model.requires_grad_(False), target.num_layers
        self.transform = logit_transform(target.model.config.get_text_config(decoder=True))

    @property
    def lm_head(self) -> Float[Tensor, "vocab hidden"]:
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight

    def read(self, batch: Batch) -> Tensor | None:
        """Return None: nothing is on a disk."""
        return None

    def hidden(self, batch: Batch) -> Float[Tensor, "batch positions hidden"]:
        return self.tapped(batch, ())[0]

    @torch.no_grad()
    def tapped(self, batch: Batch, taps: Sequence[int], stored: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return what the lm_head reads, and the states behind the layers ``taps``, by one run of the target.

        (batch, positions, hidden) and (batch, positions, taps) on the batch's device; the latter empty without taps.
        ``stored`` is what `read` gave, on the batch's device.
        """
        with span("target"), capture_taps(self._model, self._layers, taps) as tapped:
            hidden = lm_head_input(self._model, batch.model_inputs())
        device = batch.tokens.device  # a target spread over devices ends on another
        return hidden.to(device), (tapped[0] if tapped else hidden[..., :0]).to(device)


# --- from products to logits ----------------------------------------------------------------------------------------


def logit_scale(config: PreTrainedConfig) -> float:
    """Return the factor between the lm_head's products and the logits: Granite divides by one, Cohere multiplies."""
    factor, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    return float(factor or 1.0) / float(divisor or 1.0)


def logit_transform(config: PreTrainedConfig) -> LogitTransform | None:
    """Return the function from products to logits, `logit_scale` and Gemma-2's soft cap; None where they are equal."""
    scale, cap = logit_scale(config), getattr(config, "final_logit_softcapping", None)
    if cap:
        return lambda logits: torch.tanh(logits * scale / cap) * cap
    return None if scale == 1.0 else lambda logits: logits * scale


@torch.no_grad()
def check_logits(model: PreTrainedModel, role: str = "target") -> None:
    """Raise ValueError for a model whose logits are not `logit_transform` of its lm_head's products.

    Losses are computed from these products, so another distribution than the model's own would be trained.
    """
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"the {role}'s lm_head has a bias, which losses here have no place for: give another {role}")
    tokens = torch.tensor([[0, 1]], device=model.device)
    with capture_lm_head_input(model) as captured:
        logits = model(input_ids=tokens, use_cache=False).logits
    weight = model.get_output_embeddings().weight
    products = weight @ captured[0][0].to(weight.device).mT
    transform = logit_transform(model.config.get_text_config(decoder=True))
    expected = (products.mT if transform is None else transform(products.mT)).to(logits.device)
    if not torch.allclose(logits[0].float(), expected.float(), rtol=0.05, atol=0.05 * float(expected.abs().max())):
        raise ValueError(
            f"the {role} ({model.config.model_type}) does more to its lm_head's products than this trainer knows of: "
            f"give another {role}"
        )
