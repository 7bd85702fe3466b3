"""Work at the lm_head: in place of its forward, inside the hooks that launchers put on it."""

import pytest
import torch
from tiny_models import tiny_model
from torch import Tensor

from decoding.model.forward import lm_head_input, run_in_lm_head

TOKENS = {"input_ids": torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])}


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_what_the_lm_head_reads_makes_the_models_own_logits(family: str) -> None:
    model = tiny_model(family)
    logits = model(**TOKENS).logits
    hidden = lm_head_input(model, TOKENS)
    assert torch.allclose(run_in_lm_head(model, hidden, torch.nn.functional.linear), logits, atol=1e-5)
    assert torch.equal(model(**TOKENS).logits, logits), "the lm_head is its own again"


def test_the_lm_head_of_a_frozen_model_never_reads_a_strided_slice() -> None:
    model, read = tiny_model("llama").requires_grad_(False), list[Tensor]()
    layer = model.get_output_embeddings()
    assert isinstance(layer, torch.nn.Module)
    layer.register_forward_hook(lambda _, args, output: read.append(args[0]))
    assert lm_head_input(model, TOKENS).shape == (2, 4, 16)
    assert read[0].shape == (2, 1, 16) and read[0].is_contiguous()


def test_work_runs_between_the_layers_hooks_and_leaves_as_the_layers_result() -> None:
    """ZeRO-3 gathers the weight in a pre-hook, and again for the gradient of the outputs that its hook sees."""
    model, seen = tiny_model("llama"), list[object]()
    layer = model.get_output_embeddings()
    layer.register_forward_pre_hook(lambda *_: seen.append("gathered"))
    layer.register_forward_hook(lambda _, args, output: seen.append(output))

    def work(hidden: Tensor, weight: Tensor) -> tuple[Tensor, str]:
        seen.append("work")
        return (hidden @ weight.T).sum(), "anything"

    result = run_in_lm_head(model, torch.ones(1, 1, 16), work)
    assert seen == ["gathered", "work", result] and result[1] == "anything"
    result[0].backward()
    assert layer.weight.grad is not None and torch.equal(layer.weight.grad, torch.ones_like(layer.weight))


def test_a_forward_that_a_launcher_has_set_is_there_again_also_after_an_error() -> None:
    model = tiny_model("llama")
    layer = model.get_output_embeddings()

    def fails(hidden: Tensor, weight: Tensor) -> None:
        raise RuntimeError("full")

    with pytest.raises(RuntimeError, match="full"):
        run_in_lm_head(model, torch.ones(1, 1, 16), fails)
    assert "forward" not in vars(layer)
    layer.forward = launchers = lambda hidden: hidden
    with pytest.raises(RuntimeError, match="full"):
        run_in_lm_head(model, torch.ones(1, 1, 16), fails)
    assert vars(layer)["forward"] is launchers
