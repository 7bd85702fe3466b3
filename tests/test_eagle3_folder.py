"""Folders of EAGLE-3 drafts: read back to the bit, read in other trainers' forms, or rejected in one sentence."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from changed_folders import with_config, with_tensors
from drafter_checks import Follower, assert_same
from safetensors.torch import load_file
from tiny_eagle3 import tiny_eagle3
from tiny_models import tiny_model

from decoding.drafters import Eagle3Drafter
from decoding.model.causal_lm import CausalLM
from decoding.model.eagle3_config import default_layers, is_eagle3_folder
from decoding.model.loading import load_draft, load_eagle3
from decoding.rules.sampling import SamplingConfig


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return CausalLM(tiny_model(num_hidden_layers=8))


def test_the_tensors_and_the_config_are_those_that_every_server_reads(target: CausalLM, tmp_path: Path) -> None:
    """Sizes: H 16, two heads of 8, one key head, I 24, V 16, of which 5 tokens can be written; the default taps are 2,
    4 and 5 of 8 layers.
    """
    tiny_eagle3(target, writes=(0, 2, 3, 5, 15), target_layer_ids=(1, 3, 4)).bfloat16().save_pretrained(tmp_path)
    wanted = {
        "input_layernorm": [16],
        "hidden_norm": [16],
        "post_attention_layernorm": [16],
        "self_attn.q_proj": [16, 32],
        "self_attn.k_proj": [8, 32],
        "self_attn.v_proj": [8, 32],
        "self_attn.o_proj": [16, 16],
        "mlp.gate_proj": [24, 16],
        "mlp.up_proj": [24, 16],
        "mlp.down_proj": [16, 24],
    }
    shapes = {
        "fc.weight": [16, 48],
        **{f"midlayer.{name}.weight": shape for name, shape in wanted.items()},
        "norm.weight": [16],
        "lm_head.weight": [5, 16],
        "d2t": [5],
    }
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: list(tensor.shape) for name, tensor in stored.items()} == shapes
    assert stored["d2t"].tolist() == [0, 1, 1, 2, 11]
    assert json.loads((tmp_path / "config.json").read_text()) == {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "vocab_size": 16,
        "draft_vocab_size": 5,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 2048,
        "rope_parameters": {"rope_theta": 1e4, "rope_type": "default"},
        "rope_theta": 1e4,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def test_the_default_layers_are_those_that_servers_tap() -> None:
    """For 32 layers, taps 2, 16 and 29 are the states after layers 1, 15 and 28."""
    assert default_layers(32) == (1, 15, 28) and default_layers(8) == (1, 3, 4) and default_layers(7) == (1, 2, 3)
    with pytest.raises(ValueError, match="a target of 6 layers does not have so many"):
        default_layers(6)


LLAMA3 = {
    "rope_theta": 5e5,
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
FORMS: dict[str, dict[str, Any]] = {
    "the portable one": {"target_layer_ids": (1, 3, 4), "writes": (0, 2, 3, 5, 15)},
    "all tokens, other layers": {"target_layer_ids": (0, 6)},
    "flags": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "norms of taps": {"fc_norm": True},
    "a scaled rope": {"rope_parameters": LLAMA3, "max_position_embeddings": 512},
    "a window, norms of queries and keys": {"sliding_window": 3, "qk_norm": True},
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", FORMS)
def test_a_draft_is_read_back_to_the_bit(tmp_path: Path, form: str, dtype: torch.dtype) -> None:
    target = CausalLM(tiny_model(num_hidden_layers=8).to(dtype))
    draft = tiny_eagle3(target, **FORMS[form]).to(dtype)
    draft.save_pretrained(tmp_path)
    state, read = torch.get_rng_state(), load_eagle3(tmp_path, target)
    assert torch.equal(torch.get_rng_state(), state), "no random weights were made, which would take seconds"
    assert read.config == draft.config and is_eagle3_folder(tmp_path)
    found, wanted = read.state_dict(), draft.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert not any(parameter.requires_grad for parameter in read.parameters()) and not read.training


def test_a_scaled_rope_turns_as_in_transformers(target: CausalLM) -> None:
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    draft = tiny_eagle3(target, **FORMS["a scaled rope"]).bfloat16()
    config = LlamaConfig(hidden_size=16, num_attention_heads=2, max_position_embeddings=512, rope_parameters=LLAMA3)
    positions = torch.arange(300)[None]
    wanted = LlamaRotaryEmbedding(config)(torch.empty(0), positions)
    for found, each in zip(draft._rotary(positions), wanted, strict=True):
        assert found.dtype == torch.bfloat16, "the frequencies themselves are not rounded with the weights"
        torch.testing.assert_close(found.float(), each, rtol=0, atol=2**-8)


# --- other trainers ---------------------------------------------------------------------------------------------------

SIZED: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2, "vocab_size": 16}
ROPE = {"rope_theta": 5e5, "rope_type": "default"}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3DraftModel"],
    "draft_vocab_size": 5,
    "norm_before_residual": True,
    "norm_before_fc": True,
    "fc_norm": False,
    "norm_output": True,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [2, 5, 7],
    "embed_requires_grad": False,
    "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "x"}},
    "transformer_layer_config": {
        **SIZED,
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "layer_types": ["full_attention"],
        "rope_parameters": ROPE,
        "hidden_act": "silu",
        "attention_bias": False,
    },
}
FLAGS = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "EAGLE": (
        {"architectures": ["LlamaForCausalLMEagle3"], **SIZED, "num_key_value_heads": 1, "draft_vocab_size": 5},
        {"target_layer_ids": (1, 3, 4)},
    ),
    "SpecForge, rope of transformers 4": (
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            **SIZED,
            "num_key_value_heads": 1,
            "draft_vocab_size": 5,
            "rope_theta": 5e5,
            "rope_scaling": None,
            "norm_output": True,
            "fc_norm": True,
        },
        {"target_layer_ids": (1, 3, 4), "fc_norm": True, "norm_output": True, "rope_parameters": ROPE},
    ),
    "ModelOpt": (
        {
            "architectures": ["LlamaForCausalLMEagle3"],
            **SIZED,
            "num_key_value_heads": 1,
            "draft_vocab_size": 5,
            "eagle_config": {
                "use_aux_hidden_state": True,
                "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
                "norm_before_fc": True,
            },
        },
        {"target_layer_ids": (1, 3, 4), "norm_before_fc": True},
    ),
    "speculators": (SPECULATORS, {"target_layer_ids": (1, 4, 6), **FLAGS, "rope_parameters": ROPE}),
    "speculators, a layer of Qwen 3 with a window": (
        {
            **SPECULATORS,
            "transformer_layer_config": {
                **SPECULATORS["transformer_layer_config"],
                "model_type": "qwen3",
                "layer_types": ["sliding_attention"],
                "use_sliding_window": True,
                "sliding_window": 4,
            },
        },
        {"target_layer_ids": (1, 4, 6), **FLAGS, "rope_parameters": ROPE, "sliding_window": 4, "qk_norm": True},
    ),
    "speculators before norm_before_residual": (
        {key: value for key, value in SPECULATORS.items() if key != "norm_before_residual"},
        {"target_layer_ids": (1, 4, 6), **FLAGS, "norm_before_residual": False, "rope_parameters": ROPE},
    ),
    "vLLM's names for Qwen 3": (
        {
            "architectures": ["Eagle3Qwen3ForCausalLM"],
            **SIZED,
            "num_key_value_heads": 1,
            "draft_vocab_size": 5,
            "layer_types": ["full_attention"],
            "use_sliding_window": False,
            "sliding_window": 4,
        },
        {"target_layer_ids": (1, 3, 4), "qk_norm": True},
    ),
    "speculators, default taps": (
        {**SPECULATORS, "eagle_aux_hidden_state_layer_ids": None},
        {"target_layer_ids": (1, 3, 4), **FLAGS, "rope_parameters": ROPE},
    ),
}


@pytest.mark.parametrize("name", SHAPES)
def test_the_folders_of_other_trainers_draft_as_the_same_weights_do_here(
    target: CausalLM, tmp_path: Path, name: str
) -> None:
    """The folders have the layer names, the copies of the target's embedding and the inverse map that some trainers
    store.
    """
    content, wanted = SHAPES[name]
    draft = tiny_eagle3(target, (0, 2, 3, 5, 15), **wanted)
    draft.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(content))
    embedding = target.model.get_input_embeddings().weight.detach().clone()

    def as_speculators(tensors: dict[str, torch.Tensor]) -> None:
        for key in [key for key in tensors if key.startswith("midlayer.")]:
            tensors[key.replace("midlayer.", "layers.0.")] = tensors.pop(key)
        tensors.update({"embed_tokens.weight": embedding, "t2d": torch.ones(16, dtype=torch.bool)})

    if "speculators" in name:
        with_tensors(as_speculators)(tmp_path)
    read = load_eagle3(tmp_path, target)
    assert read.config == draft.config
    for sampling in (SamplingConfig(), SamplingConfig(1.0)):
        found, same_weights = (Follower(Eagle3Drafter(each), target, sampling) for each in (read, draft))
        for text in ([3], [3, 1, 4, 1, 5], [3, 1, 4, 1, 5, 9, 2, 6]):
            assert_same(found.propose(text)[0], same_weights.propose(text)[0])


# --- refusals ---------------------------------------------------------------------------------------------------------


def _pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "two layers": (with_config(num_hidden_layers=2), "num_hidden_layers is 2"),
    "another style": (
        with_config(architectures=["Eagle3DeepseekV2ForCausalLM"]),
        "a layer of Eagle3DeepseekV2ForCausalLM, not of Llama or Qwen 3",
    ),
    "another nested style": (
        with_config(transformer_layer_config={"model_type": "gemma3"}, norm_before_residual=False),
        "the draft has a layer of gemma3, not of Llama or Qwen 3",
    ),
    "a window without a size": (with_config(layer_types=["sliding_attention"]), "'sliding_window' is missing"),
    "a window of none": (
        with_config(layer_types=["sliding_attention"], sliding_window=0),
        "sliding_window is 0: use a whole number",
    ),
    "a window that is not used": (
        with_config(layer_types=["sliding_attention"], sliding_window=4, use_sliding_window=False),
        "use_sliding_window is False, but layer_types is ['sliding_attention']",
    ),
    "another kind of layer": (with_config(layer_types=["chunked_attention"]), "layer_types is ['chunked_attention']"),
    "another rope": (with_config(rope_parameters={"rope_type": "longrope"}), "the rotary embeddings are longrope"),
    "a rope without its factor": (with_config(rope_parameters={"rope_type": "linear"}), "factor"),
    "a partial rope": (with_config(partial_rotary_factor=0.5), "partial_rotary_factor is 0.5"),
    "a partial rope within": (
        with_config(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
        "partial_rotary_factor is 0.5",
    ),
    "an embedding of its own": (with_config(embed_requires_grad=True), "embed_requires_grad is True"),
    "biases": (with_config(attention_bias=True), "attention_bias is True"),
    "another width": (with_config(target_hidden_size=32), "size 16, not the target's size 32"),
    "no taps": (
        with_config(eagle_config={"use_aux_hidden_state": False}),
        "reads no states between the target's layers",
    ),
    "ambiguous taps": (
        with_config(eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 3, 6]}),
        "eagle_config names the layers [0, 3, 6], which servers number in different ways",
    ),
    "both norms": (with_config(norm_before_fc=True, fc_norm=True), "norm_before_fc and fc_norm are both true"),
    "a flag that is none": (with_config(norm_output=1), "norm_output is 1: use true or false"),
    "falling taps": (with_config(eagle_aux_hidden_state_layer_ids=[5, 4, 2]), "[4, 3, 1]: use increasing layers"),
    "the embedding's output": (with_config(eagle_aux_hidden_state_layer_ids=[0, 4, 5]), "target_layer_ids is -1"),
    "a tap that is none": (with_config(eagle_aux_hidden_state_layer_ids=["2"]), "does not describe an EAGLE-3 draft"),
    "a tap beyond": (
        with_config(eagle_aux_hidden_state_layer_ids=[2, 4, 8]),
        "reads layer 7, but only layers 0 to 6 can be read",
    ),
    "fewer taps": (with_config(num_aux_hidden_states=2), "num_aux_hidden_states is 2, but the config names 3 layers"),
    "fc of other taps": (
        with_config(eagle_aux_hidden_state_layer_ids=[2, 4]),
        "fc.weight has the shape (16, 48), not (16, 32)",
    ),
    "another target": (with_config(vocab_size=32), "a target whose vocab_size is 32, not 16"),
    "sizes that no memory holds": (with_config(intermediate_size=10**12), "size mismatch, midlayer.mlp.gate_proj"),
    "a size that is none": (with_config(hidden_size="wide"), "does not describe an EAGLE-3 draft"),
    "a missing size": (
        lambda folder: (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLMEagle3"]}'),
        "hidden_size",
    ),
    "more tokens than the target": (
        with_config(draft_vocab_size=17),
        "draft_vocab_size is 17: use at most the target's 16",
    ),
    "other tokens": (with_config(draft_vocab_size=6), "d2t is not a list of 6 whole numbers"),
    "no map": (with_tensors(lambda tensors: tensors.pop("d2t")), "d2t is not a list of 5 whole numbers"),
    "a map of ids": (
        with_tensors(lambda tensors: tensors.update(d2t=torch.tensor([0, 2, 3, 5, 15]))),
        "does not map the outputs to increasing token ids of the target",
    ),
    "a missing tensor": (with_tensors(lambda tensors: tensors.pop("lm_head.weight")), "lm_head.weight is missing"),
    "norms of queries": (
        with_tensors(lambda tensors: tensors.update({"midlayer.self_attn.q_norm.weight": torch.ones(8)})),
        "midlayer.self_attn.q_norm.weight is unknown",
    ),
    "no number": (with_tensors(lambda tensors: tensors["fc.weight"].fill_(torch.nan)), "that are not finite"),
    "another embedding": (
        with_tensors(lambda tensors: tensors.update({"embed_tokens.weight": torch.ones(16, 16)})),
        "contains an embed_tokens.weight that differs from this tensor in the target",
    ),
    "pickled weights": (_pickled, "lacks .safetensors files: convert its weights (pickled weights are not loaded)"),
    "weights cut short": (
        lambda folder: (folder / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:999]),
        "cannot be read as safetensors",
    ),
    "another architecture": (with_config(architectures=["LlamaForCausalLM"]), "does not contain an EAGLE-3 draft"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_folder_is_refused_in_one_sentence(target: CausalLM, tmp_path: Path, name: str) -> None:
    tiny_eagle3(target, (0, 2, 3, 5, 15), target_layer_ids=(1, 3, 4)).save_pretrained(tmp_path)
    change, problem = BROKEN[name]
    change(tmp_path)
    with pytest.raises(ValueError) as raised:
        load_eagle3(tmp_path, target)
    assert problem in str(raised.value) and "\n" not in str(raised.value)


def test_default_taps_of_a_shallow_target_are_refused(target: CausalLM, tmp_path: Path) -> None:
    tiny_eagle3(target, target_layer_ids=(1, 3, 4)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="a target of 6 layers does not have so many: name the draft's layers in"):
        load_eagle3(tmp_path, CausalLM(tiny_model(num_hidden_layers=6)))


def test_an_eagle3_draft_is_no_ordinary_one_nor_an_ordinary_one_an_eagle3_draft(
    target: CausalLM, tmp_path: Path
) -> None:
    tiny_eagle3(target).save_pretrained(tmp_path / "eagle3")
    tiny_model().save_pretrained(tmp_path / "draft")
    with pytest.raises(ValueError, match="not a draft model: pass it as eagle3:"):
        load_draft(str(tmp_path / "eagle3"), target, None)
    with pytest.raises(ValueError, match="does not contain an EAGLE-3 draft: use draft:"):
        load_eagle3(tmp_path / "draft", target)
