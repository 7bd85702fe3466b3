"""A killed run on a GPU resumes where it was, with every part of its optimizers on the device again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
NEEDED = ("accelerate", "jaxtyping", "jinja2", "pydantic", "rich")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
def test_heads_and_a_draft_are_trained_killed_resumed_exported_and_decode(tmp_path: Path) -> None:
    finds = f"import importlib.util; print(*[name for name in {NEEDED} if not importlib.util.find_spec(name)])"
    # In a separate process, because the GPU suite replaces missing packages by stand-ins.
    if missing := subprocess.run(
        [sys.executable, "-c", finds], capture_output=True, text=True, check=True
    ).stdout.strip():
        pytest.skip(f"not installed: {missing}")
    paths = os.pathsep.join((*map(str, (HERE.parents[1], HERE.parent)), os.environ.get("PYTHONPATH", "")))
    command = [sys.executable, str(HERE / "killed_and_resumed.py"), str(tmp_path)]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("resumed, exported and decoded") == 3
