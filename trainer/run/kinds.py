"""THE dispatch from a recipe to its kind. No other code asks for the class of a recipe or an objective."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from trainer.drafts.job import DraftKind
from trainer.files.folders import check_can_be_folder
from trainer.heads.job import HeadsKind
from trainer.job import Kind
from trainer.pretrain import PretrainKind
from trainer.recipe.draft import DraftRecipe
from trainer.recipe.heads import MedusaRecipe
from trainer.recipe.pretrain import PretrainRecipe
from trainer.recipe.recipe import AnyRecipe

_KINDS: Mapping[type[AnyRecipe], Callable[[Any], Kind]] = {
    MedusaRecipe: HeadsKind,
    DraftRecipe: DraftKind,
    PretrainRecipe: PretrainKind,
}


def kind_of(recipe: AnyRecipe) -> Kind:
    """Return the recipe with all that depends on its kind."""
    return _KINDS[type(recipe)](recipe)


def check_folders(kind: Kind) -> None:
    """Raise ValueError if a file stands where the recipe writes a folder."""
    output = Path(kind.recipe.output)
    check_can_be_folder(output, "output")
    check_can_be_folder(output / "final", "the folder of the finished run")
    if kind.stored is not None:
        check_can_be_folder(kind.stored.folder, kind.stored.setting)
