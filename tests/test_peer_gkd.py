"""The comparison with TRL's GKD trainer is of like with like, and counts what it says it counts."""

import argparse
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from decoding.metrics import StepCount
from trainer.data.batch import Example
from trainer.recipe.common import TrainingSection
from trainer.recipe.draft import DraftRecipe
from trainer.run.loop import learning_rate_at

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def _loaded(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"{name}_benchmark", BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def peer() -> ModuleType:
    """The script that the peer's Python runs."""
    return _loaded("peer_gkd")


@pytest.fixture(scope="module")
def comparison() -> Iterator[ModuleType]:
    """The script that compares, with its own folder in the path as where it is run."""
    path = list(sys.path)
    sys.path.append(str(BENCHMARKS))
    yield _loaded("drafts_peer")
    sys.path[:] = path


@pytest.fixture(scope="module")
def decoded(comparison: ModuleType) -> ModuleType:
    module: ModuleType = sys.modules[comparison.measure.__module__]
    return module


def _batch(labels: list[list[int]], padding: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(len(labels), len(labels[0]), dtype=torch.long)
    mask[0, :padding] = 0
    return {"labels": torch.tensor(labels), "attention_mask": mask}


def test_what_enters_the_loss_is_counted_micro_batch_by_micro_batch(peer: ModuleType) -> None:
    meter, seen = peer.Meter(), []

    def compute(model: None, inputs: dict[str, torch.Tensor], num_items_in_batch: int) -> float:
        seen.append(num_items_in_batch)
        return 2.5

    counted = meter.counted(compute)
    meter.on_step_begin()
    # A label at the first position is no token that anything predicts.
    assert counted(None, _batch([[-100, 5, 6], [7, 8, 9]], padding=1), num_items_in_batch=4) == 2.5
    counted(None, _batch([[-100, -100, 6], [-100, -100, -100]], padding=0), num_items_in_batch=4)
    assert seen == [4, 4] and (meter.steps[0].trained_tokens, meter.steps[0].tokens) == (5, 11)


def test_the_first_step_is_not_timed(peer: ModuleType) -> None:
    steps = [(100.0, 50, 5.0), (101.0, 10, 0.25), (104.0, 30, 0.5)]
    meter = peer.Meter([peer.Step(99, tokens, 1, waited, ended) for ended, tokens, waited in steps])
    figures = meter.figures()
    assert (figures["trained_tokens"], figures["seconds_of_training"], figures["tokens_per_second"]) == (40, 4.0, 10.0)
    assert figures["trained_tokens_of_all_steps"] == 90 and figures["generation_seconds"] == 0.75
    with pytest.raises(ValueError, match="1 steps were trained: give 2 or more"):
        peer.Meter([peer.Step()]).figures()


def test_both_sides_have_one_learning_rate_at_every_step(peer: ModuleType) -> None:
    section = TrainingSection(steps=20, warmup_fraction=0.25, learning_rate=0.5)
    theirs = [0.5 * peer.learning_rate_factor(step, 20, 0.25) for step in range(20)]
    assert theirs == [learning_rate_at(step, section) for step in range(20)]


def test_both_sides_train_on_the_same_tokens(peer: ModuleType, comparison: ModuleType, tmp_path: Path) -> None:
    examples = [Example((4, 5, 6, 1), (False, False, True, True), 2), Example((7, 8), (False, True), 1)]
    path = comparison.write_rows(examples, tmp_path / "run" / "rows.jsonl")
    rows = peer.read_rows(path, max_length=4)
    assert [row["input_ids"] for row in rows] == [example.tokens.tolist() for example in examples]
    assert [list(map(bool, row["completion_mask"])) for row in rows] == [
        example.trained.tolist() for example in examples
    ]


@pytest.mark.parametrize(
    "example",
    [
        Example((4, 5, 6, 7), (False, True, False, True), 1),
        Example((4, 5), (True, True), 0),
        Example((4, 5, 6, 7), (False, True, True, True), 1, (2, 2)),
    ],
    ids=["two answers", "no prompt", "packed"],
)
def test_what_the_peer_cannot_train_on_is_refused(comparison: ModuleType, example: Example, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="example 0 is no prompt with one answer behind it"):
        comparison.write_rows([example], tmp_path / "rows.jsonl")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"input_ids": [1, 2, 3, 4, 5], "prompt_length": 2}, "has 5 tokens: cut it to 4"),
        ({"input_ids": [1, 2], "prompt_length": 2}, "has prompt_length 2: give 1 to 1"),
    ],
)
def test_rows_that_would_be_trained_otherwise_are_refused(
    peer: ModuleType, row: dict[str, Any], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row) + "\n")
    with pytest.raises(ValueError, match=message):
        peer.read_rows(path, max_length=4)


