"""The commit in reports and checkpoints is a commit of this project, or "unknown"."""

import importlib.util
import shutil
import subprocess
from pathlib import Path

import pytest

from decoding.measure import machine

OURS = Path(__file__).resolve().parents[1]


def git(folder: Path, *words: str) -> str:
    """Run git with an author's name."""
    somebody = ["-c", "user.name=a", "-c", "user.email=a@b"]
    return subprocess.run(["git", *somebody, *words], cwd=folder, check=True, capture_output=True, text=True).stdout


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    git(tmp_path, "init", "-q")
    (tmp_path / "pyproject.toml").write_text('[project]\nname = "theirs"\n')
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "theirs")
    return tmp_path


@pytest.mark.parametrize("place", [".venv/lib/python3.11/site-packages", "vendored", "."])
def test_the_commit_of_a_repository_around_the_package_is_not_ours(theirs: Path, place: str) -> None:
    copied = theirs / place / "decoding" / "measure" / "machine.py"
    copied.parent.mkdir(parents=True)
    shutil.copy(machine.__file__, copied)
    if place == "vendored":
        shutil.copy(OURS / "pyproject.toml", theirs / place)
    spec = importlib.util.spec_from_file_location("copied", copied)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.commit() == "unknown"


@pytest.mark.skipif(not (OURS / ".git").exists(), reason="not a git checkout")
def test_a_variable_of_git_does_not_change_our_commit(theirs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = git(OURS, "rev-parse", "HEAD")[:12]
    monkeypatch.setenv("GIT_DIR", str(theirs / ".git"))
    assert machine.commit().removesuffix("-dirty") == expected
