"""Greedy decoding is `transformers`' own `generate`, family by family; what could not be is refused by name."""

from functools import cache
from typing import Any

import pytest
import torch
from scripted_drafters import HostileDrafter
from tiny_models import FEW_ATTENTIONS, FEW_FAMILIES, WINDOW, naive_greedy, tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    Llama4TextConfig,
    LlamaConfig,
    LlamaModel,
    OpenAIGPTConfig,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from decoding.drafters import DraftModelDrafter, DraftTreeDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig

PROMPT = [3, 1, 4, 1, 5, 9]
# From one token to far past the window.
RAGGED = [PROMPT, [7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [6, 6]]
COUNT = 16


@cache
def model_of(family: str, attention: str | None = None, seed: int = 0) -> PreTrainedModel:
    return tiny_model(family, attention=attention, seed=seed)


@cache
def plain_texts(family: str) -> list[tuple[int, ...]]:
    """Of the prompts in RAGGED, each by itself and without any cache."""
    return [naive_greedy(model_of(family), prompt, COUNT) for prompt in RAGGED]


def transformers_greedy(model: PreTrainedModel, prompt: list[int], count: int, **settings: float) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    generate: Any = model.generate  # which nn.Module's getattr hides
    with torch.inference_mode():
        output = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **settings)
    return tuple(output[0, len(prompt) :].tolist())


# --- families that decode --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "attention"), FEW_ATTENTIONS)
def test_plain_decoding_is_transformers_generate(family: str, attention: str) -> None:
    model = model_of(family, attention)
    wanted = transformers_greedy(model, PROMPT, COUNT)
    assert len(wanted) == COUNT > WINDOW
    assert Engine(CausalLM(model)).decode(PROMPT, DecodingConfig(COUNT)).tokens == wanted


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_the_texts_of_these_tests_need_their_context(family: str) -> None:
    """Else nothing here would notice a wrong mask: change the far past and the text changes."""
    model = model_of(family)
    texts = {naive_greedy(model, [first, *PROMPT[1:]], 8) for first in range(4)}
    assert len(texts) > 1
    assert len(set(plain_texts(family))) == len(RAGGED)


@pytest.mark.parametrize("chains", [False, True], ids=["trees", "chains"])
@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_speculative_greedy_is_plain_greedy(family: str, chains: bool) -> None:
    target, plain = CausalLM(model_of(family)), plain_texts(family)[0]
    accepted = 0
    for seed in range(2):
        drafter = HostileDrafter(seed, [*PROMPT, *plain], chains=chains)
        generation = Engine(target, drafter).decode(PROMPT, DecodingConfig(COUNT))
        assert generation.tokens == plain
        accepted += sum(step.accepted for step in generation.steps)
    assert accepted > 3, "a hostile drafter nobody believes proves nothing"


@pytest.mark.parametrize(("family", "attention"), FEW_ATTENTIONS)
def test_ragged_batches_under_a_hostile_drafter_are_plain_greedy(family: str, attention: str) -> None:
    """Mixtures of experts among them: which rows stand beside a row does not change its text."""
    target, plain = CausalLM(model_of(family, attention)), plain_texts(family)
    right = [[*prompt, *text] for prompt, text in zip(RAGGED, plain, strict=True)]
    drafter = HostileDrafter(1, right[0], others=right[1:])
    generations = Engine(target, drafter).decode(RAGGED, DecodingConfig(COUNT), batch_size=3)
    assert [generation.tokens for generation in generations] == plain
    assert all(sum(step.accepted for step in generation.steps) > 0 for generation in generations)


@pytest.mark.parametrize("family", FEW_FAMILIES)
def test_a_draft_of_the_same_family_drafts_trees_for_ragged_rows(family: str) -> None:
    target, draft = CausalLM(model_of(family)), CausalLM(model_of(family, seed=1))
    generations = Engine(target, DraftTreeDrafter(draft, 2, 2, 7)).decode(RAGGED, DecodingConfig(10), batch_size=3)
    assert [generation.tokens for generation in generations] == [text[:10] for text in plain_texts(family)]


def test_a_repetition_penalty_means_what_it_means_in_transformers() -> None:
    model = model_of("llama")
    wanted = transformers_greedy(model, PROMPT, COUNT, repetition_penalty=1.4)
    config = DecodingConfig(COUNT, SamplingConfig(repetition_penalty=1.4))
    assert Engine(CausalLM(model)).decode(PROMPT, config).tokens == wanted
    assert Engine(CausalLM(model), HostileDrafter(0, [*PROMPT, *wanted])).decode(PROMPT, config).tokens == wanted


# --- longrope: as long as the keys in the cache stay what they are ---------------------------------------------------


