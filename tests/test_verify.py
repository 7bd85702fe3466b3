"""Every lossless rule, proved by enumerating each outcome of drafting and verifying."""

import pytest
import torch
from enumeration import (
    LOSSLESS,
    LOSSY,
    MODELS,
    ContextModel,
    Draft,
    EnumeratingSource,
    contexts,
    deterministic_draft,
    distance_from_target,
    distribution,
    model_pair,
    sampled_draft,
    target_rows,
    top_tokens,
)
from torch import Tensor

from decoding.proposal import Proposal, ProposalKind
from decoding.sampling import RandomSource
from decoding.tree import TokenTree, TreeShape
from decoding.verify import (
    GREEDY,
    RECURSIVE_REJECTION,
    TOKEN_REJECTION,
    TOP_K_CHILDREN,
    Rule,
    Verdict,
    lossless_rule,
    typical_acceptance,
)

WITH = ProposalKind.SAMPLED
WITHOUT = ProposalKind.SAMPLED_WITHOUT_REPLACEMENT
DETERMINISTIC = ProposalKind.DETERMINISTIC

# Parents of each node. The second numbers its nodes depth first, so that siblings do not stand together.
TREES = {
    "two children": (-1, 0, 0),
    "depth first": (-1, 0, 1, 0, 3),
    "one long branch": (-1, 0, 0, 2, 3),
    "three children, one grown": (-1, 0, 0, 0, 1),
}


# --- lossless rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("models", [*MODELS, "p = q"])
@pytest.mark.parametrize(("vocab", "length", "seeds"), [(5, 1, 12), (4, 2, 6), (3, 3, 4)])
def test_token_rejection_emits_the_targets_distribution(models: str, vocab: int, length: int, seeds: int) -> None:
    for seed in range(seeds):
        p, q = model_pair(models, vocab, length, seed)
        draft = sampled_draft(TreeShape.chain(length), q, WITH)
        assert distance_from_target(draft, TOKEN_REJECTION, p, length + 1) < LOSSLESS


@pytest.mark.parametrize("models", [*MODELS, "p = q"])
@pytest.mark.parametrize("kind", [WITH, WITHOUT])
@pytest.mark.parametrize("tree", TREES)
def test_recursive_rejection_emits_the_targets_distribution(tree: str, kind: ProposalKind, models: str) -> None:
    shape = TreeShape(TREES[tree])
    for seed in range(12 if shape.max_depth == 1 else 3):
        p, q = model_pair(models, 3, shape.max_depth, seed)
        draft = sampled_draft(shape, q, kind)
        assert distance_from_target(draft, RECURSIVE_REJECTION, p, shape.max_depth + 1) < LOSSLESS


@pytest.mark.parametrize("models", ["dense", "zeros"])
@pytest.mark.parametrize("kind", [WITH, WITHOUT])
def test_recursive_rejection_is_lossless_with_four_tokens_and_three_children(kind: ProposalKind, models: str) -> None:
    for seed in range(3):
        p, q = model_pair(models, 4, 1, seed)
        draft = sampled_draft(TreeShape((-1, 0, 0, 0)), q, kind)
        assert distance_from_target(draft, RECURSIVE_REJECTION, p, 2) < LOSSLESS


@pytest.mark.parametrize("models", [*MODELS, "p = q"])
@pytest.mark.parametrize("parents", [(-1, 0, 1, 2), (-1, 0, 0, 1, 1, 2), (-1, 0, 1, 0, 3, 3)])
def test_top_k_children_emit_the_targets_distribution(parents: tuple[int, ...], models: str) -> None:
    shape = TreeShape(parents)
    for seed in range(8):
        p, q = model_pair(models, 4, shape.max_depth, seed)
        draft = deterministic_draft(shape, top_tokens(q))
        assert distance_from_target(draft, TOP_K_CHILDREN, p, shape.max_depth + 1) < LOSSLESS


def test_top_k_children_stay_lossless_with_duplicate_children() -> None:
    p, _ = model_pair("dense", 3, 2, seed=0)
    draft = deterministic_draft(TreeShape((-1, 0, 0, 1, 2)), lambda context, count: [1] * count)
    assert distance_from_target(draft, TOP_K_CHILDREN, p, 3) < LOSSLESS


