"""One interface for any causal language model: a pass over rows of trees equals separate passes over every path of
every row.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from grouped_queries import check_grouped_queries
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples, few
from tiny_models import FAMILIES, FEW_ATTENTIONS, FEW_FAMILIES, full_forward, tiny_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM
from decoding.model.dynamic import TreeMasks
from decoding.model.forward import _GROUPED as NAME
from decoding.model.forward import copy_free_attention, grouped_attention
from decoding.rules.tree import TokenTree, TreeShape

# Longer than the window of families with a window, on both sides of a branch.
PREFIX = [3, 1, 4, 1, 5, 9, 2]
TREE = TokenTree(torch.tensor([9, 2, 6, 5, 3, 5, 8]), TreeShape((-1, 0, 0, 1, 2, 2, 5)))
# Far longer than the window, one token, and exactly the window.
RAGGED = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], [2, 7, 1, 8, 2]]
# fp32 rounding is 2e-5 for logits as large as these; a wrong mask changes them by whole units.
FLOAT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-4}


@cache
def causal_lm(family: str, attention: str | None = None) -> CausalLM:
    return CausalLM(tiny_model(family, attention=attention))


@cache
def alone(family: str, text: tuple[int, ...]) -> Tensor:
    """Return the last logits of a plain forward pass over this text, of shape (vocab,)."""
    return full_forward(causal_lm(family).model, text)[-1]


def filled(model: CausalLM, texts: Sequence[list[int]], capacity: int = 64) -> PreallocatedCache:
    cache = model.new_cache(capacity, len(texts))
    model.prefill(texts, cache)
    return cache


def layers_of(cache: PreallocatedCache) -> list[Any]:
    return list(cache.layers)


def add(text: list[int], token: int) -> int:
    text.append(token)
    return token


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
def test_rows_of_different_lengths_and_trees_are_each_row_alone(family: str, attention: str) -> None:
    model = causal_lm(family, attention)
    trees = [TokenTree.chain([9, 2]), TREE, TokenTree.chain([4])]
    output = model.verify(trees, filled(model, RAGGED))
    assert output.logits.shape == (3, 7, 16) and output.hidden.shape == (3, 7, model.hidden_size)
    assert_every_node_is_its_path_alone(family, RAGGED, trees, output.logits)


@pytest.mark.parametrize("given", [RAGGED, [PREFIX, PREFIX, PREFIX]], ids=["ragged", "of one length"])
@pytest.mark.parametrize(("family", "attention"), FEW_ATTENTIONS)
def test_prefill_append_and_step_are_each_row_alone(family: str, attention: str, given: list[list[int]]) -> None:
    model = causal_lm(family, attention)
    texts = [list(text) for text in given]
    cache = model.new_cache(8, 3)

    def assert_alone(logits: Tensor) -> None:
        for row, text in enumerate(texts):
            torch.testing.assert_close(logits[row], alone(family, tuple(text)), **FLOAT)

    assert_alone(model.prefill(texts, cache).logits)
    assert_alone(model.step(torch.tensor([add(text, row) for row, text in enumerate(texts)]), cache).logits)
    for blocks in ([[1], [2, 3, 4, 5, 6, 7], [8, 9]], [[6, 6], [1, 2], [3, 4]]):
        for text, block in zip(texts, blocks, strict=True):
            text += block
        assert_alone(model.append(blocks, cache).logits)


# --- trees that are in the cache in part -----------------------------------------------------------------------------


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
    # The first nodes of a tree form a tree; each row has run a random number of them.
    first = [chance.randint(1, len(tree) - 1) for tree in trees]
    parts = [
        TokenTree(tree.tokens[:count], tree.shape.keep(range(count))) for tree, count in zip(trees, first, strict=True)
    ]
    assert_every_node_is_its_path_alone(family, texts, parts, model.verify(parts, cache).logits)  # any trees, anywhere
    logits = model.verify(trees, cache, first).logits
    for row, (text, tree, skipped) in enumerate(zip(texts, trees, first, strict=True)):
        assert cache.lengths[row] == len(text) + len(tree)
        for node in range(skipped, len(tree)):
            wanted = alone(family, (*text, *path_text(tree, node)))
            torch.testing.assert_close(logits[row, node - skipped], wanted, **FLOAT)


# --- what stands next to a row ----------------------------------------------------------------------------------------


def test_a_slot_is_prefilled_while_other_rows_hold_text() -> None:
    model = causal_lm("mistral")
    cache = filled(model, RAGGED)
    cache.truncate(1, 0)
    late = [6, 2, 8, 3, 1, 8, 5]
    torch.testing.assert_close(model.prefill([late], cache, [1]).logits[0], alone("mistral", tuple(late)), **FLOAT)
    texts = [RAGGED[0], late, RAGGED[2]]
    assert_every_node_is_its_path_alone("mistral", texts, [TREE] * 3, model.verify([TREE] * 3, cache).logits)


@torch.inference_mode()
@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_what_stands_in_other_rows_and_in_the_padding_does_not_reach_a_row(family: str) -> None:
    model = causal_lm(family)
    outputs = []
    for other in ([1, 2, 3], [15, 15, 15, 0, 15, 15, 15, 15, 15]):
        cache = filled(model, [PREFIX, other])
        # A row must not read keys of padding in its prefill, nor keys left behind by a rejection.
        for row in (0, 1):
            for layer in layers_of(cache):
                layer.keys[row, :, cache.lengths[row] :] = 1e4
                layer.values[row, :, cache.lengths[row] :] = 1e4
        outputs.append(model.verify([TREE, TokenTree.chain([other[0]] * len(other))], cache).logits[0, : len(TREE)])
    torch.testing.assert_close(*outputs, **FLOAT)


def test_a_row_that_is_full_may_step_along_with_the_others() -> None:
    """A draft steps all rows as long as one has room; nothing reads what the full row writes."""
    model = CausalLM(tiny_model("gpt2", max_position_embeddings=16))
    texts = [[1] * 16, [5, 6]]
    cache = filled(model, texts)
    for token in (3, 4, 5):
        texts[1].append(token)
        logits = model.step(torch.tensor([9, token]), cache).logits[1]
        torch.testing.assert_close(logits, full_forward(model.model, texts[1])[-1], **FLOAT)


def test_mistral_gives_every_layer_its_window_whatever_its_config_says_of_types() -> None:
    """Some published configs list layer types. Mistral's class ignores these types and uses one mask."""
    types = ["sliding_attention", "full_attention"]
    model = CausalLM(tiny_model("mistral", layer_types=types))
    logits = model.verify([TREE], filled(model, [PREFIX])).logits
    for node in range(len(TREE)):
        wanted = full_forward(model.model, [*PREFIX, *path_text(TREE, node)])[-1]
        torch.testing.assert_close(logits[0, node], wanted, **FLOAT)


