"""One call for any causal language model: rows of trees in one pass are every path of every row on its own."""

import itertools
import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples
from tiny_models import FAMILIES, FEW_ATTENTIONS, WINDOW, full_forward, tiny_model
from torch import Tensor
from torch.nn import functional as F

from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM
from decoding.model.lm_head import capture_lm_head_input, last_position
from decoding.rules.tree import TokenTree, TreeShape

# Longer than the window of the families that have one, on both sides of a branch.
PREFIX = [3, 1, 4, 1, 5, 9, 2]
TREE = TokenTree(torch.tensor([9, 2, 6, 5, 3, 5, 8]), TreeShape((-1, 0, 0, 1, 2, 2, 5)))
# Far past the window, one token, and just at the window.
RAGGED = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [2, 7, 1, 8, 2]]
# fp32 leaves 2e-5 of logits as large as these; a wrong mask changes whole units.
FLOAT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-4}


@cache
def causal_lm(family: str, attention: str | None = None) -> CausalLM:
    return CausalLM(tiny_model(family, attention=attention))


@cache
def alone(family: str, text: tuple[int, ...]) -> Tensor:
    """What a plain forward over this text writes last, (vocab,)."""
    return full_forward(causal_lm(family).model, text)[-1]


def filled(model: CausalLM, texts: Sequence[list[int]], capacity: int = 64) -> PreallocatedCache:
    cache = model.new_cache(capacity, len(texts))
    model.prefill(texts, cache)
    return cache


def layers_of(cache: PreallocatedCache) -> list[Any]:
    return list(cache.layers)


def path_text(tree: TokenTree, node: int) -> list[int]:
    return [tree.token_list[ancestor] for ancestor in (0, *tree.shape.path(node))]


def random_tree(chance: random.Random, nodes: int) -> TokenTree:
    shape = TreeShape((-1, *(chance.randrange(node) for node in range(1, nodes))))
    return TokenTree(torch.tensor([chance.randrange(16) for _ in range(nodes)]), shape)


def assert_every_node_is_its_path_alone(
    family: str, texts: Sequence[list[int]], trees: Sequence[TokenTree], logits: Tensor
) -> None:
    for row, (text, tree) in enumerate(zip(texts, trees, strict=True)):
        for node in range(len(tree)):
            wanted = alone(family, (*text, *path_text(tree, node)))
            torch.testing.assert_close(logits[row, node], wanted, **FLOAT)


# --- trees and lines, family by family -------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "attention"), FEW_ATTENTIONS)
def test_every_nodes_logits_are_those_of_its_path_alone(family: str, attention: str) -> None:
    assert len(PREFIX) > WINDOW
    model = causal_lm(family, attention)
    logits = model.verify([TREE], filled(model, [PREFIX])).logits
    assert_every_node_is_its_path_alone(family, [PREFIX], [TREE], logits)


@pytest.mark.parametrize(("family", "attention"), FEW_ATTENTIONS)
def test_rows_of_different_lengths_and_trees_are_each_row_alone(family: str, attention: str) -> None:
    model = causal_lm(family, attention)
    trees = [TokenTree.chain([9, 2]), TREE, TokenTree.chain([4])]
    output = model.verify(trees, filled(model, RAGGED))
    assert output.logits.shape == (3, 7, 16) and output.hidden.shape == (3, 7, model.hidden_size)
    assert_every_node_is_its_path_alone(family, RAGGED, trees, output.logits)


@pytest.mark.parametrize(("family", "attention"), FEW_ATTENTIONS)
def test_a_text_appended_in_blocks_is_the_text_run_whole(family: str, attention: str) -> None:
    model = causal_lm(family, attention)
    text = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
    for cuts in ([0, 11], [0, 1, 11], [0, 7, 8, 11], [0, 3, 6, 9, 11]):
        cache = model.new_cache(4)
        for begin, end in itertools.pairwise(cuts):
            output = model.append([text[begin:end]], cache)
            assert output.logits.shape == (1, 16) and output.hidden.shape == (1, model.hidden_size)
            torch.testing.assert_close(output.logits[0], alone(family, tuple(text[:end])), **FLOAT)


