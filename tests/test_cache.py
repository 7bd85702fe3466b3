"""The preallocated cache: after any tree and any acceptance, it is the cache of the accepted text."""

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import full_forward

from decoding.cache import PreallocatedCache
from decoding.target import CausalLM
from decoding.tree import TokenTree, TreeShape

PREFIX = [3, 1, 4, 1, 5]
# Root 9 -> {2, 6}, 2 -> {5}, 6 -> {3, 5}, the second 5 -> {8}
TREE = TokenTree(torch.tensor([9, 2, 6, 5, 3, 5, 8]), TreeShape((-1, 0, 0, 1, 2, 2, 5)))
FLOAT = {"rtol": 0.0, "atol": 1e-5}


def filled(model: CausalLM, tokens: list[int], capacity: int = 64) -> PreallocatedCache:
    cache = model.new_cache(capacity)
    model.append(torch.tensor(tokens), cache)
    return cache


def contents(cache: PreallocatedCache) -> torch.Tensor:
    """Keys and values of every layer, up to the length: (2, layers, heads, length, dim)."""
    layers = [(layer.keys[0, :, : cache.length], layer.values[0, :, : cache.length]) for layer in cache.layers]
    return torch.stack([torch.stack(list(kind)) for kind in zip(*layers, strict=True)])


def assert_same_content(cache: PreallocatedCache, expected: torch.Tensor) -> None:
    """Equal to 1e-6 of the largest entry: what fp32 leaves when blocks of other sizes are multiplied."""
    torch.testing.assert_close(contents(cache), expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def buffers(cache: PreallocatedCache) -> list[int]:
    return [tensor.data_ptr() for layer in cache.layers for tensor in (layer.keys, layer.values)]


@pytest.mark.parametrize("path", [(), (1,), (2,), (1, 3), (2, 5), (2, 5, 6)])
def test_a_rejected_branch_leaves_no_trace_in_the_cache(tiny_llama: CausalLM, path: tuple[int, ...]) -> None:
    cache = filled(tiny_llama, PREFIX)
    tiny_llama.verify(TREE, cache)
    assert cache.length == len(PREFIX) + len(TREE)
    cache.commit(len(PREFIX), (0, *path))
    text = [*PREFIX, *(TREE.token_list[node] for node in (0, *path))]
    fresh = filled(tiny_llama, text)
    assert cache.length == fresh.length == len(text)
    assert_same_content(cache, contents(fresh))


@pytest.mark.parametrize("path", [(), (1,), (2, 5, 6)])
def test_the_next_logits_are_those_of_the_accepted_text_alone(tiny_llama: CausalLM, path: tuple[int, ...]) -> None:
    cache = filled(tiny_llama, PREFIX)
    tiny_llama.verify(TREE, cache)
    cache.commit(len(PREFIX), (0, *path))
    text = [*PREFIX, *(TREE.token_list[node] for node in (0, *path)), 7]
    logits = tiny_llama.append(torch.tensor([7]), cache).logits[-1]
    torch.testing.assert_close(logits, full_forward(tiny_llama.model, text)[-1], **FLOAT)


@given(seed=st.integers(0, 2**32 - 1), steps=st.integers(1, 5), capacity=st.integers(1, 40))
def test_many_trees_and_random_acceptances_later_it_is_still_the_cache_of_the_text(
    tiny_llama: CausalLM, seed: int, steps: int, capacity: int
) -> None:
    chance = random.Random(seed)
    text = [chance.randrange(16) for _ in range(chance.randint(1, 4))]
    cache = filled(tiny_llama, text, capacity)
    for _ in range(steps):
        parents = (-1, *(chance.randrange(node) for node in range(1, chance.randint(1, 7))))
        tree = TokenTree(torch.tensor([chance.randrange(16) for _ in parents]), TreeShape(parents))
        tiny_llama.verify(tree, cache)
        path = (0, *tree.shape.path(chance.randrange(len(tree))))
        cache.commit(len(text), path)
        text += [tree.token_list[node] for node in path]
    assert_same_content(cache, contents(filled(tiny_llama, text)))


def test_commit_moves_the_kept_nodes_together_in_their_order() -> None:
    cache = PreallocatedCache(num_layers=1, capacity=8)
    # One head, one dimension: position i holds the number i.
    block = torch.arange(6.0).view(1, 1, 6, 1)
    cache.update(block, -block, 0)
    cache.commit(2, (0, 1, 3))
    assert contents(cache)[:, 0, 0, :, 0].tolist() == [[0, 1, 2, 3, 5], [0, -1, -2, -3, -5]]


def test_commit_copies_nothing_of_the_prefix(tiny_llama: CausalLM) -> None:
    cache = filled(tiny_llama, PREFIX)
    tiny_llama.verify(TREE, cache)
    before, prefix = buffers(cache), contents(cache)[..., : len(PREFIX), :].clone()
    cache.commit(len(PREFIX), (0, 2, 5))
    assert buffers(cache) == before
    assert torch.equal(contents(cache)[..., : len(PREFIX), :], prefix)


def test_an_update_returns_views_of_the_buffers() -> None:
    cache = PreallocatedCache(num_layers=2, capacity=8)
    block = torch.randn(1, 2, 3, 4)
    keys, values = cache.update(block, 2 * block, 1)
    assert keys.shape == (1, 2, 3, 4) and torch.equal(keys, block) and torch.equal(values, 2 * block)
    assert keys.data_ptr() == cache.layers[1].keys.data_ptr()
    keys_later, _ = cache.update(block, block, 1)
    assert keys_later.shape[-2] == 6 and keys_later.data_ptr() == keys.data_ptr()


def test_growing_keeps_the_content(tiny_llama: CausalLM) -> None:
    small, large = filled(tiny_llama, PREFIX, capacity=5), filled(tiny_llama, PREFIX, capacity=64)
    before = contents(small).clone()
    for cache in (small, large):
        tiny_llama.verify(TREE, cache)
    assert small.capacity == 20, "5 doubled until 12 positions fit"
    assert torch.equal(contents(small)[..., : len(PREFIX), :], before)
    assert torch.equal(contents(small), contents(large))


def test_a_cache_of_capacity_zero_grows_from_one() -> None:
    cache = PreallocatedCache(num_layers=1, capacity=0)
    block = torch.arange(3.0).view(1, 1, 3, 1)
    for _ in range(2):
        cache.update(block, block, 0)
    assert cache.capacity == 8 and contents(cache)[0, 0, 0, :, 0].tolist() == [0, 1, 2, 0, 1, 2]


def test_truncation_drops_the_end_and_nothing_else(tiny_llama: CausalLM) -> None:
    cache = filled(tiny_llama, PREFIX)
    before = contents(cache).clone()
    cache.truncate(2)
    assert cache.length == 2 and cache.get_seq_length() == 2
    assert torch.equal(contents(cache), before[..., :2, :])
    tiny_llama.append(torch.tensor(PREFIX[2:]), cache)
    assert_same_content(cache, before)


def test_truncating_to_more_than_there_is_is_our_own_bug(tiny_llama: CausalLM) -> None:
    with pytest.raises(AssertionError, match="cannot truncate 5 positions to 6"):
        filled(tiny_llama, PREFIX).truncate(6)


def test_committing_into_a_cache_that_never_ran_is_allowed() -> None:
    cache = PreallocatedCache(num_layers=2, capacity=4)
    cache.commit(0, ())
    assert cache.length == 0
