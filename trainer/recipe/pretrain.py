"""The recipe of a language model trained from scratch."""

from typing import Literal

from pydantic import model_validator

from decoding.errors import UserError
from trainer.recipe.common import CommonRecipe, Section


class PretrainSection(Section):
    """A small Llama with random weights. ``tokenizer`` is the folder of its tokenizer."""

    tokenizer: str
    hidden_size: int = 256
    intermediate_size: int = 688
    num_hidden_layers: int = 8
    num_attention_heads: int = 4
    max_position_embeddings: int = 1024


class PretrainRecipe(CommonRecipe):
    """A language model trained from scratch, such as the quickstart target."""

    kind: Literal["pretrain"]
    model: PretrainSection

    @property
    def tokenizer_name(self) -> str:
        return self.model.tokenizer

    @model_validator(mode="after")
    def _nothing_goes_by_evaluations(self) -> "PretrainRecipe":
        if self.evaluation.keep == "best":
            raise UserError("evaluation.keep=best needs a target, and pretraining has none: omit it")
        return self