# --- masks by hand ---------------------------------------------------------------------------------------------------


def seen(model: CausalLM, shapes: Sequence[TreeShape], starts: list[int], window: int | None = None) -> list[list[str]]:
    """Return the mask of each row as text: a line per query, with ``x`` for visible and ``.`` for hidden keys."""
    size = max(len(shape) for shape in shapes)
    masks = TreeMasks(model.model, {"full_attention": window})
    mask = masks.of_trees(shapes, starts, [0] * len(shapes), size)
    assert mask.shape == (len(mask), 1, size, max(starts) + size)
    rows = mask.expand(len(shapes), -1, -1, -1)[:, 0] == 0
    return [
        ["".join("x" if look else "." for look in line.tolist()) for line in row[: len(shape)]]
        for row, shape in zip(rows, shapes, strict=True)
    ]


FORK, LINE = TreeShape((-1, 0, 0, 1)), TreeShape.chain(2)


def test_masks_of_trees_of_different_shapes_behind_prefixes_of_different_lengths(tiny_llama: CausalLM) -> None:
    # The keys of the second row are its one token, its three nodes, and keys that it must not see.
    assert seen(tiny_llama, [FORK, LINE], [3, 1]) == [
        ["xxxx...", "xxxxx..", "xxxx.x.", "xxxxx.x"],
        ["xx.....", "xxx....", "xxxx..."],
    ]


