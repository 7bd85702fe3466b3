"""A draft with a sliding window: it drafts by its forward over the whole text, and holds only the end of it."""

import random
from pathlib import Path

import pytest
import torch
from distilling import objective_for
from drafter_checks import accept_some, request
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples
from tiny_models import full_forward, naive_greedy, tiny_model
from tiny_training import tiny_tokenizer
from torch import Tensor

from decoding.drafters import DraftModelDrafter, DraftTreeDrafter
from decoding.drafters.base import TextStart
from decoding.drafters.draft_state import DraftState
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.lm_head import lm_head_input
from decoding.model.loading import load_draft
from decoding.model.windowed import with_window
from decoding.rules.drawing import GeneratorSource
from decoding.rules.sampling import SamplingConfig
from trainer.data.batch import Example, collate
from trainer.drafts.start import write_draft
from trainer.servers.speculator import Speculator, SpeculatorName

WINDOW = 6
LONG = 240
"""Tokens of a text; the tiny models' contexts hold 96."""
FAMILIES = ["llama", "qwen2", "qwen3"]
SAMPLED = SamplingConfig(1.0)


def windowed(family: str = "llama", window: int = WINDOW, static: str | None = None, **changes: object) -> CausalLM:
    return CausalLM(with_window(tiny_model(family, seed=3, **changes), window), static=static)


@torch.inference_mode()
def by_a_band(draft: CausalLM, text: list[int], window: int) -> Tensor:
    """Return the logits after a text by one forward over all of it, with a band for a mask that is written out here."""
    place = torch.arange(len(text))
    distance = place[:, None] - place
    mask = torch.zeros(1, 1, len(text), len(text))
    mask.masked_fill_((distance < 0) | (distance >= window), torch.finfo(mask.dtype).min)
    kinds = draft.windows()
    given = dict.fromkeys(kinds, mask) if len(kinds) > 1 else mask
    logits: Tensor = draft.model(torch.tensor([text]), attention_mask=given, use_cache=False).logits[0, -1]
    return logits


@examples(8)
@given(family=st.sampled_from(FAMILIES), static=st.sampled_from([None, "eager"]), seed=st.integers(0, 2**32 - 1))
def test_each_q_is_that_of_a_band_over_the_whole_text(family: str, static: str | None, seed: int) -> None:
    """Three rows of prompts of any length, trees, tokens that no draft wrote, steps without drafts, a row moved."""
    chance, target = random.Random(seed), CausalLM(tiny_model("llama"))
    draft = windowed(family, static=static)
    session = DraftModelDrafter(draft, 3).open(target, SAMPLED, 3, LONG)
    texts = [[chance.randrange(16) for _ in range(chance.choice([1, 4, 30, 150]))] for _ in range(3)]
    for slot in range(3):
        session.admit(slot, TextStart(1, GeneratorSource.from_seed(seed + slot)))
    for step in range(8):
        if step == 5:
            session.move(2, 0)
            texts = [texts[2], texts[1]]
        for text, proposal in zip(texts, session.propose([request(text) for text in texts]), strict=True):
            assert proposal.q is not None
            for node, children in enumerate(proposal.tree.shape.children):
                if children:
                    path = [proposal.tree.token_list[at] for at in proposal.tree.shape.path(node)]
                    wanted = by_a_band(draft, [*text, *path], WINDOW).softmax(-1)
                    torch.testing.assert_close(proposal.q[node], wanted, rtol=0, atol=2e-5)
            text += accept_some(proposal, chance) + [1, 2, 3][: chance.choice([0, 0, 3])]


