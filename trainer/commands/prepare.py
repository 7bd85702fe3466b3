"""Writing what a recipe learns from ahead of its training, on a machine or at a time of its own."""

from rich.console import Console

from trainer.data.dataset import load_dataset
from trainer.quickstart import resolve
from trainer.recipe.draft import DraftRecipe
from trainer.recipe.heads import MedusaRecipe
from trainer.recipe.recipe import AnyRecipe
from trainer.run.assemble import as_teacher, check_folders, features_of, load_recipe_tokenizer, load_target
from trainer.run.distributed import build_accelerator
from trainer.target.features import FeatureStore
from trainer.target.teacher_cache import TeacherStore, teacher_of
from trainer.terminal.console import standard_error


def prepare_features(recipe: AnyRecipe, console: Console | None = None) -> FeatureStore | TeacherStore:
    """Write what is missing of a recipe's features, or of a draft's teacher cache.

    Under `accelerate launch`, every process its share. ValueError for a recipe that has neither.
    """
    features = recipe.features if isinstance(recipe, MedusaRecipe) else None
    teacher = recipe.draft.teacher if isinstance(recipe, DraftRecipe) else None
    if features is None and teacher is None:
        raise ValueError(
            f"{recipe.name} has no features section: give features.folder=FOLDER behind a medusa recipe, or "
            "draft.teacher.folder=FOLDER behind a draft's"
        )
    check_folders(recipe)
    accelerator = build_accelerator(recipe.training)  # its processes have time to wait for one another
    target = load_target(recipe, accelerator.device)
    assert target is not None
    target = as_teacher(recipe, target, accelerator.device)
    tokenizer = load_recipe_tokenizer(recipe)
    dataset = load_dataset(resolve(recipe.data.train), recipe.data, tokenizer)
    console = console or standard_error()
    processes = accelerator.process_index, accelerator.num_processes
    if isinstance(recipe, DraftRecipe):
        assert teacher is not None
        return teacher_of(target, tokenizer, dataset, teacher, recipe.draft.loss.temperature, console, *processes)
    assert features is not None
    return features_of(target, tokenizer, dataset, features, console, *processes)
