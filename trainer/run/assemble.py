"""THE dispatch from a recipe to its job; no other code checks the class of a recipe or an objective."""

from pathlib import Path

import torch

from trainer.drafts.job import assemble_draft
from trainer.files.folders import check_can_be_folder
from trainer.heads.job import assemble_heads
from trainer.job import Job
from trainer.processes import Process
from trainer.recipe.heads import MedusaRecipe
from trainer.recipe.reading import AnyRecipe


def assemble(recipe: AnyRecipe, device: torch.device, process: Process, begins: bool = False) -> Job:
    """Load and check everything that the recipe names, and write the missing part of its `store`.

    Every process calls this. ``begins``: no weights of an earlier start will be loaded. Then first weights are fitted
    to the target, and UserError is raised for a draft too slow here to ever pay, unless the recipe switches that off.
    """
    if isinstance(recipe, MedusaRecipe):
        return assemble_heads(recipe, device, process, begins)
    return assemble_draft(recipe, device, process, begins)


def check_folders(recipe: AnyRecipe) -> None:
    """Raise UserError if a file is in the place of a folder that the recipe writes."""
    output = Path(recipe.output)
    for key, folder in (("output", output), ("the folder of the finished run", output / "final")):
        check_can_be_folder(folder, key)
    if recipe.store is not None:
        key, name = recipe.store
        check_can_be_folder(Path(name), key)
