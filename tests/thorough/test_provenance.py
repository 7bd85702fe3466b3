"""What is written beside the weights: enough to know where they come from, and nothing secret."""

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from fake_hub import FakeHub, folder_on
from fake_hub import hub as hub
from rich.console import Console
from tiny_training import recipe_content, write_corpus, write_target

from decoding.model.fingerprint import stored_fingerprint
from trainer.export.companions import target_of
from trainer.export.exporter import export
from trainer.processes import Process
from trainer.recipe.reading import AnyRecipe, parse_recipe
from trainer.run.train import FILE_NAME, assemble, run_recipe

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MARKER = "s3cret-m4rker-that-must-not-leak"


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a target and a corpus; accelerate is told to use the CPU and forgets its state."""
    write_target(tmp_path / "target", seed=3)
    write_corpus(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    AcceleratorState._reset_state(True)
    yield tmp_path
    AcceleratorState._reset_state(True)


def run(folder: Path, kind: str, **changes: Any) -> tuple[Path, str]:
    """Train a tiny recipe in this process; returns its final folder and what it said."""
    said = io.StringIO()
    recipe = parse_recipe({**recipe_content(folder, kind), **changes})
    return run_recipe(recipe, Console(file=said, width=200)), said.getvalue()


def assembled(recipe: AnyRecipe) -> Any:
    return assemble(recipe, torch.device("cpu"), Process(console=Console(file=io.StringIO())))


def identity_of(folder: Path, **sections: Any) -> dict[str, Any]:
    recipe = parse_recipe({**recipe_content(folder, "medusa"), **sections})
    return dict(assembled(recipe).identity)


def test_a_finished_run_says_what_it_was_made_from(run_folder: Path) -> None:
    prompts = {"written_by": "the target", "draws": 30, "prompts": 24}
    (run_folder / "train.jsonl.meta.json").write_text(json.dumps({"settings": {}, "about": {"prompts": prompts}}))
    final, _ = run(run_folder, "medusa")
    written = json.loads((final / FILE_NAME).read_text())
    assert {"commit", "versions", "hardware", "recipe", "data", "target", "steps", "tokens"} <= written.keys()
    assert written["recipe"]["training"]["batch_size"] == 8 and written["recipe"]["heads"]["decay"] == 0.8
    assert written["versions"].keys() >= {"python", "torch", "transformers", "accelerate"}
    train_file = run_folder / "train.jsonl"
    assert written["data"][str(train_file)] == {
        "sha256": hashlib.sha256(train_file.read_bytes()).hexdigest(),
        "rows": 24,
        "commit": None,
        "source": None,
        "prompts": [prompts],
        "license": None,
    }
    assert written["data"][str(run_folder / "heldout.jsonl")]["prompts"] == []
    target = run_folder / "target"
    assert written["target"] == {"name": str(target), "fingerprint": stored_fingerprint(target)}
    assert written["num_processes"] == 1
    # 4 steps of 8 texts of 20 tokens, of which all but the first are trained.
    assert (written["steps"], written["tokens"]) == (4, 4 * 8 * 19)


@pytest.mark.parametrize("kind", ["medusa", "draft"])
def test_no_secret_of_the_environment_is_written_anywhere(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, MARKER)
    _, said = run(run_folder, kind)
    files = [path for path in run_folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {FILE_NAME, "metrics.jsonl", "state.json", "weights.safetensors"}
    assert not [path for path in files if MARKER.encode() in path.read_bytes()]
    assert MARKER not in said


def test_a_draft_is_known_by_the_weights_it_starts_from_wherever_they_lie(run_folder: Path) -> None:
    """The same draft in two folders is one run, another draft is not."""

    def identity(name: str) -> dict[str, Any]:
        draft = {"check_costs": False, "init": {"from_model": str(run_folder / name)}}
        return identity_of(run_folder, kind="draft", draft=draft)

    for name, seed in (("one", 1), ("moved", 1), ("other", 2)):
        write_target(run_folder / name, seed=seed, num_hidden_layers=1)
    assert identity("one") == identity("moved") != identity("other")


def test_models_of_the_hub_are_recorded_by_their_commits_and_read_so_again(run_folder: Path, hub: FakeHub) -> None:
    """Though the branch that the recipe names moves on while the run is exported."""
    commit = folder_on(hub, "zoe/target", run_folder / "target", branch="v1")
    heads, _ = run(run_folder, "medusa", output="first", target="zoe/target@v1")
    earlier = folder_on(hub, "zoe/heads", heads)
    write_target(run_folder / "another", seed=4)
    folder_on(hub, "zoe/target", run_folder / "another", branch="v1")
    final, _ = run(run_folder, "medusa", output="second", target="zoe/target@v1", heads={"init": "zoe/heads"})
    stored = json.loads((final / FILE_NAME).read_text())
    assert stored["revisions"] == {"target": f"zoe/target@{commit}", "heads.init": f"zoe/heads@{earlier}"}
    fingerprinted = stored_fingerprint(run_folder / "target")
    assert stored["target"] == {"name": "zoe/target", "fingerprint": fingerprinted}
    assert target_of(final) == f"zoe/target@{commit}" and stored_fingerprint(f"zoe/target@{commit}") == fingerprinted
    export(final, run_folder / "exported", "headstart")
    card = (run_folder / "exported" / "README.md").read_text()
    assert "base_model: zoe/target\n" in card and f"zoe/target@{commit}" in card