def test_a_window_is_counted_in_positions_of_the_text_not_in_keys(tiny_llama: CausalLM) -> None:
    # With a window of two, a node looks at its own position and the position before. The root has two children. The
    # second child is the third key of the tree, but only one position after the root; this child has a child, which has
    # a child too.
    deep = TreeShape((-1, 0, 0, 2, 3))
    lines = ["..xx....", "...xx...", "...x.x..", ".....xx.", "......xx"]
    assert seen(tiny_llama, [deep], [3], window=2) == [lines]
    assert seen(tiny_llama, [deep, LINE], [3, 1], window=2) == [lines, ["xx......", ".xx.....", "..xx...."]]


# --- hidden states ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", few(FAMILIES, FEW_FAMILIES))
def test_hidden_is_exactly_what_the_lm_head_reads(family: str) -> None:
    # Granite divides the output of its lm_head by 8, and OPT projects to fewer dimensions first; neither matters here.
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


def test_many_long_prompts_run_in_groups_and_give_what_they_give_together(
    tiny_llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [[3, 1, 4], [1, 5, 9, 2, 6], [5], [3, 5, 8, 9], [7, 9, 3]]
    whole, slots = tiny_llama.new_cache(16, 6), [4, 0, 1, 5, 2]
    expected = tiny_llama.prefill(texts, whole, slots)
    passes: list[tuple[int, int]] = []
    monkeypatch.setattr("decoding.model.causal_lm._PREFILL_TOKENS", 11)  # two rows of the largest length
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


TEXTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5]]
CLOSE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5}
BLOCKED = torch.finfo(torch.float32).min


class Grouped(nn.Module):
    """The attributes that attention functions read from the layer that calls them."""

    is_causal = True

    def __init__(self, shared: int) -> None:
        super().__init__()
        self.num_key_value_groups = shared


def random_inputs(heads: int, groups: int, queries: int, keys: int, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, heads, queries, 8), torch.randn(rows, groups, keys, 8), torch.randn(rows, groups, keys, 8)


def random_mask(rows: int, queries: int, keys: int) -> Tensor:
    """Make a random additive mask in which every query sees at least the first key."""
    hidden = torch.rand(rows, 1, queries, keys) < 0.5
    hidden[..., 0] = False
    return torch.zeros(rows, 1, queries, keys).masked_fill(hidden, BLOCKED)


