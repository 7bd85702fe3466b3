"""The provenance next to the weights says where they come from, and contains nothing secret."""

import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from fake_hub import FakeHub, folder_on
from fake_hub import hub as hub
from rich.console import Console
from test_checkpoint import another_holds
from tiny_models import counting_model
from tiny_training import recipe_content, tiny_tokenizer, write_corpus, write_target

from decoding.files.fingerprint import stored_fingerprint
from trainer.export.companions import target_of
from trainer.export.exporter import export
from trainer.files.folders import LOCK_NAME, hold
from trainer.processes import Process
from trainer.recipe.reading import AnyRecipe, parse_recipe
from trainer.run import loop
from trainer.run.job import assemble
from trainer.run.train import FILE_NAME, consolidate, run_recipe

ROPE = {"rope_type": "default", "rope_theta": 10000.0}
MARKER = "s3cret-m4rker-that-must-not-leak"


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Make a folder with a target and a corpus; accelerate uses the CPU and forgets its state."""
    write_target(tmp_path / "target", seed=3)
    write_corpus(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    AcceleratorState._reset_state(True)
    yield tmp_path
    AcceleratorState._reset_state(True)


def run(folder: Path, kind: str, **changes: Any) -> tuple[Path, str]:
    """Train a tiny recipe in this process; return its final folder and what it printed."""
    said = io.StringIO()
    recipe = parse_recipe({**recipe_content(folder, kind), **changes})
    return run_recipe(recipe, Console(file=said, width=200)), said.getvalue()


def assembled(recipe: AnyRecipe) -> Any:
    return assemble(recipe, torch.device("cpu"), Process(console=Console(file=io.StringIO())))


def identity_of(folder: Path, **sections: Any) -> dict[str, Any]:
    recipe = parse_recipe({**recipe_content(folder, "medusa"), **sections})
    return dict(assembled(recipe).origin)


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
    # 4 steps of 8 texts of 20 tokens, of which all except the first are trained.
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
    """With the same draft in two folders the run is the same; with another draft it is another run."""

    def origin(name: str) -> dict[str, Any]:
        draft = {"init": {"from_model": str(run_folder / name)}}
        return identity_of(run_folder, kind="draft", draft=draft)

    for name, seed in (("one", 1), ("moved", 1), ("other", 2)):
        write_target(run_folder / name, seed=seed, num_hidden_layers=1)
    assert origin("one") == origin("moved") != origin("other")


def test_models_of_the_hub_are_recorded_by_their_commits_and_read_so_again(run_folder: Path, hub: FakeHub) -> None:
    """This is true even if the branch in the recipe moves while the run is exported."""
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
    export(final, run_folder / "exported", "heads")
    card = (run_folder / "exported" / "README.md").read_text()
    assert "base_model: zoe/target\n" in card and f"zoe/target@{commit}" in card


CHANGES: dict[str, dict[str, Any]] = {
    "heads": {"kind": "medusa"},
    "heads on stored features": {"kind": "medusa", "features": {"folder": "features"}},
    "heads with adapters": {"kind": "medusa", "adapters": {"rank": 2}},
    "a draft": {"kind": "draft"},
    "a draft by a teacher cache": {"kind": "draft", "draft": {"teacher": {"folder": "teacher", "top_k": 4}}},
}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a run of four steps, with checkpoints of steps 2 and 4."""
    runs: dict[str, Path] = {}

    def run(name: str) -> Path:
        if name not in runs:
            folder = tmp_path_factory.mktemp(name.replace(" ", "-"))
            write_target(folder / "target")
            write_corpus(folder)
            content = {**recipe_content(folder, CHANGES[name]["kind"]), "checkpoint": {"every": 2}, **CHANGES[name]}
            for section in (content.get("features"), content.get("draft", {}).get("teacher")):
                if section:
                    section |= {"folder": str(folder / section["folder"])}
            runs[name] = run_recipe(parse_recipe(content)).parent
            shutil.rmtree(folder / "features", ignore_errors=True)
            shutil.rmtree(folder / "teacher", ignore_errors=True)
        return runs[name]

    return run


