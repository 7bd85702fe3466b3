"""What a run says and records where it goes on, and what it refuses to publish."""

import json
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from rich.console import Console
from test_lock import another_holds
from tiny_models import counting_model
from tiny_training import recipe_content, tiny_tokenizer, write_corpus

from trainer.recipe.reading import parse_recipe
from trainer.run import loop
from trainer.run.train import run_recipe


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Path]:
    """A target that counts, its tokenizer and texts."""
    counting_model().save_pretrained(tmp_path / "target")
    tiny_tokenizer().save_pretrained(tmp_path / "target")
    write_corpus(tmp_path)
    yield tmp_path
    AcceleratorState._reset_state(True)


def train(folder: Path, dtype: str = "fp32", keep: str = "last", tracking: str = "none", **training: Any) -> str:
    """Train heads in the workshop with a checkpoint every 2 steps of 6; returns what was said."""
    content = recipe_content(folder, "medusa", **{"steps": 6, **training})
    content |= {"checkpoint": {"every": 2, "keep": 2}, "dtype": dtype, "tracking": tracking, "heads": {"num_heads": 2}}
    content["evaluation"] |= {"every": 2, "keep": keep}
    AcceleratorState._reset_state(True)
    said = StringIO()
    run_recipe(parse_recipe(content), Console(file=said, width=1000))
    return said.getvalue()


def stop_after(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends when it is about to do the step behind this one, as a kill would have it."""
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
    """The step of every line, and whether it is of a step or of an evaluation."""
    content = [json.loads(line) for line in file.read_text().splitlines()]
    return [(row["step"], "loss" if "loss" in row else "heldout") for row in content]


def test_each_step_stands_once_in_the_metrics_and_what_was_repeated_beside_them(workshop: Path) -> None:
    killed_after(5, workshop)
    run = workshop / "run"
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 6, "lo')  # the kill fell into a line
    train(workshop)
    expected = [(1, "loss"), (2, "loss"), (2, "heldout"), (3, "loss"), (4, "loss"), (4, "heldout"), (5, "loss")]
    assert rows(run / "metrics.jsonl") == [*expected, (6, "loss"), (6, "heldout")]
    superseded = (run / "metrics.superseded.jsonl").read_text().splitlines()
    assert superseded.pop() == '{"step": 6, "lo'
    assert [json.loads(line)["step"] for line in superseded] == [4, 5]


def test_another_learning_rate_is_announced_and_kept_with_its_steps(workshop: Path) -> None:
    killed_after(3, workshop, learning_rate=3e-3)
    said = train(workshop, learning_rate=1e-3, mixed_precision="bf16")
    assert "changed from here on: training.learning_rate (0.003, now 0.001)\n" in said
    assert "changed from here on: training.mixed_precision (no, now bf16)\n" in said
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
    """They are finite in fp32, in which they are trained, and infinite in fp16."""
    whole = loop._step

    def large(*args: Any) -> Any:
        figures = whole(*args)
        args[0].module.heads.heads[1].lm_head.weight.data[0, 0] = 1e5
        return figures

    monkeypatch.setattr(loop, "_step", large)
    with pytest.raises(ValueError) as error:
        train(workshop, dtype="fp16")
    assert "model.safetensors has weights that are not finite, 1 of" in str(error.value)
    assert "set dtype to one with a wider range, such as bf16" in str(error.value)
    assert not (workshop / "run" / "final").exists()


def test_two_runs_in_one_folder_are_one_too_many(workshop: Path) -> None:
    with another_holds(workshop / "run") as other:
        with pytest.raises(ValueError, match=rf"{workshop}/run is being written by process {other.pid} on "):
            train(workshop)
        assert [path.name for path in (workshop / "run").iterdir()] == ["run.lock"]
    train(workshop)
    assert not (workshop / "run" / "run.lock").exists()


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
