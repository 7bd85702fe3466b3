"""Heads that share their target's lm_head, exported for vLLM: with a copy of it."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model

from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.export.exporter import NO_PROMPTS, export
from trainer.export.vllm import read_vllm_heads

CHAIN = ((0,), (0, 0))


def write_heads(folder: Path, target: Path | None, hidden_size: int = 16) -> MedusaHeads:
    """Two heads in bf16 without output layers, and a provenance that names their target."""
    heads = MedusaHeads(MedusaConfig(hidden_size, 16, 2, 1, CHAIN, shared_lm_head=True))
    torch.manual_seed(0)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter)
    heads.to(torch.bfloat16).save_pretrained(folder)
    if target is not None:
        provenance = {"recipe": {"target": str(target)}, "target": {"name": str(target)}}
        (folder / "provenance.json").write_text(json.dumps(provenance))
    return heads


def write_model(folder: Path, family: str = "llama", **changes: Any) -> torch.Tensor:
    model = tiny_model(family, **changes)
    model.save_pretrained(folder)
    weight: torch.Tensor = model.get_output_embeddings().weight.detach()  # type: ignore[operator]
    return weight


def test_shared_heads_take_one_copy_of_their_targets_lm_head_with_them(tmp_path: Path) -> None:
    lm_head = write_model(tmp_path / "target")
    heads = write_heads(tmp_path / "run", tmp_path / "target")
    summary = export(tmp_path / "run", tmp_path / "out", "vllm")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["original_lm_head"] is True and config["vocab_size"] == config["truncated_vocab_size"] == 16
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert sorted(stored) == [
        *(f"blocks.{head}.layers.0.{part}" for head in (0, 1) for part in ("bias", "weight")),
        "lm_heads.0.weight",
    ]
    assert torch.equal(stored["lm_heads.0.weight"], lm_head), "in fp32, as the target stores it"
    assert summary.compared[0].startswith("5 tensors read back bit-equal")
    assert "with a copy of the target's lm_head" in (tmp_path / "out" / "README.md").read_text()
    read = read_vllm_heads(tmp_path / "out")
    assert read.config == heads.config
    assert all(torch.equal(tensor, read.state_dict()[name]) for name, tensor in heads.state_dict().items())


@pytest.mark.parametrize(("family", "changes"), [("llama", {"tie_word_embeddings": True}), ("gpt-neox", {})])
def test_the_lm_head_of_every_family_goes_with_shared_heads(
    family: str, changes: dict[str, Any], tmp_path: Path
) -> None:
    lm_head = write_model(tmp_path / "target", family, **changes)
    write_heads(tmp_path / "run", tmp_path / "target")
    export(tmp_path / "run", tmp_path / "out", "vllm", prompts=NO_PROMPTS)
    assert torch.equal(load_file(tmp_path / "out" / "model.safetensors")["lm_heads.0.weight"], lm_head)


def test_a_target_that_is_unknown_missing_or_another_is_refused_in_a_sentence(tmp_path: Path) -> None:
    write_model(tmp_path / "wide", vocab=24)
    write_model(tmp_path / "bare")
    path = tmp_path / "bare" / "model.safetensors"
    save_file({name: tensor for name, tensor in load_file(path).items() if name != "lm_head.weight"}, path)
    write_heads(tmp_path / "run", None)
    refused = [
        (None, r"but no provenance\.json tells which target: give it as --target"),
        ("/nowhere/target", r"there is no folder /nowhere/target.*--target"),
        (str(tmp_path / "wide"), r"is \(24, 16\) and theirs would be \(16, 16\).*--target"),
        (str(tmp_path / "bare"), r"lm_head\.weight"),
    ]
    for target, complaint in refused:
        with pytest.raises(ValueError, match=rf"run share their target's lm_head.*{complaint}"):
            export(tmp_path / "run", tmp_path / "out", "vllm", target=target)
        assert not (tmp_path / "out").exists()
