"""Folders of DSpark and DFlash drafts: the form that servers read, reading back to the bit,
and errors in one sentence.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_folders import with_config, with_tensors
from drafter_checks import Follower, assert_same
from safetensors.torch import load_file
from tiny_dspark import tiny_dflash, tiny_dspark
from tiny_models import tiny_model

from decoding.drafters import DSparkDrafter
from decoding.drafters.registry import DrafterLoader, parse_drafter
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import is_dspark_folder, read_dspark_config
from decoding.model.loading import load_draft, load_dspark
from decoding.rules.sampling import SamplingConfig


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM(tiny_model(num_hidden_layers=4))


def test_the_tensors_are_those_that_servers_read_by_name_and_shape(target: CausalLM, tmp_path: Path) -> None:
    """Sizes: H 16, two heads of 32, one key head, I 24, V 16, r 3, and three taps of a target with the same width."""
    tiny_dspark(target, enable_confidence_head=True).save_pretrained(tmp_path)
    layer = {
        "input_layernorm": [16],
        "post_attention_layernorm": [16],
        "self_attn.q_proj": [64, 16],
        "self_attn.k_proj": [32, 16],
        "self_attn.v_proj": [32, 16],
        "self_attn.q_norm": [32],
        "self_attn.k_norm": [32],
        "self_attn.o_proj": [16, 64],
        "mlp.gate_proj": [24, 16],
        "mlp.up_proj": [24, 16],
        "mlp.down_proj": [16, 24],
    }
    wanted = {
        "fc.weight": [16, 48],
        "hidden_norm.weight": [16],
        **{f"layers.0.{name}.weight": shape for name, shape in layer.items()},
        "norm.weight": [16],
        "markov_head.markov_w1.weight": [16, 3],
        "markov_head.markov_w2.weight": [16, 3],
        "confidence_head.proj.weight": [1, 19],
        "confidence_head.proj.bias": [1],
    }
    assert {name: list(t.shape) for name, t in load_file(tmp_path / "model.safetensors").items()} == wanted


def test_the_config_is_that_which_servers_read(target: CausalLM, tmp_path: Path) -> None:
    tiny_dspark(target, num_hidden_layers=2, mask_token_id=7).bfloat16().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config.pop("headstart") == {"tree": []}
    assert config == {
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "attention_bias": False,
        "vocab_size": 16,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 2,
        "dtype": "bfloat16",
        "block_size": 4,
        "mask_token_id": 7,
        "target_layer_ids": [0, 1, 2],
        "num_target_layers": 4,
        "markov_rank": 3,
        "markov_head_type": "vanilla",
        "enable_confidence_head": False,
        "confidence_head_with_markov": True,
        "sample_from_anchor": True,
    }


def test_a_draft_without_a_bias_is_a_dflash_folder_whose_block_counts_the_newest_token(
    target: CausalLM, tmp_path: Path
) -> None:
    tiny_dflash(target).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["architectures"] == ["DFlashDraftModel"] and config["block_size"] == 5
    assert config["dflash_config"] == {"mask_token_id": 15, "target_layer_ids": [0, 1, 2]}
    assert read_dspark_config(tmp_path).block_size == 4 and read_dspark_config(tmp_path).slots == 5


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 64
}
WINDOWS = {"layer_types": ("sliding_attention",), "sliding_window": 3}
FORMS: dict[str, dict[str, Any]] = {
    "DSpark": {"tree": ((0,), (1,), (0, 0))},
    "fill-in, with confidence": {"sample_from_anchor": False, "enable_confidence_head": True},
    "DFlash": {"rank": 0, "sample_from_anchor": False},
    "DSpark without a bias": {"rank": 0, "enable_confidence_head": True, "confidence_head_with_markov": False},
    "few tokens": {"writes": (0, 2, 3, 5, 15), "tree": ((0,), (4,), (0, 0))},
    "gated": {"markov_head_type": "gated"},
    "windows": {**WINDOWS, "is_causal": False, "rope_scaling": LLAMA3, "target_layer_ids": (1, 3)},
    "causal": {"markov_head_type": "rnn", "is_causal": True},
    "other sizes": {"rope_theta": 500.0, "rms_norm_eps": 1e-5, "target_layer_ids": (2,), "num_key_value_heads": 2},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_draft_is_read_back_to_the_bit(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    target = CausalLM(tiny_model(num_hidden_layers=4).to(dtype))
    draft = tiny_dspark(target, **FORMS[form]).to(dtype)
    draft.save_pretrained(tmp_path)
    state, read = torch.get_rng_state(), load_dspark(tmp_path, target)
    assert torch.equal(torch.get_rng_state(), state), "no random weights were made, which would take seconds"
    assert read.config == draft.config and is_dspark_folder(tmp_path)
    found, wanted = read.state_dict(), draft.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not any(parameter.requires_grad for parameter in read.parameters()) and not read.training


# --- other trainers ---------------------------------------------------------------------------------------------------

SIZED = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 16}
HEADS = {"num_key_value_heads": 1, "head_dim": 32, "rms_norm_eps": 1e-5, "max_position_embeddings": 99}
ROPE = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
LAYERS: dict[str, Any] = {**SIZED, **HEADS, **ROPE, "hidden_act": "silu", "layer_types": ["full_attention"]}
BLOCK = {"block_size": 4, "mask_token_id": 7}
BIAS = {"markov_rank": 3, "markov_head_type": "vanilla"}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "speculators": (
        {
            "architectures": ["DSparkSpeculator"],
            "speculators_model_type": "dspark",
            "transformer_layer_config": {**LAYERS, "model_type": "qwen3"},
            "aux_hidden_state_layer_ids": [1, 3],
            "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}], "verifier": {"name_or_path": "x"}},
            "draft_vocab_size": 16,
            **BLOCK,
            **BIAS,
        },
        {"sample_from_anchor": False, "markov_rank": 3, "block_size": 3},
    ),
    "speculators, from the anchor": (
        {
            "architectures": ["DSparkDraftModel"],
            "speculators_model_type": "dspark",
            "transformer_layer_config": LAYERS,
            "eagle_aux_hidden_state_layer_ids": [1, 3],
            "sample_from_anchor": True,
            "enable_confidence_head": True,
            "confidence_head_with_markov": False,
            **BLOCK,
            **BIAS,
        },
        {"sample_from_anchor": True, "markov_rank": 3, "block_size": 4, "enable_confidence_head": True}
        | {"confidence_head_with_markov": False},
    ),
    "speculators, few tokens": (
        {
            "speculators_model_type": "dspark",
            "transformer_layer_config": LAYERS,
            "aux_hidden_state_layer_ids": [1, 3],
            "sample_from_anchor": True,
            "draft_vocab_size": 6,
            **BLOCK,
            **BIAS,
        },
        {"sample_from_anchor": True, "markov_rank": 3, "block_size": 4, "writes": (0, 2, 3, 5, 7, 11)},
    ),
    "speculators, DFlash": (
        {
            "architectures": ["DFlashDraftModel"],
            "speculators_model_type": "dflash",
            "transformer_layer_config": LAYERS,
            "aux_hidden_state_layer_ids": [1, 3],
            **BLOCK,
        },
        {"sample_from_anchor": False, "markov_rank": 0, "block_size": 3},
    ),
    "speculators 0.9, windows, DFlash": (
        {
            "speculators_model_type": "dflash",
            "transformer_layer_config": {
                **LAYERS,
                "num_hidden_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"],
                "sliding_window": 3,
                "use_sliding_window": True,
                "rope_parameters": {**LLAMA3, "rope_theta": 5e5, "partial_rotary_factor": 1.0},
            },
            "aux_hidden_state_layer_ids": [1, 4],
            "sliding_window_non_causal": False,
            **BLOCK,
        },
        {"sample_from_anchor": False, "markov_rank": 0, "block_size": 3, "target_layer_ids": (0, 3)}
        | {"num_hidden_layers": 2, "layer_types": ("sliding_attention", "full_attention"), "sliding_window": 3}
        | {"rope_scaling": LLAMA3},
    ),
    "speculators 0.9, windows, a bias with a memory": (
        {
            "speculators_model_type": "dspark",
            "transformer_layer_config": {**LAYERS, **WINDOWS},
            "aux_hidden_state_layer_ids": [1, 3],
            "sliding_window_non_causal": True,
            **BLOCK,
            **BIAS,
            "markov_head_type": "rnn",
        },
        {"sample_from_anchor": False, "markov_rank": 3, "block_size": 3, "markov_head_type": "rnn"}
        | {**WINDOWS, "is_causal": False},
    ),
    "SpecForge, a gated bias, causal": (
        {
            "architectures": ["DSparkDraftModel"],
            **LAYERS,
            "rope_parameters": None,
            "rope_theta": 5e5,
            "rope_scaling": {"type": "linear", "factor": 2.0},
            "block_size": 4,
            "dflash_config": {"causal": True, "mask_token_id": 7, "target_layer_ids": [0, 2], **BIAS}
            | {"markov_head_type": "gated"},
        },
        {"sample_from_anchor": True, "markov_rank": 3, "block_size": 4, "markov_head_type": "gated"}
        | {"is_causal": True, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
    ),
    "SpecForge": (
        {
            "architectures": ["DSparkDraftModel"],
            "model_type": "qwen3",
            **LAYERS,
            "block_size": 4,
            "dflash_config": {"projector_type": "dspark", "mask_token_id": 7, "target_layer_ids": [0, 2], **BIAS},
        },
        {"sample_from_anchor": True, "markov_rank": 3, "block_size": 4},
    ),
    "DeepSpec": (
        {
            "architectures": ["Qwen3DSparkModel"],
            **LAYERS,
            "target_layer_ids": [0, 2],
            "num_anchors": 8,
            **BLOCK,
            **BIAS,
        },
        {"sample_from_anchor": True, "markov_rank": 3, "block_size": 4},
    ),
    "DeepSpec, no bias": (
        {"architectures": ["Qwen3DSparkModel"], **LAYERS, "target_layer_ids": [0, 2], "markov_rank": 0, **BLOCK},
        {"sample_from_anchor": True, "markov_rank": 0, "block_size": 4},
    ),
    "nested": (
        {
            "architectures": ["Qwen3DSparkModel"],
            **LAYERS,
            "dflash_config": {"mask_token_id": 1, "target_layer_ids": [1]},
            "dspark_config": {"target_layer_ids": [0, 2], "sample_from_anchor": True, **BLOCK, **BIAS},
        },
        {"sample_from_anchor": True, "markov_rank": 3, "block_size": 4},
    ),
    "z-lab": (
        {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            **SIZED,
            **HEADS,
            "rope_theta": 5e5,
            "rope_scaling": None,
            "block_size": 4,
            "num_target_layers": 4,
            "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2], "use_swa": False},
        },
        {"sample_from_anchor": False, "markov_rank": 0, "block_size": 3},
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_folders_of_other_trainers_draft_as_the_same_weights_do_here(
    target: CausalLM, tmp_path: Path, name: str
) -> None:
    """The folders contain copies of the target's embedding and lm_head, and identity maps of the draft's ids."""
    content, wanted = SHAPES[name]
    same = {key: LAYERS[key] for key in (*SIZED, *HEADS)}
    wanted = {**same, "rope_theta": 5e5, "target_layer_ids": (0, 2), "mask_token_id": 7, **wanted}
    draft = tiny_dspark(target, **wanted, num_target_layers=content.get("num_target_layers"))
    draft.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(content))
    ends = {name: weight.detach().clone() for name, weight in ends_of(target).items()}
    maps = {"t2d": torch.ones(16, dtype=torch.bool)}
    if draft.lm_head is None:
        maps["d2t"] = torch.zeros(16, dtype=torch.int64)
    else:
        del ends["lm_head.weight"]
    with_tensors(lambda tensors: tensors.update(**ends, **maps))(tmp_path)
    read = DrafterLoader(target).load(parse_drafter(f"dspark:{tmp_path}"))
    assert isinstance(read, DSparkDrafter) and read.draft.config == draft.config
    for sampling in (SamplingConfig(), SamplingConfig(temperature=1.0)):
        found, same_weights = (Follower(each, target, sampling) for each in (read, DSparkDrafter(draft)))
        for text in ([3], [3, 1, 4, 1, 5], [3, 1, 4, 1, 5, 9, 2, 6]):
            assert_same(found.propose(text)[0], same_weights.propose(text)[0])
    wrong = torch.tensor([0] * 3 + [2] + [0] * (draft.config.outputs - 4))
    with_tensors(lambda tensors: tensors.update(d2t=wrong))(tmp_path)
    problem = "contains d2t, but its config has no draft_vocab_size: use a DSpark"
    if draft.lm_head is not None:
        problem = "d2t in .* does not map the outputs to increasing token ids of the target: use a DSpark"
    with pytest.raises(ValueError, match=problem):
        load_dspark(tmp_path, target)


def ends_of(target: CausalLM) -> dict[str, torch.Tensor]:
    ends: dict[str, Any] = {
        "embed_tokens.weight": target.model.get_input_embeddings(),
        "lm_head.weight": target.model.get_output_embeddings(),
    }
    return {name: module.weight for name, module in ends.items()}


@pytest.mark.parametrize("name", ["embed_tokens.weight", "lm_head.weight"])
def test_copies_of_the_targets_ends_are_left_out_and_others_refused(
    target: CausalLM, tmp_path: Path, name: str
) -> None:
    tiny_dspark(target).save_pretrained(tmp_path)
    weight = ends_of(target)[name].detach().bfloat16()
    with_tensors(lambda tensors: tensors.update({name: weight.clone()}))(tmp_path)
    assert load_dspark(tmp_path, target).config.block_size == 4
    weight[7] += 1
    for other in (weight, weight[:8]):
        with_tensors(lambda tensors, other=other: tensors.update({name: other.clone()}))(tmp_path)
        with pytest.raises(ValueError, match=f"contains an {name} that differs from this tensor in the target"):
            load_dspark(tmp_path, target)


# --- refusals ---------------------------------------------------------------------------------------------------------

SIZES: dict[str, tuple[dict[str, Any], str]] = {
    "no layer so high": (
        {"target_layer_ids": (1, 4)},
        r"target_layer_ids is \[1, 4\]: use increasing layers from 0 to 3",
    ),
    "falling layers": ({"target_layer_ids": (2, 0)}, "use increasing layers"),
    "a layer twice": ({"target_layer_ids": (1, 1)}, "use increasing layers"),
    "no layer": ({"target_layer_ids": ()}, "use increasing layers"),
    "the embedding's output": ({"target_layer_ids": (-1, 2)}, "an entry of target_layer_ids is -1"),
    "a mask beyond": ({"mask_token_id": 16}, "mask_token_id is 16: use one of the target's 16 tokens"),
    "heads in no groups": (
        {"num_attention_heads": 3, "num_key_value_heads": 2},
        "is not a multiple of num_key_value_heads",
    ),
    "heads of no kernel": ({"head_dim": 8}, "head_dim is 8: use one of 32, 64"),
    "a deep tree": ({"tokens": 2, "tree": ((0,), (0, 0), (0, 0, 0))}, "depth 3, but a pass drafts 2 tokens: shorten"),
    "a tree without a parent": ({"tree": ((1, 0),)}, r"tree path \[1, 0\] lacks its parent"),
    "no tokens": ({"tokens": 0}, "block_size is 0"),
}


@pytest.mark.parametrize("name", SIZES)
def test_sizes_that_no_server_loads_are_refused(target: CausalLM, name: str) -> None:
    changes, problem = SIZES[name]
    with pytest.raises(ValueError, match=problem) as raised:
        tiny_dspark(target, **changes)
    assert "\n" not in str(raised.value)


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "sizes that no memory holds": (with_config(vocab_size=10**12, markov_rank=10**6), "vocab_size is 1000000000000"),
    "a layer that is not there": (with_config(num_hidden_layers=2), "layers.1"),
    "another target": (with_config(num_target_layers=9), "num_target_layers is 9, not 4"),
    "a tap beyond": (with_config(num_target_layers=None, target_layer_ids=[0, 1, 4]), "layer 4, but only layers 0"),
    "a size that is none": (with_config(block_size="six"), "does not describe a DSpark draft .*block_size is 'six'"),
    "half a rope": (with_config(rope_parameters={"rope_type": "yarn"}), "are yarn with missing or wrong .*factor"),
    "another rope": (
        with_config(rope_scaling={"type": "xpos"}, rope_parameters=None),
        "embeddings are xpos: use one of",
    ),
    "ropes by layer": (with_config(rope_parameters={"full_attention": {"rope_theta": 5e5}}), "between types of layers"),
    "half heads": (with_config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "half heads, new": (with_config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.25}),
                        "partial_rotary_factor is 0.25"),
    "windows of no size": (with_config(layer_types=["sliding_attention"]), "sliding_window is None"),
    "other layers": (with_config(layer_types=["chunked_attention"]), "layer_types is ['chunked_attention']: use full"),
    "windows of too few layers": (with_config(num_hidden_layers=2, layer_types=["sliding_attention"]),
                                  "for each of the 2 layers"),
    "windows not used": (with_config(layer_types=["sliding_attention"], sliding_window=3, use_sliding_window=False),
                                  "use_sliding_window is False, but layer_types is ['sliding_attention']"),
    "windows somewhere": (with_config(layer_types=None, sliding_window=3, use_sliding_window=True),
                          "use_sliding_window is True, but layer_types is []"),
    "a missing size": (lambda folder: (folder / "config.json").write_text('{"architectures": ["Qwen3DSparkModel"]}'),
                       "does not describe a DSpark draft"),
    "a missing tensor": (with_tensors(lambda tensors: tensors.pop("fc.weight")), "fc.weight"),
    "a tensor too many": (with_tensors(lambda tensors: tensors.update(more=torch.ones(2))), "more"),
    "no number": (with_tensors(lambda tensors: tensors["fc.weight"].fill_(torch.nan)), "that are not finite"),
    "a mask": (lambda folder: (folder / "mask_embedding.pt").touch(), "mask_embedding.pt, and separate masks"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "does not contain tensors"),
    "another architecture": (with_config(architectures=["Qwen3ForCausalLM"]), "does not contain a DSpark draft"),
}  # fmt: skip
"""These include settings of other trainers that change the computation and are not supported here."""
BROKEN |= {
    name: (with_config(**{name: value}), f"{name} is {value}")
    for name, value in {
        "is_causal": "yes",
        "markov_head_type": "lstm",
        "attention_bias": True,
        "hidden_act": "gelu",
        "use_swa": True,
        "attention_sink_bias": True,
        "attention_value_scale": 0.5,
        "is_neox_style": False,
    }.items()
}
BROKEN["nested"] = with_config(dspark_config={"markov_head_type": "rnn"}), "markov_head.joint_proj.weight is missing"
BROKEN["DFlash with a bias"] = with_config(architectures=["DFlashDraftModel"]), "markov_rank is 3 in a DFlash draft"
BROKEN["fewer tokens"] = with_config(draft_vocab_size=8), "d2t is not a list of 8 whole numbers"
BROKEN["as many tokens"] = (
    with_config(draft_vocab_size=17),
    "draft_vocab_size is 17: use fewer than the target's 16 tokens",
)


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_in_one_sentence(target: CausalLM, tmp_path: Path, name: str) -> None:
    tiny_dspark(target).save_pretrained(tmp_path)
    change, problem = BROKEN[name]
    change(tmp_path)
    with pytest.raises(ValueError, match=problem.replace("[", r"\[")) as raised:
        load_dspark(tmp_path, target)
    assert "\n" not in str(raised.value)
    assert torch.empty(1).device.type == "cpu", "nothing is left of the sizes that were read without memory"


def test_a_dspark_draft_is_no_ordinary_one_nor_an_ordinary_one_a_dspark_draft(target: CausalLM, tmp_path: Path) -> None:
    tiny_dspark(target).save_pretrained(tmp_path / "dspark")
    tiny_model().save_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match="not a draft model: pass it as dspark:"):
        load_draft(str(tmp_path / "dspark"), target, None)
    with pytest.raises(ValueError, match="does not contain a DSpark draft: use draft:"):
        load_dspark(tmp_path / "draft", target)
    with pytest.raises(ValueError, match="there is no folder"):
        load_dspark(str(tmp_path / "nowhere"), target)
