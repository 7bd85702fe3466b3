"""Windows attended to in bands: the same states and gradients as by a mask over the whole text."""

from typing import Any

import pytest
import torch
from test_data_batches import packed_batch
from tiny_models import WINDOW, tiny_model
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.nn import functional as F
from transformers import PreTrainedModel

from decoding.model import attention as banded
from decoding.model.attention import attention_in_bands, band, banded_attention
from decoding.model.lm_head import lm_head_input
from decoding.model.windowed import with_window

LONG = torch.arange(46).reshape(2, 23).mul(7).remainder(16)
"""Two texts of four windows and a half."""


@pytest.mark.parametrize("tokens", [7, 8, 9, 12, 31])
@pytest.mark.parametrize(("groups", "window"), [(4, 3), (2, 3), (1, 1), (4, 2)])
def test_blocks_give_the_attention_of_a_mask_and_its_gradients(tokens: int, groups: int, window: int) -> None:
    source = torch.Generator().manual_seed(tokens)
    shapes = [(2, 4, tokens, 8), (2, groups, tokens, 8), (2, groups, tokens, 8)]
    given = [torch.randn(shape, generator=source, dtype=torch.float64).requires_grad_() for shape in shapes]
    found = banded_attention(*given, band(window, 2 * window, window, "cpu"), scaling=0.3)
    mask = band(tokens, tokens, window, "cpu")
    wanted = F.scaled_dot_product_attention(*given, attn_mask=mask, scale=0.3, enable_gqa=True)
    torch.testing.assert_close(found, wanted)
    toward = torch.randn(found.shape, generator=source, dtype=torch.float64)
    for own, whole in zip(*(torch.autograd.grad(each, given, toward) for each in (found, wanted)), strict=True):
        torch.testing.assert_close(own, whole)


def wrap_layers(model: PreTrainedModel) -> None:
    """Let each layer keep what it reads alone, as accelerate does for FSDP."""
    apply_activation_checkpointing(model, check_fn=lambda module: module in list(model.model.layers))


@pytest.fixture
def in_bands(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of the block's mask at each call of `banded_attention`."""
    calls = list[tuple[int, ...]]()

    def noted(query: Tensor, key: Tensor, value: Tensor, block: Tensor, *settings: Any) -> Tensor:
        calls.append(tuple(block.shape))
        return banded_attention(query, key, value, block, *settings)

    monkeypatch.setattr(banded, "banded_attention", noted)
    return calls


def models() -> dict[str, PreTrainedModel]:
    own = {family: tiny_model(family) for family in ("mistral", "qwen2-mixed", "gemma3", "phi3")}
    return own | {f"{family}, windowed": with_window(tiny_model(family), WINDOW) for family in ("llama", "qwen3")}


@pytest.mark.parametrize("name", models())
def test_a_model_with_windows_runs_a_text_in_bands_as_by_its_masks(name: str, in_bands: list[tuple[int, ...]]) -> None:
    model = models()[name].double()
    layers = 1 if name in ("qwen2-mixed", "gemma3") else 2  # the other one attends to the whole text
    found = []
    for run in (lambda: lm_head_input(model, {"input_ids": LONG}), lambda: model.model(LONG).last_hidden_state):
        model.zero_grad()
        states = run()
        states.square().sum().backward()
        found.append([states, *(each.grad for each in model.model.parameters())])
        assert in_bands == [(1, 1, WINDOW, 2 * WINDOW)] * layers
    for own, whole in zip(*found, strict=True):
        torch.testing.assert_close(own, whole)
    assert model.config._attn_implementation == "sdpa"


def test_short_texts_documents_padding_and_layers_run_again_keep_their_masks(in_bands: list[tuple[int, ...]]) -> None:
    """Of two windows' length a mask is as small; documents and padding have a part in it; the context is over when
    layers run again in the backward pass."""
    model = tiny_model("mistral")
    padded = {"input_ids": LONG, "attention_mask": (LONG.new_tensor([[9], [23]]) > torch.arange(23)).long()}
    for inputs in ({"input_ids": LONG[:, : 2 * WINDOW]}, packed_batch().model_inputs(), padded):
        states = lm_head_input(model, inputs)
        torch.testing.assert_close(states, model.model(**inputs, use_cache=False).last_hidden_state, rtol=0, atol=0)
    for run_again in (lambda model: model.gradient_checkpointing_enable(), wrap_layers):
        again = tiny_model("mistral").train()
        run_again(again)
        lm_head_input(again, {"input_ids": LONG}).sum().backward()
    lm_head_input(tiny_model("mistral", attention="eager"), {"input_ids": LONG})
    assert in_bands == []


def test_an_error_leaves_the_models_own_attention() -> None:
    model = tiny_model("mistral")
    with pytest.raises(IndexError), attention_in_bands(model):
        model(torch.tensor([[99]]))
    assert model.config._attn_implementation == "sdpa"
