"""The fingerprint of a large model is computed once on a machine, and anew whenever one of its files changed."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from decoding.model.fingerprint import stored_fingerprint
from trainer.target import fingerprints
from trainer.target.fingerprints import kept_fingerprint


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model that counts as large and as written some time ago, and a cache of its own."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprints, "_SMALL", 0)
    monkeypatch.setattr(fingerprints, "_SETTLED", 0.0)
    tiny_model("llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The fingerprints that were computed rather than found."""
    found: list[str] = []

    def compute(name: str | Path, trust_remote_code: bool = False) -> str:
        found.append(stored_fingerprint(name, trust_remote_code))
        return found[-1]

    monkeypatch.setattr(fingerprints, "stored_fingerprint", compute)
    return found


def test_files_that_stay_are_read_once(folder: Path, computed: list[str]) -> None:
    first, again = kept_fingerprint(folder), kept_fingerprint(str(folder))
    assert first == again == stored_fingerprint(folder)
    assert computed == [first]


def test_a_weight_that_changes_under_the_same_size_and_time_is_seen(folder: Path, computed: list[str]) -> None:
    first, path = kept_fingerprint(folder), folder / "model.safetensors"
    before, tensors = path.stat(), load_file(path)
    changed = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    save_file(changed, path, {"format": "pt"})
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert path.stat().st_size == before.st_size and path.stat().st_mtime_ns == before.st_mtime_ns
    assert kept_fingerprint(folder) == stored_fingerprint(folder) != first
    assert len(computed) == 2


def test_files_that_changed_a_moment_ago_are_not_kept(
    folder: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another change could leave their times as they are."""
    monkeypatch.setattr(fingerprints, "_SETTLED", 3600.0)
    for _ in range(2):
        kept_fingerprint(folder)
    assert len(computed) == 2


def test_a_damaged_entry_is_computed_anew_and_a_closed_cache_is_done_without(
    folder: Path, computed: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = kept_fingerprint(folder)
    (entry,) = (tmp_path / "cache" / "fingerprints").iterdir()
    entry.write_text("")
    assert kept_fingerprint(folder) == first and entry.read_text() == first
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "file"))
    assert kept_fingerprint(folder) == first
    assert len(computed) == 3


def test_another_folder_and_a_small_one_are_read(
    folder: Path, computed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept_fingerprint(folder)
    shutil.copytree(folder, folder.with_name("copy"))
    assert kept_fingerprint(folder.with_name("copy")) == computed[0]
    monkeypatch.setattr(fingerprints, "_SMALL", 1 << 40)
    kept_fingerprint(folder)
    assert len(computed) == 3
