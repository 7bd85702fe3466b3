"""Where a step went: by a clock or a GPU's events, in metrics.jsonl, and as a trace with a table."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from tiny_training import recipe_content, write_corpus, write_target

from trainer.learning.spans import Stopwatch, span
from trainer.recipe.heads import MedusaRecipe
from trainer.run.train import run_recipe


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time, which stands still."""
    now = [0.0]
    monkeypatch.setattr("trainer.learning.spans.time.perf_counter", lambda: now[0])
    return now


def test_a_span_has_the_time_that_no_span_inside_it_has(clock: list[float]) -> None:
    with Stopwatch(torch.device("cpu")) as watch:
        assert watch.step() is None, "nothing is known of what was before"
        with span("forward"):
            clock[0] += 1
            with span("target"):
                clock[0] += 4
            clock[0] += 2
        with span("target"):
            clock[0] += 1
        clock[0] += 2
        times = watch.step()
        assert times is not None and times.seconds == 10
        assert times.spans == {"forward": 3, "target": 5} and times.share("target") == 0.5 and times.share("data") == 0
        clock[0] += 7
        watch.restart()
        assert watch.step() is None
    with span("target"):
        clock[0] += 1  # nobody listens


class Event:
    """A GPU's event: passed once the GPU has worked up to it."""

    gpu = 0.0
    queued = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = Event.queued

    def query(self) -> bool:
        return self.at <= Event.gpu

    def elapsed_time(self, end: "Event") -> float:
        assert self.query() and end.query(), "torch would refuse"
        return 1e3 * (end.at - self.at)


def test_a_gpus_events_are_read_once_they_are_passed_and_never_waited_for(
    clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.Event", Event)
    with Stopwatch(torch.device("cuda")) as watch:
        watch.step()
        with span("target"):
            Event.queued += 3
        Event.gpu = Event.queued  # the step's transfer
        with span("optimizer"):
            Event.queued += 1
        clock[0] += 4
        first = watch.step()
        Event.gpu = Event.queued
        clock[0] += 4
        second = watch.step()
    assert first is not None and first.spans == {"target": 3} and first.share("target") == 0.75
    assert second is not None and second.spans == {"optimizer": 1}


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    return tmp_path


def recipe(folder: Path, **training: Any) -> MedusaRecipe:
    return MedusaRecipe.model_validate(recipe_content(folder, "medusa", **{"steps": 7, **training}))


def test_a_profile_is_a_trace_of_three_steps_with_a_table_and_figures_say_where_each_step_went(workshop: Path) -> None:
    heard = io.StringIO()
    AcceleratorState._reset_state(True)
    run_recipe(recipe(workshop, micro_batch_size=4), Console(file=heard, width=200), workshop / "profile")
    events = json.loads((workshop / "profile" / "trace-0.json").read_text())["traceEvents"]
    ranges = [event["name"] for event in events if event.get("cat") == "user_annotation"]
    for name, times in {"target": 6, "forward": 6, "backward": 6, "data": 6, "transfer": 3, "optimizer": 3}.items():
        assert ranges.count(name) == times, f"{name} in three steps of two micro batches"
    assert "a step under the profiler, mean of 3; the trace is" in heard.getvalue()
    (target,) = (line for line in heard.getvalue().splitlines() if line.startswith("target  "))
    assert target.endswith("the frozen target's forward") and " ms " in target and "%" in target
    first, *rows = [json.loads(line) for line in (workshop / "run" / "metrics.jsonl").read_text().splitlines()][:7]
    assert "target_share" not in first and all(0 < row["target_share"] < 1 for row in rows)
    assert all(0 <= row["data_share"] < 1 for row in rows)


def test_a_run_too_short_to_be_profiled_is_refused_and_one_nearly_over_says_so(workshop: Path) -> None:
    AcceleratorState._reset_state(True)
    with pytest.raises(ValueError, match=r"--profile traces steps 4 to 6 but training\.steps is 5: set it to 6"):
        run_recipe(recipe(workshop, steps=5), Console(file=io.StringIO()), workshop / "profile")
    with pytest.raises(
        ValueError, match=r"--profile is .*train\.jsonl/profile, but .*train\.jsonl is a file: give anoth"
    ):
        run_recipe(recipe(workshop), Console(file=io.StringIO()), workshop / "train.jsonl" / "profile")
    assert not (workshop / "run").exists(), "both before anything is trained"
    run_recipe(recipe(workshop), Console(file=io.StringIO()))
    AcceleratorState._reset_state(True)
    heard = io.StringIO()
    run_recipe(recipe(workshop), Console(file=heard, width=200), workshop / "profile")  # which is finished
    assert "no profile: 0 steps were done, and 6 are needed" in heard.getvalue()
    assert not (workshop / "profile").exists()
