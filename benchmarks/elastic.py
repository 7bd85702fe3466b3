"""An elastic run, really launched: `torchrun --nnodes 1:2` as two machines on this one, one of which dies or joins.

Each agent starts one process. Three runs of the tests' tiny draft: the second machine's process is killed and started
again; the second machine is killed, agent and process, and the first goes on alone; the first begins alone, and the
second joins. Compared are the finished weights with those of one process, and of two that nobody disturbed.

    python benchmarks/elastic.py FOLDER [--json FILE]

Four minutes. Ends with 1 if a run fails, goes on with another number of processes, or has a weight further off than
`WEIGHTS`.
"""

import argparse
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
# This folder, which has a script of a package's name, comes last.
sys.path = [*(str(ROOT / name) for name in ("", "tests", "tests/system")), *sys.path[1:], str(ROOT / "benchmarks")]

from decoding.threads import spin_briefly  # noqa: E402

spin_briefly()  # before torch is imported

from launchers import furthest  # noqa: E402
from whole_runs import (  # noqa: E402
    DIRECT,
    SCRIPT,
    TORCHRUN,
    environment,
    kill_group,
    provenance,
    run,
    steps_done,
    wait_until,
    write_recipe,
    write_workshop,
)

from decoding.measure.machine import commit, hardware, versions  # noqa: E402

STEPS, EVENT, PAUSE = 40, 6, 0.7
"""Steps of a run, the step behind which a machine leaves or comes, and seconds between steps, so that it is in time."""
WEIGHTS = 1e-3
"""Largest difference of a finished weight from one process's, at a learning rate of 3e-2."""
OPTIONS = ["--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
WAITS = "last_call_timeout=4,keep_alive_interval=1,keep_alive_max_attempt=3"
"""Seconds that a meeting waits for a second machine, and in which a machine says that it lives."""


class Run(NamedTuple):
    """A run: what happened to it, the processes of each stretch of steps, and differences of its weights."""

    event: str
    stretches: list[tuple[int, int]]
    """First step (from 0) and number of processes."""
    from_one: float
    from_two: float
    seconds: float

    @property
    def is_right(self) -> bool:
        processes = [processes for _, processes in self.stretches]
        return self.from_one <= WEIGHTS and processes == EVENTS[self.event].processes


def train_slowly(recipe: str) -> None:
    """Train in this process, with a pause behind each step."""
    from trainer.run.log import Log

    note_step = Log.step

    def note_and_wait(self: Log, *step: Any) -> None:
        note_step(self, *step)
        time.sleep(PAUSE)

    Log.step = note_and_wait  # type: ignore[method-assign]
    sys.argv = [SCRIPT, recipe]
    runpy.run_path(SCRIPT, run_name="__main__")


class Machines:
    """Two agents that meet at a port of this machine; the first of them keeps the meeting."""

    def __init__(self, workshop: Path, output: Path) -> None:
        self.output, self._workshop = output, workshop
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        recipe = write_recipe(workshop, "draft", output, every=5, steps=STEPS, micro_batch_size=2)
        script = [str(Path(__file__).resolve()), "--worker", recipe]
        self._command = [*TORCHRUN, *OPTIONS, "--rdzv-endpoint", f"127.0.0.1:{self._port}", "--rdzv-id", "elastic"]
        self._command += ["--rdzv-conf", WAITS, *script]

    def start(self, name: str) -> "subprocess.Popen[str]":
        """Start an agent in a process group of its own; its messages go to a file beside the output."""
        with self.output.with_suffix(f".{name}.err").open("w") as messages:
            return subprocess.Popen(
                self._command, cwd=self._workshop, env=environment(TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"),
                stdout=messages, stderr=messages, text=True, start_new_session=True,
            )  # fmt: skip

    def is_open(self) -> bool:
        """Return True once an agent keeps the meeting; the next one to start does not."""
        with socket.socket() as caller:
            return caller.connect_ex(("127.0.0.1", self._port)) == 0


def worker_of(agent: "subprocess.Popen[str]") -> int:
    """Return the id of an agent's process."""
    children = Path(f"/proc/{agent.pid}/task/{agent.pid}/children").read_text().split()
    return int(children[-1])


def kill_process(machines: Machines, agents: "list[subprocess.Popen[str]]") -> None:
    """Kill the second machine's process; its agent lives."""
    os.kill(worker_of(agents[1]), signal.SIGKILL)


def kill_machine(machines: Machines, agents: "list[subprocess.Popen[str]]") -> None:
    """Kill the second machine's agent and process, as a loss of power does."""
    worker = worker_of(agents[1])
    kill_group(agents[1])
    os.kill(worker, signal.SIGKILL)


def join(machines: Machines, agents: "list[subprocess.Popen[str]]") -> None:
    """Start the second machine."""
    agents.append(machines.start("second"))


class Event(NamedTuple):
    """An event behind step `EVENT`, and the processes of each stretch of steps then."""

    happen: Callable[[Machines, "list[subprocess.Popen[str]]"], None]
    processes: list[int]


EVENTS = {
    "process killed": Event(kill_process, [2]),
    "machine killed": Event(kill_machine, [2, 1]),
    "machine joins": Event(join, [1, 2]),
}


def elastic(event: str, workshop: Path) -> Run:
    """Launch a run, let the event happen, and compare its weights at the end."""
    happen, processes = EVENTS[event]
    machines = Machines(workshop, workshop / event.replace(" ", "-"))
    start = time.perf_counter()
    agents = [machines.start("first")]
    try:
        wait_until(machines.is_open, agents[0])
        if processes[0] == 2:
            agents.append(machines.start("second"))
        wait_until(lambda: steps_done(machines.output) >= EVENT, agents[0])
        happen(machines, agents)
        agents[0].wait(240)
        seconds = time.perf_counter() - start
    finally:
        for agent in agents:
            kill_group(agent)
    if agents[0].returncode:
        print(machines.output.with_suffix(".first.err").read_text()[-3000:], file=sys.stderr)
        return Run(event, [], float("inf"), float("inf"), seconds)
    stretches = [(each["first_step"], each["num_processes"]) for each in provenance(machines.output)["stretches"]]
    ones, twos = (furthest(machines.output, workshop / name) for name in ("one", "two"))
    return Run(event, stretches, ones, twos, seconds)


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder for the runs; with --worker a recipe")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    if given.worker:
        train_slowly(str(given.folder))
        return
    workshop: Path = given.folder.resolve()
    workshop.mkdir(parents=True)
    write_workshop(workshop)
    for name, command in (("one", DIRECT), ("two", [*TORCHRUN, "--standalone", "--nproc_per_node", "2", SCRIPT])):
        run([*command, write_recipe(workshop, "draft", workshop / name, steps=STEPS, micro_batch_size=2)], workshop)
    runs = []
    for event in EVENTS:
        runs.append(elastic(event, workshop))
        print(runs[-1], flush=True)
    if given.json:
        rows = [{**each._asdict(), "is_right": each.is_right} for each in runs]
        content = {"hardware": hardware(), "versions": versions(), "commit": commit(), "steps": STEPS, "runs": rows}
        given.json.write_text(json.dumps(content, indent=1) + "\n")
    sys.exit(not all(each.is_right for each in runs))


if __name__ == "__main__":
    main()