@pytest.mark.parametrize(("family", "attention"), FEW_ATTENTIONS)
def test_prefill_append_and_step_of_ragged_rows_are_each_row_alone(family: str, attention: str) -> None:
    model = causal_lm(family, attention)
    texts = [list(text) for text in RAGGED]
    cache = model.new_cache(8, 3)

    def assert_alone(logits: Tensor) -> None:
        for row, text in enumerate(texts):
            torch.testing.assert_close(logits[row], alone(family, tuple(text)), **FLOAT)

    assert_alone(model.prefill(texts, cache).logits)
    for blocks in ([[1], [2, 3, 4, 5, 6, 7], [8, 9]], [[6, 6], [1, 2], [3, 4]]):
        for text, block in zip(texts, blocks, strict=True):
            text += block
        assert_alone(model.append(blocks, cache).logits)
    for token in (3, 9):
        for row, text in enumerate(texts):
            text.append((token + row) % 16)
        assert_alone(model.step(torch.tensor([text[-1] for text in texts]), cache).logits)


@pytest.mark.parametrize(("family", "attention"), FEW_ATTENTIONS)
def test_rows_of_one_length_step_without_a_mask_of_ours(family: str, attention: str) -> None:
    model = causal_lm(family, attention)
    texts = [[*PREFIX, 1], [*PREFIX, 2]]
    cache = filled(model, [PREFIX, PREFIX])
    logits = model.step(torch.tensor([1, 2]), cache).logits
    for row, text in enumerate(texts):
        torch.testing.assert_close(logits[row], alone(family, tuple(text)), **FLOAT)


@examples(20)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    family=st.sampled_from(["llama", "mistral", "qwen2-mixed"]),
)
def test_any_trees_behind_any_prefixes_are_every_path_alone(seed: int, lengths: list[int], family: str) -> None:
    chance = random.Random(seed)
    model = causal_lm(family)
    texts = [[chance.randrange(16) for _ in range(length)] for length in lengths]
    trees = [random_tree(chance, chance.randint(1, 9)) for _ in texts]
    logits = model.verify(trees, filled(model, texts)).logits
    assert_every_node_is_its_path_alone(family, texts, trees, logits)


# --- trees that are in the cache in part -----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-mixed", "gemma3"])
def test_a_tree_run_level_by_level_is_the_tree_run_whole(family: str) -> None:
    model = causal_lm(family)
    whole = model.verify([TREE], filled(model, [PREFIX]))
    level_cache = filled(model, [PREFIX])
    begin, logits, hidden = 0, [], []
    for end in (1, 3, 6, 7):  # where each level of the tree ends
        level = TokenTree(TREE.tokens[:end], TREE.shape.keep(range(end)))
        output = model.verify([level], level_cache, first=[begin])
        assert output.logits.shape[1] == end - begin
        logits.append(output.logits)
        hidden.append(output.hidden)
        begin = end
    torch.testing.assert_close(torch.cat(logits, 1), whole.logits, **FLOAT)
    torch.testing.assert_close(torch.cat(hidden, 1), whole.hidden, **FLOAT)


@examples(20)
@given(
    seed=st.integers(0, 2**32 - 1),
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    family=st.sampled_from(["llama", "mistral", "qwen2-mixed"]),
)
def test_each_row_runs_its_tree_in_parts_of_its_own(seed: int, lengths: list[int], family: str) -> None:
    chance = random.Random(seed)
    model = causal_lm(family)
    texts = [[chance.randrange(16) for _ in range(length)] for length in lengths]
    trees = [random_tree(chance, chance.randint(2, 9)) for _ in texts]
    cache = filled(model, texts)
    # The first nodes of a tree are a tree; each row has run as many as it likes.
    first = [chance.randint(1, len(tree) - 1) for tree in trees]
    parts = [
        TokenTree(tree.tokens[:count], tree.shape.keep(range(count))) for tree, count in zip(trees, first, strict=True)
    ]
    assert_every_node_is_its_path_alone(family, texts, parts, model.verify(parts, cache).logits)
    logits = model.verify(trees, cache, first).logits
    for row, (text, tree, skipped) in enumerate(zip(texts, trees, first, strict=True)):
        assert cache.lengths[row] == len(text) + len(tree)
        for node in range(skipped, len(tree)):
            wanted = alone(family, (*text, *path_text(tree, node)))
            torch.testing.assert_close(logits[row, node - skipped], wanted, **FLOAT)


