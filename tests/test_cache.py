"""The preallocated cache: after any trees and acceptances, each row equals a cache of only that row's text."""

import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any
from weakref import ref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples
from tiny_models import full_forward, tiny_model
from torch import Tensor

from decoding.model.cache import PreallocatedCache, rounded_up
from decoding.model.causal_lm import CausalLM
from decoding.rules.tree import TokenTree, TreeShape

PREFIX = [3, 1, 4, 1, 5]
# Root 9 -> {2, 6}, 2 -> {5}, 6 -> {3, 5}, the second 5 -> {8}
TREE = TokenTree(torch.tensor([9, 2, 6, 5, 3, 5, 8]), TreeShape((-1, 0, 0, 1, 2, 2, 5)))
RAGGED = [[3, 1, 4, 1, 5, 9, 2, 6], [5], [3, 5, 8, 9]]
FLOAT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5}


def filled(model: CausalLM, *texts: list[int], capacity: int = 64) -> PreallocatedCache:
    cache = model.new_cache(capacity, len(texts))
    model.prefill(texts, cache)
    return cache


def contents(cache: PreallocatedCache, row: int = 0) -> Tensor:
    """Return the keys and values of a row in every layer, up to its length: (2, layers, heads, length, dim)."""
    layers: Any = cache.layers
    return torch.stack(
        [
            torch.stack([getattr(layer, kind)[row, :, : cache.lengths[row]] for layer in layers])
            for kind in ("keys", "values")
        ]
    )


def assert_same_content(kept: Tensor, expected: Tensor) -> None:
    """Check equality to 1e-6 of the largest entry, which is the rounding of fp32 for blocks of different sizes."""
    torch.testing.assert_close(kept, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def assert_holds(model: CausalLM, cache: PreallocatedCache, *texts: Sequence[int]) -> None:
    """Check that row i of the cache equals the cache of a model that has run only text i."""
    for row, text in enumerate(texts):
        assert cache.lengths[row] == len(text)
        assert_same_content(contents(cache, row), contents(filled(model, list(text))))


def random_tree(chance: random.Random, most_nodes: int = 7) -> TokenTree:
    parents = (-1, *(chance.randrange(node) for node in range(1, chance.randint(1, most_nodes))))
    return TokenTree(torch.tensor([chance.randrange(16) for _ in parents]), TreeShape(parents))


# --- acceptance ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [(), (1, 3), (2, 5, 6)])
def test_a_rejected_branch_leaves_no_trace_in_the_cache(tiny_llama: CausalLM, path: tuple[int, ...]) -> None:
    cache = filled(tiny_llama, PREFIX)
    tiny_llama.verify([TREE], cache)
    assert cache.lengths == [len(PREFIX) + len(TREE)]
    cache.commit(0, len(PREFIX), (0, *path))
    text = [*PREFIX, *(TREE.token_list[node] for node in (0, *path))]
    assert_holds(tiny_llama, cache, text)
    logits = tiny_llama.append([[7]], cache).logits[0]
    torch.testing.assert_close(logits, full_forward(tiny_llama.model, [*text, 7])[-1], **FLOAT)


@examples(15)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 4), steps=st.integers(1, 4), capacity=st.integers(1, 40))
def test_many_trees_and_random_acceptances_later_each_row_is_still_the_cache_of_its_text(
    tiny_llama: CausalLM, seed: int, rows: int, steps: int, capacity: int
) -> None:
    chance = random.Random(seed)
    texts = [[chance.randrange(16) for _ in range(chance.randint(1, 9))] for _ in range(rows)]
    cache = filled(tiny_llama, *texts, capacity=capacity)
    for _ in range(steps):
        trees = [random_tree(chance) for _ in texts]
        tiny_llama.verify(trees, cache)
        for row, (text, tree) in enumerate(zip(texts, trees, strict=True)):
            path = (0, *tree.shape.path(chance.randrange(len(tree))))
            cache.commit(row, len(text), path)
            text += [tree.token_list[node] for node in path]
    assert_holds(tiny_llama, cache, *texts)


# --- growth ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails_at", [1, 2])
def test_growth_that_fails_for_lack_of_memory_leaves_the_cache_as_it_was(
    tiny_llama: CausalLM, monkeypatch: pytest.MonkeyPatch, fails_at: int
) -> None:
    cache = filled(tiny_llama, PREFIX, capacity=8)
    allocate, left = cache._new_buffer, fails_at

    def fail(*wanted: Any) -> Tensor:
        nonlocal left
        left -= 1
        if left == 0:
            raise MemoryError
        return allocate(*wanted)

    with monkeypatch.context() as patch:
        patch.setattr(cache, "_new_buffer", fail)
        with pytest.raises(MemoryError):
            tiny_llama.verify([TREE], cache)
    assert cache.capacity == 8
    assert_holds(tiny_llama, cache, PREFIX)
    tiny_llama.append([[9, 2]], cache)
    tiny_llama.verify([TREE], cache)
    assert cache.capacity == 16
    cache.commit(0, 7, (0,))
    assert_holds(tiny_llama, cache, [*PREFIX, 9, 2, 9])


