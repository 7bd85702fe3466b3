"""Code shared by the tests of whole runs: a small workshop, launching, and reading the files of a run."""

import atexit
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from tiny_models import counting_model
from tiny_training import recipe_content, tiny_tokenizer, write_rows
from warm_program import Run, WarmProgram, warm_program

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "scripts" / "train.py")
ACCELERATE = [sys.executable, "-m", "accelerate.commands.launch"]
ONE_PROCESS = [*ACCELERATE, "--config_file", str(ROOT / "recipes" / "accelerate" / "cpu.yaml"), SCRIPT]
TWO_PROCESSES = [*ACCELERATE, "--config_file", str(ROOT / "recipes" / "accelerate" / "ddp.yaml")]
TWO_PROCESSES += ["--main_process_port", "0", SCRIPT]
DIRECT = [sys.executable, SCRIPT]
HEADSTART = [sys.executable, "-c", "from trainer.cli import main; main()"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
Popen = subprocess.Popen[str]
DEADLINE = 240.0
STEPS = 40


def write_workshop(folder: Path) -> Path:
    """Write a target that counts (after a comes b), its tokenizer, and texts like those it writes."""
    counting_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    letters = [" ".join("abcdefghijkl"[start : start + 9 + start % 2]) for start in range(3)]
    write_rows(folder / "train.jsonl", [{"text": text} for text in letters * 5])
    write_rows(folder / "heldout.jsonl", [{"text": "a b c d e f g h"}, {"text": "b c d e f g h i"}])
    return folder


def write_recipe(workshop: Path, kind: str, output: Path, every: int = 5, **training: Any) -> str:
    """Write a recipe in the workshop, with a checkpoint every ``every`` steps; return its path."""
    content = recipe_content(workshop, kind, **{"steps": STEPS, "learning_rate": 3e-2, **training})
    content |= {"output": str(output), "checkpoint": {"every": every, "keep": 2}}
    content["evaluation"] |= {"prompt_tokens": 2}
    if kind == "medusa":
        content["heads"] = {"num_heads": 3}
    path = output.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(content))
    return str(path)


def environment(**changes: str | None) -> dict[str, str]:
    """Return an environment with one thread per process, only the CPU, and no network, keys or compiler (which
    DeepSpeed would load needlessly).
    """
    others = ("WANDB_", "HF_", "ACCELERATE_", "OPENAI_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(others)}
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests", ROOT / "tests" / "system")))
    settings = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "NO_PROXY": "127.0.0.1", "PYTHONWARNINGS": "ignore"}
    settings |= {"ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    settings["TORCHDYNAMO_DISABLE"] = "1"
    return {**env, **{key: value for key, value in {**settings, **changes}.items() if value is not None}}


@cache
def _warm(**changes: str | None) -> WarmProgram:
    """Return the process that forks for every run in this environment, until the tests end."""
    open_until_then = ExitStack()
    atexit.register(open_until_then.close)
    return open_until_then.enter_context(warm_program(environment(**changes)))


def _forked_as(command: list[str]) -> list[str] | None:
    """Return the words of the same command for the forking process; None if it does not support such a command."""
    for started, forked in (
        (HEADSTART, ["headstart"]),
        (TORCHRUN, ["torchrun"]),
        (ACCELERATE, ["accelerate", "launch"]),
    ):
        if command[: len(started)] == started:
            return None if command[: len(ONE_PROCESS)] == ONE_PROCESS else [*forked, *command[len(started) :]]
    return command[1:] if command[1].endswith(".py") else None


def _fork(command: list[str], cwd: Path, changes: dict[str, str | None]) -> Run | None:
    """Start a command by a fork, which saves the imports; return None if it cannot be forked."""
    words = _forked_as(command)
    read_at_import = any(name.startswith("HF_") for name in changes)
    return words and _warm(**changes if read_at_import else {}).start(words, cwd, int(DEADLINE), changes)


def finish(command: list[str], cwd: Path, **changes: str | None) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; it is forked if possible, which saves each process the imports."""
    if run := _fork(command, cwd, changes):
        said, complained = run.communicate()
        return subprocess.CompletedProcess(command, run.wait(), said, complained)
    return subprocess.run(
        command, cwd=cwd, env=environment(**changes), capture_output=True, text=True, timeout=DEADLINE, check=False
    )


def run(command: list[str], cwd: Path, **changes: str | None) -> str:
    """Run a command that must succeed; return what it printed."""
    done = finish(command, cwd, **changes)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout + done.stderr


@contextmanager
def running(command: list[str], cwd: Path, **changes: str | None) -> Iterator[Popen | Run]:
    """Start a run in a separate process group; afterwards no process of this group is left."""
    process = _fork(command, cwd, changes) or subprocess.Popen(
        command, cwd=cwd, env=environment(**changes), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        kill_group(process)
        if process.stderr:
            process.stderr.close()


def kill_group(process: Popen | Run) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def wait_until(condition: Callable[[], bool], process: Popen | Run, seconds: float = DEADLINE) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, f"it ended with {process.returncode}: {process.communicate()[1][-3000:]}"
        assert time.monotonic() < deadline, "it took too long"
        time.sleep(0.002)


def metrics(output: Path, name: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the complete lines of a run's metrics so far."""
    file = output / name
    if not file.is_file():
        return []
    text = file.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def repeated(output: Path) -> list[dict[str, Any]]:
    """Return the lines, from before a kill, of steps that were repeated after it."""
    return metrics(output, "metrics.superseded.jsonl")


def losses(output: Path) -> dict[int, float]:
    """Return the loss of each step; if a step was done before and after a kill, both losses must be equal."""
    found = {line["step"]: line["loss"] for line in metrics(output) if "loss" in line}
    assert len(found) == len([line for line in metrics(output) if "loss" in line])
    for line in repeated(output):
        if "loss" in line and line["step"] in found:
            assert found[line["step"]] == line["loss"]
    return found


def steps_done(output: Path) -> int:
    return max((line["step"] for line in metrics(output)), default=0)


def checkpoint_steps(output: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (output / "checkpoints").glob("step-*"))


def provenance(output: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((output / "final" / "provenance.json").read_text())
    return content
