"""Medusa-2 heads exported with the target that they belong to: merged, or its adapters."""

import json
from pathlib import Path

import pytest
import torch
from fake_hub import hub as hub
from peft import PeftModel
from test_medusa2 import disturb, objective_on
from test_readback import run_of
from tiny_models import full_forward

from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.loading import load_model
from trainer.export import export


def run_with_adapters(folder: Path, form: str) -> Path:
    """The final folder of a run of heads with adapters on a target of 128 positions; the same weights in each form."""
    final = run_of(folder, "medusa")
    torch.manual_seed(0)
    objective = objective_on(CausalLM(load_model(str(folder / "target"), torch.float32)), export=form)
    disturb(objective)
    objective.save(final)
    stored = json.loads((final / "provenance.json").read_text())
    stored["recipe"]["adapters"] = {"rank": 2, "export": form}
    (final / "provenance.json").write_text(json.dumps(stored))
    return final


@pytest.mark.parametrize("form", ["merged", "adapter"])
def test_our_own_format_keeps_the_form_of_the_target_beside_the_heads(tmp_path: Path, form: str) -> None:
    final, out = run_with_adapters(tmp_path, form), tmp_path / "out"
    summary = export(final, out, "headstart")
    weights = "target/model.safetensors" if form == "merged" else "target/adapter_model.safetensors"
    assert {weights, "target/tokenizer.json", "model.safetensors"} <= summary.files.keys()
    assert stored_fingerprint(out / "target") == stored_fingerprint(final / "target")
    target, decoded = summary.compared[-2:]
    assert ("(--merge for a whole target)" in target) == (form == "adapter")
    assert "texts equal 3/3, to plain decoding's 3/3" in decoded and "logits of 2 heads bit-equal" in decoded
    card = (out / "README.md").read_text()
    assert "--target DIR/target --drafter heads:DIR" in card and str(tmp_path) not in card


def test_for_other_programs_the_adapters_are_merged_as_training_merges_them(tmp_path: Path) -> None:
    (tmp_path / "merged").mkdir()
    final, out = run_with_adapters(tmp_path, "adapter"), tmp_path / "out"
    merged = run_with_adapters(tmp_path / "merged", "merged")
    summary = export(final, out, "vllm")
    assert stored_fingerprint(out / "target") == stored_fingerprint(merged / "target")
    target, decoded = summary.compared[-2:]
    assert target == "the adapted target beside them, merged from its adapters: 21 tensors bit-equal"
    assert "texts equal 3/3, to plain decoding's 3/3; trained: " in decoded and "; exported: " in decoded
    assert str(out / "target") in summary.commands[0].argv, "vLLM serves the adapted target"
    ours = PeftModel.from_pretrained(load_model(str(tmp_path / "target"), torch.float32), str(final / "target"))
    theirs = load_model(str(out / "target"), torch.float32)
    text = (3, 1, 4, 1, 5)
    assert torch.allclose(full_forward(theirs, text), full_forward(ours.get_base_model(), text), atol=1e-4)


def test_a_target_that_is_copied_wrongly_is_caught_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    final = run_with_adapters(tmp_path, "merged")

    def copy(source: Path, destination: Path) -> None:
        content = bytearray(Path(source).read_bytes())
        content[-1] ^= 1
        Path(destination).write_bytes(content)

    monkeypatch.setattr("trainer.export.adapted.shutil.copyfile", copy)
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"target/.* reads back with other bytes than were written"):
        export(final, tmp_path / "out", "headstart")
    assert sorted(path.name for path in tmp_path.iterdir()) == before
