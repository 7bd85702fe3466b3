"""Two drafters in one tree: what is grafted, the kind of the proposal, how both sessions follow the text, and that
decoding is lossless.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch
from drafter_checks import opened, paths, request
from enumerated_rules import LOSSY
from scripted_drafters import ScriptedDrafter
from torch import Tensor

from decoding.drafters import HybridDrafter, PromptLookupDrafter
from decoding.drafters.base import DraftRequest
from decoding.drafters.hybrid import graft
from decoding.measure.proof.enumeration import (
    LOSSLESS,
    SHAPES,
    Context,
    ContextModel,
    Draft,
    distance_from_target,
    grafted_draft,
    model_pair,
    outcomes,
    sampled_draft,
    shapes_unchecked,
    target_rows,
)
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.drawing import RandomSource
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal, ProposalKind, TokenTree, TreeShape
from decoding.rules.verify import Verdict, lossless_rule

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
    tree = grafted.tree
    assert tree.token_list == [ROOT, 5, 6, 7, 8, 2]
    assert tree.shape.parents == (-1, 0, 0, 1, 2, 4)
    assert paths(tree) == paths(first.tree) | paths(lookup.tree)
    assert grafted.kind is ProposalKind.DETERMINISTIC


def test_duplicates_drawn_with_replacement_stay_and_the_graft_goes_on_behind_the_first_of_them() -> None:
    first = sampled((0, 0, 1), (5, 5, 3))
    grafted = graft(first, deterministic((0, 1), (5, 4)))
    tree = grafted.tree
    assert (tree.token_list, tree.shape.parents) == ([ROOT, 5, 5, 3, 4], (-1, 0, 0, 1, 1))
    assert grafted.kind is ProposalKind.GRAFTED and grafted.q is first.q
    assert grafted.drawn == (4, ProposalKind.SAMPLED)


@pytest.mark.parametrize(
    ("first", "token", "kind"),
    [
        (deterministic((0,), (5,)), 6, ProposalKind.DETERMINISTIC),
        (sampled((0,), (5,)), 6, ProposalKind.GRAFTED),
        (sampled((0,), (5,)), 5, ProposalKind.GRAFTED),
    ],
)
def test_the_graft_is_deterministic_only_if_both_are(first: Proposal, token: int, kind: ProposalKind) -> None:
    assert graft(first, deterministic((0,), (token,))).kind is kind


# --- if the first drafter drafts ------------------------------------------------------------------------------------


class Wrong(ScriptedDrafter):
    """Drafter of token 15 that counts its drafts; with the kind sampled, it claims a q with all mass on this token."""

    name = "wrong"
    rough_cost = 0.4

    def __init__(self) -> None:
        super().__init__()
        self.drafts = 0

    def propose(self, request: DraftRequest) -> Proposal:
        self.drafts += 1
        return Proposal(TokenTree.chain([request.tokens[-1], 15]), ProposalKind.DETERMINISTIC)


def follow_text(drafter: HybridDrafter, target: CausalLM, text: Sequence[int], begin: int) -> list[tuple[int, int]]:
    """Propose along a text, in steps of the accepted tokens and one more; return (place, nodes) of each proposal."""
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
    # A few steps each until there are results for no match, short and long matches, and then one match of seventeen.
    assert wrong.drafts < 12 + len(steps) / 17


# --- losslessness of grafted trees: every outcome of drafting, choosing and verifying enumerated ----------------------


WITHOUT = ProposalKind.SAMPLED_WITHOUT_REPLACEMENT


def by_its_rule(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    return lossless_rule(proposal)(proposal, p, source)


@pytest.mark.parametrize("models", ["dense", "zeros", "mixed"])
@pytest.mark.parametrize("shape", ["chain of 2", "two children", "one long branch"])
@pytest.mark.parametrize("kind", [ProposalKind.SAMPLED, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT])
def test_a_looked_up_branch_beside_drawn_ones_is_lossless(models: str, shape: str, kind: ProposalKind) -> None:
    for seed in range(3):
        p, q = model_pair(models, 3, 3, seed)
        draft = grafted_draft(sampled_draft(SHAPES[shape], q, kind), (1, 2))
        assert distance_from_target(draft, by_its_rule, p, 4) < LOSSLESS


def test_q_must_not_be_kept_where_the_lookup_happens_to_add_nothing() -> None:
    """If q is dropped only when the lookup adds a node, it is wrong;
    q may be dropped only for all draws of a context.
    """
    p, q = model_pair("dense", 3, 2, 0)
    drawn = sampled_draft(SHAPES["chain of 2"], q, ProposalKind.SAMPLED)

    def mutant(source: RandomSource) -> Proposal:
        first = drawn(source)
        grafted = graft(first, Proposal(TokenTree.chain([0, 1]), ProposalKind.DETERMINISTIC))
        return first if len(grafted.tree) == len(first.tree) else Proposal(grafted.tree, ProposalKind.DETERMINISTIC)

    assert distance_from_target(mutant, by_its_rule, p, 3) > LOSSY


def test_grafted_children_must_not_be_verified_as_drawn_ones() -> None:
    """If p - q has mass on the grafted token and on another, the grafted token would be kept too often."""
    lossy = []
    for seed in range(12):
        p, q = model_pair("dense", 3, 2, seed)
        honest = grafted_draft(sampled_draft(SHAPES["chain of 2"], q, ProposalKind.SAMPLED), (1,))

        def mutant(source: RandomSource, honest: Draft = honest) -> Proposal:
            proposal = honest(source)
            return Proposal(proposal.tree, ProposalKind.SAMPLED, proposal.q)

        assert distance_from_target(honest, by_its_rule, p, 3) < LOSSLESS
        lossy.append(distance_from_target(mutant, by_its_rule, p, 3) > LOSSY)
    assert any(lossy)


# --- turns of the drafter itself --------------------------------------------------------------------------------------

PROMPT = [1, 1, 0]
DRAWN_SHAPES = {"chain": (ProposalKind.SAMPLED, (-1, 0, 1)), "tree": (WITHOUT, (-1, 0, 0, 1))}


class Drawing(ScriptedDrafter):
    """Drafter that draws a tree from q after each text, by the choices of ``source``; it ``hides`` some of the drawn
    trees.
    """

    rough_cost = 0.7
    budgets = (Budget(1, 3), Budget(2, 4))

    def __init__(
        self, source: RandomSource, q: ContextModel, shape: str, hides: Callable[[Proposal], bool] | None = None
    ) -> None:
        super().__init__()
        self._source, self._q, self._hides = source, q, hides
        self._kind, parents = DRAWN_SHAPES[shape]
        self._shape = TreeShape(parents)
        self.depths: list[int] = []
        """Depth of the tree drawn in each step; 0 if the hybrid did not request one."""

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return frozenset({self._kind})

    def propose(self, request: DraftRequest) -> Proposal:
        depths = self._shape.depths
        shape = self._shape.keep([node for node, depth in enumerate(depths) if depth <= request.max_depth])
        after = self._q.after(tuple(request.tokens[len(PROMPT) :]))
        proposal = sampled_draft(shape, after, self._kind)(self._source)
        root = torch.tensor([request.tokens[-1]])
        proposal = Proposal(
            TokenTree(torch.cat([root, proposal.tree.tokens[1:]]), proposal.tree.shape), proposal.kind, proposal.q
        )
        self.depths[-1] = proposal.tree.shape.max_depth
        return Proposal.root_only(request.tokens[-1]) if self._hides and self._hides(proposal) else proposal


def distance_of_texts(
    target: CausalLM, models: str, shape: str, hides: Callable[[Proposal], bool] | None = None, length: int = 4
) -> tuple[float, set[tuple[int, ...]]]:
    """Enumerate whole texts of ``length`` tokens over a vocabulary of three, by a hybrid that chooses at every step.

    Returns the distance from the texts of p, and for each text the depths of the trees drawn in its steps.
    """
    p, q = model_pair(models, 3, length, 0)
    asked: set[tuple[int, ...]] = set()

    def program(source: RandomSource) -> Context:
        first = Drawing(source, q, shape, hides)
        drafter = HybridDrafter(first, PromptLookupDrafter(2, branches=2))
        session, written = opened(drafter, target, SamplingConfig(1.0), len(PROMPT)), list[int]()
        while (room := length - len(written) - 1) > 0:
            first.depths.append(0)
            (proposal,) = session.propose([request([*PROMPT, *written], min(room, 2))])
            tree = proposal.tree
            verdict = by_its_rule(proposal, target_rows(tree, p.after(tuple(written))), source)
            written += [*(tree.token_list[node] for node in verdict.path), verdict.token]
        asked.add(tuple(first.depths))
        return tuple(written)

    emitted: dict[Context, float] = defaultdict(float)
    with shapes_unchecked():
        for text, probability in outcomes(program):
            emitted[text] += probability
    completed, wanted = p.completed(emitted, length), p.joint(length)
    return max(abs(completed.get(text, 0.0) - probability) for text, probability in wanted.items()), asked


@pytest.mark.parametrize(
    ("models", "shape", "length"), [("dense", "chain", 5), ("dense", "tree", 4), ("mixed", "tree", 5)]
)
def test_a_hybrid_that_chooses_at_every_step_is_lossless(
    tiny_llama: CausalLM, models: str, shape: str, length: int
) -> None:
    """With only three tokens, a looked-up child equals a drawn one in many outcomes."""
    distance, depths = distance_of_texts(tiny_llama, models, shape, length=length)
    assert distance < LOSSLESS
    assert shape == "tree" or any(0 in steps for steps in depths), "after drafts that added nothing none is asked for"


def test_the_enumeration_catches_a_draw_that_is_hidden_for_its_token(tiny_llama: CausalLM) -> None:
    distance, _ = distance_of_texts(tiny_llama, "dense", "chain", lambda drawn: drawn.tree.token_list[1] == 1)
    assert distance > LOSSY
