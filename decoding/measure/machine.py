"""Hardware, library versions and commit, recorded with every measurement."""

import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import torch

_PACKAGES = ("torch", "transformers", "accelerate", "safetensors", "tokenizers", "numpy")


def processor_name() -> str:
    """Return the processor's model name, or its architecture if the system does not report a name."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def hardware() -> dict[str, str | int]:
    """Describe the machine, for a table's caption."""
    described: dict[str, str | int] = {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "threads": torch.get_num_threads(),
    }
    if torch.cuda.is_available():
        described["gpu"] = torch.cuda.get_device_name()
        if (count := torch.cuda.device_count()) > 1:
            described["gpus"] = count
    return described


def versions() -> dict[str, str]:
    """Return the versions of Python, this project, and the packages that affect its figures."""
    by_package = {"python": platform.python_version()}
    for package in ("headstart", *_PACKAGES):
        try:
            by_package[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return by_package


def commit() -> str:
    """Return the commit of this code, with ``-dirty`` if files were changed; ``unknown`` outside its own checkout.

    The package may be inside another repository, as in a ``.venv``, and git's variables may name a third repository.
    """
    root = Path(__file__).resolve().parents[2]
    project = root / "pyproject.toml"
    if not project.is_file() or '\nname = "headstart"\n' not in project.read_text(encoding="utf-8"):
        return "unknown"
    try:
        described = subprocess.run(
            ["git", "--git-dir=.git", "--work-tree=.", "describe", "--always", "--dirty", "--abbrev=12"],
            cwd=root,
            env={name: value for name, value in os.environ.items() if not name.startswith("GIT_")},
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return described.stdout.strip()
