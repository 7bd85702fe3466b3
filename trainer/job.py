"""`Job`: everything one training run needs, assembled from its recipe."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from trainer.data.batch import BatchSource, Offline
from trainer.data.dataset import Dataset
from trainer.files.folders import digest_of_each
from trainer.learning.objective import Objective
from trainer.processes import Process
from trainer.recipe.heads import MedusaRecipe
from trainer.recipe.reading import AnyRecipe
from trainer.target.loading import StoredTarget, Target, load_target_model


@dataclass(frozen=True)
class Job:
    """Recipe, data, target and objective of one run, for heads or a draft."""

    recipe: AnyRecipe
    tokenizer: PreTrainedTokenizerBase
    dataset: Dataset
    """The training data."""
    heldout: Dataset
    target: StoredTarget
    """A `Target` if the model is loaded, or a `StoredTarget` if it was released to free memory."""
    objective: Objective
    identity: Mapping[str, Any]
    """The recipe as plain JSON values; `trainer.run.checkpoint` uses it to recognise the run.

    Target, data and drafts appear as digests of their initial content, not as paths."""
    policy_source: Callable[[Process], BatchSource] | None = None
    """Makes a source of texts that are written during training; None means training on the answers in the data."""

    def source(self, process: Process) -> BatchSource:
        """Return the source of training batches."""
        if self.policy_source is not None:
            return self.policy_source(process)
        return Offline(self.dataset.examples, self.recipe.training.batch_size, self.recipe.training.seed)

    def target_again(self, device: torch.device) -> Target:
        """Return the target for the last evaluation; reload it if it was released."""
        if isinstance(self.target, Target):
            return self.target
        assert isinstance(self.recipe, MedusaRecipe), "only training on stored features releases the target"
        return self.target.loaded(load_target_model(self.recipe, device))

    @property
    def trained_numbers(self) -> int:
        """The number of trained parameters."""
        return sum(p.numel() for p in self.objective.module.parameters() if p.requires_grad)


def shared_identity(recipe: AnyRecipe, target: StoredTarget, dataset: Dataset, heldout: Dataset) -> dict[str, Any]:
    """Return the part of `Job.identity` that all kinds of recipe share."""
    content = recipe.model_dump(mode="json", exclude={"target", "data"})
    content["target weights"] = target.fingerprint
    content["training data"] = digest_of_each(example.content() for example in dataset.examples)
    content["held-out data"] = digest_of_each(example.content() for example in heldout.firsts)
    return content