def test_rounding_up_adds_less_than_an_eighth() -> None:
    rounded = [rounded_up(count) for count in range(1, 2**14 + 1)]
    assert all(8 * count <= 8 * result < 9 * count for count, result in enumerate(rounded, start=1))
    assert [rounded_up(result) for result in rounded] == rounded
    assert sorted({result for result in rounded if result > 2**13}) == list(range(9 * 2**10, 2**14 + 1, 2**10))


# --- dropping, reusing, moving ---------------------------------------------------------------------------------------


def test_truncation_drops_the_end_of_one_row_and_nothing_else(tiny_llama: CausalLM) -> None:
    cache = filled(tiny_llama, *RAGGED)
    before = contents(cache, 0).clone()
    cache.truncate(0, 2)
    assert cache.lengths == [2, 1, 4] and torch.equal(contents(cache, 0), before[..., :2, :])
    tiny_llama.append([RAGGED[0][2:], [8], [8]], cache)
    assert_holds(tiny_llama, cache, RAGGED[0], [*RAGGED[1], 8], [*RAGGED[2], 8])


@pytest.mark.parametrize(
    ("prompt", "kept"),
    [
        ([3, 1, 4, 1, 5, 9], 5),
        ([3, 1, 4, 1, 5], 4),  # the last token runs again, because its logits are needed
        ([3, 1, 4], 2),
        ([3, 1, 9, 1, 5, 9], 2),
        ([9, 1, 4], 0),
    ],
)
def test_a_new_prompt_keeps_what_it_begins_with(tiny_llama: CausalLM, prompt: list[int], kept: int) -> None:
    cache = filled(tiny_llama, PREFIX)
    cache.text = list(PREFIX)
    assert cache.rewind(prompt) == kept
    assert cache.lengths == [kept] and cache.text == PREFIX[:kept]
    assert cache.rewind([*PREFIX, 9]) == kept, "what was rewound is not promised any more"
    tiny_llama.append([prompt[kept:]], cache)
    assert_holds(tiny_llama, cache, prompt)


def test_a_row_that_moves_goes_on_in_its_new_slot(tiny_llama: CausalLM) -> None:
    cache = filled(tiny_llama, *RAGGED)
    moved = contents(cache, 2).clone()
    cache.move(2, 0)
    assert cache.lengths == [4, 1, 0] and torch.equal(contents(cache, 0), moved)
    tiny_llama.verify([TREE, TREE], cache)
    cache.commit(0, 4, (0, 2, 4))
    cache.commit(1, 1, (0, 1))
    assert_holds(tiny_llama, cache, [*RAGGED[2], 9, 6, 3], [*RAGGED[1], 9, 2])


def test_a_longer_row_that_left_leaves_no_trace_in_the_slot_of_a_shorter_one(tiny_llama: CausalLM) -> None:
    cache = filled(tiny_llama, *RAGGED)
    cache.move(1, 0)  # one token instead of eight
    logits = tiny_llama.append([[7]], cache).logits[0]
    torch.testing.assert_close(logits, full_forward(tiny_llama.model, [*RAGGED[1], 7])[-1], **FLOAT)


@pytest.mark.parametrize("static", [None, "eager"])
def test_a_deep_copy_goes_on_apart_from_its_original(static: str | None) -> None:
    """Users of transformers copy the cache of a shared prompt and continue each copy."""
    model = CausalLM(tiny_model("llama"), static=static)
    cache = filled(model, PREFIX)
    copied = deepcopy(cache)
    for block, each in (([7], cache), ([9, 2], copied), ([8], cache), ([6], copied)):
        model.append([block], each)
    assert_holds(CausalLM(model.model), cache, [*PREFIX, 7, 8])
    assert_holds(CausalLM(model.model), copied, [*PREFIX, 9, 2, 6])


@pytest.mark.parametrize("static", [None, "eager"])
def test_a_dropped_model_and_its_cache_are_freed_at_once(static: str | None) -> None:
    """A GPU may be full before Python looks for cycles."""
    model = CausalLM(tiny_model("llama"), static=static)
    cache = filled(model, PREFIX)
    model.verify([TREE], cache)
    held = ref(cache), ref(model.model)
    del model, cache
    assert [one() for one in held] == [None, None]
