"""Objective and job for a small Llama trained from scratch: the quickstart target."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_tokenizer
from trainer.data.batch import Batch, flat_rows
from trainer.data.dataset import load_splits
from trainer.files.transformers4 import write_model
from trainer.job import Job, shared_identity
from trainer.learning.objective import EVERYWHERE_THE_SAME, GreedyTexts, TermSums
from trainer.recipe.pretrain import PretrainRecipe, PretrainSection


class LanguageModelTraining(nn.Module):
    """A causal LM with its cross entropy at the trained tokens."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, batch: Batch, places: Int[Tensor, " labels"], scale: Float[Tensor, " terms"] | None = None
    ) -> TermSums:
        """Return the sums over the labels; ``places`` index the flattened batch."""
        logits = flat_rows(self.model(**batch.model_inputs(), use_cache=False).logits, places)
        labels = batch.tokens.flatten()[places + 1]
        loss = nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        return TermSums.of(loss[None], (logits.argmax(-1) == labels).sum()[None], scale)


class PretrainObjective:
    """A small Llama with tied embeddings, and the mean cross entropy of its next token."""

    terms: tuple[str, ...] = ("next_token",)
    hit_name = "top1"

    def __init__(self, tokenizer: PreTrainedTokenizerBase, section: PretrainSection) -> None:
        self._tokenizer = tokenizer
        config = LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=section.hidden_size,
            intermediate_size=section.intermediate_size,
            num_hidden_layers=section.num_hidden_layers,
            num_attention_heads=section.num_attention_heads,
            max_position_embeddings=section.max_position_embeddings,
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        self.module: LanguageModelTraining = LanguageModelTraining(LlamaForCausalLM(config))

    def counts(self, batch: Batch, step: int = 0) -> Float[Tensor, " terms"]:
        return batch.labelled(1).sum()[None]

    def weights(self, step: int) -> tuple[float, ...]:
        return (1.0,)

    def rates(self, step: int) -> Mapping[str, float]:
        return EVERYWHERE_THE_SAME

    def ahead(self, batch: Batch, step: int) -> Int[Tensor, " labels"]:
        return batch.label_places(1)

    def inputs(self, batch: Batch, step: int, ahead: Int[Tensor, " labels"] | None = None) -> tuple[Any, ...]:
        return batch, self.ahead(batch, step) if ahead is None else ahead

    def drafter(self) -> Drafter | None:
        return None

    def choose_tree(self, target: CausalLM, texts: GreedyTexts) -> None:
        """Do nothing: models lack a tree."""

    def save(self, folder: Path) -> None:
        model = copy.deepcopy(self.module.model)
        model.to(torch.bfloat16)  # type: ignore[arg-type]  # transformers' stubs
        model.config.dtype = torch.bfloat16
        model.generation_config = GenerationConfig.from_model_config(model.config)
        write_model(model, self._tokenizer, folder)


def assemble_pretraining(recipe: PretrainRecipe) -> Job:
    """Build the job of a recipe that trains a model from scratch."""
    tokenizer = load_tokenizer(recipe.tokenizer_name)
    dataset, heldout = load_splits(recipe.data, tokenizer)
    identity = shared_identity(recipe, None, dataset, heldout)
    torch.manual_seed(recipe.training.seed)  # for the random initial weights
    return Job(recipe, tokenizer, dataset, heldout, None, PretrainObjective(tokenizer, recipe.model), identity)