@pytest.mark.parametrize("kind", [WITH, WITHOUT])
def test_greedy_writes_the_argmax_whatever_was_drafted(kind: ProposalKind) -> None:
    shape = TreeShape(TREES["depth first"])
    for seed in range(3):
        p, q = model_pair("one-hot target", 3, 2, seed)
        assert distance_from_target(sampled_draft(shape, q, kind), GREEDY, p, 3) < LOSSLESS
        assert distance_from_target(deterministic_draft(shape, top_tokens(q)), GREEDY, p, 3) < LOSSLESS


def test_greedy_takes_the_lowest_index_on_ties() -> None:
    proposal = Proposal(TokenTree.chain([0, 2]), DETERMINISTIC)
    scores = torch.tensor([[0.0, 5.0, 5.0], [1.0, 0.0, 0.0]])
    assert GREEDY(proposal, scores, EnumeratingSource()) == Verdict((), 1)


def test_greedy_follows_the_tree_to_its_leaf_and_writes_one_more() -> None:
    # Root 9 -> {4, 5}; 5 -> {6}. The target wants 5, then 6, then 7.
    proposal = Proposal(TokenTree(torch.tensor([9, 4, 5, 6]), TreeShape((-1, 0, 0, 2))), DETERMINISTIC)
    scores = torch.eye(10)[[5, 0, 6, 7]]
    assert GREEDY(proposal, scores, EnumeratingSource()) == Verdict((2, 3), 7)


def test_a_tree_without_draft_is_plain_sampling() -> None:
    p = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    proposal = Proposal.root_only(0)
    verdicts = distribution(lambda source: lossless_rule(proposal)(proposal, p, source))
    assert verdicts == {Verdict((), 0): 0.5, Verdict((), 1): 0.25, Verdict((), 2): 0.25}


# --- acceptance -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("models", [*MODELS, "p = q"])
def test_token_rejection_accepts_the_overlap_of_p_and_q(models: str) -> None:
    for seed in range(5):
        p, q = model_pair(models, 4, 1, seed)
        draft = sampled_draft(TreeShape.chain(1), q, WITH)

        def accepted(source: RandomSource, draft: Draft = draft, p: ContextModel = p) -> int:
            proposal = draft(source)
            return len(TOKEN_REJECTION(proposal, target_rows(proposal.tree, p), source).path)

        overlap = float(torch.minimum(p(()), q(())).sum())
        assert distribution(accepted).get(1, 0.0) == pytest.approx(overlap, abs=LOSSLESS)


def test_token_rejection_by_hand() -> None:
    # q always drafts 0, p gives it 1/4: kept in a quarter of cases, else 1 or 2 in proportion 2 : 1.
    p = torch.tensor([[0.25, 0.5, 0.25], [0.0, 0.0, 1.0]], dtype=torch.float64)
    proposal = Proposal(TokenTree.chain([0, 0]), WITH, torch.tensor([[1.0, 0.0, 0.0]], dtype=torch.float64))
    verdicts = distribution(lambda source: TOKEN_REJECTION(proposal, p, source))
    assert verdicts == pytest.approx({Verdict((1,), 2): 0.25, Verdict((), 1): 0.5, Verdict((), 2): 0.25})


@pytest.mark.parametrize("kind", [WITH, WITHOUT])
def test_on_a_chain_recursive_rejection_is_token_rejection_outcome_by_outcome(kind: ProposalKind) -> None:
    for seed in range(4):
        p, q = model_pair("mixed", 3, 2, seed)
        proposals = distribution_of_proposals(TreeShape.chain(2), q)
        for tokens, rows in proposals:
            tree = TokenTree.chain(tokens)
            targets = target_rows(tree, p)
            as_chain, as_tree = Proposal(tree, WITH, rows), Proposal(tree, kind, rows)
            by_token = distribution(lambda source, x=as_chain, t=targets: TOKEN_REJECTION(x, t, source))
            by_tree = distribution(lambda source, x=as_tree, t=targets: RECURSIVE_REJECTION(x, t, source))
            assert by_tree == pytest.approx(by_token, abs=LOSSLESS)


