"""One task for a worker script in an engine's own environment, and its answer."""

import json
import subprocess
from pathlib import Path
from typing import Any


def answer_of(engine: str, python: Path, worker: Path, task: dict[str, Any], seconds: float) -> dict[str, Any]:
    """Run the worker on a JSON task, for at most ``seconds``; return its JSON. RuntimeError if it fails."""
    done = subprocess.run(
        [python, worker], input=json.dumps(task), capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode != 0:
        raise RuntimeError(f"{engine} ended with {done.returncode}: {done.stderr[-3000:]}")
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
