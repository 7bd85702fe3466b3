"""A small Llama trained from nothing, for the embedded default target: the objective, and its kind of job."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_tokenizer
from trainer.data.batch import Batch, Example, flat_rows
from trainer.data.dataset import Dataset, load_splits
from trainer.data.source import BatchSource, Offline
from trainer.files.transformers4 import write_model
from trainer.job import (
    Largest,
    Phase,
    Stored,
    shared_identity,
    trained_itemsize,
    trained_numbers,
)
from trainer.learning.objective import EVERYWHERE_THE_SAME, GreedyTexts, TermSums
from trainer.processes import Process
from trainer.recipe.common import TrainingSection
from trainer.recipe.pretrain import PretrainRecipe, PretrainSection
from trainer.target.store import Writer


class LanguageModelTraining(nn.Module):
    """A causal LM with its cross entropy at the trained tokens."""

    def __init__(self, model: LlamaForCausalLM) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Batch, places: Int[Tensor, " labels"]) -> TermSums:
        """Return the sums over the labels, whose places are those in the flattened batch."""
        logits = flat_rows(self.model(**batch.model_inputs(), use_cache=False).logits, places)
        labels = batch.tokens.flatten()[places + 1]
        loss = nn.functional.cross_entropy(logits.float(), labels, reduction="sum")
        return TermSums(loss[None], (logits.argmax(-1) == labels).sum()[None])


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

    def save(self, folder: Path) -> None:
        model = copy.deepcopy(self.module.model)
        model.to(torch.bfloat16)  # type: ignore[arg-type]  # transformers' stubs
        model.config.dtype = torch.bfloat16
        model.generation_config = GenerationConfig.from_model_config(model.config)
        write_model(model, self._tokenizer, folder)


@dataclass(frozen=True)
class PretrainKind:
    """The kind of a recipe for a model from nothing: see `trainer.job.Kind`."""

    recipe: PretrainRecipe

    @property
    def target(self) -> str | None:
        return None

    @property
    def tokenizer(self) -> str:
        return self.recipe.model.tokenizer

    @property
    def stored(self) -> Stored | None:
        return None

    @property
    def keeps_target(self) -> bool:
        return False

    @property
    def steps_per_writing(self) -> int:
        return 1

    def phases(self) -> list[Phase]:
        return [Phase("a step", 0, self.recipe.training.steps)]

    def measured_from(self, phase: Phase) -> int:
        return phase.first

    def small(self, rows: int, scratch: Path) -> PretrainRecipe:
        return self.recipe

    def without_store(self) -> PretrainRecipe:
        return self.recipe

    def assemble(self, device: torch.device, process: Process, check_costs: bool = False) -> "PretrainJob":
        recipe, tokenizer = self.recipe, load_tokenizer(self.tokenizer)
        dataset, heldout = load_splits(recipe.data, tokenizer)
        identity = shared_identity(recipe, None, dataset, heldout)
        torch.manual_seed(recipe.training.seed)  # for the weights, which start at random
        objective = PretrainObjective(tokenizer, recipe.model)
        return PretrainJob(recipe, tokenizer, dataset, heldout, objective, identity)


@dataclass(frozen=True)
class PretrainJob:
    """A model to be trained from nothing: see `trainer.job.Job`."""

    recipe: PretrainRecipe
    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset
    heldout: Dataset
    objective: PretrainObjective
    identity: Mapping[str, Any]

    @property
    def target(self) -> None:
        """None: there is no target."""

    def source(self, section: TrainingSection, process: Process, folder: Path | None = None) -> BatchSource:
        return Offline(self.dataset.examples, section.batch_size, section.seed)

    def writer(self, examples: Sequence[Example]) -> Writer | None:
        return None

    def target_again(self, device: torch.device) -> None:
        """Return None: there is no target."""

    def choose_tree(self, target: CausalLM, texts: GreedyTexts) -> None:
        """Do nothing: a model has no tree."""

    def passing_bytes(self, largest: Largest) -> int:
        """See `trainer.job.Job.passing_bytes`; the logits of all trained tokens exist at once."""
        shape, itemsize = self.recipe.model, trained_itemsize(self.recipe)
        layer = 10 * shape.hidden_size + 4 * shape.intermediate_size
        vocab = self.objective.module.get_parameter("model.lm_head.weight").shape[0]
        layers = largest.positions * layer * shape.num_hidden_layers * itemsize
        return layers + largest.trained * vocab * (2 * itemsize + 8)

    def artefact_bytes(self) -> dict[str, int]:
        return {"the finished artefact": 4 * trained_numbers(self.objective)}