def test_the_peer_gets_the_recipes_settings(peer: ModuleType, comparison: ModuleType) -> None:
    recipe = DraftRecipe.model_validate(
        {
            "kind": "draft",
            "name": "tiny",
            "output": "run",
            "target": "folder of target",
            "data": {"train": "train.jsonl", "heldout": "heldout.jsonl", "max_length": 40},
            "training": {"steps": 7, "batch_size": 8, "micro_batch_size": 8, "learning_rate": 0.25, "adam_beta2": 0.5},
            "draft": {"policy": {"draft": 1.0, "temperature": 0.5, "max_new_tokens": 9}},
        }
    )
    run = comparison.Run("half on-policy", comparison.PEER, 4, 3)
    command = comparison.peer_command("python", run, Path("student"), Path("rows"), Path("out"), recipe)
    options = vars(peer.parse(command[2:]))
    wanted = {"steps": 7, "batch_size": 8, "micro_batch_size": 4, "learning_rate": 0.25, "adam_beta2": 0.5}
    wanted |= {"lmbda": 0.5, "beta": 0, "temperature": 0.5, "max_new_tokens": 9, "max_length": 40, "seed": 3}
    wanted |= {"student": "student", "teacher": "folder of target", "warmup_fraction": 0.1, "output": "out"}
    assert {name: options[name] for name in wanted} == wanted


def test_our_steps_are_timed_from_the_second_or_behind_the_first_that_are_written_at_once(
    comparison: ModuleType, tmp_path: Path
) -> None:
    path = tmp_path / "metrics.jsonl"
    steps = [
        {"step": 1, "tokens": 100, "loss": 2.0, "generated/seconds": 9.0},
        {"step": 2, "tokens": 120, "loss": 2.0, "tokens_per_second": 20.0},  # a second
        {"step": 3, "tokens": 150, "loss": 2.0, "tokens_per_second": 10.0, "generated/seconds": 2.0},  # three
        {"step": 3, "tokens": 150, "heldout/tokens_per_pass": 2.0},
    ]
    path.write_text("".join(json.dumps(step) + "\n" for step in steps))
    figures = comparison.our_figures(path, every=1)
    assert (figures["timed_steps"], figures["seconds_of_training"], figures["trained_tokens"]) == (2, 4.0, 50)
    assert figures["tokens_per_second"] == 12.5 and figures["generation_seconds"] == 2.0
    figures = comparison.our_figures(path, every=2)
    assert (figures["seconds_of_training"], figures["trained_tokens"]) == (3.0, 30)
    with pytest.raises(ValueError, match="3 steps, of which the first 3 are not timed"):
        comparison.our_figures(path, every=3)


def test_each_side_is_judged_by_its_own_best_micro_batch(comparison: ModuleType) -> None:
    found = {("Headstart", 16): (30, 10, 20), ("Headstart", 4): (9, 99, 9), ("TRL GKD", 16): (1, 2, 3)}
    found["TRL GKD", 4] = (8, 9, 10)
    timed = {
        comparison.Run("offline", side, size, index): {"tokens_per_second": speed}
        for (side, size), runs in found.items()
        for index, speed in enumerate(runs)
    }
    speeds = comparison.speeds(timed)
    assert speeds["micro_batch_size"] == {"Headstart": 16, "TRL GKD": 4}
    assert speeds["ratio"] == 20 / 9 and len(speeds["runs"]) == 12 and speeds["peak_gib"]["Headstart"] is None
    folders = comparison.trained_drafts(
        {"settings": {"offline": speeds}}, argparse.Namespace(settings=["offline"], rounds=1, runs="runs")
    )
    assert folders == {
        "offline: Headstart": [Path("runs/offline-headstart-16-0/final")],
        "offline: TRL GKD": [Path("runs/offline-trl-gkd-4-0")],
    }
    folders = comparison.trained_drafts(
        {"settings": {"teacher cache": speeds}}, argparse.Namespace(settings=["teacher cache"], rounds=1, runs="runs")
    )
    assert folders == {
        "teacher cache: Headstart": [Path("runs/teacher-cache-headstart-16-0/final")],
        "teacher cache: TRL GKD": [Path("runs/offline-trl-gkd-4-0")],
    }, "TRL has no cache: its offline draft stands beside"


def test_acceptance_is_compared_prompt_by_prompt(decoded: ModuleType) -> None:
    def text(emitted: int, passes: int) -> list[StepCount]:
        return [StepCount(emitted // passes, 0, 4, 4)] * passes

    # Four tokens a pass against two, over 9 passes and over 15.
    ours, theirs = [text(12, 3), text(24, 6)], [text(6, 3), text(24, 12)]
    ratio = decoded.paired_ratio(ours, theirs)
    assert tuple(ratio) == (2.0, 2.0, 2.0, 2)
    mixed = decoded.paired_ratio([text(12, 3), text(12, 12)], [text(12, 6), text(12, 6)])
    assert mixed.value == 12 / 15 and (mixed.low, mixed.high) == (0.5, 2.0)


def test_a_goal_is_met_by_speed_and_by_acceptance_that_may_be_equal(comparison: ModuleType) -> None:
    over_peer = {"greedy": {"value": 0.99, "low": 0.97, "high": 1.01}, "T=1": {"value": 0.9, "low": 0.8, "high": 0.95}}
    goals = comparison.goals({"settings": {"offline": {"ratio": 1.5}}, "over_peer": {"offline": over_peer}}, "offline")
    assert [goal["met"] for goal in goals] == [True, True, False]
