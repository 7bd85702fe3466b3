"""The real loop writes the same as the one-page algorithm, pass by pass and token by token, greedy and sampled."""

from functools import partial

import pytest
import torch
from tiny_models import full_forward, tiny_model
from transformers import PreTrainedModel

from decoding.drafters import DraftModelDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.reference import speculate
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import TOKEN_REJECTION

PROMPTS = [[seed, 3, 5, seed + 2][: 1 + seed % 4] for seed in range(8)]
EOS = (9, 2)


def often_right() -> PreTrainedModel:
    """Make a draft for the target `tiny_model`: a copy whose lm_head is mixed with noise."""
    draft = tiny_model()
    weight = draft.get_output_embeddings().weight
    with torch.no_grad():
        weight += 0.25 * torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    return draft


@pytest.mark.parametrize(("chain", "batch_size"), [(1, 1), (4, 5)])
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(1.0), SamplingConfig(0.7, top_k=9, top_p=0.9)])
def test_every_pass_of_the_loop_writes_the_tokens_of_the_reference(
    sampling: SamplingConfig, chain: int, batch_size: int
) -> None:
    target, draft = tiny_model(), often_right()
    rule = None if sampling.greedy else TOKEN_REJECTION
    engine = Engine(CausalLM(target), DraftModelDrafter(CausalLM(draft), chain))
    texts = engine.decode(PROMPTS, DecodingConfig(14, sampling, rule, EOS), batch_size=batch_size)
    models = partial(full_forward, target), partial(full_forward, draft)
    for seed, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True)):
        passes = speculate(*models, prompt, 14, chain, sampling, seed, EOS)
        assert [list(step.tokens) for step in text.steps] == list(passes)
    accepted, offered = (
        sum(getattr(step, name) for text in texts for step in text.steps) for name in ("accepted", "offered")
    )
    assert 0.2 < accepted / offered < 0.9, "the draft must be right and wrong"
    assert {len(text.tokens) == 14 for text in texts} == {True, False}, "texts end at EOS and at their longest"