def test_rows_that_are_alike_but_for_how_much_of_their_tree_has_run() -> None:
    model = causal_lm("mistral")
    cache = filled(model, [PREFIX, PREFIX])
    first = [1, 3]
    parts = [TokenTree(TREE.tokens[:count], TREE.shape.keep(range(count))) for count in first]
    model.verify(parts, cache)
    logits = model.verify([TREE, TREE], cache, first).logits
    for row, skipped in enumerate(first):
        for node in range(skipped, len(TREE)):
            wanted = alone("mistral", (*PREFIX, *path_text(TREE, node)))
            torch.testing.assert_close(logits[row, node - skipped], wanted, **FLOAT)


# --- what stands beside a row ----------------------------------------------------------------------------------------


def test_a_slot_is_prefilled_while_other_rows_hold_text() -> None:
    model = causal_lm("mistral")
    cache = filled(model, RAGGED)
    cache.truncate(1, 0)
    late = [6, 2, 8, 3, 1, 8, 5]
    torch.testing.assert_close(model.prefill([late], cache, [1]).logits[0], alone("mistral", tuple(late)), **FLOAT)
    texts = [RAGGED[0], late, RAGGED[2]]
    assert_every_node_is_its_path_alone("mistral", texts, [TREE] * 3, model.verify([TREE] * 3, cache).logits)


def test_prefilling_a_row_that_holds_something_is_our_own_bug() -> None:
    model = causal_lm("llama")
    cache = filled(model, RAGGED)
    with pytest.raises(AssertionError, match="these rows are not empty"):
        model.prefill([[1, 2]], cache, [1])


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_what_stands_in_other_rows_and_in_the_padding_does_not_reach_a_row(family: str) -> None:
    model = causal_lm(family)
    outputs = []
    for other in ([1, 2, 3], [15, 15, 15, 0, 15, 15, 15, 15, 15]):
        cache = filled(model, [PREFIX, other])
        # Nothing a row does not own may be read: neither the padding of its prefill nor what a rejection left behind.
        for slot in (0, 1):
            for layer in layers_of(cache):
                layer.keys[slot, :, cache.lengths[slot] :] = 1e4
                layer.values[slot, :, cache.lengths[slot] :] = 1e4
        outputs.append(model.verify([TREE, TokenTree.chain([other[0]] * len(other))], cache).logits[0, : len(TREE)])
    torch.testing.assert_close(*outputs, **FLOAT)


def test_a_row_that_is_full_may_step_along_with_the_others() -> None:
    """A draft steps all rows while one has room. What the full row writes nobody reads."""
    model = CausalLM(tiny_model("gpt2", max_position_embeddings=16))
    texts = [[1] * 16, [5, 6]]
    cache = filled(model, texts)
    for token in (3, 4, 5):
        texts[1].append(token)
        logits = model.step(torch.tensor([9, token]), cache).logits[1]
        torch.testing.assert_close(logits, full_forward(model.model, texts[1])[-1], **FLOAT)


def test_mistral_gives_every_layer_its_window_whatever_its_config_says_of_types() -> None:
    """Some published configs carry types along, which the class does not read: it takes one mask."""
    types = ["sliding_attention", "full_attention"]
    model = CausalLM(tiny_model("mistral", layer_types=types))
    logits = model.verify([TREE], filled(model, [PREFIX])).logits
    for node in range(len(TREE)):
        wanted = full_forward(model.model, [*PREFIX, *path_text(TREE, node)])[-1]
        torch.testing.assert_close(logits[0, node], wanted, **FLOAT)


