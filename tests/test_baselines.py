"""transformers' batched generate as a peer: its time, its seeds, and the random state that it leaves."""

import torch
from tiny_models import tiny_model

from decoding.generate import DecodingConfig
from decoding.measure.baselines import transformers_generate, transformers_generate_batch
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig

PROMPTS = [[1, 2, 1, 2], [5], [7, 7, 0]]


def test_a_batch_is_timed_from_its_first_tokens_and_shares_its_seconds(tiny_llama: CausalLM) -> None:
    texts = transformers_generate_batch(tiny_llama, PROMPTS, DecodingConfig(6))
    alone = [transformers_generate(tiny_llama, prompt, DecodingConfig(6)).tokens for prompt in PROMPTS]
    assert [text.tokens for text in texts] == alone
    assert len({(text.first_seconds, text.decode_seconds) for text in texts}) == 1
    assert all(text.first_tokens == 1 and text.first_seconds > 0 and text.decode_seconds > 0 for text in texts)


def test_a_peers_run_leaves_torchs_global_chance_as_it_was_and_repeats_by_its_seed() -> None:
    target = CausalLM(tiny_model("llama"))
    config = DecodingConfig(12, SamplingConfig(2.0), seed=3)
    torch.manual_seed(11)
    before = torch.get_rng_state()
    single = [transformers_generate(target, [1, 2], config).tokens for _ in range(2)]
    batch = [[text.tokens for text in transformers_generate_batch(target, [[1, 2], [5]], config)] for _ in range(2)]
    assert torch.equal(torch.get_rng_state(), before)
    assert single[0] == single[1] and batch[0] == batch[1]
