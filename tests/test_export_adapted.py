"""Medusa-2 heads exported with the target that they belong to."""

import json
from pathlib import Path

import pytest
import torch
from fake_hub import hub as hub
from test_medusa2 import disturb, objective_on
from test_readback import run_of

from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.loading import load_model
from trainer.export.exporter import export


@pytest.fixture
def final(tmp_path: Path) -> Path:
    """The final folder of a run of heads with adapters on a target of 128 positions."""
    folder = run_of(tmp_path, "medusa")
    torch.manual_seed(0)
    objective = objective_on(CausalLM(load_model(str(tmp_path / "target"), torch.float32)))
    disturb(objective)
    objective.save(folder)
    stored = json.loads((folder / "provenance.json").read_text())
    stored["recipe"]["adapters"] = {"rank": 2}
    (folder / "provenance.json").write_text(json.dumps(stored))
    return folder


def test_the_adapted_target_goes_with_its_heads(final: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    summary = export(final, out, "headstart")
    assert {"target/model.safetensors", "target/tokenizer.json", "model.safetensors"} <= summary.files.keys()
    assert stored_fingerprint(out / "target") == stored_fingerprint(final / "target")
    assert stored_fingerprint(out / "target") != stored_fingerprint(tmp_path / "target")
    decoded, card = summary.compared[-1], (out / "README.md").read_text()
    assert "3/3 texts equal, 3/3 as in plain decoding" in decoded and "logits of 2 heads bit-equal" in decoded
    assert "`DIR/target` is the adapted target" in card and str(tmp_path) not in card
    assert str(out / "target") in summary.commands[0].argv, "vLLM serves the adapted target"


def test_a_target_that_is_copied_wrongly_is_caught_and_leaves_nothing(
    final: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copy(source: Path, destination: Path) -> None:
        content = bytearray(Path(source).read_bytes())
        content[-1] ^= 1
        Path(destination).write_bytes(content)

    monkeypatch.setattr("trainer.export.companions.shutil.copyfile", copy)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"target/.* differs from its original after copying"):
        export(final, tmp_path / "out", "headstart")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