@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_an_attention_that_takes_no_trees_mask_is_refused_by_name(attention: str) -> None:
    model = tiny_model("llama")
    model.config._attn_implementation = attention
    with pytest.raises(ValueError, match=f"attends by '{attention}', .* attn_implementation='sdpa' or 'eager'"):
        CausalLM(model)


# --- masks by hand ---------------------------------------------------------------------------------------------------


def seen(model: CausalLM, shapes: Sequence[TreeShape], starts: list[int], window: int | None = None) -> list[list[str]]:
    """The mask of each row as text: a line per query, ``x`` where it looks and ``.`` where it does not."""
    size = max(len(shape) for shape in shapes)
    mask = model._masks._mask(shapes, starts, [0] * len(shapes), size, window)
    assert mask.shape == (len(mask), 1, size, max(starts) + size)
    rows = mask.expand(len(shapes), -1, -1, -1)[:, 0] == 0
    return [
        ["".join("x" if look else "." for look in line.tolist()) for line in row[: len(shape)]]
        for row, shape in zip(rows, shapes, strict=True)
    ]


FORK, LINE = TreeShape((-1, 0, 0, 1)), TreeShape.chain(2)


def test_a_node_looks_at_its_rows_prefix_and_its_own_path(tiny_llama: CausalLM) -> None:
    assert seen(tiny_llama, [FORK], [3]) == [["xxxx...", "xxxxx..", "xxxx.x.", "xxxxx.x"]]


def test_masks_of_trees_of_different_shapes_behind_prefixes_of_different_lengths(tiny_llama: CausalLM) -> None:
    # The keys of the second row are its one, its three nodes, and what it must not look at.
    assert seen(tiny_llama, [FORK, LINE], [3, 1]) == [
        ["xxxx...", "xxxxx..", "xxxx.x.", "xxxxx.x"],
        ["xx.....", "xxx....", "xxxx..."],
    ]


def test_rows_that_are_alike_share_one_mask(tiny_llama: CausalLM) -> None:
    assert tiny_llama._masks._mask([FORK, FORK], [3, 3], [0, 0], 4, None).shape == (1, 1, 4, 7)
    assert seen(tiny_llama, [FORK, FORK], [3, 2])[0] == seen(tiny_llama, [FORK, FORK], [3, 3])[0]


def test_a_window_is_counted_in_positions_of_the_text_not_in_keys(tiny_llama: CausalLM) -> None:
    # A window of two: a node looks at its own position and the one before. The root has two children; the second,
    # the third key of the tree but one position behind the root, has a child, and this has one.
    deep = TreeShape((-1, 0, 0, 2, 3))
    lines = ["..xx....", "...xx...", "...x.x..", ".....xx.", "......xx"]
    assert seen(tiny_llama, [deep], [3], window=2) == [lines]
    assert seen(tiny_llama, [deep, LINE], [3, 1], window=2) == [lines, ["xx......", ".xx.....", "..xx...."]]


def test_trees_of_one_shape_share_a_mask_and_the_store_stays_bounded(tiny_llama: CausalLM) -> None:
    model = CausalLM(tiny_llama.model)
    for length in range(600):
        model._masks.among_nodes(TreeShape.chain(length % 290 + 2))
    assert len(model._masks._stored) <= 257
    assert model._masks.among_nodes(TreeShape((-1, 0, 0))) is model._masks.among_nodes(TreeShape((-1, 0, 0)))


def test_the_mask_of_a_long_block_is_not_stored(tiny_llama: CausalLM) -> None:
    """A turn of a conversation that is appended to a cache is one block, and its mask as large as that squared."""
    model = CausalLM(tiny_llama.model)
    for length in (1000, 2000):
        mask = model._masks.among_nodes(TreeShape.chain(length))
        assert torch.equal(mask == 0, torch.ones(length + 1, length + 1).tril().bool())
    assert sum(mask.numel() for mask in model._masks._stored.values()) == 0


