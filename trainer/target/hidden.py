"""The target's hidden states, for heads that are trained on a frozen target: here from the target itself.

`trainer.target.features` has them from disk.
"""

from typing import Protocol

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.model.causal_lm import CausalLM
from decoding.model.lm_head import lm_head_input
from trainer.data.batch import Batch
from trainer.learning.spans import span
from trainer.target.logits import LogitTransform, check_logits, logit_transform


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
        self._model = target.model.requires_grad_(False)
        self.transform = logit_transform(target.model.config.get_text_config(decoder=True))

    @property
    def lm_head(self) -> Float[Tensor, "vocab hidden"]:
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight

    def read(self, batch: Batch) -> None:
        """Return None: nothing is on a disk."""

    @torch.no_grad()
    def hidden(self, batch: Batch) -> Float[Tensor, "batch positions hidden"]:
        with span("target"):
            hidden = lm_head_input(self._model, batch.model_inputs())
        return hidden.to(batch.tokens.device)  # a target spread over devices ends on another
