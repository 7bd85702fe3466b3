"""Writing a recipe's features ahead of its training, on a machine or at a time of its own."""

from rich.console import Console

from trainer.assemble import check_folders, features_of, load_recipe_tokenizer, load_target
from trainer.data import load_dataset
from trainer.distributed import build_accelerator
from trainer.features import FeatureStore
from trainer.quickstart import resolve
from trainer.recipe import AnyRecipe, MedusaRecipe


def prepare_features(recipe: AnyRecipe, console: Console | None = None) -> FeatureStore:
    """Write what is missing of a recipe's features; under `accelerate launch`, every process its share."""
    if not isinstance(recipe, MedusaRecipe) or recipe.features is None:
        raise ValueError(f"{recipe.name} has no features section: give features.folder=FOLDER behind a medusa recipe")
    check_folders(recipe)
    accelerator = build_accelerator(recipe.training)  # its processes have time to wait for one another
    target = load_target(recipe, accelerator.device)
    assert target is not None
    tokenizer = load_recipe_tokenizer(recipe)
    dataset = load_dataset(resolve(recipe.data.train), recipe.data, tokenizer)
    return features_of(
        target,
        tokenizer,
        dataset,
        recipe.features,
        console or Console(stderr=True),
        accelerator.process_index,
        accelerator.num_processes,
    )
