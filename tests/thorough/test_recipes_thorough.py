"""Every recipe in recipes/: it is parsed, says what it is meant for and whether it was measured, and names itself."""

import io
import json
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from rich.console import Console
from test_recipes import RECIPES
from tiny_training import write_corpus, write_target

from trainer.recipe.reading import load_recipe
from trainer.run.train import run_recipe


@pytest.mark.parametrize(
    "path", [p for p in RECIPES if p.parent.name == "any"], ids=lambda p: f"{p.parent.name}/{p.stem}"
)
def test_a_recipe_of_a_small_target_or_for_any_trains_to_its_end_in_a_few_steps(path: Path, tmp_path: Path) -> None:
    """The target is tiny, and the recipe keeps its settings except those that make the run small."""
    write_target(tmp_path / "target")
    train, heldout = write_corpus(tmp_path)
    small = ["training.steps=3", "training.batch_size=4", "training.micro_batch_size=2", "data.max_length=16"]
    small += ["evaluation.prompts=1", "evaluation.prompt_tokens=4", "evaluation.max_new_tokens=4", "tracking=none"]
    small += ["evaluation.best_prompts=8", "evaluation.tree_prompts=1"]
    given = ["name=tiny", f"target={tmp_path / 'target'}", f"output={tmp_path / 'run'}", "training.mixed_precision=no"]
    given += [f"data.train={train}", f"data.heldout={heldout}", "dtype=fp32"]
    if path.stem == "medusa2":
        small += ["adapters.heads_first_steps=1"]
    if path.stem.startswith(("draft", "dspark", "eagle3")):
        small += ["draft.init.from_model=null", "draft.policy.max_new_tokens=4"]
    if path.stem == "dspark":  # every id of the tiny tokenizer is a word
        small += ["draft.dspark.mask_token=<user>"]
    if path.stem == "eagle3":  # the tiny target has two layers
        small += ["draft.eagle3.taps=[0]"]
    AcceleratorState._reset_state(True)
    final = run_recipe(load_recipe(path, [*given, *small]), Console(file=io.StringIO()))
    AcceleratorState._reset_state(True)
    steps = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert max(line["step"] for line in steps) == 3 and (final / "model.safetensors").is_file()
