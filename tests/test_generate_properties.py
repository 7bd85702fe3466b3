"""Whatever the prompts, drafts, ends, batches and policies: greedy is plain greedy, and a seed is its text."""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples
from scripted_drafters import HostileDrafter, RandomPolicy
from test_generate import Letters, shortest_with
from tiny_dspark import tiny_dspark
from tiny_models import naive_greedy, tiny_model

from decoding.drafters import Drafter, DraftModelDrafter, DraftTreeDrafter, DSparkDrafter, PromptLookupDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark import DSparkDraft
from decoding.policies import FixedPolicy, Policy
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import SAMPLED_VERIFY
from decoding.text import Generation

SEEDS = st.integers(0, 2**32 - 1)
TOKENS = st.integers(0, 15)
PROMPTS = st.lists(st.lists(TOKENS, min_size=1, max_size=12), min_size=1, max_size=5)
FAMILIES = st.sampled_from(["llama", "mistral", "qwen2-mixed", "gpt2", "qwen3-moe", "gemma2"])
COUNT = 12


@cache
def causal_lm(family: str, seed: int = 0) -> CausalLM:
    return CausalLM(tiny_model(family, seed=seed))


@cache
def dspark_draft(family: str) -> DSparkDraft:
    return tiny_dspark(causal_lm(family), tokens=3)


@cache
def plain_greedy(family: str, prompt: tuple[int, ...], penalty: float = 1.0) -> tuple[int, ...]:
    return naive_greedy(causal_lm(family).model, prompt, COUNT, penalty)


def hostile(seed: int, prompts: Sequence[list[int]], texts: Sequence[tuple[int, ...]], chains: bool) -> HostileDrafter:
    right = [[*prompt, *text] for prompt, text in zip(prompts, texts, strict=True)]
    return HostileDrafter(seed, right[0], chains=chains, others=right[1:])


def policy_of(seed: int | None) -> Policy:
    return FixedPolicy() if seed is None else RandomPolicy(seed)


# --- greedy ----------------------------------------------------------------------------------------------------------


@examples(30)
@given(
    family=FAMILIES,
    prompts=PROMPTS,
    seed=SEEDS,
    drafter_of=st.sampled_from(["hostile trees", "hostile chains", "DSpark", "DSpark tree"]),
    batch_size=st.integers(1, 6),
    count=st.integers(1, COUNT),
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
    family=FAMILIES,
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
    """Whatever is drafted, in batches of any size, drafted now and then or always."""
    target, sampling = causal_lm(family), SamplingConfig(**controls)
    texts = [
        Engine(target)
        .decode(prompt, DecodingConfig(COUNT, sampling, eos_token_ids=tuple(eos), seed=seed + place))
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
    config = DecodingConfig(COUNT, sampling, SAMPLED_VERIFY, eos_token_ids=tuple(eos), seed=seed)
    generations = Engine(target, drafters[drafter_of], policy_of(policy_seed)).decode(
        prompts, config, batch_size=batch_size
    )
    assert [generation.tokens for generation in generations] == texts


# --- one cache for a conversation that goes anywhere -----------------------------------------------------------------


@examples(15)
@given(family=FAMILIES, seed=SEEDS, turns=st.integers(2, 5), capacity=st.integers(1, 30))
def test_a_cache_serves_any_prompts_after_calls_that_ended_anywhere(
    family: str, seed: int, turns: int, capacity: int
) -> None:
    chance = random.Random(seed)
    target = causal_lm(family)
    kept, text = target.new_cache(capacity), [chance.randrange(16) for _ in range(chance.randint(1, 8))]
    for _ in range(turns):
        # Some beginning of all that was said, and something new behind it.
        text = text[: chance.randint(0, len(text))][:40]
        prompt = [*text, *(chance.randrange(16) for _ in range(chance.randint(1, 5)))]
        wanted = plain_greedy(family, tuple(prompt))
        drafter = HostileDrafter(seed, [*prompt, *wanted]) if chance.random() < 0.7 else None
        stream = Engine(target, drafter).steps(prompt, DecodingConfig(COUNT), cache=kept)
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
