"""`headstart features`: features or a teacher cache, written ahead of the training that reads them."""

from typing import Any

from rich.console import Console

from trainer.processes import Process, agreed
from trainer.recipe.recipe import AnyRecipe
from trainer.run.distributed import build_accelerator
from trainer.run.embedded import ensure_answered
from trainer.run.kinds import check_folders, kind_of
from trainer.run.train import ensure_built
from trainer.target.store import Store
from trainer.terminal.console import standard_error


def prepare_features(recipe: AnyRecipe, console: Console | None = None) -> Store[Any]:
    """Write what is missing of a recipe's features, or of a draft's teacher cache.

    Under `accelerate launch`, every process its share. ValueError for a recipe that has neither.
    """
    kind = kind_of(recipe)
    if kind.stored is None:
        raise ValueError(
            f"{recipe.name} has no features section: give features.folder=FOLDER behind a medusa recipe, or "
            "draft.teacher.folder=FOLDER behind a draft's"
        )
    ensure_built(kind.target)
    ensure_answered(kind.recipe.data.train)
    accelerator = build_accelerator(recipe.training)
    agreed(lambda: check_folders(kind))
    process = Process(accelerator.process_index, accelerator.num_processes, console or standard_error())
    write = kind.stored.write
    return agreed(lambda: write(accelerator.device, process))
