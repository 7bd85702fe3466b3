"""Greedy decoding equals `generate` of `transformers` for each family; targets for which this is impossible are
rejected by name.
"""

import random
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples, few
from scripted_drafters import HostileDrafter, RandomPolicy
from test_generate import Letters, shortest_with
from tiny_dspark import tiny_dspark
from tiny_models import ATTENTIONS, FAMILIES, FEW_ATTENTIONS, FEW_FAMILIES, WINDOW, naive_greedy, tiny_model
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaModel,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from decoding.drafters import Drafter, DraftModelDrafter, DraftTreeDrafter, DSparkDrafter, PromptLookupDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_draft import DSparkDraft
from decoding.policies import FixedPolicy, Policy
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import SAMPLED_VERIFY
from decoding.text import Generation

PROMPT = [3, 1, 4, 1, 5, 9]
# from one token to far more than the window
RAGGED = [PROMPT, [7], [2, 7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9], [6, 6]]
COUNT = 16


@cache
def model_of(family: str, attention: str | None = None, seed: int = 0) -> PreTrainedModel:
    return tiny_model(family, attention=attention, seed=seed)


@cache
def plain_texts(family: str) -> list[tuple[int, ...]]:
    """Return the texts of the prompts in RAGGED, each decoded separately and without a cache."""
    return [naive_greedy(model_of(family), prompt, COUNT) for prompt in RAGGED]


def transformers_greedy(model: PreTrainedModel, prompt: list[int], count: int, **settings: float) -> tuple[int, ...]:
    ids = torch.tensor([prompt])
    generate: Any = model.generate  # nn.Module's getattr hides this
    with torch.inference_mode():
        output = generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **settings)
    return tuple(output[0, len(prompt) :].tolist())


# --- families that decode --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "attention"), few(ATTENTIONS, FEW_ATTENTIONS))
def test_plain_decoding_is_transformers_generate(family: str, attention: str) -> None:
    model = model_of(family, attention)
    wanted = transformers_greedy(model, PROMPT, COUNT)
    assert len(wanted) == COUNT > WINDOW
    assert Engine(CausalLM(model)).decode(PROMPT, DecodingConfig(COUNT)).tokens == wanted


@pytest.mark.parametrize("family", few(FAMILIES, FEW_FAMILIES))
def test_the_texts_of_these_tests_need_their_context(family: str) -> None:
    """A change far back in the prompt changes the text; otherwise no test here would notice a wrong mask."""
    model = model_of(family)
    texts = {naive_greedy(model, [first, *PROMPT[1:]], 8) for first in range(4)}
    assert len(texts) > 1
    assert len(set(plain_texts(family))) == len(RAGGED)


@pytest.mark.parametrize(("family", "attention"), few(ATTENTIONS, FEW_ATTENTIONS))
def test_ragged_batches_under_a_hostile_drafter_are_plain_greedy(family: str, attention: str) -> None:
    """Mixtures of experts are included: other rows in the batch do not change the text of a row."""
    target, plain = CausalLM(model_of(family, attention)), plain_texts(family)
    right = [[*prompt, *text] for prompt, text in zip(RAGGED, plain, strict=True)]
    drafter = HostileDrafter(1, right[0], others=right[1:])
    generations = Engine(target, drafter).decode(RAGGED, DecodingConfig(COUNT), batch_size=3)
    assert [generation.tokens for generation in generations] == plain
    assert all(sum(step.accepted for step in generation.steps) > 0 for generation in generations)


# --- longrope: as long as the keys in the cache stay what they are ---------------------------------------------------


