"""Trains the arms of a comparison (recipes with overrides) in separate processes, and reads figures from their logs."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SECONDS = "seconds.json"
"""Name of the file with wall time and peak memory of an arm's training, including imports and evaluations."""


def slug(name: str) -> str:
    """Return the name of an arm's folder."""
    return "-".join("".join(c if c.isalnum() else " " for c in name.lower()).split())


def train(recipe: Path, overrides: Sequence[str], folder: Path, threads: int | None = None) -> None:
    """Run a recipe to its end and write its wall time into the folder; do not repeat a finished run."""
    if (folder / "final").is_dir():
        return
    command = [sys.executable, str(ROOT / "scripts" / "train.py"), str(recipe), f"output={folder}", *overrides]
    used = run(command, threads)
    (folder / SECONDS).write_text(json.dumps(used))


def run(command: Sequence[str], threads: int | None = None, **variables: str) -> dict[str, float]:
    """Run a command in the repository's root; return its wall time and its peak memory (resident, GiB).

    Raises CalledProcessError if the command fails.
    """
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    began = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **limit, **variables})
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"seconds": time.perf_counter() - began, "peak_gib": used.ru_maxrss / 2**20}


def curve_of(folder: Path) -> dict[str, Any]:
    """Return the wall time, a curve of held-out tokens per target pass against trained tokens, the number of trained
    tokens, and the median training speed in tokens/s.
    """
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    # A step repeated after a kill is logged twice; only its times differ.
    held = list({line["step"]: line for line in lines if "heldout/tokens_per_pass" in line}.values())
    steps = list({line["step"]: line for line in lines if "loss" in line}.values())
    seconds = folder / SECONDS  # missing if a kill came between the last weights and this file
    return {
        **(json.loads(seconds.read_text()) if seconds.is_file() else {"seconds": None}),
        "curve": [[line["tokens"], line["heldout/tokens_per_pass"]] for line in held],
        "tokens": steps[-1]["tokens"],
        "training_tokens_per_second": sorted(line.get("tokens_per_second", 0) for line in steps)[len(steps) // 2],
    }


def write(results: dict[str, Any], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
