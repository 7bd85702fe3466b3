"""Taps: the states after a model's layers equal those of `transformers`, for each family and each kind of pass."""

import threading
from contextlib import ExitStack
from functools import cache

import pytest
import torch
from hypothesis_profiles import few
from tiny_dspark import states_at
from tiny_models import FAMILIES, FEW_FAMILIES, tiny_model
from torch import Tensor
from transformers import PreTrainedModel

from decoding.model.causal_lm import CausalLM
from decoding.model.forward import begun_behind, capture_taps, hooked, layers_of, lm_head_input, run_in_lm_head
from decoding.rules.tree import TokenTree, TreeShape

TAPS = (0, 2)
TEXTS = ([3, 1, 4, 1, 5, 9, 2], [6], [5, 3, 5])
TREE = TreeShape((-1, 0, 0, 1, 1, 2))


_MIXED = {"layer_types": ["full_attention", "sliding_attention"] * 2}
_DEPTH = {"gpt2": {"n_layer": 4}, **dict.fromkeys(("qwen2-mixed", "gemma2", "gemma3"), _MIXED)}


@cache
def model_of(family: str) -> PreTrainedModel:
    """Make a model of four layers, with both kinds of attention if the family mixes them."""
    return tiny_model(family, **_DEPTH.get(family, {}), **{} if family == "gpt2" else {"num_hidden_layers": 4})


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.shape == wanted.shape and (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("static", [None, "eager"])
@pytest.mark.parametrize("family", few(FAMILIES, FEW_FAMILIES))
def test_states_behind_a_layer_are_those_of_transformers_in_every_pass(family: str, static: str | None) -> None:
    """The passes read a ragged batch of prompts, then a block of tokens, and then a tree or a chain in each row, in
    dynamic and in fixed shapes.
    """
    model = CausalLM(model_of(family), static=static)
    cache = model.new_cache(32, len(TEXTS))
    output = model.prefill(TEXTS, cache, taps=TAPS)
    for found, text in zip(output.states, TEXTS, strict=True):
        close(found, states_at(model, text, TAPS))
    blocks = [[7, 7], [1, 2, 3], [8]]
    output = model.append(blocks, cache, taps=TAPS)
    texts = [[*text, *block] for text, block in zip(TEXTS, blocks, strict=True)]
    for found, text, block in zip(output.states, texts, blocks, strict=True):
        close(found, states_at(model, text, TAPS)[-len(block) :])
    trees = [TokenTree(torch.arange(6), TREE), TokenTree.chain([9, 8]), TokenTree.chain([4])]
    output = model.verify(trees, cache, taps=TAPS)
    for found, text, tree in zip(output.states, texts, trees, strict=True):
        for node in range(len(tree)):
            path = [tree.token_list[ancestor] for ancestor in (0, *tree.shape.path(node))]
            close(found[node], states_at(model, [*text, *path], TAPS)[-1])


@pytest.mark.parametrize("family", few(FAMILIES, FEW_FAMILIES))
def test_a_forward_that_begins_behind_a_layer_ends_as_the_whole_one_and_runs_no_layer_before(family: str) -> None:
    model, ran = model_of(family), list[int]()
    inputs = {"input_ids": torch.tensor([TEXTS[0][:3], TEXTS[2]]), "attention_mask": torch.ones(2, 3)}
    with torch.no_grad(), capture_taps(model, 4, (2,)) as tapped, ExitStack() as hooks:
        whole = lm_head_input(model, inputs)
        for index, layer in enumerate(layers_of(model, 4)):
            part = next(layer.children())
            hooks.enter_context(hooked(part.register_forward_hook, lambda *_, index=index: ran.append(index)))
        with begun_behind(model, 4, 2, tapped[0], in_tuple=family == "falcon"):
            assert torch.equal(lm_head_input(model, inputs), whole) and ran == [3]
        assert torch.equal(lm_head_input(model, inputs), whole) and ran == [3, 0, 1, 2, 3]


def test_a_pass_without_taps_hooks_no_layer_and_one_with_them_no_other_and_leaves_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = CausalLM(tiny_model())  # transformers leaves hooks on models from which all states were requested
    layers, hooked = layers_of(model.model, 2), list[list[int]]()
    forward = type(layers[0]).forward

    def noting(layer: torch.nn.Module, *args: object, **named: object) -> object:
        hooked.append([index for index, each in enumerate(layers) if each._forward_hooks])
        assert not named.get("output_hidden_states")
        return forward(layer, *args, **named)

    monkeypatch.setattr(type(layers[0]), "forward", noting)
    for taps in ((), (0,), (1,)):
        hooked.clear()
        output = model.prefill([[1, 2, 3], [4]], model.new_cache(8, 2), taps=taps)
        assert hooked == [list(taps)] * 2 and not any(layer._forward_hooks for layer in layers)
        assert [states.shape for states in output.states] == ([(3, 16), (1, 16)] if taps else [])


def test_a_vision_tower_as_deep_as_the_text_is_not_taken_for_it() -> None:
    class Seeing(type(tiny_model())):  # type: ignore[misc]  # a class made at run time
        pass

    model = Seeing(tiny_model().config)
    text = model.model
    del model.model
    model.tower = torch.nn.ModuleList(torch.nn.Linear(2, 2) for _ in text.layers)
    model.model = text
    assert next(model.children()) is model.lm_head and layers_of(model, len(text.layers)) is text.layers
    assert any(module is model.tower for module in model.modules())


def test_another_threads_forward_adds_nothing(tiny_llama: CausalLM) -> None:
    with capture_taps(tiny_llama.model, 2, (0,)) as found:
        other = threading.Thread(target=lm_head_input, args=(tiny_llama.model, {"input_ids": torch.ones(1, 2).long()}))
        other.start()
        other.join()
        lm_head_input(tiny_llama.model, {"input_ids": torch.ones(1, 3).long()})
    assert [states.shape for states in found] == [(1, 3, 16)]


TOKENS = {"input_ids": torch.tensor([[3, 1, 4, 1], [5, 9, 2, 6]])}


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt"])
def test_what_the_lm_head_reads_makes_the_models_own_logits(family: str) -> None:
    model = tiny_model(family)
    logits = model(**TOKENS).logits
    hidden = lm_head_input(model, TOKENS)
    assert torch.allclose(run_in_lm_head(model, hidden, torch.nn.functional.linear), logits, atol=1e-5)
    assert torch.equal(model(**TOKENS).logits, logits), "the lm_head is its own again"


@pytest.mark.parametrize("rows", [1, 2])
def test_the_lm_head_of_a_frozen_model_never_reads_a_strided_slice(rows: int) -> None:
    model, read = tiny_model("llama").requires_grad_(False), list[Tensor]()
    layer = model.get_output_embeddings()
    assert isinstance(layer, torch.nn.Module)
    layer.register_forward_hook(lambda _, args, output: read.append(args[0]))
    tokens = {name: value[:rows] for name, value in TOKENS.items()}
    assert lm_head_input(model, tokens).shape == (rows, 4, 16)
    assert read[0].shape == (rows, 1, 16) and read[0].stride() == (16, 16, 1)


def test_work_runs_between_the_layers_hooks_and_leaves_as_the_layers_result() -> None:
    """ZeRO-3 gathers the weight in a pre-hook, and again for the gradient of the outputs that its hook receives."""
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
