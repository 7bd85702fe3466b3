"""A run's `Job`: what a recipe's kind assembles for the loop. Heads, drafts and models from nothing each make one."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from trainer.data.dataset import Dataset
from trainer.data.source import BatchSource, Offline
from trainer.files.shards import digest_of_each
from trainer.learning.objective import Objective
from trainer.processes import Process
from trainer.recipe.heads import MedusaRecipe
from trainer.recipe.reading import AnyRecipe
from trainer.target.loading import StoredTarget, Target, load_target_model


@dataclass(frozen=True)
class Job:
    """All that a run is made of."""

    recipe: AnyRecipe
    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset
    """The training data."""
    heldout: Dataset
    target: StoredTarget | None
    """A `Target` if one is loaded, a `StoredTarget` if it was let go; None for a model from nothing."""
    objective: Objective
    identity: Mapping[str, Any]
    """The recipe as plain JSON values, by which `trainer.run.checkpoint` tells one run from another.

    Target, data and drafts are known by their content, wherever they lie, from before anything is trained."""
    policy_source: Callable[[Process], BatchSource] | None = None
    """Makes a source of texts that are written during the training; None: the data's own answers are trained on."""

    def source(self, process: Process) -> BatchSource:
        """Return the batches of the training."""
        if self.policy_source is not None:
            return self.policy_source(process)
        return Offline(self.dataset.examples, self.recipe.training.batch_size, self.recipe.training.seed)

    def target_again(self, device: torch.device) -> Target | None:
        """Return the target for the last evaluation, loaded once more if it was let go."""
        if self.target is None or isinstance(self.target, Target):
            return self.target
        assert isinstance(self.recipe, MedusaRecipe), "only heads on features let their target go"
        return self.target.loaded(load_target_model(self.recipe, device))

    @property
    def trained_numbers(self) -> int:
        """The number of trained parameters."""
        return sum(p.numel() for p in self.objective.module.parameters() if p.requires_grad)


def shared_identity(
    recipe: AnyRecipe, target: StoredTarget | None, dataset: Dataset, heldout: Dataset
) -> dict[str, Any]:
    """Return `Job.identity` but for what else a kind knows by its content."""
    content = recipe.model_dump(mode="json", exclude={"target", "data"})
    content["target weights"] = target.fingerprint if target else None
    content["training data"] = digest_of_each(example.content() for example in dataset.examples)
    content["held-out data"] = digest_of_each(example.content() for example in heldout.firsts)
    return content