@cache
def longrope() -> PreTrainedModel:
    """Make a Phi-3 with other frequencies for texts of more than 24 tokens."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [4.0] * 4, "rope_theta": 10000.0}
    return tiny_model("phi3", sliding_window=None, original_max_position_embeddings=24, rope_scaling=factors)


def test_longrope_decodes_up_to_where_its_frequencies_change() -> None:
    target = CausalLM(longrope())
    assert target.max_positions == 24
    wanted = transformers_greedy(longrope(), PROMPT, 18)
    for drafter in (None, HostileDrafter(0, [*PROMPT, *wanted])):
        assert Engine(target, drafter).decode(PROMPT, DecodingConfig(18)).tokens == wanted


def test_longrope_is_refused_beyond() -> None:
    """A row that grows beyond the original length would change the frequencies of all rows, and the frequencies of
    cached keys.
    """
    target = CausalLM(longrope())
    with pytest.raises(ValueError, match=r"prompt of 6 tokens and 19 new tokens exceed .* context of 24"):
        Engine(target).decode(PROMPT, DecodingConfig(19))
    with pytest.raises(ValueError, match="may grow to 25 tokens, more than the draft's context of 24"):
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


def config_of(kind: str, settings: dict[str, Any]) -> PreTrainedConfig:
    config: PreTrainedConfig = AutoConfig.for_model(kind, **{**_TINY, **settings})
    return config


def of(kind: str, **settings: Any) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config_of(kind, settings))
    return model


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "an encoder-decoder": (
        lambda: T5ForConditionalGeneration(
            T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1)
        ),
        "^t5 is an encoder-decoder model: use a decoder-only",
    ),
    "both directions": (lambda: of("bert"), "^bert reads texts in both directions: use a causal LM"),
    "no lm_head": (lambda: LlamaModel(LlamaConfig(**_TINY)), "LlamaModel lacks an lm_head: load the model with Auto"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_causal_lm_is_refused_by_name(name: str) -> None:
    make, problem = REFUSED[name]
    with pytest.raises(ValueError, match=problem):
        CausalLM(make())


SEEDS = st.integers(0, 2**32 - 1)
TOKENS = st.integers(0, 15)
PROMPTS = st.lists(st.lists(TOKENS, min_size=1, max_size=12), min_size=1, max_size=5)
SOME_FAMILY = st.sampled_from(["llama", "mistral", "qwen2-mixed", "gpt2", "qwen3-moe", "gemma2"])
LENGTH = 12


@cache
def causal_lm(family: str, seed: int = 0) -> CausalLM:
    return CausalLM(tiny_model(family, seed=seed))


@cache
def dspark_draft(family: str) -> DSparkDraft:
    return tiny_dspark(causal_lm(family), tokens=3)


@cache
def plain_greedy(family: str, prompt: tuple[int, ...], penalty: float = 1.0) -> tuple[int, ...]:
    return naive_greedy(causal_lm(family).model, prompt, LENGTH, penalty)


def hostile(seed: int, prompts: Sequence[list[int]], texts: Sequence[tuple[int, ...]], chains: bool) -> HostileDrafter:
    right = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    return HostileDrafter(seed, right[0], chains=chains, others=right[1:])


def policy_of(seed: int | None) -> Policy:
    return FixedPolicy() if seed is None else RandomPolicy(seed)


# --- greedy ----------------------------------------------------------------------------------------------------------


@examples(30)
@given(
    family=SOME_FAMILY,
    prompts=PROMPTS,
    seed=SEEDS,
    drafter_of=st.sampled_from(["hostile trees", "hostile chains", "DSpark", "DSpark tree"]),
    batch_size=st.integers(1, 6),
    count=st.integers(1, LENGTH),
    eos=st.lists(TOKENS, max_size=2),
    strings=st.lists(st.text(alphabet="abcd .xyz", min_size=1, max_size=2), max_size=2),
    policy_seed=st.none() | SEEDS,
    penalty=st.sampled_from([1.0, 1.0, 1.4]),
)
def test_greedy_rows_are_plain_greedy_up_to_their_ends(
    family: str,
    prompts: list[list[int]],
    seed: int,
    drafter_of: str,
    batch_size: int,
    count: int,
    eos: list[int],
    strings: list[str],
    policy_seed: int | None,
    penalty: float,
) -> None:
    texts = [plain_greedy(family, tuple(prompt), penalty) for prompt in prompts]
    config = DecodingConfig(
        count, SamplingConfig(repetition_penalty=penalty), eos_token_ids=tuple(eos), stop_strings=tuple(strings)
    )
    drafters: dict[str, Drafter] = {
        "hostile trees": hostile(seed, prompts, texts, chains=False),
        "hostile chains": hostile(seed, prompts, texts, chains=True),
        "DSpark": DSparkDrafter(dspark_draft(family)),
        "DSpark tree": DSparkDrafter(dspark_draft(family), tree=[[0], [1], [0, 0], [1, 0], [0, 0, 0]]),
    }
    engine = Engine(causal_lm(family), drafters[drafter_of], policy_of(policy_seed), tokenizer=Letters())
    generations = engine.decode(prompts, config, batch_size=batch_size)
    for prompt, text, generation in zip(prompts, texts, generations, strict=True):
        ends = [place + 1 for place, token in enumerate(text) if token in eos]
        wanted = shortest_with(prompt, text, strings)[: min([count, *ends])]
        assert generation.tokens == wanted
        assert sum(len(step.tokens) for step in generation.steps) == len(wanted)
        assert all(step.accepted <= step.offered <= step.drafted for step in generation.steps)


# --- a seed is its text ----------------------------------------------------------------------------------------------


@examples(15)
@given(
    family=SOME_FAMILY,
    prompts=PROMPTS,
    seed=SEEDS,
    drafter_of=st.sampled_from(["hostile trees", "hostile chains", "chain", "tree", "DSpark", "lookup"]),
    batch_size=st.integers(1, 6),
    eos=st.lists(TOKENS, max_size=2),
    policy_seed=st.none() | SEEDS,
    controls=st.fixed_dictionaries(
        {
            "temperature": st.sampled_from([0.3, 1.0, 2.0]),
            "top_k": st.sampled_from([0, 5]),
            "top_p": st.sampled_from([1.0, 0.8]),
            "min_p": st.sampled_from([0.0, 0.05]),
            "repetition_penalty": st.sampled_from([1.0, 1.3]),
        }
    ),
)
def test_sampled_verify_writes_what_plain_decoding_writes_with_the_same_seed(
    family: str,
    prompts: list[list[int]],
    seed: int,
    drafter_of: str,
    batch_size: int,
    eos: list[int],
    policy_seed: int | None,
    controls: dict[str, Any],
) -> None:
    """This is true for any draft, in batches of any size, with drafts in some steps or in all."""
    target, sampling = causal_lm(family), SamplingConfig(**controls)
    texts = [
        Engine(target)
        .decode(prompt, DecodingConfig(LENGTH, sampling, eos_token_ids=tuple(eos), seed=seed + place))
        .tokens
        for place, prompt in enumerate(prompts)
    ]
    drafters: dict[str, Drafter] = {
        "hostile trees": hostile(seed, prompts, texts, chains=False),
        "hostile chains": hostile(seed, prompts, texts, chains=True),
        "chain": DraftModelDrafter(causal_lm(family, 1), 3),
        "tree": DraftTreeDrafter(causal_lm(family, 1), 2, 2, 7),
        "DSpark": DSparkDrafter(dspark_draft(family)),
        "lookup": PromptLookupDrafter(4, branches=2),
    }
    config = DecodingConfig(LENGTH, sampling, SAMPLED_VERIFY, eos_token_ids=tuple(eos), seed=seed)
    generations = Engine(target, drafters[drafter_of], policy_of(policy_seed)).decode(
        prompts, config, batch_size=batch_size
    )
    assert [generation.tokens for generation in generations] == texts


# --- one cache for a conversation that goes anywhere -----------------------------------------------------------------


@examples(15)
@given(family=SOME_FAMILY, seed=SEEDS, turns=st.integers(2, 5), capacity=st.integers(1, 30))
def test_a_cache_serves_any_prompts_after_calls_that_ended_anywhere(
    family: str, seed: int, turns: int, capacity: int
) -> None:
    chance = random.Random(seed)
    target = causal_lm(family)
    kept, text = target.new_cache(capacity), [chance.randrange(16) for _ in range(chance.randint(1, 8))]
    for _ in range(turns):
        # a random beginning of the conversation, followed by something new
        text = text[: chance.randint(0, len(text))][:40]
        prompt = [*text, *(chance.randrange(16) for _ in range(chance.randint(1, 5)))]
        wanted = plain_greedy(family, tuple(prompt))
        drafter = HostileDrafter(seed, [*prompt, *wanted]) if chance.random() < 0.7 else None
        stream = Engine(target, drafter).steps(prompt, DecodingConfig(LENGTH), cache=kept)
        given_up_after = chance.choice([0, 1, 2, 3, 99])
        steps = []
        for step in stream:
            steps.append(step)
            if len(steps) == given_up_after:
                break
        stream.close()  # type: ignore[attr-defined]  # it is a generator
        written = Generation.of(steps).tokens
        assert written == wanted[: len(written)]
        assert given_up_after != 99 or written == wanted
        text = [*prompt, *written]
