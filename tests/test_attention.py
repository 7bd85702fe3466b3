"""Attention without copies: the numbers of `transformers`' own, read where the cache lies."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from grouped_queries import check_grouped_queries
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.llama.modeling_llama import eager_attention_forward

from decoding.model.attention import _GROUPED as NAME
from decoding.model.attention import copy_free_attention, grouped_attention
from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM
from decoding.rules.tree import TokenTree, TreeShape

TEXTS = [[3, 1, 4, 1, 5, 9, 2], [6, 5]]
TREE = TokenTree(torch.tensor([9, 2, 6, 5, 3, 5, 8]), TreeShape((-1, 0, 0, 1, 2, 2, 5)))
FLOAT: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5}
BLOCKED = torch.finfo(torch.float32).min


class Grouped(nn.Module):
    """What attention functions read of the layer that calls them."""

    is_causal = True

    def __init__(self, shared: int) -> None:
        super().__init__()
        self.num_key_value_groups = shared


def random_inputs(heads: int, groups: int, queries: int, keys: int, rows: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, heads, queries, 8), torch.randn(rows, groups, keys, 8), torch.randn(rows, groups, keys, 8)


def random_mask(rows: int, queries: int, keys: int) -> Tensor:
    """Additive; every query sees the first key at least."""
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
    torch.testing.assert_close(ours, sdpa, **FLOAT)
    torch.testing.assert_close(ours, eager, **FLOAT)


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
    torch.testing.assert_close(ours, wanted, **FLOAT)
    with pytest.raises(ValueError, match="does not support `softcap`"):  # it is not forgotten
        grouped_attention(Grouped(2), query, key, value, mask, softcap=5.0)


# --- no copy ---------------------------------------------------------------------------------------------------------


@contextmanager
def sdpa_calls() -> Iterator[list[tuple[Tensor, Tensor]]]:
    """The keys and values of every call of torch's scaled dot-product attention."""
    calls: list[tuple[Tensor, Tensor]] = []
    original = F.scaled_dot_product_attention

    def spy(query: Tensor, key: Tensor, value: Tensor, **options: object) -> Tensor:
        calls.append((key, value))
        return original(query, key, value, **options)  # type: ignore[arg-type]  # handed through

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", spy)
        yield calls


def layers_of(cache: PreallocatedCache) -> list[Any]:
    return list(cache.layers)


def filled(model: CausalLM) -> PreallocatedCache:
    cache = model.new_cache(64, 2)
    model.prefill(TEXTS, cache)
    return cache


GROUPED: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2-mixed", "gemma3", "gpt2", "falcon"])
@pytest.mark.parametrize("trees", [[TREE, TREE], [TREE, TokenTree.chain([1, 2])], [TokenTree.chain([1])] * 2])
def test_what_attention_reads_is_the_cache_itself(family: str, trees: list[TokenTree]) -> None:
    model = CausalLM(tiny_model(family, **(GROUPED if family not in ("gpt2", "falcon") else {})))
    cache = filled(model)
    if family == "llama":  # transformers' own sdpa would copy, or this test would show nothing
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
    """Falcon would take any name but sdpa for eager attention, and add the boolean mask of a prefill to its scores."""
    for family, attention, during in (("llama", "sdpa", NAME), ("llama", "eager", "eager"), ("falcon", "sdpa", "sdpa")):
        model = tiny_model(family, attention=attention)
        with copy_free_attention(model), copy_free_attention(model):  # a draft may share the target's config
            assert model.config._attn_implementation == during
        with pytest.raises(KeyboardInterrupt), copy_free_attention(model):
            raise KeyboardInterrupt
        assert model.config._attn_implementation == attention


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_four_queries_a_key_over_an_odd_number_of_keys_attend_as_one_by_one(dtype: torch.dtype) -> None:
    """What tests/gpu runs on a GPU."""
    check_grouped_queries("cpu", dtype)


def test_whoever_decodes_attends_without_cudnn() -> None:
    """Its plan for every new key length would be paid at every step, by the peers on the same model too."""
    torch.backends.cuda.enable_cudnn_sdp(True)
    CausalLM(tiny_model("llama"))
    assert not torch.backends.cuda.cudnn_sdp_enabled()
