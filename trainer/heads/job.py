"""Heads: from a recipe to heads to be trained on a target that runs or on its features, and the memory for it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerBase

from decoding.model.causal_lm import CausalLM
from decoding.model.hub import local_folder
from trainer.data.batch import Example
from trainer.data.dataset import Dataset, load_splits, load_training_data
from trainer.data.source import BatchSource, Offline
from trainer.heads.medusa import MedusaObjective
from trainer.heads.medusa2 import Medusa2Objective
from trainer.job import (
    Largest,
    Phase,
    Stored,
    shared_identity,
    trained_itemsize,
    trained_numbers,
    with_few_rows,
)
from trainer.learning.memory import frozen_bytes, frozen_forward_bytes, layer_bytes
from trainer.learning.objective import GreedyTexts
from trainer.learning.products import held_bytes
from trainer.processes import Process
from trainer.recipe.common import TrainingSection
from trainer.recipe.heads import FeaturesSection, MedusaRecipe
from trainer.target.features import FeatureStore, FeatureWriter, StoredFeatures, ensure_features, feature_writer
from trainer.target.hidden import OnlineTarget
from trainer.target.loading import (
    StoredTarget,
    Target,
    load_target,
    load_target_model,
)


@dataclass(frozen=True)
class HeadsKind:
    """The kind of a recipe for heads: see `trainer.job.Kind`."""

    recipe: MedusaRecipe

    @property
    def target(self) -> str:
        return self.recipe.target

    @property
    def tokenizer(self) -> str:
        return self.recipe.target

    @property
    def stored(self) -> Stored | None:
        features = self.recipe.features
        if features is None:
            return None
        return Stored("features.folder", Path(features.folder), partial(self._write_features, features))

    @property
    def keeps_target(self) -> bool:
        return self.recipe.features is None or self.recipe.features.keep_target

    @property
    def steps_per_writing(self) -> int:
        return 1

    def phases(self) -> list[Phase]:
        """Return two phases where adapters join the heads later."""
        steps = self.recipe.training.steps
        alone = self.recipe.adapters.heads_first_steps if self.recipe.adapters else 0
        if not 0 < alone < steps:
            return [Phase("a step", 0, steps)]
        return [Phase("a step of the heads alone", 0, alone), Phase("a step with the adapters", alone, steps - alone)]

    def measured_from(self, phase: Phase) -> int:
        return phase.first

    def small(self, rows: int, scratch: Path) -> MedusaRecipe:
        if self.recipe.features is None:
            return self.recipe
        changes = {"folder": str(scratch / "features"), "keep_target": True}
        features = self.recipe.features.model_copy(update=changes)
        return self.recipe.model_copy(update={"features": features, **with_few_rows(self.recipe, rows)})

    def without_store(self) -> MedusaRecipe:
        return self.recipe.model_copy(update={"features": None})

    def _write_features(self, section: FeaturesSection, device: torch.device, process: Process) -> FeatureStore:
        target = load_target(self.recipe, device)
        return _features(section, target, load_training_data(self.recipe.data, target.tokenizer), process)

    def assemble(self, device: torch.device, process: Process, check_costs: bool = False) -> "HeadsJob":
        """See `trainer.job.Kind.assemble`; the costs of heads are small, and not checked."""
        recipe, target = self.recipe, load_target(self.recipe, device)
        dataset, heldout = load_splits(recipe.data, target.tokenizer)
        torch.manual_seed(recipe.training.seed)  # for heads that start at random
        kept: StoredTarget = target
        if recipe.features is None:
            objective = _objective_on(recipe, target)
        else:
            store = _features(recipe.features, target, dataset, process)
            objective = _objective_from(recipe, target, store, device)
            kept = target if recipe.features.keep_target else target.let_go()
        return HeadsJob(recipe, dataset, heldout, kept, objective, _identity(recipe, target, dataset, heldout))


@dataclass(frozen=True)
class HeadsJob:
    """Heads to be trained: see `trainer.job.Job`."""

    recipe: MedusaRecipe
    dataset: Dataset
    heldout: Dataset
    target: StoredTarget
    objective: MedusaObjective | Medusa2Objective
    identity: Mapping[str, Any]

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self.target.tokenizer

    def source(self, section: TrainingSection, process: Process, folder: Path | None = None) -> BatchSource:
        return Offline(self.dataset.examples, section.batch_size, section.seed)

    def writer(self, examples: Sequence[Example]) -> FeatureWriter | None:
        features = self.recipe.features
        return None if features is None else feature_writer(self._loaded, examples, features)

    def target_again(self, device: torch.device) -> Target:
        if isinstance(self.target, Target):
            return self.target
        return self.target.loaded(load_target_model(self.recipe, device))

    def choose_tree(self, target: CausalLM, texts: GreedyTexts) -> None:
        self.objective.choose_tree(target, texts())

    def passing_bytes(self, largest: Largest) -> int:
        """See `trainer.job.Job.passing_bytes`: a head keeps its input, and three states of each block, in fp32."""
        recipe, target, itemsize = self.recipe, self._loaded.model, trained_itemsize(self.recipe)
        head = 4 * target.hidden_size * (2 + 3 * recipe.heads.num_layers)
        heads = largest.trained * head * recipe.heads.num_heads
        softmaxed = 8 if recipe.heads.loss.soft else 3
        heads += held_bytes(largest.trained, target.vocab_size, itemsize, target.device, 1, softmaxed)
        # Each head keeps a gradient of the bias's output layer, and what that layer reads.
        per_rank = largest.positions + recipe.heads.num_heads * (target.vocab_size + largest.trained)
        heads += 4 * recipe.heads.markov_rank * per_rank
        if recipe.adapters is None:
            return heads + (0 if recipe.features else frozen_forward_bytes(target, largest.positions))
        layer = layer_bytes(target, itemsize, adapted=True)
        if recipe.adapters.gradient_checkpointing:  # layers keep what they read, and are run again one by one
            return heads + largest.positions * (target.num_layers * target.hidden_size * itemsize + layer)
        return heads + largest.positions * target.num_layers * layer

    def artefact_bytes(self) -> dict[str, int]:
        """See `trainer.job.Job.artefact_bytes`; adapters may be merged into a copy of the target."""
        parts = {"the finished artefact": trained_numbers(self.objective) * self.target.dtype.itemsize}
        if self.recipe.adapters is not None and self.recipe.adapters.export == "merged":
            parts["the merged target"] = frozen_bytes(self._loaded.model, self.objective.module)
        return parts

    @property
    def _loaded(self) -> Target:
        assert isinstance(self.target, Target), "a plan keeps the target"
        return self.target


def _identity(recipe: MedusaRecipe, target: StoredTarget, dataset: Dataset, heldout: Dataset) -> dict[str, Any]:
    """See `trainer.job.Job.identity`; of stored features only what a loss reads in them makes another run."""
    content, features = shared_identity(recipe, target, dataset, heldout), recipe.features
    content["features"] = {
        "top_k": features.top_k if features and recipe.heads.loss.soft else 0,
        "states": features.states if features else "target",
    }
    return content


def _features(section: FeaturesSection, target: Target, dataset: Dataset, process: Process) -> FeatureStore:
    """Return the features of the training data, written where they are not there yet."""
    writer = feature_writer(target, dataset.examples, section)
    return ensure_features(writer, dataset.examples, section, process)


def _objective_on(recipe: MedusaRecipe, target: Target) -> MedusaObjective | Medusa2Objective:
    """Make the objective on a target that runs at every step."""
    steps = recipe.training.steps
    if recipe.adapters is not None:
        return Medusa2Objective(target.model, target.tokenizer, recipe.heads, recipe.adapters, steps)
    return MedusaObjective(OnlineTarget(target.model), recipe.heads, steps, target.dtype)


def _objective_from(
    recipe: MedusaRecipe, target: StoredTarget, store: FeatureStore, device: torch.device
) -> MedusaObjective:
    """Make the objective on stored features, for which the target need not be loaded."""
    config = AutoConfig.from_pretrained(
        str(local_folder(target.name, weights=False)), trust_remote_code=recipe.trust_remote_code
    )
    return MedusaObjective(StoredFeatures(store, config, device), recipe.heads, recipe.training.steps, target.dtype)
