"""Where a draft model's drafting ends: tokens it does not know, caches it shares, targets it does not fit."""

from collections.abc import Sequence

import pytest
import torch
from drafter_checks import PROMPTS, opened, request
from tiny_models import full_forward, naive_greedy, tiny_model
from torch import Tensor

from decoding.drafters import CascadeDrafter, Drafter, DraftModelDrafter, DraftTreeDrafter, PromptLookupDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig

KNOWN = 12
"""Tokens of the small draft; the target knows 16."""


@pytest.fixture(scope="module")
def small_draft() -> CausalLM:
    return CausalLM(tiny_model("llama", vocab=KNOWN, seed=2))


class OnlyLateTokens:
    """Forbids every token below 12 in texts whose length is in ``where`` modulo 5."""

    def __init__(self, where: Sequence[int]) -> None:
        self._where = where

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if input_ids.shape[1] % 5 not in self._where:
            return scores
        return scores.index_fill(1, torch.arange(KNOWN), -torch.inf)


def controls(*where: int, temperature: float = 1.0) -> SamplingConfig:
    return SamplingConfig(temperature, processors=(OnlyLateTokens(where),))


def drafters(draft: CausalLM) -> dict[str, Drafter]:
    return {
        "chain": DraftModelDrafter(draft, (1,) * 4),
        "chain that stops early": DraftModelDrafter(draft, (1,) * 4, stop_below=0.01),
        "tree without replacement": DraftModelDrafter(draft, (2, 2, 2)),
        "tree with replacement": DraftModelDrafter(draft, (2, 2, 2), with_replacement=True),
        "draft tree": DraftTreeDrafter(draft, 3, 2, 7),
        "cascade": CascadeDrafter(draft, PromptLookupDrafter(3), 4),
    }


NAMES = list(drafters(None))  # type: ignore[arg-type]  # only its names

# --- tokens the draft does not know ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_that_knows_no_token_allowed_drafts_nothing(
    tiny_llama: CausalLM, small_draft: CausalLM, name: str
) -> None:
    session = opened(drafters(small_draft)[name], tiny_llama, controls(0, 1, 2, 3, 4))
    (proposal,) = session.propose([request([1, 2, 3, 1, 2])])
    assert proposal.tree.token_list == [2]


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_ends_at_the_node_behind_which_it_knows_no_token_allowed(
    tiny_llama: CausalLM, small_draft: CausalLM, name: str
) -> None:
    session = opened(drafters(small_draft)[name], tiny_llama, controls(2), rows=2)
    # Behind five tokens it may draft two, the second row behind six one: no text of seven tokens is followed.
    for texts in ([[1, 2, 3, 1, 2], [4, 4, 4, 4, 4, 4]], [[1, 2, 3, 1, 2, 5], [4, 4, 4, 4, 4, 4, 4]]):
        proposals = session.propose([request(text) for text in texts])
        assert [proposal.tree.shape.max_depth for proposal in proposals] == [7 - len(text) for text in texts]
        for proposal in proposals:
            assert proposal.q is None or not bool(proposal.q[: len({*proposal.tree.shape.parents[1:]})].isnan().any())


# --- drafts that do not fit -----------------------------------------------------------------------------------------


def trimmed(*output_tokens: int) -> CausalLM:
    """A draft whose lm_head writes these tokens alone."""
    model = tiny_model("llama", seed=1)
    head = torch.nn.Linear(model.config.hidden_size, len(output_tokens), bias=False)
    model.set_output_embeddings(head)
    return CausalLM(model, torch.tensor(output_tokens))


@pytest.mark.parametrize("name", ["chain", "draft tree", "cascade"])
def test_a_trimmed_draft_that_writes_tokens_the_target_lacks_is_refused_at_once(
    tiny_llama: CausalLM, name: str
) -> None:
    drafter = drafters(trimmed(1, 2, 3, 16))[name]
    with pytest.raises(ValueError, match="lm_head writes token 16 but the target knows 0 to 15: give a draft"):
        drafter.open(tiny_llama, SamplingConfig(), 1, 20)


def test_more_children_than_a_trimmed_draft_can_write_are_refused(tiny_llama: CausalLM) -> None:
    draft = trimmed(1, 2, 3)
    with pytest.raises(ValueError, match="width is 4 but target and draft share 3 tokens"):
        DraftTreeDrafter(draft, 2, 4, 9).open(tiny_llama, SamplingConfig(), 1, 20)
    with pytest.raises(ValueError, match=r"branching is \[4\] but target and draft share 3 tokens"):
        DraftModelDrafter(draft, (4,)).open(tiny_llama, SamplingConfig(), 1, 20)


@pytest.mark.parametrize("name", NAMES)
def test_a_text_longer_than_the_drafts_context_is_refused_before_it_begins(tiny_llama: CausalLM, name: str) -> None:
    drafter = drafters(CausalLM(tiny_model("llama", max_position_embeddings=8)))[name]
    with pytest.raises(ValueError, match="may grow to 12 tokens but the draft's context holds 8"):
        drafter.open(tiny_llama, SamplingConfig(), 1, 12)


def test_a_cascade_checks_its_inner_drafter_too(tiny_llama: CausalLM, tiny_draft: CausalLM) -> None:
    inner = CascadeDrafter(CausalLM(tiny_model("llama", max_position_embeddings=8)), PromptLookupDrafter(3))
    with pytest.raises(ValueError, match="may grow to 12 tokens but the draft's context holds 8"):
        CascadeDrafter(tiny_draft, inner).open(tiny_llama, SamplingConfig(), 1, 12)


# --- the draft's cache ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["chain", "tree without replacement", "draft tree", "cascade"])
def test_a_drafts_cache_has_room_for_its_trees_to_the_texts_end(
    tiny_llama: CausalLM, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def grow(cache: PreallocatedCache, needed: int) -> None:
        pytest.fail(f"a cache of {cache.capacity} positions has to grow to {needed}")

    monkeypatch.setattr(PreallocatedCache, "_grow", grow)
    texts = Engine(tiny_llama, drafters(tiny_llama)[name]).decode(PROMPTS, DecodingConfig(12), batch_size=3)
    assert texts[0].tokens == naive_greedy(tiny_llama.model, PROMPTS[0], 12)


def test_a_cascade_that_was_not_asked_for_long_pays_for_the_logits_of_its_tree_alone(
    tiny_llama: CausalLM, tiny_draft: CausalLM
) -> None:
    session = opened(CascadeDrafter(tiny_draft, PromptLookupDrafter(3), 3), tiny_llama)
    session.propose([request([1, 2, 3])])
    widths: list[int] = []
    lm_head = tiny_draft.model.get_output_embeddings()
    handle = lm_head.register_forward_hook(lambda module, args, output: widths.append(output.shape[1]))
    text = [1, 2, 3, *[4, 7, 9, 0, 5] * 6]
    try:
        (proposal,) = session.propose([request(text)])
    finally:
        handle.remove()
    assert max(widths) <= 4, "three guesses and the root"
    assert proposal.tree.token_list[1] == int(full_forward(tiny_draft.model, text)[-1].argmax())