def distribution_of_proposals(shape: TreeShape, q: ContextModel) -> list[tuple[list[int], Tensor]]:
    """Every chain q can draft, with its rows of q."""
    draft = sampled_draft(shape, q, WITH)
    chains = distribution(lambda source: tuple(draft(source).tree.token_list))
    return [
        (list(tokens), torch.stack([q(context) for context in contexts(TokenTree.chain(list(tokens)))[:-1]]))
        for tokens in chains
    ]


def sequential_top_k(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    """The published form: try each child with its p, after a refusal zero it and renormalise."""
    tree, path, node = proposal.tree, [], 0
    while True:
        p_now, accepted = p[node].clone(), None
        for child in tree.shape.children[node]:
            token = tree.token_list[child]
            if source.accept(float(p_now[token])):
                accepted = child
                break
            p_now[token] = 0
            p_now /= p_now.sum()
        if accepted is None:
            return Verdict(tuple(path), source.draw(p_now))
        path.append(accepted)
        node = accepted


@pytest.mark.parametrize("order", ["best first", "worst first"])
def test_one_draw_per_node_has_the_verdicts_of_trying_each_child_in_turn(order: str) -> None:
    shape = TreeShape((-1, 0, 0, 1, 1, 2, 3))
    for seed in range(8):
        p, q = model_pair("dense" if seed % 2 else "zeros", 4, 3, seed)
        best = top_tokens(q)
        draft = deterministic_draft(
            shape, best if order == "best first" else lambda context, count, best=best: best(context, count)[::-1]
        )
        proposal = draft(EnumeratingSource())
        rows = target_rows(proposal.tree, p)
        assert distribution(lambda source, x=proposal, t=rows: TOP_K_CHILDREN(x, t, source)) == pytest.approx(
            distribution(lambda source, x=proposal, t=rows: sequential_top_k(x, t, source)), abs=LOSSLESS
        )


# --- refusals -------------------------------------------------------------------------------------------------------


def proposal_of(kind: ProposalKind, parents: tuple[int, ...] = (-1, 0)) -> Proposal:
    shape = TreeShape(parents)
    q = None if kind is DETERMINISTIC else torch.full((len(shape), 3), 1 / 3)
    return Proposal(TokenTree(torch.zeros(len(shape), dtype=torch.long), shape), kind, q)


@pytest.mark.parametrize(
    ("rule", "kind"),
    [
        (TOKEN_REJECTION, DETERMINISTIC),
        (TOKEN_REJECTION, WITHOUT),
        (RECURSIVE_REJECTION, DETERMINISTIC),
        (TOP_K_CHILDREN, WITH),
        (TOP_K_CHILDREN, WITHOUT),
    ],
)
def test_a_rule_refuses_a_kind_it_was_not_derived_for(rule: Rule, kind: ProposalKind) -> None:
    with pytest.raises(ValueError, match=f"{rule.name} rule takes .* proposals, not {kind.value} ones"):
        rule(proposal_of(kind), torch.full((2, 3), 1 / 3), EnumeratingSource())


def test_token_rejection_refuses_a_tree() -> None:
    with pytest.raises(ValueError, match="takes chains; use recursive rejection"):
        TOKEN_REJECTION(proposal_of(WITH, (-1, 0, 0)), torch.full((3, 3), 1 / 3), EnumeratingSource())


def test_a_sampled_proposal_without_q_cannot_be_made_nor_a_deterministic_one_with_q() -> None:
    tree = TokenTree.chain([0, 1])
    with pytest.raises(ValueError, match="a sampled proposal needs q"):
        Proposal(tree, WITH)
    with pytest.raises(ValueError, match="a deterministic proposal carries no q"):
        Proposal(tree, DETERMINISTIC, torch.ones(1, 3))


def test_a_token_whose_recorded_q_is_zero_is_our_own_bug() -> None:
    tree, q = TokenTree.chain([0, 1]), torch.tensor([[1.0, 0.0]])
    p = torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    for rule in (TOKEN_REJECTION, RECURSIVE_REJECTION):
        with pytest.raises(AssertionError, match="q = 0"):
            rule(Proposal(tree, WITH, q), p, EnumeratingSource())


def test_the_rule_that_fits_is_chosen_by_kind_and_shape() -> None:
    assert lossless_rule(proposal_of(DETERMINISTIC, (-1, 0, 0))) is TOP_K_CHILDREN
    assert lossless_rule(proposal_of(WITH, (-1, 0, 1))) is TOKEN_REJECTION
    assert lossless_rule(proposal_of(WITH, (-1, 0, 0))) is RECURSIVE_REJECTION
    assert lossless_rule(proposal_of(WITHOUT, (-1, 0, 1))) is RECURSIVE_REJECTION
    assert all(rule.label == "lossless" for rule in (GREEDY, TOKEN_REJECTION, RECURSIVE_REJECTION, TOP_K_CHILDREN))


# --- typical acceptance ---------------------------------------------------------------------------------------------


def test_typical_acceptance_is_labelled_lossy_and_is() -> None:
    rule = typical_acceptance()
    assert rule.label == "lossy" and not rule.lossless
    p, q = model_pair("dense", 3, 1, seed=0)
    assert distance_from_target(deterministic_draft(TreeShape((-1, 0)), top_tokens(q)), rule, p, 2) > LOSSY


@pytest.mark.parametrize(
    ("row", "kept"),
    [
        # Entropy 0: the threshold is min(0.09, 0.3) = 0.09.
        ([1.0, 0.0, 0.0, 0.0], [0]),
        # Entropy ln 4: the threshold is min(0.09, 0.3 / 4) = 0.075.
        ([0.25, 0.25, 0.25, 0.25], [0, 1, 2, 3]),
        # Entropy 0.4 ln(1/0.4) + 0.52 ln(1/0.52) + 0.08 ln(1/0.08) = 0.909: 0.3 exp(-0.909) = 0.1209, so 0.09.
        ([0.4, 0.52, 0.08, 0.0], [0, 1]),
    ],
)
def test_typical_acceptance_keeps_what_is_above_the_threshold(row: list[float], kept: list[int]) -> None:
    rows = torch.tensor([row, [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    for token in range(4):
        proposal = Proposal(TokenTree.chain([0, token]), DETERMINISTIC)
        lengths = {
            len(verdict.path)
            for verdict in distribution(lambda source, x=proposal: typical_acceptance()(x, rows, source))
        }
        assert lengths == {int(token in kept)}


def test_typical_acceptance_is_strict_at_the_threshold() -> None:
    rows = torch.tensor([[0.5, 0.5], [1.0, 0.0]], dtype=torch.float64)
    proposal = Proposal(TokenTree.chain([0, 1]), DETERMINISTIC)
    # The entropy is ln 2, so the threshold is min(epsilon, delta / 2).
    at = typical_acceptance(epsilon=0.5, delta=100.0)(proposal, rows, EnumeratingSource())
    below = typical_acceptance(epsilon=0.49, delta=100.0)(proposal, rows, EnumeratingSource())
    assert (at.path, below.path) == ((), (1,))


def test_typical_acceptance_keeps_the_longest_path_and_breaks_ties_by_likelihood() -> None:
    # Root -> {0, 1, 2}, 0 -> {0}, 1 -> {1}; every token is above the threshold. Two paths of length 2:
    # 0.5 * 0.5 = 0.25 and 0.3 * 0.9 = 0.27.
    tree = TokenTree(torch.tensor([0, 0, 1, 2, 0, 1]), TreeShape((-1, 0, 0, 0, 1, 2)))
    rows = torch.tensor(
        [[0.5, 0.3, 0.2], [0.5, 0.25, 0.25], [0.0, 0.9, 0.1], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 0.0, 1.0]],
        dtype=torch.float64,
    )
    verdict = typical_acceptance()(Proposal(tree, DETERMINISTIC), rows, EnumeratingSource())
    assert verdict == Verdict((2, 5), 2)


def test_typical_acceptance_always_writes_a_token_of_the_target() -> None:
    # Nothing drafted is likely enough: the root stays, and the target writes from p after it.
    rows = torch.tensor([[0.0, 0.25, 0.75], [1.0, 0.0, 0.0]], dtype=torch.float64)
    proposal = Proposal(TokenTree.chain([0, 0]), DETERMINISTIC)
    verdicts = distribution(lambda source: typical_acceptance()(proposal, rows, source))
    assert verdicts == {Verdict((), 1): 0.25, Verdict((), 2): 0.75}
