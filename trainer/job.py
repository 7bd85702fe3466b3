"""Everything that a run asks of a recipe's kind: a `Kind`, from the recipe alone, and the `Job` that it assembles.

Heads, drafts and models from nothing have one of each; `trainer.run.kinds` alone chooses among them by the recipe.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedTokenizerBase

from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Example
from trainer.data.dataset import Dataset
from trainer.data.source import BatchSource
from trainer.files.shards import digest_of_each
from trainer.learning.objective import GreedyTexts, Objective
from trainer.processes import Process
from trainer.recipe.common import TrainingSection
from trainer.recipe.recipe import AnyRecipe
from trainer.target.loading import StoredTarget, Target
from trainer.target.store import Store, Writer


class Stored(NamedTuple):
    """A folder that is written ahead of the training, which then reads it: features or a teacher cache."""

    setting: str
    """The key of the recipe that names the folder."""
    folder: Path
    write: Callable[[torch.device, Process], Store[Any]]
    """Writes what is missing of it. Every process calls this, and writes its share."""


class Phase(NamedTuple):
    """Steps of a run that take the same time: from step ``first`` (from 0), ``steps`` of them."""

    name: str
    first: int
    steps: int


class Largest(NamedTuple):
    """The most positions of any micro batch, padding included, and the most trained tokens of any."""

    positions: int
    trained: int


class Kind(Protocol):
    """A recipe with all that depends on its kind before anything is loaded, and the making of its job."""

    @property
    def recipe(self) -> AnyRecipe: ...

    @property
    def target(self) -> str | None:
        """The recipe's name for the target; None where a model is trained from nothing."""

    @property
    def tokenizer(self) -> str:
        """The recipe's name for the folder or hub id with the tokenizer."""

    @property
    def stored(self) -> Stored | None:
        """The folder that is written ahead; None where the training reads none."""

    @property
    def keeps_target(self) -> bool:
        """True where a target stays loaded during the training, for evaluations."""

    def phases(self) -> list[Phase]:
        """Return the run's phases, in order."""

    def measured_from(self, phase: Phase) -> int:
        """Return the step (from 0) at which the measurement of a phase's time begins."""

    @property
    def steps_per_writing(self) -> int:
        """Steps whose texts are written together; 1 where no texts are written during the training."""

    def small(self, rows: int, scratch: Path) -> AnyRecipe:
        """Cut the recipe down for a measurement: with ``stored``, at most ``rows`` rows, stored in ``scratch``."""

    def without_store(self) -> AnyRecipe:
        """Return the recipe without ``stored``, for weights that are trained already."""

    def assemble(self, device: torch.device, process: Process, check_costs: bool = False) -> "Job":
        """Load and check everything the recipe names, and write what is missing of ``stored``.

        Every process calls this. With ``check_costs``, ValueError for a draft that by the costs measured here could
        not pay, unless the recipe asks for no such check.
        """


class Job(Protocol):
    """All that a run is made of, assembled."""

    @property
    def recipe(self) -> AnyRecipe: ...

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase: ...

    @property
    def dataset(self) -> Dataset:
        """The training data."""

    @property
    def heldout(self) -> Dataset: ...

    @property
    def target(self) -> StoredTarget | None:
        """A `Target` where one is loaded, a `StoredTarget` where it was let go; None for a model from nothing."""

    @property
    def objective(self) -> Objective: ...

    @property
    def identity(self) -> Mapping[str, Any]:
        """The recipe as plain JSON values, by which `trainer.run.resuming` tells one run from another.

        Target, data and drafts are known by their content, wherever they lie, from before anything is trained.
        """

    def source(self, section: TrainingSection, process: Process, folder: Path | None = None) -> BatchSource:
        """Return the batches of a training by ``section``.

        ``folder`` is for texts that are written, by default in the output.
        """

    def writer(self, examples: Sequence[Example]) -> Writer | None:
        """Return the writer of features or of a teacher cache of these examples; None where the training reads neither.

        Only where a target is loaded.
        """

    def target_again(self, device: torch.device) -> Target | None:
        """Return the target for the last evaluation: as ``target``, but loaded once more if it was let go."""

    def choose_tree(self, target: CausalLM, texts: GreedyTexts) -> None:
        """Fit the tree of finished heads to the target's own texts; nothing to do for anything else."""

    def passing_bytes(self, largest: Largest) -> int:
        """Estimate the bytes on one device that pass through a step, with micro batches up to ``largest``."""

    def artefact_bytes(self) -> dict[str, int]:
        """Return the bytes of the finished artefact on disk, by part."""


def shared_identity(
    recipe: AnyRecipe, target: StoredTarget | None, dataset: Dataset, heldout: Dataset
) -> dict[str, Any]:
    """Return `Job.identity` but for what else a kind knows by its content."""
    content = recipe.model_dump(mode="json", exclude={"target", "data"})
    content["target weights"] = target.fingerprint if target else None
    content["training data"] = digest_of_each(example.content() for example in dataset.examples)
    content["held-out data"] = digest_of_each(example.content() for example in heldout.firsts)
    return content


def with_few_rows(recipe: AnyRecipe, rows: int) -> dict[str, Any]:
    """Return the change of a recipe that makes it read at most ``rows`` rows."""
    return {"data": recipe.data.model_copy(update={"max_rows": min(recipe.data.max_rows or rows, rows)})}


def trained_itemsize(recipe: AnyRecipe) -> int:
    """Return the bytes of a number as products are computed in: 2 in bf16, else 4."""
    return 2 if recipe.training.mixed_precision == "bf16" else 4


def trained_numbers(objective: Objective) -> int:
    """Return the number of trained parameters."""
    return sum(p.numel() for p in objective.module.parameters() if p.requires_grad)