def provenance(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "provenance.json").read_text())
    return content


@pytest.mark.parametrize("name", CHANGES)
def test_the_last_checkpoint_gives_what_the_run_finished(name: str, ran: Callable[[str], Path], tmp_path: Path) -> None:
    run = ran(name)
    told = consolidate(run / "checkpoints" / "step-00000004", tmp_path / "made")
    assert stored_fingerprint(tmp_path / "made") == stored_fingerprint(run / "final"), "weights, config and tree"
    assert told.endswith("weights after step 4 of 4, not the finished weights")
    assert provenance(tmp_path / "made") == {**provenance(run / "final"), "checkpoint": "step-00000004"}
    if name == "heads with adapters":
        assert stored_fingerprint(tmp_path / "made" / "target") == stored_fingerprint(run / "final" / "target")


def test_a_run_that_was_stopped_is_exported_as_its_newest_checkpoint(
    ran: Callable[[str], Path], tmp_path: Path
) -> None:
    shutil.copytree(ran("a draft") / "checkpoints", tmp_path / "run" / "checkpoints")
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step-00000004")
    summary = export(tmp_path / "run", tmp_path / "out", "draft")
    place = tmp_path / "run" / "checkpoints" / "step-00000002"
    assert summary.compared[0].startswith(f"made from the checkpoint {place}: weights after step 2 of 4")
    assert summary.compared[-1].startswith("3 prompts of heldout.jsonl, trained and")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]
    assert stored_fingerprint(tmp_path / "out") != stored_fingerprint(ran("a draft") / "final")


