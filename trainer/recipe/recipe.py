"""A recipe of any kind: the union of the three, told apart by their field ``kind``."""

from typing import Annotated

from pydantic import Field

from trainer.recipe.draft import DraftRecipe
from trainer.recipe.heads import MedusaRecipe
from trainer.recipe.pretrain import PretrainRecipe

AnyRecipe = MedusaRecipe | DraftRecipe | PretrainRecipe
Recipe = Annotated[AnyRecipe, Field(discriminator="kind")]
"""`AnyRecipe` with the mark that tells pydantic how to choose."""
