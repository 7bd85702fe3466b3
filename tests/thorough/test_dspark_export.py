"""Exported DSpark drafts: the folder that vLLM and SGLang load, the file for llama.cpp,
and replays of damaged copies.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.torch import load_file, save_file
from test_gguf import SIZES, byte_level
from tiny_dspark import tiny_dflash, tiny_dspark
from tiny_models import tiny_model

from decoding.drafters import DSparkDrafter
from decoding.errors import UserError
from decoding.files.fingerprint import stored_fingerprint
from decoding.measure.proof.finding import Finding
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import read_dspark_config
from trainer.export.exporter import export
from trainer.export.gguf import readers
from trainer.export.task import ExportTask
from trainer.servers.diagnosis import compare_settings, compare_vocabularies
from trainer.servers.speculator import compare_top_1, load_speculator, named_speculator

TREE = ((0,), (1,), (0, 0))
MASK, TAPS = 261, (0, 1)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CausalLM]:
    """Make a target of three layers with a tokenizer of 260 of its 264 tokens; return its folder and the model."""
    folder = tmp_path_factory.mktemp("dspark") / "target"
    model = tiny_model("llama", num_hidden_layers=3, **SIZES)
    model.save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder, CausalLM(model)


def trained(folder: Path, target: tuple[Path, CausalLM], flash: bool = False, **changes: Any) -> Path:
    """Write a draft in bf16 in the form that training writes."""
    sizes = {"mask_token_id": MASK, "tree": TREE, "enable_confidence_head": not flash, **changes}
    draft = tiny_dflash(target[1], **sizes) if flash else tiny_dspark(target[1], **sizes)
    draft.bfloat16().save_pretrained(folder)
    (folder / "provenance.json").write_text(json.dumps({"target": {"name": str(target[0])}, "recipe": {}}))
    return folder


# --- the folder -------------------------------------------------------------------------------------------------------


def test_the_folder_is_what_training_wrote_and_its_card_says_what_it_reads(
    tmp_path: Path, target: tuple[Path, CausalLM]
) -> None:
    source, out = trained(tmp_path / "run", target), tmp_path / "out"
    summary = export(source, out, "dspark")
    assert "are bit-equal when read back" in summary.compared[0]
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (source, out))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert read_dspark_config(out) == read_dspark_config(source) and stored_fingerprint(out) == stored_fingerprint(
        source
    )
    assert sorted(summary.files) == ["README.md", "config.json", "model.safetensors", "provenance.json"]
    assert [command.server for command in summary.commands] == ["vllm", "sglang"]
    card = (out / "README.md").read_text()
    assert "# DSpark draft for target\n" in card and "--drafter dspark:DIR" in card and "- dspark\n" in card
    assert "reads the hidden states of this target" in card and "A bias of rank 3 that depends on the" in card
    assert "contains a tree of 3 nodes for the drafts; servers draft a chain" in card
    few = export(trained(tmp_path / "few", target, writes=(1, 4, 5, 9, 263)), tmp_path / "few-out", "dspark")
    assert few.compared[1].startswith("the draft can write 5 of the target's 264 tokens")
    assert [command.server for command in few.commands] == ["vllm"], "SGLang does not read d2t"
    gated = export(trained(tmp_path / "gated", target, markov_head_type="gated"), tmp_path / "gated-out", "dspark")
    assert [command.server for command in gated.commands] == ["sglang"], "the only server that computes this bias"
    flash = export(trained(tmp_path / "flash", target, flash=True), tmp_path / "flash-out", "dspark")
    assert "# DFlash draft for target\n" in (flash.folder / "README.md").read_text()


@pytest.mark.parametrize("format", ["heads", "draft"])
def test_formats_of_other_artefacts_do_not_take_it(tmp_path: Path, target: tuple[Path, CausalLM], format: str) -> None:
    with pytest.raises(
        ValueError, match=r"contains a DSpark draft, which format .* use format dspark or speculators or gguf"
    ):
        export(trained(tmp_path / "run", target), tmp_path / "out", format)


# --- llama.cpp's file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flash", "sure", "writes"),
    [(False, True, None), (False, False, None), (True, False, None), (False, True, (1, 4, 5, 9, 263))],
)
def test_a_gguf_file_has_llama_cpps_keys_and_names_and_the_targets_tokenizer(
    tmp_path: Path, target: tuple[Path, CausalLM], flash: bool, sure: bool, writes: tuple[int, ...] | None
) -> None:
    sizes = {"num_hidden_layers": 2, "confidence_head_with_markov": sure, "writes": writes}
    source = trained(tmp_path / "run", target, flash, **sizes)
    summary = export(source, tmp_path / "out", "gguf")
    reader, weights = GGUFReader(tmp_path / "out" / "model.gguf"), load_file(source / "model.safetensors")
    keys = {name: field.contents() for name, field in reader.fields.items()}
    assert keys["general.architecture"] == "dflash" and keys["general.file_type"] == 32, "bf16, as it is stored"
    assert keys["dflash.target_layers"] == [tap + 1 for tap in TAPS], "llama.cpp counts the inputs of layers"
    assert (keys["dflash.block_size"], keys["dflash.sample_from_anchor"]) == ((5, False) if flash else (4, True))
    assert keys["dflash.has_confidence_head"] is sure, "llama.cpp loads no such head that reads no bias"
    assert keys["tokenizer.ggml.mask_token_id"] == MASK
    assert len(keys["tokenizer.ggml.tokens"]) == 264 and keys["tokenizer.ggml.merges"] == ["h e", "l l", "he ll"]
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    if writes is not None:
        ids = tensors.pop("d2t")
        assert ids.tensor_type.name == "I64" and ids.data.tolist() == list(writes), "llama.cpp has no distances"
        assert weights.pop("d2t").tolist() == [1, 3, 3, 6, 259]
    stored = {name: dequantize(t.data, t.tensor_type).reshape(t.shape[::-1]) for name, t in tensors.items()}
    names = {
        "fc.weight": "fc.weight",
        "enc.output_norm.weight": "hidden_norm.weight",
        "output_norm.weight": "norm.weight",
        "blk.1.attn_q.weight": "layers.1.self_attn.q_proj.weight",
        "blk.1.attn_k_norm.weight": "layers.1.self_attn.k_norm.weight",
        "blk.0.ffn_norm.weight": "layers.0.post_attention_layernorm.weight",
        **({"conf_proj.bias": "confidence_head.proj.bias"} if sure else {}),
        **({} if writes is None else {"output.weight": "lm_head.weight"}),
        **({} if flash else {"markov_w1.weight": "markov_head.markov_w1.weight"}),
        **({} if flash else {"markov_w2.weight": "markov_head.markov_w2.weight"}),
    }
    assert len(stored) == len(weights) - 2 * (not flash and not sure) and all(
        np.array_equal(stored[theirs], weights[name].float()) for theirs, name in names.items()
    )
    kind = "dflash" if flash else "dspark"
    assert summary.commands[0].argv[-5:] == (f"draft-{kind}", "--spec-draft-n-max", "4", "--spec-draft-p-min", "0")


WINDOWS = {"num_hidden_layers": 2, "sliding_window": 8, "layer_types": ("sliding_attention", "full_attention")}
YARN = {"rope_type": "yarn", "factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, {"attention.causal": False}),
        ({"is_causal": True}, {"attention.causal": True}),
        (
            {**WINDOWS, "is_causal": False},
            {"attention.causal": False, "attention.sliding_window": 8}
            | {"attention.sliding_window_pattern": [True, False]},
        ),
        (
            {"rope_scaling": YARN},
            {"rope.freq_base": 1e4, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
            | {"rope.scaling.original_context_length": 2048},
        ),
    ],
)
def test_a_gguf_file_says_what_slots_see_and_how_rotary_embeddings_are_scaled(
    tmp_path: Path, target: tuple[Path, CausalLM], changes: dict[str, Any], wanted: dict[str, Any]
) -> None:
    export(trained(tmp_path / "run", target, **changes), tmp_path / "out", "gguf")
    reader = GGUFReader(tmp_path / "out" / "model.gguf")
    keys = {name.removeprefix("dflash."): field.contents() for name, field in reader.fields.items()}
    rope_and_sight = ("attention.causal", "attention.sliding", "rope.scaling")
    assert wanted.items() <= keys.items()
    assert {name for name in keys if name.startswith(rope_and_sight)} <= {"attention.causal", *wanted}


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (WINDOWS, "causal in some of the draft's layers and not in others, but llama.cpp treats all"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "by dynamic .* cannot write for DSpark drafts"),
        ({"target_layer_ids": (0, 2)}, "reads the target's last layer, which llama.cpp cannot"),
        ({"markov_head_type": "gated"}, "has a gated Markov head, which llama.cpp cannot compute"),
    ],
)
def test_what_a_gguf_file_cannot_say_is_refused(
    tmp_path: Path, target: tuple[Path, CausalLM], changes: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        export(trained(tmp_path / "run", target, **changes), tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


def test_a_nested_folder_is_flattened_and_servers_that_cannot_read_it_get_no_command(
    tmp_path: Path, target: tuple[Path, CausalLM]
) -> None:
    """The draft is a DFlash draft in the layout of ``speculators``. It reads the last layer, and its layers with
    windows have causal blocks.
    """
    source = trained(tmp_path / "run", target, flash=True, tree=(), **WINDOWS, target_layer_ids=(0, 2))
    flat = json.loads((source / "config.json").read_text())
    layers = {name: flat.pop(name) for name in list(flat) if name not in ("block_size", "mask_token_id")}
    nested = {"speculators_model_type": "dflash", "aux_hidden_state_layer_ids": [1, 3], "num_target_layers": 3}
    (source / "config.json").write_text(json.dumps({**flat, **nested, "transformer_layer_config": layers}))
    summary = export(source, tmp_path / "out", "dspark")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and "transformer_layer_config" not in config
    assert config["layer_types"] == ["sliding_attention", "full_attention"] and config["sliding_window"] == 8
    assert "is_causal" not in config, "servers then mask later slots in layers with windows alone"
    assert read_dspark_config(tmp_path / "out") == read_dspark_config(source)
    assert [command.server for command in summary.commands] == ["vllm"]


@pytest.mark.parametrize("writes", [None, (1, 4, 5, 9, 263)])
def test_the_file_drafts_what_the_trained_draft_does(
    tmp_path: Path, target: tuple[Path, CausalLM], writes: tuple[int, ...] | None
) -> None:
    source = trained(tmp_path / "run", target, writes=writes)
    export(source, tmp_path / "out", "gguf")
    ((ours, theirs),) = readers(ExportTask(source, tmp_path / "out", "gguf"), target[1])
    trained_draft, read = ours(), theirs()
    assert isinstance(trained_draft, DSparkDrafter) and isinstance(read, DSparkDrafter)
    assert trained_draft.name == read.name == "dspark" and trained_draft.growth.tree.max_depth == 4, "a chain"
    state = read.draft.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in trained_draft.draft.state_dict().items())


def test_a_file_without_its_target_or_for_another_one_is_refused(tmp_path: Path, target: tuple[Path, CausalLM]) -> None:
    source = trained(tmp_path / "run", target)
    tiny_model("llama", num_hidden_layers=4, **SIZES).save_pretrained(tmp_path / "deeper")
    byte_level().save_pretrained(tmp_path / "deeper")
    with pytest.raises(ValueError, match="whose num_target_layers is 3, not 4"):
        export(source, tmp_path / "out", "gguf", target=str(tmp_path / "deeper"))
    with pytest.raises(ValueError, match=r"needs the tokenizer of the target .* name the target with --target"):
        export(source, tmp_path / "out", "gguf", target=str(tmp_path / "missing"))
    (source / "provenance.json").unlink()
    with pytest.raises(ValueError, match=r"does not name its target, .*: use --target"):
        export(source, tmp_path / "out", "gguf")
    assert not (tmp_path / "out").exists()


# --- what a server reads ----------------------------------------------------------------------------------------------


def diagnosed(source: Path, served: Path, trained_on: tuple[Path, CausalLM]) -> list[Finding]:
    folder, target = trained_on
    weights = load_speculator(named_speculator(f"dspark:{source}"), target).weights
    texts = [list(range(5 + offset, 25 + offset)) for offset in range(3)]
    return [
        compare_settings(target, folder, served, source, 64),
        compare_vocabularies(target, byte_level(), served),
        compare_top_1(target, weights, served, texts, False),
    ]


@pytest.mark.parametrize("rope", [{"rope_theta": 1e4}, {"rope_theta": 5e5}, {"rope_scaling": YARN}])
def test_an_untouched_copy_has_no_difference(
    tmp_path: Path, target: tuple[Path, CausalLM], rope: dict[str, Any]
) -> None:
    """This includes readers of transformers 4's keys."""
    source = trained(tmp_path / "run", target, **rope)
    served = export(source, tmp_path / "dspark-out", "dspark").folder
    assert [finding.status for finding in diagnosed(source, served, target)] == ["ok"] * 3


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("target_layer_ids", [1], "target_layer_ids"),
        ("target_layer_ids", [1, 3], "cannot be read"),
        ("block_size", 3, "block_size 3, but was trained with 4"),
        ("mask_token_id", 3, "mask_token_id 3, but was trained with 261"),
        ("is_causal", True, "is_causal True, but was trained with None"),
        ("sample_from_anchor", False, "sample_from_anchor False, but was trained with True"),
        ("rope_parameters", {"rope_theta": 5e5}, "rope_theta 500000.0, but was trained with 10000.0"),
    ],
)
def test_a_setting_that_differs_is_named(
    tmp_path: Path, target: tuple[Path, CausalLM], key: str, value: Any, found: str
) -> None:
    source = trained(tmp_path / "run", target)
    served = export(source, tmp_path / "out", "dspark").folder
    config = json.loads((served / "config.json").read_text()) | {key: value}
    (served / "config.json").write_text(json.dumps(config))
    settings, _, top_1 = diagnosed(source, served, target)
    assert settings.status == "problem" and found in settings.found
    assert (key == "block_size") == ("draft 3 tokens at a time, not 4" in top_1.found)