def test_checkpoints_that_cannot_be_trusted_are_refused(ran: Callable[[str], Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    shutil.copytree(ran("heads").parent, tmp_path / "copy")
    content = (tmp_path / "copy" / "run" / "checkpoints" / "step-00000002" / "state.json").read_text()
    shutil.copytree(tmp_path / "copy" / "run" / "checkpoints" / "step-00000002", run)
    refused = {
        "SHA256SUMS": ("", r"cannot be read \(.* is not listed in SHA256SUMS\): use another"),
        "state.json": (content.replace('"step": 2', '"step": 3'), "state.json is damaged"),
    }
    for name, (changed, complaint) in refused.items():
        before = (run / name).read_text()
        (run / name).write_text(changed)
        with pytest.raises(ValueError, match=complaint):
            export(run, tmp_path / "out", "heads")
        (run / name).write_text(before)
    data = Path(json.loads(content)["recipe"]["data"]["train"])
    rows = data.read_text()
    data.write_text(rows.splitlines()[0] + "\n")
    try:
        with pytest.raises(ValueError, match="was written, its training data changed"):
            export(run, tmp_path / "out", "heads")
    finally:
        data.write_text(rows)
    assert not (tmp_path / "out").exists()


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Path]:
    """Write a target that counts, its tokenizer and texts."""
    counting_model().save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    write_corpus(tmp_path)
    yield tmp_path
    AcceleratorState._reset_state(True)


def train(folder: Path, dtype: str = "fp32", keep: str = "last", tracking: str = "none", **training: Any) -> str:
    """Train heads in the workshop for 6 steps, with a checkpoint every 2 steps; return what was printed."""
    content = recipe_content(folder, "medusa", **{"steps": 6, **training})
    content |= {"checkpoint": {"every": 2, "keep": 2}, "dtype": dtype, "tracking": tracking, "heads": {"num_heads": 2}}
    content["evaluation"] |= {"every": 2, "keep": keep}
    AcceleratorState._reset_state(True)
    said = StringIO()
    run_recipe(parse_recipe(content), Console(file=said, width=1000))
    return said.getvalue()


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """End the process before the step after this one, like a kill."""
    whole = loop._step

    def stopped(*args: Any) -> Any:
        if args[-2].step == step:
            raise KeyboardInterrupt
        return whole(*args)

    monkeypatch.setattr(loop, "_step", stopped)


def killed_after(step: int, folder: Path, **training: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        stop_after(step, patch)
        with pytest.raises(KeyboardInterrupt):
            train(folder, **training)


def rows(file: Path) -> list[tuple[int, str]]:
    """Return, for every line, its step and whether it is of a step or of an evaluation."""
    content = [json.loads(line) for line in file.read_text().splitlines()]
    return [(row["step"], "loss" if "loss" in row else "heldout") for row in content]


def test_each_step_stands_once_in_the_metrics_and_what_was_repeated_beside_them(workshop: Path) -> None:
    killed_after(5, workshop)
    run = workshop / "run"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # the kill came in the middle of a line
    train(workshop)
    expected = [(1, "loss"), (2, "loss"), (2, "heldout"), (3, "loss"), (4, "loss"), (4, "heldout"), (5, "loss")]
    assert rows(run / "metrics.jsonl") == [*expected, (6, "loss"), (6, "heldout")]
    superseded = (run / "metrics.superseded.jsonl").read_text().splitlines()
    assert superseded.pop() == '{"step": 6, "lo'
    assert [json.loads(line)["step"] for line in superseded] == [4, 5]


def test_another_learning_rate_is_announced_and_kept_with_its_steps(workshop: Path) -> None:
    killed_after(3, workshop, learning_rate=3e-3)
    said = train(workshop, learning_rate=1e-3, mixed_precision="bf16")
    assert "changed from this step: training.learning_rate (0.003, now 0.001)\n" in said
    assert "changed from this step: training.mixed_precision (no, now bf16)\n" in said
    assert "micro_batch_size" not in said
    provenance = json.loads((workshop / "run" / "final" / "provenance.json").read_text())
    same = {"micro_batch_size": 8, "num_processes": 1}
    assert provenance["stretches"] == [
        {"first_step": 0, "learning_rate": 3e-3, "mixed_precision": "no", **same},
        {"first_step": 2, "learning_rate": 1e-3, "mixed_precision": "bf16", **same},
    ]


def test_weights_too_large_for_the_dtype_they_are_written_in_are_not_finished(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights are finite in fp32, in which they are trained, but infinite in fp16."""
    whole = loop._step

    def large(*args: Any) -> Any:
        figures = whole(*args)
        args[0].objective.module.heads.heads[1].lm_head.weight.data[0, 0] = 1e5
        return figures

    monkeypatch.setattr(loop, "_step", large)
    with pytest.raises(ValueError) as error:
        train(workshop, dtype="fp16")
    assert "model.safetensors has weights that are not finite (1 of" in str(error.value)
    assert "set dtype to a type with a wider range, such as bf16" in str(error.value)
    assert not (workshop / "run" / "final").exists()


def test_two_runs_in_one_folder_are_one_too_many(workshop: Path) -> None:
    with another_holds(workshop / "run") as other:
        with pytest.raises(ValueError, match=rf"{workshop}/run is being written by process {other.pid} on "):
            train(workshop)
        assert [path.name for path in (workshop / "run").iterdir()] == ["run.lock"]
    train(workshop)
    assert not (workshop / "run" / "run.lock").exists()


def test_a_process_may_hold_a_folder_twice_and_keeps_it_until_the_last_end(tmp_path: Path) -> None:
    with hold(tmp_path):
        with hold(tmp_path):
            pass
        assert (tmp_path / LOCK_NAME).exists()
        program = "import sys; from pathlib import Path; from trainer.files.folders import hold\n"
        program += "with hold(Path(sys.argv[1])): raise AssertionError('held twice')"
        words = [sys.executable, "-c", program, str(tmp_path)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and f"process {os.getpid()} on" in done.stderr
    assert not (tmp_path / LOCK_NAME).exists()


@pytest.mark.parametrize("change", [{"learning_rate": 5e-4}, {"mixed_precision": "bf16"}])
def test_a_finished_run_is_refused_a_setting_that_nothing_would_be_trained_by(
    workshop: Path, change: dict[str, Any]
) -> None:
    train(workshop, learning_rate=3e-3)
    run = workshop / "run"
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    ((name, now),) = change.items()
    with pytest.raises(ValueError, match=rf"finished .* training\.{name} \(.*, now {now}\): .*another output"):
        train(workshop, **{"learning_rate": 3e-3, **change})
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