# --- hidden states ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_is_exactly_what_the_lm_head_reads(family: str) -> None:
    # Granite divides what its lm_head writes by 8, OPT projects to fewer dimensions before: neither shows here.
    model = causal_lm(family)
    written: list[Tensor] = []
    handle = model.model.get_output_embeddings().register_forward_hook(lambda *call: written.append(call[-1]))
    try:
        output = model.verify([TREE], filled(model, [PREFIX]))
    finally:
        handle.remove()
    lm_head = model.model.get_output_embeddings()
    with torch.inference_mode():
        assert torch.equal(F.linear(output.hidden, lm_head.weight, lm_head.bias), written[-1])
    assert output.hidden.shape[-1] == model.hidden_size == lm_head.in_features
    assert family != "granite" or torch.equal(written[-1] / 8, output.logits)


def test_hidden_is_the_last_hidden_state_after_the_final_norm(tiny_llama: CausalLM) -> None:
    hidden = tiny_llama.append([PREFIX], tiny_llama.new_cache(16)).hidden
    with torch.inference_mode():
        states = tiny_llama.model(torch.tensor([PREFIX]), output_hidden_states=True).hidden_states
    torch.testing.assert_close(hidden[-1], states[-1][0, -1], **FLOAT)


def test_of_ragged_rows_hidden_is_each_rows_last(tiny_llama: CausalLM) -> None:
    together = tiny_llama.prefill(RAGGED, tiny_llama.new_cache(16, 3)).hidden
    for row, text in enumerate(RAGGED):
        own = tiny_llama.prefill([text], tiny_llama.new_cache(16)).hidden[0]
        torch.testing.assert_close(together[row], own, **FLOAT)


def test_a_prefill_pays_for_the_logits_of_one_position_per_row(tiny_llama: CausalLM) -> None:
    widths: list[int] = []
    lm_head: Any = tiny_llama.model.get_output_embeddings()
    handle = lm_head.register_forward_hook(lambda module, args, output: widths.append(output.shape[1]))
    try:
        cache = filled(tiny_llama, RAGGED)
        tiny_llama.append([[1, 2, 3]] * 3, cache)
        tiny_llama.verify([TREE] * 3, cache)
    finally:
        handle.remove()
    assert widths == [1, 1, len(TREE)]


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


def test_many_long_prompts_run_in_groups_and_give_what_they_give_together(
    tiny_llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [[3, 1, 4], [1, 5, 9, 2, 6], [5], [3, 5, 8, 9], [7, 9, 3]]
    whole, slots = tiny_llama.new_cache(16, 6), [4, 0, 1, 5, 2]
    expected = tiny_llama.prefill(texts, whole, slots)
    passes: list[tuple[int, int]] = []
    monkeypatch.setattr("decoding.model.causal_lm._PREFILL_TOKENS", 11)  # two rows of the longest
    handle = tiny_llama.model.register_forward_pre_hook(
        lambda module, args, named: passes.append(tuple(named["input_ids"].shape)), with_kwargs=True
    )
    try:
        cache = tiny_llama.new_cache(16, 6)
        found = tiny_llama.prefill(texts, cache, slots)
    finally:
        handle.remove()
    assert passes == [(2, 5), (2, 4), (1, 3)] and cache.lengths == whole.lengths == [5, 1, 3, 0, 3, 4]
    assert torch.allclose(found.hidden, expected.hidden, atol=1e-5)
    assert torch.allclose(found.logits, expected.logits, atol=1e-5)


def test_a_prompt_longer_than_a_group_runs_alone(tiny_llama: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("decoding.model.causal_lm._PREFILL_TOKENS", 2)
    cache = tiny_llama.new_cache(16, 2)
    tiny_llama.prefill([[3, 1, 4, 1], [5]], cache)
    assert cache.lengths == [4, 1]
