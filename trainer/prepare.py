"""Writing a recipe's features ahead of its training, on a machine or at a time of its own."""

from pathlib import Path

from accelerate import PartialState
from rich.console import Console

from trainer.assemble import feature_identity, load_recipe_tokenizer, load_target
from trainer.data import load_dataset
from trainer.features import FeatureStore, ensure_features
from trainer.quickstart import resolve
from trainer.recipe import AnyRecipe, MedusaRecipe


def prepare_features(recipe: AnyRecipe, console: Console | None = None) -> FeatureStore:
    """Write what is missing of a recipe's features; under `accelerate launch`, every process its share."""
    if not isinstance(recipe, MedusaRecipe) or recipe.features is None:
        raise ValueError(f"{recipe.name} has no features section: give features.folder=FOLDER behind a medusa recipe")
    state = PartialState()
    target = load_target(recipe, state.device)
    assert target is not None and target.model is not None
    tokenizer = load_recipe_tokenizer(recipe)
    dataset = load_dataset(resolve(recipe.data.train), recipe.data, tokenizer)
    return ensure_features(
        target.model,
        dataset.examples,
        Path(recipe.features.folder),
        feature_identity(target, tokenizer, dataset, recipe.features),
        recipe.features,
        console or Console(stderr=True),
        state.process_index,
        state.num_processes,
    )
