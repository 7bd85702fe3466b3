"""A draft that learns from texts written during its training, under several launchers and with kills."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from whole_runs import DIRECT, TWO_PROCESSES, losses, metrics, provenance, run, write_recipe, write_workshop

STEPS = 12
POLICY = {"offline": 1, "target": 1, "loop": 1, "max_new_tokens": 6, "every": 3}


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_workshop(tmp_path_factory.mktemp("workshop"))


def recipe(workshop: Path, name: str) -> tuple[str, Path]:
    """Write a recipe with generated rows, a trimmed vocabulary and ``keep: best``; return it with the folder of its
    run.
    """
    output = workshop / name
    path = Path(write_recipe(workshop, "draft", output, every=5, steps=STEPS, micro_batch_size=2))
    content: dict[str, Any] = yaml.safe_load(path.read_text())
    content["draft"] = {"policy": POLICY, "vocabulary": 10, "num_draft_tokens": 2}
    content["evaluation"] |= {"every": 4, "keep": "best", "batch_size": 1}
    path.write_text(yaml.safe_dump(content))
    return str(path), output


@pytest.fixture(scope="module")
def alone(workshop: Path) -> Path:
    path, output = recipe(workshop, "alone")
    run([*DIRECT, path], workshop)
    return output


def written(output: Path) -> list[Any]:
    """Return every text that was written, by any process."""
    rows = [
        json.loads(line) for file in (output / "generated").glob("*.jsonl") for line in file.read_text().splitlines()
    ]
    return sorted((row["step"], row["position"], row["kind"], row["tokens"]) for row in rows)


def evaluated(output: Path) -> list[Any]:
    """Return the lines of all evaluations without the number of tokens trained so far."""
    return [{**line, "tokens": 0} for line in metrics(output) if "heldout/tokens_per_pass" in line]


def test_two_processes_write_and_learn_what_one_does(alone: Path, workshop: Path) -> None:
    path, output = recipe(workshop, "pair")
    run([*TWO_PROCESSES, path], workshop)
    assert provenance(output)["num_processes"] == 2
    assert written(output) == written(alone) and evaluated(output) == evaluated(alone)
    for step, loss in losses(alone).items():
        # The first gradients are nearly zero, so the optimizer's steps depend on their rounding.
        assert losses(output)[step] == pytest.approx(loss, rel=1e-3)