@pytest.mark.parametrize(("static", "room"), [(None, 2 * WINDOW + 5 + 1), ("eager", 256)])
def test_the_cache_holds_two_windows_and_a_tree_however_long_the_text(static: str | None, room: int) -> None:
    """One position takes padding. A step of fixed shapes reads 256 at least, and rows hold no more for it."""
    target, draft = CausalLM(tiny_model("llama", max_position_embeddings=9000)), windowed(static=static)
    sizes = []
    for length in (40, 400, 4000):
        state = DraftState(draft, target, SamplingConfig(), 1, length + 100, 5)
        state.admit(0, TextStart(1, GeneratorSource.from_seed(0)))
        text = [i % 16 for i in range(length)]
        for _ in range(40):
            state.catch_up([text])
            assert state.cache.lengths[0] + state.cache.dropped[0] == len(text)
            assert state.cache.lengths[0] <= 2 * WINDOW + 5 + 1
            text += [1, 2]
        sizes.append(state.cache.capacity)
    assert sizes == [room] * 3


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_draft_with_a_window_drafts_for_texts_longer_than_its_context(attention: str) -> None:
    model = tiny_model("llama", max_position_embeddings=300)
    target, draft = CausalLM(model), windowed(attention=attention)
    assert (draft.max_positions, draft.max_text, draft.window) == (96, None, WINDOW)
    prompts = [[i % 13 for i in range(120)], [3, 1, 4]]
    for drafter in (DraftModelDrafter(draft, 3), DraftTreeDrafter(draft, 3, 2, 6)):
        results = Engine(target, drafter).decode(prompts, DecodingConfig(max_new_tokens=24), batch_size=2)
        assert [result.tokens for result in results] == [naive_greedy(model, prompt, 24) for prompt in prompts]


@pytest.mark.parametrize(
    ("family", "changes", "context"),
    [
        ("llama", {}, 96),
        ("gpt2", {}, 96),
        ("mistral", {}, None),
        ("mistral", {"sliding_window": 97}, 96),
        ("mistral", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, 96),
    ],
)
def test_a_context_ends_where_a_layer_sees_the_whole_text_or_positions_are_not_only_distances(
    family: str, changes: dict[str, object], context: int | None
) -> None:
    draft, target = CausalLM(tiny_model(family, **changes)), CausalLM(tiny_model("llama"))
    assert draft.max_text == context
    if context is not None:
        with pytest.raises(ValueError, match=r"may grow to 97 tokens.* context of 96: .* or a draft with a window"):
            DraftModelDrafter(draft).open(target, SamplingConfig(), 1, 97)


def test_a_speculator_is_diagnosed_on_texts_as_long_as_its_drafter_follows() -> None:
    for draft, longest in ((CausalLM(tiny_model("llama")), 96), (windowed(), None)):
        assert Speculator(SpeculatorName("draft", "a/folder", None), draft).max_positions == longest


def test_the_window_shares_the_weights_and_comes_back_from_a_folder(tmp_path: Path) -> None:
    whole = tiny_model("llama", tie_word_embeddings=True, vocab=16)
    draft = with_window(whole, 7)
    assert draft.config.model_type == "mistral" and draft.config.sliding_window == 7
    assert not {"attention_bias", "mlp_bias", "pretraining_tp"} & draft.config.to_dict().keys()
    assert {id(parameter) for parameter in draft.parameters()} == {id(parameter) for parameter in whole.parameters()}
    write_draft(CausalLM(draft), tiny_tokenizer(), tmp_path)
    again = load_draft(str(tmp_path), CausalLM(whole), None)
    text = [i % 16 for i in range(50)]
    assert again.window == 7 and torch.equal(full_forward(again.model, text), full_forward(draft, text))


def test_a_draft_is_trained_through_the_window_that_it_drafts_by() -> None:
    """Its states at each trained token, where the losses read them, are those of a band over the text."""
    text = tuple(7 * i * i % 16 for i in range(40))
    batch = collate([Example(text, (True,) * 40, 0), Example(text[:25], (True,) * 25, 0)])
    for family in FAMILIES:
        objective = objective_for(tiny_model(family), init={"from_target": {"layers": [0, 1]}}, window=WINDOW)
        (inputs,) = objective.inputs(batch, step=0)
        states = lm_head_input(objective.module.draft.eval(), inputs.model_inputs)
        logits = objective.module.draft.get_output_embeddings()(states)
        draft = objective.writing_draft()
        assert draft.window == WINDOW
        for row, length in ((0, 40), (1, 25)):
            for end in range(1, length + 1):
                wanted = by_a_band(draft, list(text[:end]), WINDOW)
                torch.testing.assert_close(logits[row, end - 1], wanted, rtol=0, atol=2e-4)
