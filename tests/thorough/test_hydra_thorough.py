"""Sequential heads (Hydra): what they read, how they are kept, and the trees that are grown of them."""

from collections import Counter

import pytest
import torch
from drafter_checks import check_greedy, check_penalised_greedy, check_text_of_the_seed
from test_generate_sampling import FALSE_ALARM, LENGTH, PROMPT, exact_probabilities, p_value, small_llama
from test_hydra import BOTH_TREES, PATHS

from decoding.drafters import MedusaDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.rules.sampling import SamplingConfig


def nudged_heads(target: CausalLM, shared: bool = False, count: int = 3) -> MedusaHeads:
    """Heads that say nearly what the target's lm_head says, right now and then, but hear the tokens as well."""
    config = MedusaConfig(target.hidden_size, target.vocab_size, count, 1, ((0,),), shared, sequential=True)
    heads = MedusaHeads.for_target(target.model, config)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for head in heads.heads:
            embedded = head.blocks[0].embedded.weight
            embedded.copy_(0.1 * torch.randn(embedded.shape, generator=generator))
    return heads


@pytest.mark.parametrize(("shared", "dynamic"), [(False, None), (True, 9)], ids=["own, static", "shared, dynamic"])
def test_greedy_output_is_plain_greedy_alone_and_in_batches(
    tiny_llama: CausalLM, shared: bool, dynamic: int | None
) -> None:
    drafter = MedusaDrafter(nudged_heads(tiny_llama, shared), None if dynamic else PATHS, dynamic)
    check_greedy(tiny_llama, drafter, 12)
    check_penalised_greedy(tiny_llama, drafter)
    assert sum(step.accepted for step in Engine(tiny_llama, drafter).decode([1, 2, 3], DecodingConfig(24)).steps) > 0


@BOTH_TREES
def test_sampled_verify_writes_what_plain_decoding_writes_with_the_same_seed(
    tiny_llama: CausalLM, dynamic: int | None
) -> None:
    check_text_of_the_seed(tiny_llama, MedusaDrafter(nudged_heads(tiny_llama), None if dynamic else PATHS, dynamic))


@pytest.mark.parametrize("dynamic", [None, 5])
def test_sampled_texts_have_the_targets_distribution(dynamic: int | None) -> None:
    """Chi-square of 400 texts with fixed seeds; were they not, it would fail by chance once in 10**6."""
    target, sampling = small_llama(5), SamplingConfig(1.0)
    heads = nudged_heads(target, count=2)
    drafter = MedusaDrafter(heads, None if dynamic else [[0], [1], [0, 0], [0, 1], [1, 0]], dynamic)
    generations = Engine(target, drafter).decode([PROMPT] * 400, DecodingConfig(LENGTH, sampling), batch_size=40)
    counts = Counter(generation.tokens for generation in generations)
    assert p_value(counts, exact_probabilities(target, sampling)) > FALSE_ALARM
    assert sum(step.accepted for generation in generations for step in generation.steps) > 40
