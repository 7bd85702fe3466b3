"""A trace of three steps of a run, and a table of where they went: ``headstart train RECIPE --profile FOLDER``."""

import os
from collections import Counter
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from trainer.learning.spans import NAMES, Name, StepTimes
from trainer.processes import Process

TRACED = 3
_BEFORE = 2  # steps that compile, allocate and fill caches, and one in which the profiler itself warms up
NEEDED = _BEFORE + 1 + TRACED
"""Steps of a run that is profiled, at least."""
_MEANING: dict[Name, str] = {
    "data": "waiting for the next micro batch",
    "target": "the frozen target's forward",
    "forward": "forward of what is trained, and the losses",
    "backward": "backward, with the sums of gradients that launchers do in it",
    "communication": "sums of counts and figures over the processes",
    "transfer": "the step's figures to the host, and the wait for them",
    "optimizer": "the optimizers' step",
}


class Profile:
    """Traces steps 4 to 6 of a run, from where it begins or goes on. To be entered; without a folder it does nothing.

    Each process writes ``trace-RANK.json``, for chrome://tracing or ui.perfetto.dev; the first prints the table.
    """

    def __init__(self, folder: Path | None, process: Process, device: torch.device) -> None:
        self._folder, self._place = folder, process
        self._spans: Counter[Name] = Counter()
        self._seconds = 0.0
        self._steps = 0
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # its own lines on standard error
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        phases = schedule(wait=_BEFORE, warmup=1, active=TRACED, repeat=1)
        self._profiler = profile(activities=activities, schedule=phases) if folder is not None else None

    def __enter__(self) -> "Profile":
        if self._profiler is not None:
            self._profiler.start()
        return self

    def __exit__(self, *exception: object) -> None:
        if self._profiler is None:
            return
        self._profiler.stop()
        if self._steps < NEEDED:
            self._place.say(f"no profile: {self._steps} steps were done, and {NEEDED} are needed")

    def step(self, times: StepTimes | None) -> None:
        """Count a step; after the last one that is traced, write the trace and print the table."""
        if self._profiler is None or self._steps >= NEEDED:
            return
        self._steps += 1
        if self._steps > _BEFORE + 1 and times is not None:
            self._spans.update(times.spans)
            self._seconds += times.seconds
        self._profiler.step()
        if self._steps == NEEDED:
            self._write()

    def _write(self) -> None:
        assert self._profiler is not None and self._folder is not None, "a profile is asked for"
        self._folder.mkdir(parents=True, exist_ok=True)
        trace = self._folder / f"trace-{self._place.rank}.json"
        self._profiler.export_chrome_trace(str(trace))
        rest = self._seconds - sum(self._spans.values())
        rows = [(name, self._spans[name], _MEANING[name]) for name in NAMES]
        rows.append(("rest", rest, "all else: masks, losses' sums, logging, the profiler itself"))  # type: ignore[arg-type]
        lines = [
            f"{name:<13} {1e3 * seconds / TRACED:>9.1f} ms {seconds / self._seconds:>6.1%}  {meaning}"
            for name, seconds, meaning in rows
        ]
        self._place.say(f"a step under the profiler, mean of {TRACED}; the trace is {trace}", *lines)
