"""Two drafters in one tree: what is grafted, what kind it is, and that both sessions keep up."""

from collections.abc import Sequence

import pytest
import torch
from drafter_checks import opened, paths, request
from scripted_drafters import ScriptedDrafter
from torch import Tensor

from decoding.drafters import HybridDrafter, PromptLookupDrafter
from decoding.drafters.base import DraftRequest
from decoding.drafters.hybrid import graft
from decoding.model.causal_lm import CausalLM
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree, TreeShape

SAMPLED = SamplingConfig(1.0)
ROOT = 9


def tree_of(parents: Sequence[int], tokens: Sequence[int]) -> TokenTree:
    return TokenTree(torch.tensor([ROOT, *tokens]), TreeShape((-1, *parents)))


def deterministic(parents: Sequence[int], tokens: Sequence[int]) -> Proposal:
    return Proposal(tree_of(parents, tokens), ProposalKind.DETERMINISTIC)


def sampled(parents: Sequence[int], tokens: Sequence[int]) -> Proposal:
    return Proposal(tree_of(parents, tokens), ProposalKind.SAMPLED, torch.full((len({*parents}), 16), 1 / 16))


# --- grafting -------------------------------------------------------------------------------------------------------


def test_what_both_draft_is_one_node_and_the_rest_stands_behind_the_first_tree() -> None:
    first = deterministic((0, 0, 1), (5, 6, 7))
    lookup = deterministic((0, 1, 2, 0, 4), (6, 8, 2, 5, 7))
    grafted = graft(first, lookup)
    tree = grafted.proposal.tree
    assert tree.token_list == [ROOT, 5, 6, 7, 8, 2]
    assert tree.shape.parents == (-1, 0, 0, 1, 2, 4)
    assert paths(tree) == paths(first.tree) | paths(lookup.tree)
    assert grafted.nodes == ([0, 1, 2, 3], [0, 2, 4, 5, 1, 3])
    assert grafted.proposal.kind is ProposalKind.DETERMINISTIC


def test_duplicates_drawn_with_replacement_stay_and_the_graft_goes_on_behind_the_first_of_them() -> None:
    first = sampled((0, 0, 1), (5, 5, 3))
    grafted = graft(first, deterministic((0, 1), (5, 4)))
    tree = grafted.proposal.tree
    assert (tree.token_list, tree.shape.parents) == ([ROOT, 5, 5, 3, 4], (-1, 0, 0, 1, 1))
    assert grafted.proposal.kind is ProposalKind.GRAFTED and grafted.proposal.q is first.q
    assert grafted.proposal.drawn == (4, ProposalKind.SAMPLED)


@pytest.mark.parametrize(
    ("first", "lookup", "kind"),
    [
        (deterministic((0,), (5,)), deterministic((0,), (6,)), ProposalKind.DETERMINISTIC),
        (sampled((0,), (5,)), deterministic((0,), (6,)), ProposalKind.GRAFTED),
        (sampled((0,), (5,)), deterministic((0,), (5,)), ProposalKind.GRAFTED),
        (deterministic((0,), (5,)), sampled((0,), (6,)), ProposalKind.MIXED),
        (sampled((0,), (5,)), sampled((0,), (6,)), ProposalKind.MIXED),
    ],
)
def test_the_graft_is_deterministic_only_if_both_are_and_mixed_where_both_drew(
    first: Proposal, lookup: Proposal, kind: ProposalKind
) -> None:
    assert graft(first, lookup).proposal.kind is kind


# --- sessions -------------------------------------------------------------------------------------------------------


class Listening(ScriptedDrafter):
    """Keeps what it is told."""

    def __init__(self, *script: tuple[Sequence[int], Sequence[int]]) -> None:
        super().__init__(*script)
        self.heard: list[tuple[Proposal, Tensor]] = []

    def observe(self, proposal: Proposal, logits: Tensor) -> None:
        self.heard.append((proposal, logits))


def test_each_session_is_told_what_the_target_said_at_its_own_nodes(tiny_llama: CausalLM) -> None:
    first, lookup = Listening(((0, 0), (5, 6))), Listening(((0, 1), (6, 8)))
    session = opened(HybridDrafter(first, lookup), tiny_llama)
    (proposal,) = session.propose([request([ROOT])])
    assert proposal.tree.token_list == [ROOT, 5, 6, 8]
    session.observe([proposal], [torch.arange(4.0)[:, None].expand(4, 16)])
    for listener, tokens, nodes in ((first, [ROOT, 5, 6], [0, 1, 2]), (lookup, [ROOT, 6, 8], [0, 2, 3])):
        ((own, logits),) = listener.heard
        assert own.tree.token_list == tokens and logits[:, 0].tolist() == nodes


# --- if the first drafter drafts ------------------------------------------------------------------------------------


class Wrong(ScriptedDrafter):
    """Drafts token 15 and counts its drafts; ``kind`` sampled says that it was drawn from a q of that token alone."""

    name = "wrong"
    rough_cost = 0.4

    def __init__(self) -> None:
        super().__init__()
        self.drafts = 0

    def propose(self, request: DraftRequest) -> Proposal:
        self.drafts += 1
        return Proposal(TokenTree.chain([request.tokens[-1], 15]), ProposalKind.DETERMINISTIC)


def follow_text(drafter: HybridDrafter, target: CausalLM, text: Sequence[int], begin: int) -> list[tuple[int, int]]:
    """Propose along a text, one step of the accepted tokens and one more after the other: (place, nodes) of each."""
    session, steps, place = opened(drafter, target), [], begin
    while place < len(text):
        (proposal,) = session.propose([request(text[:place])])
        steps.append((place, len(proposal.tree)))
        place += 1 + len(proposal.tree.follow(text[place:]))
    return steps


def test_a_first_drafter_that_adds_nothing_is_asked_less_and_less(tiny_llama: CausalLM) -> None:
    text = [place % 7 for place in range(400)]
    wrong, always = Wrong(), Wrong()
    steps = follow_text(HybridDrafter(wrong, PromptLookupDrafter(3)), tiny_llama, text, 1)
    assert len(follow_text(HybridDrafter(always, PromptLookupDrafter(3), 0), tiny_llama, text, 1)) == len(steps)
    assert always.drafts == len(steps) > 90
    # A few steps each until no match, short ones and long ones have told, then one of seventeen.
    assert wrong.drafts < 12 + len(steps) / 17
