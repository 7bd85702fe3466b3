"""Plain and speculative greedy decoding beside transformers' own `generate`, family by family."""

from functools import cache

import pytest
import torch
from scripted_drafters import HostileDrafter
from tiny_models import FAMILIES, WINDOW, naive_greedy, tiny_model
from transformers import Gemma3TextConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM

from decoding.drafters import DraftModelDrafter
from decoding.generate import DecodingConfig, decode
from decoding.sampling import SamplingConfig
from decoding.target import CausalLM

PROMPT = [3, 1, 4, 1, 5, 9]
COUNT = 16


@cache
def model_of(family: str, attention: str = "sdpa") -> PreTrainedModel:
    return tiny_model(family, attention=attention)


def transformers_greedy(model: PreTrainedModel, prompt: list[int], count: int, **settings: float) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    with torch.inference_mode():
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **settings
        )
    return tuple(output[0, len(prompt) :].tolist())


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_transformers_generate(family: str, attention: str) -> None:
    model = model_of(family, attention)
    wanted = transformers_greedy(model, PROMPT, COUNT)
    assert len(wanted) == COUNT > WINDOW
    assert decode(CausalLM(model), None, PROMPT, DecodingConfig(COUNT)).tokens == wanted


@pytest.mark.parametrize("family", FAMILIES)
def test_the_texts_of_these_tests_need_their_context(family: str) -> None:
    """Else nothing here would notice a wrong mask: change the far past and the text changes."""
    model = model_of(family)
    texts = {naive_greedy(model, [first, *PROMPT[1:]], 10) for first in range(6)}
    assert len(texts) > 1


@pytest.mark.parametrize("chains", [False, True], ids=["trees", "chains"])
@pytest.mark.parametrize("family", FAMILIES)
def test_speculative_greedy_is_plain_greedy(family: str, chains: bool) -> None:
    target = CausalLM(model_of(family))
    plain = decode(target, None, PROMPT, DecodingConfig(COUNT)).tokens
    accepted = 0
    for seed in range(6):
        drafter = HostileDrafter(seed, [*PROMPT, *plain], chains=chains)
        generation = decode(target, drafter, PROMPT, DecodingConfig(COUNT))
        assert generation.tokens == plain
        accepted += sum(step.accepted for step in generation.steps)
    assert accepted > 10, "a hostile drafter nobody believes proves nothing"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_of_the_same_family_drafts_chains_and_trees(family: str) -> None:
    target, draft = CausalLM(model_of(family)), CausalLM(tiny_model(family, seed=1))
    plain = decode(target, None, PROMPT, DecodingConfig(COUNT)).tokens
    for branching in ((1, 1, 1), (3, 2)):
        assert decode(target, DraftModelDrafter(draft, branching), PROMPT, DecodingConfig(COUNT)).tokens == plain


def test_a_repetition_penalty_means_what_it_means_in_transformers() -> None:
    model = model_of("llama")
    wanted = transformers_greedy(model, PROMPT, COUNT, repetition_penalty=1.4)
    config = DecodingConfig(COUNT, SamplingConfig(repetition_penalty=1.4))
    assert decode(CausalLM(model), None, PROMPT, config).tokens == wanted
    assert decode(CausalLM(model), HostileDrafter(0, [*PROMPT, *wanted]), PROMPT, config).tokens == wanted


def test_sliding_and_full_layers_with_rotary_embeddings_of_their_own() -> None:
    torch.manual_seed(0)
    config = Gemma3TextConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        max_position_embeddings=96,
        sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        initializer_range=0.5,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = AutoModelForCausalLM.from_config(config).eval()
    wanted = transformers_greedy(model, PROMPT, COUNT)
    target = CausalLM(model)
    for chains in (False, True):
        drafter = HostileDrafter(0, [*PROMPT, *wanted], chains=chains)
        assert decode(target, drafter, PROMPT, DecodingConfig(COUNT)).tokens == wanted
