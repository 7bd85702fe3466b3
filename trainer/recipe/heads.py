"""The recipe of heads on a target: Medusa-1 and Medusa-2."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from decoding.errors import UserError
from trainer.recipe.common import CommonRecipe, LossSection, Section, default_term


class HeadsSection(Section):
    """Medusa heads: their shape, their loss, and the weight of each head in the loss."""

    num_heads: Annotated[int, Field(ge=1)] = 4
    num_layers: Annotated[int, Field(ge=1)] = 1
    """Residual blocks per head."""
    markov_rank: Annotated[int, Field(ge=0)] = 0
    """Rank of a bias on each head's logits that depends on the previous token, such as 256; 0 means no bias."""
    shared_lm_head: bool | None = None
    """True: heads consist only of residual blocks and share the target's lm_head, which makes the heads far smaller.

    None: the heads share the target's lm_head if separate lm_heads would be at least half as large as the target,
    or would have at least a billion parameters.
    """
    vocabulary: Annotated[int, Field(ge=1)] | None = None
    """Largest number of tokens that the heads can write: the most frequent tokens of the data. The heads get copies of
    the rows of the target's lm_head for these tokens, so drafting and training read fewer rows. Requires
    ``shared_lm_head``. None means all tokens.
    """
    fit_tokens: Annotated[int, Field(ge=0)] = 32_768
    """New heads with a Markov bias start as a regression of the target's states, on this many tokens of the data
    (`trainer.target.initial`). With 0 the heads start near the target's own prediction. Heads of Medusa-2 and heads on
    targets that scale their logits always start near this prediction, and heads with ``init`` start as the heads that
    ``init`` names.
    """
    init: str | None = None
    """Folder or hub id of heads to start from, such as a Medusa-1 run's final/."""
    decay: Annotated[float, Field(gt=0, le=1)] = 0.8
    """Head k (from 0) has weight ``decay ** k``."""
    schedule: Literal["constant", "sine"] = "constant"
    """``sine``: the heads' weights rise as sin(step / steps · π/2)."""
    loss: Annotated[LossSection, default_term("cross_entropy")] = LossSection(cross_entropy=1.0)
    tree_nodes: Annotated[int, Field(ge=1, le=4096)] = 16
    """Number of drafted nodes in the tree, at most 4096. The tree is chosen at the end of training, by the measured
    accuracies of the heads."""


class AdaptersSection(Section):
    """Medusa-2 (2401.10774, section 2.2.2): LoRA adapters (2106.09685) on the target, trained with the heads.

    Every linear layer except the lm_head gets an adapter.
    """

    rank: Annotated[int, Field(ge=1)] = 32
    alpha: Annotated[float, Field(gt=0)] = 16.0
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.05
    heads_first_steps: Annotated[int, Field(ge=0)] = 0
    """Number of first steps that train only the heads, before the adapters join."""
    base_loss: Literal["cross_entropy", "forward_kl"] = "cross_entropy"
    """Loss of the target's next token: cross entropy on the data, or the KL divergence from the target without
    adapters.
    """
    base_weight: Annotated[float, Field(ge=0)] = 1.0
    heads_weight: Annotated[float, Field(gt=0)] = 0.2
    """Factor on every head's weight once the adapters have joined."""
    heads_rate: Annotated[float, Field(gt=0)] = 4.0
    """Learning rate of the heads and their biases, as a multiple of the adapters' learning rate."""
    gradient_checkpointing: bool = True


StatesDtype = Literal["target", "bf16", "int8"]


class FeaturesSection(Section):
    """The target's hidden states, which are written to disk once. Training reads these states, so the target need not
    run at every step.
    """

    folder: str
    states: StatesDtype = "target"
    """Dtype of the states: the dtype of the target, bf16, or int8 with one scale per token and layer (half as large as
    bf16).
    """
    shard_tokens: Annotated[int, Field(ge=1024)] = 262_144
    keep_target: bool = True
    """True keeps the target in memory for evaluations during training. If False, the target is released from memory
    once the features are written or checked, and reloaded at the end."""


class MedusaRecipe(CommonRecipe):
    """Heads on a frozen target (Medusa-1). With ``adapters``, LoRA adapters of the target are trained together with the
    heads (Medusa-2).
    """

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
            raise UserError(
                "adapters change the target, so stored features would be out of date: use only one of these sections"
            )
        if self.evaluation.keep == "best" and self.features is not None and not self.features.keep_target:
            raise UserError(
                "evaluation.keep=best needs the target for evaluations during training: set features.keep_target=true"
            )
        return self
