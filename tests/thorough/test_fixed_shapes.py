"""The choice between fixed and dynamic shapes, from the commands and `HeadstartModel` down to the drafts."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from drafter_checks import nearly
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding.drafters import CascadeDrafter, Drafter, DraftModelDrafter, HybridDrafter, PromptLookupDrafter
from decoding.drafters.draft_tree import DraftTreeDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.headstart_model import HeadstartModel
from decoding.model.architecture import static_of
from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM

DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
PROMPTS = [[3, 1, 4, 1, 5] * 3, [9, 2], [6, 5, 3, 5, 8, 9, 7], [5, 6] * 8]


def on_gpu(**changes: Any) -> Any:
    """Imitate a model on a GPU: the choice reads only its device, class, config and placement."""
    model = tiny_model("llama", **changes)
    of_class = type("OnGPU", (SimpleNamespace,), {"forward": type(model).forward})
    return of_class(device=torch.device("cuda"), config=model.config)


def test_auto_is_graphs_on_a_gpu_and_off_elsewhere() -> None:
    assert static_of("auto", on_gpu()) == "auto" and static_of("graphs", on_gpu()) == "graphs"
    assert static_of("off", on_gpu()) is None
    model = tiny_model("llama")
    assert [static_of(choice, model) for choice in ("auto", "off", "eager")] == [None, None, "eager"]
    assert static_of("auto", on_gpu(rope_parameters=DYNAMIC)) is None
    spread = on_gpu()
    spread.hf_device_map = {"model": 0, "lm_head": 1}
    assert static_of("auto", spread) is None
    with pytest.raises(ValueError, match="static is 'fast': use one of auto, off, eager, graphs"):
        static_of("fast", model)
    with pytest.raises(ValueError, match="graphs, which need a CUDA device, not cpu"):
        HeadstartModel(model, None, static="graphs")


def test_a_loaded_model_and_its_draft_run_as_asked_and_write_the_same_text(tmp_path: Path) -> None:
    for name, seed in (("target", 0), ("draft", 1)):
        tiny_model(vocab=128, seed=seed).save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
    texts = []
    for static in ("off", "eager"):
        model = HeadstartModel.from_pretrained(
            str(tmp_path / "target"), f"draft:{tmp_path}/draft", dtype=torch.float32, static=static
        )
        assert isinstance(model.drafter, DraftModelDrafter)
        assert model.target.static == model.drafter.draft.static == (None if static == "off" else static)
        texts.append(model.generate(torch.tensor([[5, 9, 2]]), max_new_tokens=20, eos_token_id=None, pad_token_id=0))
    assert torch.equal(*texts)


# --- caches are made large enough -------------------------------------------------------------------------------------


def drafters(draft: CausalLM) -> dict[str, Drafter]:
    lookup = PromptLookupDrafter(3)
    return {
        "chain": DraftModelDrafter(draft, 4),
        "draft tree": DraftTreeDrafter(draft, depth=3, width=2, nodes=7),
        "cascade": CascadeDrafter(draft, nearly(draft), 4, 2),
        "lookup beside a chain that seldom drafts": HybridDrafter(DraftModelDrafter(draft, 2), lookup, 9.0),
    }


@pytest.mark.parametrize("static", [None, "eager"])
@pytest.mark.parametrize("own", [True, False], ids=["accepted", "refused"])
def test_no_cache_grows_in_the_life_of_a_text(
    static: str | None, own: bool, monkeypatch: pytest.MonkeyPatch, tiny_llama: CausalLM
) -> None:
    """Rows of a batch lack different numbers of tokens;
    padding of one row must not make the buffers of all rows grow.
    """
    grown: list[int] = []
    monkeypatch.setattr(PreallocatedCache, "_grow", lambda cache, needed: grown.append(needed))
    draft = CausalLM(tiny_llama.model if own else tiny_model("llama", seed=1), static=static)
    plain = Engine(tiny_llama).decode(PROMPTS, DecodingConfig(30), batch_size=3)
    for name, drafter in drafters(draft).items():
        texts = Engine(tiny_llama.with_static(static), drafter).decode(PROMPTS, DecodingConfig(30), batch_size=3)
        assert [text.tokens for text in texts] == [text.tokens for text in plain], name
        assert not grown, name


def test_padding_without_room_goes_to_a_position_that_is_nobodys(tiny_llama: CausalLM) -> None:
    """A row at the end of the buffers is next to a row that appends a long block."""
    for capacity in (9, 64):
        cache = tiny_llama.new_cache(capacity, 2)
        tiny_llama.prefill([[3, 1, 4, 1, 5, 9, 2], [6]], cache)
        logits = tiny_llama.append([[5], [3, 5, 8, 9]], cache).logits
        assert cache.lengths == [8, 5] and cache.capacity == capacity
        alone = [
            tiny_llama.prefill([text], tiny_llama.new_cache(16)).logits[0]
            for text in ([3, 1, 4, 1, 5, 9, 2, 5], [6, 3, 5, 8, 9])
        ]
        torch.testing.assert_close(logits, torch.stack(alone), rtol=0, atol=1e-5)
        again = tiny_llama.append([[7], [7]], cache).logits  # the keys of the first row are unchanged
        expected = tiny_llama.prefill([[3, 1, 4, 1, 5, 9, 2, 5, 7]], tiny_llama.new_cache(16)).logits[0]
        torch.testing.assert_close(again[0], expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", ["mistral", "gpt2"])
def test_long_blocks_of_a_ragged_batch_are_appended_in_pieces(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished rows run a dummy token that leaves no trace, and keep the outputs of their last token."""
    monkeypatch.setattr("decoding.model.dynamic._APPENDED_TOKENS", 12)
    model = CausalLM(tiny_model(family))
    texts = [[place % 16 for place in range(17)], [7, 9, 2], [(place * place) % 16 for place in range(9)]]
    held = [3, 2, 1]
    whole, cache = model.new_cache(32, 3), model.new_cache(32, 3)
    expected = model.prefill(texts, whole)
    model.prefill([text[:count] for text, count in zip(texts, held, strict=True)], cache)
    masks: list[tuple[int, ...]] = []
    handle = model.model.register_forward_pre_hook(
        lambda module, args, named: masks.append(tuple(named["attention_mask"].shape)), with_kwargs=True
    )
    found = model.append([text[count:] for text, count in zip(texts, held, strict=True)], cache)
    handle.remove()
    assert [mask[:3] for mask in masks] == [(3, 1, 4), (3, 1, 4), (3, 1, 4), (3, 1, 2)]
    assert cache.lengths == [17, 3, 9]
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=2e-5)
    torch.testing.assert_close(found.hidden, expected.hidden, rtol=0, atol=2e-5)
    nexts = [model.step(torch.tensor([4, 5, 6]), each).logits for each in (cache, whole)]
    torch.testing.assert_close(*nexts, rtol=0, atol=2e-5)
