"""`headstart doctor` and the Hub: no weights are fetched, and nothing is asked unless it is to be."""

from pathlib import Path

import pytest
import torch
from doctor_models import faults, only, read, save, save_heads
from fake_hub import TOKEN, FakeHub, folder_on
from fake_hub import hub as hub

from decoding.drafters.registry import parse_drafter
from decoding.model.hub import local_folder
from trainer.doctor.drafter import examine
from trainer.doctor.finding import has_problem
from trainer.doctor.machine import probe_hub
from trainer.doctor.reading import read_skeleton
from trainer.doctor.target import target_findings

TARGET, HEADS = "zoe/target", "zoe/heads"


@pytest.fixture
def folders(hub: FakeHub, tmp_path: Path) -> Path:
    """A target and heads on the Hub, and the folders that they come from."""
    save_heads(tmp_path / "heads", save(tmp_path / "target"))
    folder_on(hub, TARGET, tmp_path / "target")
    folder_on(hub, HEADS, tmp_path / "heads")
    return tmp_path


def test_weights_that_are_not_in_the_cache_are_noted_and_not_fetched(hub: FakeHub, folders: Path) -> None:
    findings, target = read_skeleton(TARGET, torch.float32, trusted=False)
    assert target is not None
    fault = only([*findings, *target_findings(target, 64)], "files", "note")
    assert f"hf download {TARGET}" in fault.remedy
    own = only(examine(parse_drafter(f"heads:{folders}/heads"), target, 64).findings, "origin", "note")
    assert "the target's weights are not here" in own.found
    assert "hf download" in only(examine(parse_drafter(f"heads:{HEADS}"), target, 64).findings, "files", "note").remedy
    assert not hub.asked("model.safetensors")


def test_weights_in_the_cache_are_checked_like_those_of_a_folder(hub: FakeHub, folders: Path) -> None:
    for name in (TARGET, HEADS):
        local_folder(name)
    findings, target = read_skeleton(TARGET, torch.float32, trusted=False)
    assert target is not None
    assert not faults([*findings, *examine(parse_drafter(f"heads:{HEADS}"), target, 64).findings])
    other = read(save(folders / "other", seed=7))
    assert has_problem(examine(parse_drafter(f"heads:{HEADS}"), other, 64).findings)


def test_the_hub_is_asked_for_an_answer_and_the_token_stays_out_of_it(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = probe_hub()
    assert answer.status == "ok" and hub.address in answer.found and TOKEN not in answer.found
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://zoe:secret@127.0.0.1:9")
    silent = probe_hub()
    assert silent.status == "note" and "cannot be reached" in silent.found and "HF_ENDPOINT" in silent.remedy
    assert "secret" not in silent.found
