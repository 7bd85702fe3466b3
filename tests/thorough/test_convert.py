"""Folders of other trainers (flat, nested and GGUF) draft the same before and after conversion, or are rejected by
name.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from changed_folders import with_config
from drafter_checks import Follower, assert_same
from fake_hub import FakeHub, folder_on
from fake_hub import hub as hub
from gguf import GGUFReader
from safetensors.torch import load_file
from test_gguf import LLAMA3_ROPE, SIZES, byte_level, key, tensors
from tiny_dspark import tiny_dflash, tiny_dspark
from tiny_eagle3 import tiny_eagle3
from tiny_models import tiny_model

from decoding.drafters import Drafter, DSparkDrafter, Eagle3Drafter
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import read_dspark_config
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.eagle3_config import is_eagle3_folder, read_eagle3_config
from decoding.model.eagle3_draft import Eagle3Draft
from decoding.model.loading import load_dspark, load_eagle3
from decoding.rules.sampling import SamplingConfig
from trainer.export.exporter import NO_PROMPTS, export
from trainer.export.gguf import readers
from trainer.export.task import ExportTask

MASK, FEW = 261, (1, 4, 5, 9, 104, 105, 263)
BOTH, MIXED = ("sliding_attention",) * 2, ("sliding_attention", "full_attention")
WINDOWS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": BOTH, "sliding_window": 4}
FLAGS: dict[str, Any] = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
PORTABLE: dict[str, Any] = {"target_layer_ids": (1, 3, 4), "head_dim": 16}
DRAFTS: dict[str, Callable[[CausalLM], DSparkDraft | Eagle3Draft]] = {
    "DSpark with its tree": lambda target: tiny_dspark(target, mask_token_id=MASK, tree=((0,), (1,), (0, 0))),
    "DSpark of few tokens that fills in, a recurrent bias": lambda target: tiny_dspark(
        target, mask_token_id=MASK, writes=FEW, markov_head_type="rnn", sample_from_anchor=False
    ),
    "DSpark without a bias": lambda target: tiny_dspark(target, rank=0, mask_token_id=MASK),
    "DFlash": tiny_dflash,
    "DFlash, one layer with a window": lambda target: tiny_dflash(target, **{**WINDOWS, "layer_types": MIXED}),
    "DFlash, windows that see later slots": lambda target: tiny_dflash(target, **WINDOWS, is_causal=False),
    "DFlash, causal windows": lambda target: tiny_dflash(target, **WINDOWS, is_causal=True),
    "EAGLE-3": lambda target: tiny_eagle3(target, FEW, **PORTABLE),
    "EAGLE-3, flags, a layer of Qwen 3": lambda target: tiny_eagle3(
        target, **FLAGS, sliding_window=3, qk_norm=True, head_dim=16, target_layer_ids=(0, 6)
    ),
    "EAGLE-3, norms of taps, a scaled rope": lambda target: tiny_eagle3(
        target, fc_norm=True, rope_parameters=LLAMA3_ROPE, **PORTABLE
    ),
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, CausalLM]:
    """Make a target of eight layers with a tokenizer of 260 of its 264 tokens; return its folder and the model."""
    folder = tmp_path_factory.mktemp("converted") / "target"
    model = tiny_model("llama", num_hidden_layers=8, **SIZES)
    model.save_pretrained(folder)
    byte_level().save_pretrained(folder)
    return folder, CausalLM(model)


def drafter(folder: Path, target: CausalLM) -> Drafter:
    return (
        Eagle3Drafter(load_eagle3(folder, target))
        if is_eagle3_folder(folder)
        else DSparkDrafter(load_dspark(folder, target))
    )


def assert_drafts_equal(target: CausalLM, *drafters: Drafter) -> None:
    """Compare tokens and q, bit by bit, in steps of a greedy and of a sampled text."""
    for sampling in (SamplingConfig(), SamplingConfig(1.0)):
        first, *others = (Follower(each, target, sampling) for each in drafters)
        for text in ([3], [3, 1, 4, 1, 5], [3, 1, 4, 1, 5, 9, 2, 6, 104, 105]):
            wanted = first.propose(text)[0]
            for other in others:
                assert_same(other.propose(text)[0], wanted)


# --- flat and nested --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DRAFTS)
def test_a_draft_goes_to_the_nested_layout_and_back_and_drafts_the_same(
    tmp_path: Path, target: tuple[Path, CausalLM], name: str
) -> None:
    source = tmp_path / "source"
    DRAFTS[name](target[1]).save_pretrained(source)
    there = export(source, tmp_path / "there", "speculators").folder
    back = export(there, tmp_path / "back", "eagle3" if name.startswith("EAGLE-3") else "dspark").folder
    if name == "DFlash":
        assert 'sliding_window_non_causal": true' in (there / "config.json").read_text(), "vLLM reads it in all layers"
    assert_drafts_equal(target[1], *(drafter(folder, target[1]) for folder in (source, there, back)))
    stored, again = (load_file(folder / "model.safetensors") for folder in (source, back))
    assert stored.keys() == again.keys() and all(torch.equal(stored[each], again[each]) for each in stored)
    ours, theirs = (json.loads((folder / "config.json").read_text()) for folder in (source, back))
    if name == "DFlash, causal windows":  # the default for sliding layers if the key is missing
        assert ours.pop("is_causal") is True
    if name.startswith("EAGLE-3"):  # default layers are named as well if the source names them
        theirs = {each: value for each, value in theirs.items() if each in ours}
    assert ours == theirs


def test_the_nested_config_and_tensors_are_those_of_speculators(tmp_path: Path, target: tuple[Path, CausalLM]) -> None:
    draft = tiny_dspark(target[1], mask_token_id=MASK, **WINDOWS, writes=FEW, is_causal=False)
    draft.save_pretrained(tmp_path / "dspark")
    summary = export(
        tmp_path / "dspark", tmp_path / "nested", "speculators", target="zoe/target@v1", prompts=NO_PROMPTS
    )
    config = json.loads((summary.folder / "config.json").read_text())
    layers, servers = config.pop("transformer_layer_config"), config.pop("speculators_config")
    assert {each: layers[each] for each in ("model_type", "layer_types", "sliding_window", "use_sliding_window")} == {
        "model_type": "qwen3", "layer_types": list(BOTH), "sliding_window": 4, "use_sliding_window": True,
    }  # fmt: skip
    assert (layers["vocab_size"], layers["hidden_size"], layers["head_dim"]) == (264, 32, 32)
    assert servers == {
        "algorithm": "dspark",
        "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 4}],
        "default_proposal_method": "greedy",
        "verifier": {"name_or_path": "zoe/target", "architectures": []},
    }
    wanted = {
        "architectures": ["DSparkDraftModel"],
        "speculators_model_type": "dspark",
        "aux_hidden_state_layer_ids": [1, 2, 3, 4, 5, 6, 7],
        "block_size": 4,
        "mask_token_id": MASK,
        "sample_from_anchor": True,
        "sliding_window_non_causal": True,
        "draft_vocab_size": len(FEW),
        "markov_rank": 3,
        "markov_head_type": "vanilla",
    }
    assert wanted.items() <= config.items() and not {"target_layer_ids", "is_causal", "vocab_size"} & config.keys()
    stored = load_file(summary.folder / "model.safetensors")
    assert stored["d2t"].tolist() == [token - index for index, token in enumerate(FEW)]
    assert stored["t2d"].nonzero()[:, 0].tolist() == list(FEW) and stored["t2d"].shape == (264,)
    assert [command.server for command in summary.commands] == ["vllm"]
    (told,) = [each for each in summary.commands[0].warnings if "in this layout" in each]
    assert "masks attention in layers 0, 1 differently from training" in told and "use --format dspark" in told

    tiny_eagle3(target[1], norm_before_residual=True, target_layer_ids=(0, 6)).save_pretrained(tmp_path / "eagle3")
    summary = export(tmp_path / "eagle3", tmp_path / "its", "speculators")
    config = json.loads((summary.folder / "config.json").read_text())
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_aux_hidden_states"]) == ("llama", 2), "vLLM counts three without the key"
    assert config["speculators_config"]["verifier"]["name_or_path"] == "TARGET"
    flags = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
    assert [config[flag] for flag in flags] == [True, False, False, False], "servers have different defaults"
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 7] and config["draft_vocab_size"] == 264
    stored = load_file(summary.folder / "model.safetensors")
    assert "layers.0.hidden_norm.weight" in stored and not any("midlayer" in each for each in stored)


@pytest.mark.parametrize(("taps", "servers"), [((2, 3, 4), ["vllm"]), ((2, 4, 5), ["vllm", "sglang"])])
def test_layers_that_a_config_names_stay_named_and_sglang_gets_only_those_that_it_reads(
    tmp_path: Path, target: tuple[Path, CausalLM], taps: tuple[int, ...], servers: list[str]
) -> None:
    """Layers 2, 3 and 4 are the defaults for seven layers; this target has eight layers, for which the defaults are 2,
    4 and 5.
    """
    layers = tuple(tap - 1 for tap in taps)
    tiny_eagle3(target[1], target_layer_ids=layers).save_pretrained(tmp_path / "source")
    with_config(eagle_aux_hidden_state_layer_ids=taps)(tmp_path / "source")
    for format in ("speculators", "eagle3"):
        summary = export(tmp_path / "source", tmp_path / format, format, target=str(target[0]), prompts=NO_PROMPTS)
        assert read_eagle3_config(summary.folder).target_layer_ids == layers
    assert [command.server for command in summary.commands] == servers
    assert not any("layers" in warning for command in summary.commands for warning in command.warnings)


def test_a_layout_that_lacks_a_setting_is_refused_by_its_name(tmp_path: Path, target: tuple[Path, CausalLM]) -> None:
    tiny_dspark(target[1], mask_token_id=MASK, is_causal=True).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match="causal blocks in layers without a window, and the layout speculators cannot"):
        export(tmp_path / "source", tmp_path / "out", "speculators")
    tiny_eagle3(target[1]).save_pretrained(tmp_path / "eagle3")
    for format in ("dspark", "draft", "heads"):
        with pytest.raises(
            ValueError, match=r"contains an EAGLE-3 draft, which .* use format eagle3 or speculators or"
        ):
            export(tmp_path / "eagle3", tmp_path / "out", format)
    assert not (tmp_path / "out").exists()


def test_a_draft_on_the_hub_is_converted_for_the_target_that_it_names(
    hub: FakeHub, tmp_path: Path, target: tuple[Path, CausalLM]
) -> None:
    tiny_eagle3(target[1], FEW, **PORTABLE).save_pretrained(tmp_path / "flat")
    nested = export(
        tmp_path / "flat", tmp_path / "nested", "speculators", target="zoe/target", prompts=NO_PROMPTS
    ).folder
    folder_on(hub, "zoe/draft", nested)
    folder_on(hub, "zoe/target", target[0])
    summary = export(Path("zoe/draft"), tmp_path / "out", "eagle3")
    assert_drafts_equal(target[1], *(drafter(folder, target[1]) for folder in (tmp_path / "flat", summary.folder)))
    vllm, sglang = summary.commands
    assert vllm.argv[:3] == ("vllm", "serve", "zoe/target") and '"method":"eagle3"' in vllm.argv[-1]
    assert sglang.argv[sglang.argv.index("--speculative-algorithm") + 1] == "EAGLE3"
    assert (export(Path("zoe/draft"), tmp_path / "file", "gguf").folder / "model.gguf").is_file()
    with pytest.raises(ValueError, match="'zoe/other' cannot be loaded: there is no such folder"):
        export(Path("zoe/other"), tmp_path / "none", "eagle3")


# --- llama.cpp's file -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["flat", "nested"])
@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, {"norm_before_residual": False, "norm_before_fc": False}),
        (
            {"norm_before_residual": True, "norm_before_fc": True},
            {"norm_before_residual": True, "norm_before_fc": True},
        ),
        ({"rope_parameters": LLAMA3_ROPE, "writes": None}, {"rope.freq_base": 1e4}),
    ],
)
def test_an_eagle3_file_has_llama_cpps_keys_names_and_order_and_drafts_the_same(
    tmp_path: Path, target: tuple[Path, CausalLM], changes: dict[str, Any], wanted: dict[str, Any], layout: str
) -> None:
    folder, model = target
    tiny_eagle3(model, **{"writes": FEW, **PORTABLE, **changes}).save_pretrained(tmp_path / "flat")
    source = tmp_path / "flat"
    if layout == "nested":
        source = export(source, tmp_path / "nested", "speculators").folder
    out = export(source, tmp_path / "out", "gguf", target=str(folder), type="f32").folder
    sizes = {"embedding_length": 32, "block_count": 1, "attention.head_count": 2, "attention.head_count_kv": 1}
    every = {"target_layers": [2, 4, 5], "target_hidden_size": 32, "vocab_size": 264, **sizes, **wanted}
    assert {name: key(out, f"eagle3.{name}") for name in every} == every
    assert key(out, "general.architecture") == "eagle3" and len(key(out, "tokenizer.ggml.tokens")) == 264
    file = {tensor.name: tensor for tensor in GGUFReader(out / "model.gguf").tensors}
    weights = load_file(tmp_path / "flat" / "model.safetensors")
    names = {
        "fc.weight": "fc.weight",
        "output_norm.weight": "norm.weight",
        "output.weight": "lm_head.weight",
        "blk.0.attn_norm.weight": "midlayer.input_layernorm.weight",
        "blk.0.attn_norm_2.weight": "midlayer.hidden_norm.weight",
        "blk.0.ffn_norm.weight": "midlayer.post_attention_layernorm.weight",
        "blk.0.attn_v.weight": "midlayer.self_attn.v_proj.weight",
        "blk.0.attn_output.weight": "midlayer.self_attn.o_proj.weight",
        "blk.0.ffn_down.weight": "midlayer.mlp.down_proj.weight",
        **({"enc.output_norm.weight": "input_norm.weight"} if wanted.get("norm_before_fc") else {}),
    }
    found = tensors(out)
    assert all(np.array_equal(found[theirs], weights[name]) for theirs, name in names.items())
    for name, heads in (("q", 2), ("k", 1)):
        rows = weights[f"midlayer.self_attn.{name}_proj.weight"].view(heads, 2, 8, 64).transpose(1, 2)
        assert np.array_equal(found[f"blk.0.attn_{name}.weight"], rows.reshape(-1, 64)), "llama.cpp rotates neighbours"
    assert ("d2t" in file) == ("writes" not in changes)
    if "d2t" in file:
        assert file["d2t"].tensor_type.name == "I64" and file["d2t"].data.tolist() == list(FEW), "no distances"
    assert ("rope_freqs.weight" in found) == ("rope_parameters" in changes)
    assert len(found) == len(names) + 4 + ("rope_freqs.weight" in found), "q, k, gate and up too, and nothing else"
    ((trained, read),) = readers(ExportTask(source, out, "gguf"), model)
    assert_drafts_equal(model, trained(), read())


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"fc_norm": True}, r"norms of single taps \(fc_norm\), which llama.cpp cannot compute"),
        ({"norm_output": True}, r"a norm of its recycled states \(norm_output\)"),
        ({"qk_norm": True}, "norms of queries and keys"),
        ({"sliding_window": 8}, "a window of 8 tokens"),
        ({"target_layer_ids": (0, 6)}, "2 taps instead of 3"),
    ],
)
def test_an_eagle3_draft_that_llama_cpp_would_misread_is_refused(
    tmp_path: Path, target: tuple[Path, CausalLM], changes: dict[str, Any], problem: str
) -> None:
    tiny_eagle3(target[1], **{**PORTABLE, **changes}).save_pretrained(tmp_path / "source")
    with pytest.raises(ValueError, match=problem):
        export(tmp_path / "source", tmp_path / "out", "gguf", target=str(target[0]))
    with pytest.raises(ValueError, match="does not name its target"):
        export(tmp_path / "source", tmp_path / "out", "gguf")


def test_a_nested_dflash_draft_is_flattened_for_llama_cpp(tmp_path: Path, target: tuple[Path, CausalLM]) -> None:
    name = str(target[0])
    tiny_dflash(target[1], **WINDOWS, is_causal=True).save_pretrained(tmp_path / "flat")
    nested = export(tmp_path / "flat", tmp_path / "nested", "speculators").folder
    files = [
        (export(folder, tmp_path / f"{index}", "gguf", target=name).folder / "model.gguf").read_bytes()
        for index, folder in enumerate((tmp_path / "flat", nested))
    ]
    assert files[0] == files[1] and key(tmp_path / "1", "dflash.attention.causal") is True
    tiny_dflash(target[1], **{**WINDOWS, "layer_types": MIXED}).save_pretrained(tmp_path / "mixed")
    nested = export(tmp_path / "mixed", tmp_path / "nested-mixed", "speculators").folder
    assert read_dspark_config(nested) == read_dspark_config(tmp_path / "mixed")
    with pytest.raises(ValueError, match="causal in some of the draft's layers and not in others"):
        export(nested, tmp_path / "out", "gguf", target=name)


def test_a_card_says_what_an_eagle3_draft_is(tmp_path: Path, target: tuple[Path, CausalLM]) -> None:
    tiny_eagle3(target[1], FEW, **PORTABLE, norm_before_residual=True).save_pretrained(tmp_path / "source")
    summary = export(tmp_path / "source", tmp_path / "out", "eagle3")
    assert [command.server for command in summary.commands] == ["vllm"], "SGLang ignores norm_before_residual"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "# EAGLE-3 draft\n" in card and "--drafter eagle3:DIR" in card and "2503.01840" in card
    file = export(tmp_path / "source", tmp_path / "file", "gguf", target=str(target[0]))
    assert file.commands[0].argv[-5:] == ("draft-eagle3", "--spec-draft-n-max", "4", "--spec-draft-p-min", "0")
    assert read_eagle3_config(tmp_path / "out").target_layer_ids == ()
