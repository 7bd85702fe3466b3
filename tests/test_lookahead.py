"""Lookahead decoding: its window and pool beside a naive Jacobi iteration, and the loop with it."""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafter_checks import (
    accept_some,
    check_bounds,
    check_budgets,
    opened,
    paths,
    request,
)
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import full_forward

from decoding.drafters import LookaheadDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.proposal import Proposal
from decoding.rules.sampling import SamplingConfig


def target_logits(target: CausalLM, text: Sequence[int], proposal: Proposal) -> torch.Tensor:
    """What the target says at every node, each path run by itself as a plain text."""
    tree = proposal.tree
    texts = [[*text, *(tree.token_list[at] for at in tree.shape.path(node))] for node in range(len(tree))]
    return torch.stack([full_forward(target.model, whole)[-1] for whole in texts])


def test_the_pool_of_a_target_that_counts_fills_with_counting(counting: CausalLM) -> None:
    session = opened(LookaheadDrafter(6, 4, 5, text_ngrams=False), counting, prompt_length=4)
    text = [0, 7, 0, 7, 8]
    for _ in range(5):
        (proposal,) = session.propose([request(text)])
        logits = target_logits(counting, text, proposal)
        session.observe([proposal], [logits])
        text.append(int(logits[0].argmax()))
    # The window began as 0s and 7s. A column's three levels are filled after three steps, so that the third closes
    # 0 1 2 3 and 7 8 9 10, the fourth 1 2 3 4 and 8 9 10 11, the fifth 2 3 4 5 and 9 10 11 12.
    for first in (0, 1, 2, 7, 8, 9):
        (proposal,) = session.propose([request([*text, first])])
        assert tuple(range(first + 1, first + 4)) in paths(proposal.tree)
    (proposal,) = session.propose([request([*text, 4])])
    assert (5,) not in paths(proposal.tree), "no n-gram begins with 4 yet"


def test_whole_ngrams_are_accepted_once_the_pool_knows_the_text(counting: CausalLM) -> None:
    for text_ngrams in (True, False):
        generation = Engine(counting, LookaheadDrafter(6, 4, 5, text_ngrams)).decode([0, 7, 0, 7], DecodingConfig(64))
        assert [step.accepted for step in generation.steps[-5:-1]] == [3, 3, 3, 3]
        assert len(generation.steps) < 64 / 2.5


def test_text_that_repeats_itself_is_accepted_from_the_text_alone(tiny_llama: CausalLM) -> None:
    repeating = [2, 9, 4, 11] * 4
    session = opened(LookaheadDrafter(1, 4, 3), tiny_llama, prompt_length=16)
    assert (4, 11, 2) in paths(session.propose([request([*repeating, 2, 9])])[0].tree)
    silent = opened(LookaheadDrafter(1, 4, 3, text_ngrams=False), tiny_llama, prompt_length=16)
    assert (4, 11, 2) not in paths(silent.propose([request([*repeating, 2, 9])])[0].tree)


def test_the_window_runs_beside_the_guesses_and_shares_nodes_with_them(tiny_llama: CausalLM) -> None:
    # Five tokens of prompt as the first window: all columns read on in the same text, so they are one line.
    session = opened(LookaheadDrafter(3, 4, 2), tiny_llama, prompt_length=5)
    (proposal,) = session.propose([request([1, 2, 3, 4, 5, 9])])
    assert proposal.tree.token_list == [9, 2, 3, 4, 5]
    assert proposal.tree.shape.is_chain


@given(seed=st.integers(0, 2**32 - 1), sizes=st.sampled_from([(4, 4, 3), (1, 2, 1), (6, 3, 4), (2, 5, 7)]))
def test_a_tree_stays_within_its_bounds(tiny_llama: CausalLM, seed: int, sizes: tuple[int, int, int]) -> None:
    check_bounds(LookaheadDrafter(*sizes), tiny_llama, SamplingConfig(), seed)


@given(seed=st.integers(0, 2**32 - 1))
def test_no_budget_is_smaller_than_what_it_lets_through(tiny_llama: CausalLM, seed: int) -> None:
    drafter = LookaheadDrafter(4, 4, 6)
    chance = random.Random(seed)
    session = opened(drafter, tiny_llama, prompt_length=3)
    text = [chance.randrange(16) for _ in range(4)]
    for _ in range(8):
        budget = chance.choice(drafter.budgets)
        (proposal,) = session.propose([request(text, budget.depth, budget.nodes)])
        assert proposal.tree.shape.max_depth <= budget.depth and len(proposal.tree) <= budget.nodes
        session.observe([proposal], [torch.randn(len(proposal.tree), 16)])
        text += accept_some(proposal, chance)


def test_budgets_count_columns_and_their_share_of_the_guesses() -> None:
    # One column of N = 4: two nodes behind the root, and 2 of 6 guesses of 3 nodes each.
    assert LookaheadDrafter(3, 4, 6).budgets == (Budget(3, 9), Budget(3, 18), Budget(4, 27))
    for sizes in ((15, 5, 15), (1, 2, 1), (7, 2, 3), (2, 6, 9)):
        check_budgets(LookaheadDrafter(*sizes))


def test_where_the_text_has_little_room_only_guesses_are_run_and_they_are_cut(tiny_llama: CausalLM) -> None:
    session = opened(LookaheadDrafter(3, 5, 2), tiny_llama, prompt_length=4)
    text = [6, 1, 2, 3, 4, 5, 8, 6]
    (proposal,) = session.propose([request(text, depth=2)])
    assert paths(proposal.tree) == {(1,), (1, 2)}, "a window of depth 3 at least does not fit"


def test_the_latest_guess_gets_the_nodes_where_they_are_few(tiny_llama: CausalLM) -> None:
    session = opened(LookaheadDrafter(1, 3, 2), tiny_llama, prompt_length=2)
    text = [6, 1, 2, 6, 3, 4, 6, 5, 7, 6]
    for nodes, wanted in ((3, {(5,), (5, 7)}), (5, {(5,), (5, 7), (3,), (3, 4)})):
        (proposal,) = session.propose([request(text, depth=2, nodes=nodes)])
        assert paths(proposal.tree) == wanted, "6 1 2 is no more in a pool of two for each first token"


def test_logits_of_a_tree_it_did_not_draft_are_not_read(tiny_llama: CausalLM) -> None:
    session = opened(LookaheadDrafter(3, 3, 2), tiny_llama, prompt_length=2)
    (proposal,) = session.propose([request([1, 2, 3])])
    session.observe([Proposal.root_only(3)], [torch.zeros(1, 16)])
    assert paths(session.propose([request([1, 2, 3])])[0].tree) == paths(proposal.tree)


def test_drafted_tokens_are_accepted_and_refused(tiny_llama: CausalLM) -> None:
    steps = Engine(tiny_llama, LookaheadDrafter(4, 4, 4)).decode([1, 2, 3], DecodingConfig(60)).steps
    assert 0 < sum(step.accepted for step in steps) < sum(step.drafted for step in steps)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"window": 0}, "window is 0 and guesses 15: give at least 1 of each"),
        ({"guesses": 0}, "window is 15 and guesses 0: give at least 1 of each"),
        ({"ngram": 1}, "ngram is 1: give at least 2"),
    ],
)
def test_settings_that_draft_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LookaheadDrafter(**settings)