def test_a_target_whose_logits_are_unknown_is_a_finding(
    tmp_path: Path, target: tuple[Path, CausalLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(target: Any) -> None:
        raise UserError("the target does more to its logits")

    monkeypatch.setattr("trainer.target.loading.check_logits", refuse)
    source = trained(tmp_path / "run", target)
    top_1 = diagnosed(source, source, target)[-1]
    assert top_1.status == "open" and top_1.found == "the target does more to its logits"


def test_a_bias_by_other_ids_and_another_vocabulary_are_found(tmp_path: Path, target: tuple[Path, CausalLM]) -> None:
    source = trained(tmp_path / "run", target)
    served = export(source, tmp_path / "out", "dspark").folder
    weights = load_file(served / "model.safetensors")
    weights["markov_head.markov_w1.weight"] = weights["markov_head.markov_w1.weight"].roll(1, 0)
    save_file(weights, served / "model.safetensors")
    top_1 = diagnosed(source, served, target)[-1]
    assert top_1.status == "problem" and "the served weights differ" in top_1.found
    wider = CausalLM(tiny_model("llama", num_hidden_layers=3, **{**SIZES, "vocab": 300}))
    vocabulary = compare_vocabularies(wider, byte_level(), served)
    assert vocabulary.status == "problem" and "predict 264 tokens, but the target has 300" in vocabulary.found