@pytest.mark.parametrize("mask_rows", [1, 2])
@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(("heads", "groups"), [(4, 4), (6, 2), (4, 1)])
def test_grouped_attention_is_sdpa_and_eager_attention(heads: int, groups: int, queries: int, mask_rows: int) -> None:
    query, key, value = random_inputs(heads, groups, queries, 9)
    mask = random_mask(mask_rows, queries, 9)
    layer = Grouped(heads // groups)
    ours, _ = grouped_attention(layer, query, key, value, mask, scaling=0.3)
    sdpa, _ = sdpa_attention_forward(layer, query, key, value, mask, scaling=0.3)
    eager, _ = eager_attention_forward(layer, query, key, value, mask, scaling=0.3)
    assert ours.shape == sdpa.shape == (2, queries, heads, 8)
    torch.testing.assert_close(ours, sdpa, **CLOSE)
    torch.testing.assert_close(ours, eager, **CLOSE)


@pytest.mark.parametrize("case", ["wider values", "a mask of each head", "no mask", "a bias on positions"])
def test_what_is_not_grouped_is_left_to_sdpa(case: str) -> None:
    query, key, value = random_inputs(4, 2, 5, 5)
    mask: Tensor | None = random_mask(2, 5, 5)
    bias = {"position_bias": torch.randn(2, 4, 5, 5)} if case == "a bias on positions" else {}
    if case == "wider values":
        value = torch.randn(2, 2, 5, 6)
    elif case == "a mask of each head":
        mask = torch.zeros(2, 4, 5, 5).masked_fill(torch.rand(2, 4, 5, 5) < 0.3, -5.0)
    elif case == "no mask":
        mask = None
    ours, _ = grouped_attention(Grouped(2), query, key, value, mask, **bias)
    wanted, _ = sdpa_attention_forward(Grouped(2), query, key, value, mask, **bias)
    torch.testing.assert_close(ours, wanted, **CLOSE)
    with pytest.raises(ValueError, match="does not support `softcap`"):  # the first error is not lost
        grouped_attention(Grouped(2), query, key, value, mask, softcap=5.0)


# --- no copy ---------------------------------------------------------------------------------------------------------


@contextmanager
def sdpa_calls() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Record the keys and values of every call of torch's scaled dot-product attention."""
    calls: list[tuple[Tensor, Tensor]] = []
    original = F.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        calls.append((key, value))
        return original(query, key, value, **options)  # type: ignore[arg-type]  # handed through

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", spy)
        yield calls


def two_filled(model: CausalLM) -> PreallocatedCache:
    cache = model.new_cache(64, 2)
    model.prefill(TEXTS, cache)
    return cache


GROUPED: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-mixed", "gemma3", "gpt2", "falcon"])
@pytest.mark.parametrize("trees", [[TREE, TREE], [TREE, TokenTree.chain([1, 2])], [TokenTree.chain([1])] * 2])
def test_what_attention_reads_is_the_cache_itself(family: str, trees: list[TokenTree]) -> None:
    model = CausalLM(tiny_model(family, **(GROUPED if family not in ("gpt2", "falcon") else {})))
    cache = two_filled(model)
    if family == "llama":  # transformers' sdpa would copy; otherwise this test would show nothing
        cache.begin([0, 1], 3, torch.device("cpu"))
        mask, tokens = torch.zeros(2, 1, 3, 10), torch.ones(2, 3, dtype=torch.long)
        with torch.inference_mode(), sdpa_calls() as calls:
            model.model.model(input_ids=tokens, attention_mask=mask, past_key_values=cache)
        assert calls[0][0].shape[1] == 4 and calls[0][0].data_ptr() != layers_of(cache)[0].keys.data_ptr()
        cache.end([0, 0])
    with sdpa_calls() as calls:
        model.verify(trees, cache)
    assert len(calls) == 2, "two layers"
    for layer, (key, value) in zip(layers_of(cache), calls, strict=True):
        assert key.data_ptr() == layer.keys.data_ptr() and value.data_ptr() == layer.values.data_ptr()
        assert key.stride() == layer.keys.stride() and key.shape[1] == layer.keys.shape[1], "nor is it repeated"


# --- the model's own setting -----------------------------------------------------------------------------------------


def test_only_a_models_own_sdpa_is_replaced_and_is_back_afterwards() -> None:
    """Falcon would treat any name except sdpa as eager attention,
    and add the boolean mask of a prefill to its scores.
    """
    for family, attention, during in (("llama", "sdpa", NAME), ("llama", "eager", "eager"), ("falcon", "sdpa", "sdpa")):
        model = tiny_model(family, attention=attention)
        with copy_free_attention(model), copy_free_attention(model):  # a draft may share the target's config
            assert model.config._attn_implementation == during
        with pytest.raises(KeyboardInterrupt), copy_free_attention(model):
            raise KeyboardInterrupt
        assert model.config._attn_implementation == attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_four_queries_a_key_over_an_odd_number_of_keys_attend_as_one_by_one(dtype: torch.dtype) -> None:
    """tests/gpu runs the same check on a GPU."""
    check_grouped_queries("cpu", dtype)


def test_whoever_decodes_attends_without_cudnn() -> None:
    """cuDNN would make a plan for every new key length at every step, which also slows down the peers on the same
    model.
    """
    torch.backends.cuda.enable_cudnn_sdp(True)
    CausalLM(tiny_model("llama"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
