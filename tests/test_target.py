"""One call for any causal language model: a tree in one pass is every path on its own."""

import itertools
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import FAMILIES, WINDOW, full_forward, tiny_model
from torch.nn import functional as F
from transformers import (
    AutoModelForCausalLM,
    GPTNeoConfig,
    GraniteConfig,
    Llama4TextConfig,
    LlamaConfig,
    LlamaModel,
    MambaConfig,
    MptConfig,
    PreTrainedConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from decoding.target import CausalLM, capture_lm_head_input, last_position
from decoding.tree import TokenTree, TreeShape

# Longer than the window of the families that have one, on both sides of a branch.
PREFIX = [3, 1, 4, 1, 5, 9, 2]
TREE = TokenTree(torch.tensor([9, 2, 6, 5, 3, 5, 8]), TreeShape((-1, 0, 0, 1, 2, 2, 5)))
FLOAT = {"rtol": 0.0, "atol": 1e-5}


def path_text(tree: TokenTree, node: int) -> list[int]:
    return [tree.token_list[ancestor] for ancestor in (0, *tree.shape.path(node))]


def assert_every_node_is_a_fresh_forward(model: CausalLM, prefix: list[int], tree: TokenTree) -> None:
    cache = model.new_cache(64)
    model.append(torch.tensor(prefix), cache)
    logits = model.verify(tree, cache).logits
    for node in range(len(tree)):
        fresh = full_forward(model.model, [*prefix, *path_text(tree, node)])[-1]
        torch.testing.assert_close(logits[node], fresh, **FLOAT)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_nodes_logits_are_those_of_its_path_alone(family: str, attention: str) -> None:
    assert len(PREFIX) > WINDOW
    assert_every_node_is_a_fresh_forward(CausalLM(tiny_model(family, attention=attention)), PREFIX, TREE)


@given(seed=st.integers(0, 2**32 - 1), length=st.integers(1, 8), nodes=st.integers(1, 9))
def test_any_tree_behind_any_prefix_is_every_path_alone_with_a_sliding_window(
    seed: int, length: int, nodes: int
) -> None:
    chance = random.Random(seed)
    shape = TreeShape((-1, *(chance.randrange(node) for node in range(1, nodes))))
    tree = TokenTree(torch.tensor([chance.randrange(16) for _ in range(nodes)]), shape)
    prefix = [chance.randrange(16) for _ in range(length)]
    assert_every_node_is_a_fresh_forward(CausalLM(tiny_model("qwen2-mixed")), prefix, tree)


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-mixed"])
def test_a_tree_run_level_by_level_is_the_tree_run_whole(family: str) -> None:
    model = CausalLM(tiny_model(family))
    whole_cache, level_cache = model.new_cache(64), model.new_cache(64)
    for cache in (whole_cache, level_cache):
        model.append(torch.tensor(PREFIX), cache)
    whole = model.verify(TREE, whole_cache)
    begin, logits, hidden = 0, [], []
    for end in (1, 3, 6, 7):  # where each level of the tree ends
        level = TokenTree(TREE.tokens[:end], TREE.shape.keep(range(end)))
        output = model.verify(level, level_cache, first=begin)
        assert len(output.logits) == end - begin
        logits.append(output.logits)
        hidden.append(output.hidden)
        begin = end
    torch.testing.assert_close(torch.cat(logits), whole.logits, **FLOAT)
    torch.testing.assert_close(torch.cat(hidden), whole.hidden, **FLOAT)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_text_appended_in_blocks_is_the_text_run_whole(family: str, attention: str) -> None:
    model = CausalLM(tiny_model(family, attention=attention))
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    for cuts in ([0, 11], [0, 1, 11], [0, 7, 8, 11], [0, 3, 6, 9, 11]):
        cache = model.new_cache(4)
        for begin, end in itertools.pairwise(cuts):
            output = model.append(torch.tensor(text[begin:end]), cache)
            assert output.logits.shape == (1, 16) and output.hidden.shape == (1, 16)
            torch.testing.assert_close(output.logits[0], full_forward(model.model, text[:end])[-1], **FLOAT)


def test_hidden_is_exactly_what_the_lm_head_reads() -> None:
    # Granite divides what its lm_head writes by 8: neither hidden nor the lm_head must know.
    config = GraniteConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        logits_scaling=8.0,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    model = CausalLM(AutoModelForCausalLM.from_config(config))
    cache = model.new_cache(16)
    model.append(torch.tensor(PREFIX), cache)
    output = model.verify(TREE, cache)
    lm_head = model.model.get_output_embeddings()
    with torch.inference_mode():
        assert torch.equal(F.linear(output.hidden, lm_head.weight) / 8, output.logits)


def test_hidden_is_the_last_hidden_state_after_the_final_norm(tiny_llama: CausalLM) -> None:
    hidden = tiny_llama.append(torch.tensor(PREFIX), tiny_llama.new_cache(16)).hidden
    with torch.inference_mode():
        states = tiny_llama.model(torch.tensor([PREFIX]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(hidden[-1], states[-1][0, -1], **FLOAT)


def test_keeping_the_last_position_only_still_captures_the_whole(tiny_llama: CausalLM) -> None:
    model = tiny_llama.model
    with torch.inference_mode(), capture_lm_head_input(model, select=last_position) as captured:
        logits = model(torch.tensor([PREFIX])).logits
    assert captured[0].shape == (1, len(PREFIX), 16) and logits.shape == (1, 1, 16)
    assert not model.get_output_embeddings()._forward_pre_hooks, "the hook is taken off again"


def test_the_hook_is_taken_off_when_the_forward_fails(tiny_llama: CausalLM) -> None:
    model = tiny_llama.model
    with pytest.raises(IndexError), capture_lm_head_input(model):
        model(torch.tensor([[99]]))
    assert not model.get_output_embeddings()._forward_pre_hooks


def test_trees_of_one_shape_share_a_mask_and_the_store_stays_bounded(tiny_llama: CausalLM) -> None:
    model = CausalLM(tiny_llama.model)
    for length in range(1, 300):
        model._tree_mask(TokenTree.chain([0] * (length % 290 + 2)))
    assert len(model._tree_masks) <= 257
    tree = TokenTree.chain([1, 2, 3])
    assert model._tree_mask(tree) is model._tree_mask(TokenTree.chain([4, 5, 6]))


def test_an_encoder_decoder_is_refused() -> None:
    config = T5Config(vocab_size=8, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=1)
    with pytest.raises(ValueError, match="t5 is an encoder-decoder model: give a decoder-only"):
        CausalLM(T5ForConditionalGeneration(config))


def test_a_recurrent_model_is_refused() -> None:
    config = MambaConfig(vocab_size=8, hidden_size=8, state_size=4, num_hidden_layers=1)
    with pytest.raises(ValueError, match="mamba keeps a recurrent state, which cannot be rolled back"):
        CausalLM(AutoModelForCausalLM.from_config(config))


def test_a_model_without_an_lm_head_is_refused() -> None:
    config = LlamaConfig(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    with pytest.raises(ValueError, match="LlamaModel has no lm_head: load the model with AutoModelForCausalLM"):
        CausalLM(LlamaModel(config))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            GPTNeoConfig(
                vocab_size=8, hidden_size=8, num_layers=2, num_heads=1, attention_types=[[["global", "local"], 1]]
            ),
            "gpt_neo has local layers, which do not take a tree's mask",
        ),
        (
            Llama4TextConfig(
                vocab_size=8,
                hidden_size=8,
                intermediate_size=8,
                intermediate_size_mlp=8,
                num_hidden_layers=1,
                num_attention_heads=1,
                num_key_value_heads=1,
                head_dim=8,
                moe_layers=[],
                layer_types=["chunked_attention"],
                pad_token_id=0,
            ),
            "llama4_text has chunked_attention layers, which do not take a tree's mask",
        ),
        (
            MptConfig(vocab_size=8, d_model=8, n_heads=1, n_layers=1),
            r"mpt places tokens by their order \(ALiBi\), so a tree's branches cannot stand side by side",
        ),
    ],
    ids=["local attention", "chunked attention", "alibi"],
)
def test_a_model_whose_attention_would_be_silently_wrong_on_a_tree_is_refused(
    config: PreTrainedConfig, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CausalLM(AutoModelForCausalLM.from_config(config))
