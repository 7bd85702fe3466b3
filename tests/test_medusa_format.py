"""Heads in the file of FasterDecoding, TensorRT-LLM and TGI: its names, its config, and what it has no place for."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from published_heads import HEADS, HIDDEN, LAYERS, VOCAB, expected_logits, random_tensors, saved_target
from safetensors.torch import load_file

from decoding.drafters.medusa import MedusaDrafter
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.export import ExportSummary, export
from trainer.export.artefact import Task
from trainer.export.decoded import decode_greedily
from trainer.export.medusa import drafters

CONFIG = MedusaConfig(HIDDEN, VOCAB, HEADS, LAYERS, ((0,), (1,), (0, 0), (1, 0), (0, 0, 0)))
FILE = "medusa_lm_head.safetensors"


def written_heads(folder: Path, config: MedusaConfig = CONFIG, dtype: torch.dtype = torch.float32) -> Path:
    """Heads whose every tensor is random, biases included."""
    heads = MedusaHeads(config)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(torch.randn(parameter.shape))
    heads.to(dtype).save_pretrained(folder)
    return folder


def export_medusa(source: Path, destination: Path, target: str | None = "ORG/TARGET") -> ExportSummary:
    """Export without decoding, for which the target would have to be there."""
    return export(source, destination, "medusa", target=target, check_prompts=0)


def test_the_file_has_the_names_that_three_programs_look_for_and_a_config_of_three_keys(tmp_path: Path) -> None:
    export_medusa(written_heads(tmp_path / "run"), tmp_path / "out")
    ours, theirs = load_file(tmp_path / "run" / "model.safetensors"), load_file(tmp_path / "out" / FILE)
    assert {name: tuple(tensor.shape) for name, tensor in theirs.items()} == {
        name: tuple(tensor.shape) for name, tensor in random_tensors().items()
    }
    assert torch.equal(theirs["1.0.linear.bias"], ours["heads.1.blocks.0.linear.bias"])
    assert torch.equal(theirs["2.2.weight"], ours["heads.2.lm_head.weight"])
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {
        "base_model_name_or_path": "ORG/TARGET",
        "medusa_num_heads": 3,
        "medusa_num_layers": 2,
    }, "TGI takes a config with architectures for another kind of speculator"


def test_the_file_gives_the_trained_logits_by_the_published_formula(tmp_path: Path) -> None:
    export_medusa(written_heads(tmp_path / "run"), tmp_path / "out")
    hidden = torch.randn(5, HIDDEN)
    ours = MedusaHeads.from_pretrained(tmp_path / "run")(hidden)
    assert torch.allclose(expected_logits(load_file(tmp_path / "out" / FILE), hidden), ours, rtol=0, atol=1e-6)


def test_heads_that_share_the_lm_head_get_a_copy_of_the_targets_each(tmp_path: Path) -> None:
    target = saved_target(tmp_path / "target")
    run = written_heads(tmp_path / "run", replace(CONFIG, shared_lm_head=True))
    summary = export_medusa(run, tmp_path / "out", str(target))
    lm_head = load_file(target / "model.safetensors")["lm_head.weight"]
    theirs = load_file(tmp_path / "out" / FILE)
    assert all(torch.equal(theirs[f"{head}.{LAYERS}.weight"], lm_head) for head in range(HEADS))
    assert "each head has a copy of the lm_head of target, which the trained heads share" in str(summary)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": True}], ids=["own", "tied"])
def test_the_copied_lm_head_is_the_one_that_the_target_writes_with(changes: dict[str, Any], tmp_path: Path) -> None:
    target = saved_target(tmp_path / "target", **changes)
    export_medusa(written_heads(tmp_path / "run", replace(CONFIG, shared_lm_head=True)), tmp_path / "out", str(target))
    stored = load_file(target / "model.safetensors")
    expected = stored["model.embed_tokens.weight" if changes else "lm_head.weight"]
    assert torch.equal(load_file(tmp_path / "out" / FILE)["0.2.weight"], expected)


def test_a_local_target_is_named_without_its_path(tmp_path: Path) -> None:
    target = saved_target(tmp_path / "target")
    summary = export_medusa(written_heads(tmp_path / "run"), tmp_path / "out", str(target))
    assert json.loads((tmp_path / "out" / "config.json").read_text())["base_model_name_or_path"] == "target"
    assert "put a folder or hub id there that the reader finds" in str(summary)


def test_heads_without_a_known_target_are_refused_as_readers_would_load_a_default_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"do not tell their target.*give it as target"):
        export_medusa(written_heads(tmp_path / "run"), tmp_path / "out", None)
    assert not (tmp_path / "out").exists()


def test_heads_with_a_bias_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"a bias of rank 3.*give format headstart, or .*heads.markov_rank=0"):
        export_medusa(written_heads(tmp_path / "run", replace(CONFIG, markov_rank=3)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("shared", [False, True], ids=["own lm_head", "shared"])
def test_the_exported_files_draft_as_the_trained_heads_do(shared: bool, tmp_path: Path, tiny_llama: CausalLM) -> None:
    """Also bf16 heads with a copy of an lm_head in fp32, which stays what it is."""
    run = written_heads(tmp_path / "run", replace(CONFIG, shared_lm_head=shared), torch.bfloat16)
    export_medusa(run, tmp_path / "out", str(saved_target(tmp_path / "target")))
    trained, exported = drafters(Task(run, tmp_path / "out", "medusa"), tiny_llama)
    assert trained.max_nodes == exported.max_nodes == len(CONFIG.tree) + 1
    ours, theirs = (decode_greedily(tiny_llama, each, [[3, 1, 4], [1, 5]], 24) for each in (trained, exported))
    assert ours == theirs and ours.drafted > 0
    assert isinstance(trained, MedusaDrafter) and isinstance(exported, MedusaDrafter)
    hidden, lm_head = torch.randn(4, HIDDEN), tiny_llama.model.get_output_embeddings()
    assert torch.equal(trained.heads(hidden, lm_head), exported.heads(hidden))
