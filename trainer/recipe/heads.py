"""The recipe of heads on a target: Medusa-1 and Medusa-2."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from trainer.recipe.common import LossSection, Section, TargetRecipe, default_term


class HeadsSection(Section):
    """Medusa heads: their shape, their loss, and the weight of head k (from 0) in the loss."""

    num_heads: Annotated[int, Field(ge=1)] = 4
    num_layers: Annotated[int, Field(ge=1)] = 1
    """Residual blocks per head, each with weights of its own."""
    markov_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of a bias on every head's logits by the token before the head's own, such as 256; 0: none."""
    shared_lm_head: bool = False
    """Heads are residual blocks alone, which write through the target's own lm_head: far smaller."""
    init: str | None = None
    """Folder or hub id of heads to start from, such as a Medusa-1 run's final/."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Head k weighs ``decay ** k``."""
    schedule: Literal["constant", "sine"] = "constant"
    """``sine``: the heads' weights rise as sin(step / steps · π/2)."""
    loss: Annotated[LossSection, default_term("cross_entropy")] = LossSection(cross_entropy=1.0)
    tree_nodes: Annotated[int, Field(ge=1, le=4096)] = 16
    """Drafted nodes of the tree chosen at the end from the heads' measured accuracies; 4096 is the most that a heads
    file may hold."""


class AdaptersSection(Section):
    """Medusa-2 (2401.10774, section 2.2.2): LoRA adapters (2106.09685) on the target, learnt with the heads.

    Every linear layer but the lm_head gets one.
    """

    rank: Annotated[int, Field(ge=1)] = 32
    alpha: Annotated[float, Field(gt=0)] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    heads_first_steps: Annotated[int, Field(ge=0)] = 0
    """Steps in which the heads alone are trained, before the adapters join."""
    base_loss: Literal["cross_entropy", "forward_kl"] = "cross_entropy"
    """Loss of the target's own next token: on the data, or towards the target with its adapters switched off."""
    base_weight: Annotated[float, Field(ge=0)] = 1.0
    heads_weight: Annotated[float, Field(gt=0)] = 0.2
    """Factor on every head's weight once the adapters have joined."""
    heads_rate: Annotated[float, Field(gt=0)] = 4.0
    """Learning rate of the heads, their biases included, over the adapters'."""
    gradient_checkpointing: bool = True


StatesDtype = Literal["target", "bf16", "int8"]


class FeaturesSection(Section):
    """Train from the target's hidden states, written to disk once, instead of running the target at every step."""

    folder: str
    states: StatesDtype = "target"
    """Hidden states in the target's dtype, in bf16, or rounded to int8 with a scale for each token and layer: half the
    disk of bf16."""
    shard_tokens: Annotated[int, Field(ge=1024)] = 262_144
    keep_target: bool = True
    """Keep the target beside the heads for the evaluations in between. False: the target is loaded at the start to
    write the features or to check that they are its own, let go, and loaded again at the end."""


class MedusaRecipe(TargetRecipe):
    """Heads on a frozen target (Medusa-1), or with ``adapters`` jointly with the target's LoRA adapters (Medusa-2)."""

    kind: Literal["medusa"]
    heads: HeadsSection = HeadsSection()
    adapters: AdaptersSection | None = None
    features: FeaturesSection | None = None

    @property
    def store(self) -> tuple[str, str] | None:
        return None if self.features is None else ("features.folder", self.features.folder)

    def without_store(self) -> Self:
        return self.model_copy(update={"features": None})

    @model_validator(mode="after")
    def _features_are_of_a_frozen_target(self) -> "MedusaRecipe":
        if self.adapters is not None and self.features is not None:
            raise ValueError(
                "features are the hidden states of a target that stays as it is: give adapters or features"
            )
        if self.evaluation.keep == "best" and self.features is not None and not self.features.keep_target:
            raise ValueError(
                "evaluation.keep=best goes by evaluations during the training, for which the target has to stay: set "
                "features.keep_target=true"
            )
        return self