@cache
def longrope() -> PreTrainedModel:
    """Phi-3 with other frequencies for texts of more than 24 tokens."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
    return tiny_model("phi3", sliding_window=None, original_max_position_embeddings=24, rope_scaling=factors)


def test_longrope_decodes_up_to_where_its_frequencies_change() -> None:
    target = CausalLM(longrope())
    assert target.max_positions == 24
    wanted = transformers_greedy(longrope(), PROMPT, 18)
    for drafter in (None, HostileDrafter(0, [*PROMPT, *wanted])):
        assert Engine(target, drafter).decode(PROMPT, DecodingConfig(18)).tokens == wanted


def test_longrope_is_refused_beyond() -> None:
    """One row that grows beyond would change the frequencies of all rows, and those of the keys in the cache."""
    target = CausalLM(longrope())
    with pytest.raises(ValueError, match=r"prompt of 6 tokens and 19 new ones make 25, but .* context holds 24"):
        Engine(target).decode(PROMPT, DecodingConfig(19))
    with pytest.raises(ValueError, match="may grow to 25 tokens but the draft's context holds 24"):
        Engine(CausalLM(model_of("phi3")), DraftModelDrafter(target)).decode(PROMPT, DecodingConfig(19))


# --- models that are refused, each by name and with the reason -------------------------------------------------------

_TINY: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "pad_token_id": 0,
}

RECURRENT: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1, "expand": 2},
    "falcon_mamba": {"state_size": 4},
    "rwkv": {"attention_hidden_size": 16},
    "recurrent_gemma": {"lru_width": 16, "attention_window_size": 8},
    # Hybrids: some of their layers attend, some recur.
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4, "num_experts": 2},
    "falcon_h1": {"mamba_d_ssm": 16, "mamba_n_heads": 2, "mamba_d_head": 8, "mamba_d_state": 4, "mamba_n_groups": 1},
    "qwen3_next": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "num_experts": 2,
        "num_experts_per_tok": 1,
        "moe_intermediate_size": 8,
        "shared_expert_intermediate_size": 8,
    },
}


def config_of(kind: str, settings: dict[str, Any]) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.for_model(kind, **{**_TINY, **settings})
    return config


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrent_model_is_refused_for_its_state_cannot_be_rolled_back(kind: str) -> None:
    model = AutoModelForCausalLM.from_config(config_of(kind, RECURRENT[kind]))
    with pytest.raises(ValueError, match=f"^{kind} keeps a recurrent state, which cannot be rolled back after"):
        CausalLM(model)


@pytest.mark.parametrize("kind", ["bloom", "mpt", "falcon"])
def test_alibi_is_refused_for_branches_cannot_stand_side_by_side(kind: str) -> None:
    if kind == "falcon":  # which has rotary embeddings if told so
        model = tiny_model("falcon", alibi=True)
    else:
        model = AutoModelForCausalLM.from_config(config_of(kind, {"d_model": 16, "n_heads": 2, "n_layers": 1}))
    with pytest.raises(ValueError, match=rf"^{kind} places tokens by their order \(ALiBi\), so a tree's branches"):
        CausalLM(model)


def test_a_model_that_takes_no_position_ids_is_refused() -> None:
    """It would place the nodes of a tree one behind the other, without a word."""
    settings = {"d_model": 16, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 16}
    model = AutoModelForCausalLM.from_config(config_of("bart", {**settings, "is_decoder": True}))
    with pytest.raises(ValueError, match=r"^bart places tokens by their order, so a tree's branches cannot stand"):
        CausalLM(model)


@pytest.mark.parametrize(
    ("config", "layers"),
    [
        (
            config_of("gpt_neo", {"num_layers": 2, "num_heads": 2, "attention_types": [[["global", "local"], 1]]}),
            "local",
        ),
        (
            Llama4TextConfig(**{**_TINY, "intermediate_size_mlp": 8, "moe_layers": [], "num_hidden_layers": 1}),
            "chunked_attention",
        ),
        (config_of("lfm2", {"layer_types": ["conv", "full_attention"]}), "conv"),
    ],
    ids=["local attention", "chunked attention", "convolution"],
)
def test_layers_that_do_not_take_a_trees_mask_are_refused(config: PreTrainedConfig, layers: str) -> None:
    model = AutoModelForCausalLM.from_config(config)
    with pytest.raises(ValueError, match=f"^{config.model_type} has {layers} layers, which do not take a tree's mask"):
        CausalLM(model)


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1)
    with pytest.raises(ValueError, match=r"^t5 is an encoder-decoder model: give a decoder-only"):
        CausalLM(T5ForConditionalGeneration(config))


def test_a_model_that_reads_in_both_directions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^bert reads texts in both directions: give a causal LM, or set is_decoder"):
        CausalLM(AutoModelForCausalLM.from_config(config_of("bert", {})))


def test_an_old_config_that_says_nothing_of_the_kind_is_not_taken_for_that() -> None:
    model = tiny_model("gpt2", is_decoder=False)
    assert model.config.is_decoder is False and CausalLM(model).num_layers == 2


def test_a_model_without_a_cache_is_refused() -> None:
    config = OpenAIGPTConfig(vocab_size=16, n_embd=16, n_layer=1, n_head=2, n_positions=32)
    with pytest.raises(ValueError, match=r"^openai-gpt keeps no key-value cache"):
        CausalLM(AutoModelForCausalLM.from_config(config))


def test_a_model_without_an_lm_head_is_refused() -> None:
    config = LlamaConfig(**_TINY)
    with pytest.raises(ValueError, match="LlamaModel has no lm_head: load the model with AutoModelForCausalLM"):
        CausalLM(LlamaModel(config))


def test_a_model_whose_layers_have_keys_of_different_shapes_is_refused_when_it_runs() -> None:
    settings = {
        "layer_types": ["sliding_attention", "full_attention"],
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 16,
        "num_kv_shared_layers": 0,
    }
    target = CausalLM(AutoModelForCausalLM.from_config(config_of("gemma4_text", settings)))
    with pytest.raises(ValueError, match=r"layers of this model differ .*\[1, 8\] and \[1, 16\]"):
        Engine(target).decode(PROMPT, DecodingConfig(4))
