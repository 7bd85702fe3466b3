"""int8 weights change the drafted tokens but never the target's output."""

import importlib.util
import sys

import pytest
import torch
from test_vocabulary import KEPT, PROMPTS, drafters
from tiny_models import full_forward, naive_greedy, tiny_model

from decoding.dtypes import quantised
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.vocabulary import trimmed_vocabulary

TORCHAO = importlib.util.find_spec("torchao") is not None


def test_without_torchao_the_extra_that_brings_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ValueError, match=r"int8 weights need torchao: pip install 'headstart\[quantise\]'"):
        quantised(tiny_model())


@pytest.mark.skipif(not TORCHAO, reason="torchao is not installed")
def test_int8_weights_are_near_the_models_own_and_smaller() -> None:
    model = tiny_model(seed=1, tie_word_embeddings=True)
    before = full_forward(model, [1, 2, 3])
    assert quantised(model) is model
    after = full_forward(model, [1, 2, 3])
    assert 0 < (after - before).abs().max() < 0.05 * before.abs().max()
    assert model.get_output_embeddings().weight.element_size() == 4, "torchao's tensors look like those they replace"
    assert type(model.get_input_embeddings().weight) is torch.nn.Parameter, "tied embeddings stay as they are"


@pytest.mark.skipif(not TORCHAO, reason="torchao is not installed")
@pytest.mark.parametrize("trimmed", [False, True])
def test_greedy_output_is_plain_greedy_with_an_int8_draft_alone_and_in_batches(
    tiny_llama: CausalLM, trimmed: bool
) -> None:
    model = tiny_model(seed=1)
    draft = trimmed_vocabulary(model, KEPT) if trimmed else CausalLM(model)
    quantised(draft.model)
    plain = [naive_greedy(tiny_llama.model, prompt, 12) for prompt in PROMPTS]
    for drafter in drafters(draft):
        for batch_size in (1, 3):
            batch = Engine(tiny_llama, drafter).decode(PROMPTS, DecodingConfig(12), batch_size=batch_size)
            assert [generation.tokens for generation in batch] == plain
