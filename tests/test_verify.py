"""Every lossless rule, proved by enumerating each outcome of drafting and verifying."""

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from enumerated_rules import LOSSY, distribution, enumerated
from hypothesis_profiles import few
from jaxtyping import TypeCheckError
from torch import Tensor

import decoding.rules.verify
from decoding.measure.proof.enumeration import (
    ALL_MODELS,
    CHAINS,
    LOSSLESS,
    SHAPES,
    TREES,
    ContextModel,
    Draft,
    EnumeratingSource,
    contexts,
    deterministic_draft,
    distance_from_target,
    draft_of,
    model_pair,
    outcomes,
    prove_rule,
    sampled_draft,
    shapes_unchecked,
    target_rows,
    top_tokens,
    verdicts,
)
from decoding.rules.drawing import RandomSource
from decoding.rules.tree import DrawnPart, Proposal, ProposalKind, TokenTree, TreeShape
from decoding.rules.verify import (
    BLOCK_VERIFICATION,
    GREEDY,
    RECURSIVE_REJECTION,
    RULES,
    SAMPLED_VERIFY,
    TOKEN_REJECTION,
    TOP_K_CHILDREN,
    TRAVERSAL_VERIFICATION,
    Decide,
    Rule,
    Verdict,
    lossless_rule,
    typical_acceptance,
)

WITH = ProposalKind.SAMPLED
WITHOUT = ProposalKind.SAMPLED_WITHOUT_REPLACEMENT
DETERMINISTIC = ProposalKind.DETERMINISTIC
GRAFTED = ProposalKind.GRAFTED

# The promise of each rule: the kinds for which it is lossless, and whether it accepts trees.
FITS = {
    "token": ({WITH}, False),
    "block": ({WITH, DETERMINISTIC}, False),
    "recursive": ({WITH, WITHOUT, GRAFTED}, True),
    "traversal": ({WITH, WITHOUT, GRAFTED, DETERMINISTIC}, True),
    "top-k": ({DETERMINISTIC}, True),
    "sampled-verify": ({WITH, WITHOUT, GRAFTED, DETERMINISTIC}, True),
}
CASES = [
    pytest.param(name, kind, shape, id=f"{name}, {kind.value}, {shape}")
    for name, (kinds, takes_trees) in FITS.items()
    for kind in sorted(kinds, key=lambda kind: kind.value)
    for shape in (SHAPES if takes_trees else ["chain of 2"])  # rules for chains are rules for trees
]


# --- lossless rules -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "kind", "shape"), CASES)
def test_a_lossless_rule_emits_the_targets_distribution(rule: str, kind: ProposalKind, shape: str) -> None:
    for models in ALL_MODELS:
        assert enumerated(rule, kind, shape, models, 0).distance < LOSSLESS, models


@pytest.mark.parametrize("models", ["dense", "zeros"])
@pytest.mark.parametrize("kind", [WITH, WITHOUT, DETERMINISTIC])
def test_the_default_rule_is_lossless_with_more_tokens_and_children(kind: ProposalKind, models: str) -> None:
    for parents in [(-1, 0), (-1, 0, 0, 0)]:
        p, q = model_pair(models, 4, 1, seed=0)
        assert distance_from_target(draft_of(kind, TreeShape(parents), q), default_rule, p, 2) < LOSSLESS


def default_rule(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    return lossless_rule(proposal)(proposal, p, source)


@pytest.mark.parametrize("rule", [SAMPLED_VERIFY, TOP_K_CHILDREN, TRAVERSAL_VERIFICATION])
@pytest.mark.parametrize("tokens", [[1, 1, 1], [2, 1, 2], [0, 2, 0]])
def test_duplicate_siblings_do_no_harm(rule: Rule, tokens: list[int]) -> None:
    for models in ("dense", "one-hot target"):
        p, _ = model_pair(models, 3, 2, seed=0)
        draft = deterministic_draft(TreeShape((-1, 0, 0, 0, 1, 2, 3)), lambda context, count: tokens[:count])
        assert distance_from_target(draft, rule, p, 3) < LOSSLESS


@pytest.mark.parametrize("rule", [SAMPLED_VERIFY, TOP_K_CHILDREN, TRAVERSAL_VERIFICATION, BLOCK_VERIFICATION])
def test_a_drafted_token_the_target_rules_out_is_never_kept(rule: Rule) -> None:
    # In fp32, where 1/3 and 2/3 are rounded. Token 0 has probability 0 but is drafted.
    proposal = Proposal(TokenTree.chain([0, 0, 1]), DETERMINISTIC)
    rows = torch.tensor([[0.0, 1 / 3, 2 / 3]] * 3)
    assert {verdict.path for verdict in distribution(lambda source: rule(proposal, rows, source))} == {()}


@pytest.mark.parametrize("rule", [TOKEN_REJECTION, BLOCK_VERIFICATION, RECURSIVE_REJECTION, TRAVERSAL_VERIFICATION])
def test_a_draft_equal_to_the_target_up_to_rounding_is_always_answered(rule: Rule) -> None:
    # Ratios are a little below 1, so a token may be rejected although nothing is left of p - q.
    q = torch.tensor([[0.5, 0.5], [0.5, 0.5]])
    rows = torch.tensor([[0.5, 0.5 - 2**-25], [0.5, 0.5 - 2**-25], [1.0, 0.0]])
    proposal = Proposal(TokenTree.chain([0, 1, 1]), WITH, q)
    total = sum(chance for _, chance in outcomes(lambda source: rule(proposal, rows, source)))
    assert total == pytest.approx(1, abs=LOSSLESS)
    assert rule(proposal, rows, EnumeratingSource((0, 0, 0, 0))).token in (0, 1)


# --- greedy ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [WITH, WITHOUT])
def test_greedy_writes_the_argmax_whatever_was_drafted(kind: ProposalKind) -> None:
    shape = TreeShape(TREES["depth first"])
    for seed in range(3):
        p, q = model_pair("one-hot target", 3, 2, seed)
        assert distance_from_target(sampled_draft(shape, q, kind), GREEDY, p, 3) < LOSSLESS
        assert distance_from_target(deterministic_draft(shape, top_tokens(q)), GREEDY, p, 3) < LOSSLESS


# --- refusals -------------------------------------------------------------------------------------------------------


def proposal_of(kind: ProposalKind, parents: tuple[int, ...] = (-1, 0)) -> Proposal:
    shape = TreeShape(parents)
    q = torch.full((len({*parents[1:]}), 3), 1 / 3) if kind.has_q else None
    drawn = DrawnPart(len(shape), WITH) if kind is GRAFTED else None
    return Proposal(TokenTree(torch.zeros(len(shape), dtype=torch.long), shape), kind, q, drawn)


@pytest.mark.parametrize(
    ("name", "kind"), [(name, kind) for name, (kinds, _) in FITS.items() for kind in ProposalKind if kind not in kinds]
)
def test_a_rule_refuses_a_kind_it_was_not_derived_for(name: str, kind: ProposalKind) -> None:
    with pytest.raises(ValueError, match=f"{RULES[name].name} rule takes .* proposals, not {kind.value} proposals"):
        RULES[name](proposal_of(kind), torch.full((2, 3), 1 / 3), EnumeratingSource())


@pytest.mark.parametrize("rule", [TOKEN_REJECTION, BLOCK_VERIFICATION])
def test_a_chain_rule_refuses_a_tree(rule: Rule) -> None:
    with pytest.raises(ValueError, match="takes chains only: use traversal verification"):
        rule(proposal_of(WITH, (-1, 0, 0)), torch.full((3, 3), 1 / 3), EnumeratingSource())


@pytest.mark.parametrize("kind", ProposalKind)
def test_only_a_proposal_with_draws_of_one_draft_carries_q_and_it_must(kind: ProposalKind) -> None:
    q = None if kind in (WITH, WITHOUT, GRAFTED) else torch.ones(1, 3)
    with pytest.raises(ValueError, match=f"a {kind.value} proposal {'needs' if q is None else 'must not carry'} q"):
        Proposal(TokenTree.chain([0, 1]), kind, q)


@pytest.mark.parametrize("rule", [TOKEN_REJECTION, RECURSIVE_REJECTION, BLOCK_VERIFICATION, TRAVERSAL_VERIFICATION])
@pytest.mark.parametrize("target", [[1.0, 0.0], [0.5, 0.5]])
def test_a_token_whose_recorded_q_is_zero_is_our_own_bug(rule: Rule, target: list[float]) -> None:
    proposal = Proposal(TokenTree.chain([0, 1]), WITH, torch.tensor([[1.0, 0.0]]))
    with pytest.raises(AssertionError, match="q = 0"):
        rule(proposal, torch.tensor([target, target]), EnumeratingSource())


@pytest.mark.parametrize(
    ("kind", "parents", "rule"),
    [
        (DETERMINISTIC, (-1, 0, 1), SAMPLED_VERIFY),
        (DETERMINISTIC, (-1, 0, 0), SAMPLED_VERIFY),
        (WITH, (-1, 0, 1), BLOCK_VERIFICATION),
        (WITH, (-1, 0, 0), TRAVERSAL_VERIFICATION),
        (WITHOUT, (-1, 0, 1), TRAVERSAL_VERIFICATION),
        (WITHOUT, (-1, 0, 0), TRAVERSAL_VERIFICATION),
        (GRAFTED, (-1, 0, 1), TRAVERSAL_VERIFICATION),
    ],
)
def test_the_rule_that_fits_is_chosen_by_kind_and_shape(
    kind: ProposalKind, parents: tuple[int, ...], rule: Rule
) -> None:
    assert lossless_rule(proposal_of(kind, parents)) is rule


# --- typical acceptance ---------------------------------------------------------------------------------------------


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


# --- how much is accepted --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("models", ALL_MODELS)
def test_one_token_is_accepted_with_the_probability_each_rule_promises(models: str) -> None:
    for seed in range(5):
        p, q = model_pair(models, 4, 1, seed)
        drawn = sampled_draft(TreeShape.chain(1), q, WITH)
        overlap = float(torch.minimum(p(()), q(())).sum())
        for rule in (TOKEN_REJECTION, BLOCK_VERIFICATION, RECURSIVE_REJECTION, TRAVERSAL_VERIFICATION):
            assert length_of(drawn, rule, p) == pytest.approx(overlap, abs=LOSSLESS)
        assert length_of(drawn, SAMPLED_VERIFY, p) == pytest.approx(float(p(()) @ q(())), abs=LOSSLESS)
        best_two = deterministic_draft(TreeShape((-1, 0, 0)), top_tokens(q))
        of_set = float(p(())[top_tokens(q)((), 2)].sum())
        for rule in (SAMPLED_VERIFY, TOP_K_CHILDREN, TRAVERSAL_VERIFICATION):
            assert length_of(best_two, rule, p) == pytest.approx(of_set, abs=LOSSLESS)


def length_of(draft: Draft, rule: Rule, p: ContextModel) -> float:
    return sum(len(verdict.path) * probability for _, verdict, probability in verdicts(draft, rule, p))


def test_the_block_papers_own_example() -> None:
    # p = (1/3, 2/3) and q = (2/3, 1/3) in every context: token rejection keeps 2/3 + (2/3)**2 = 10/9 of two tokens.
    every = [(), (0,), (1,), (0, 0), (0, 1), (1, 0), (1, 1)]
    p = ContextModel({context: torch.tensor([1.0, 2.0], dtype=torch.float64) / 3 for context in every})
    q = ContextModel({context: torch.tensor([2.0, 1.0], dtype=torch.float64) / 3 for context in every})
    draft = sampled_draft(TreeShape.chain(2), q, WITH)
    assert length_of(draft, TOKEN_REJECTION, p) == pytest.approx(10 / 9)
    assert length_of(draft, BLOCK_VERIFICATION, p) == pytest.approx(11 / 9)


# In each pair the second rule keeps at least as many tokens in expectation on every model, and more on some.
@pytest.mark.parametrize(
    ("fewer", "more"),
    [
        (("token", WITH), ("block", WITH)),
        (("recursive", WITH), ("traversal", WITH)),
        (("recursive", WITHOUT), ("traversal", WITHOUT)),
        (("recursive", WITH), ("recursive", WITHOUT)),
        (("traversal", WITH), ("traversal", WITHOUT)),
    ],
)
def test_one_rule_keeps_at_least_as_many_as_another(
    fewer: tuple[str, ProposalKind], more: tuple[str, ProposalKind]
) -> None:
    gains = length_differences(fewer, more, CHAINS if fewer[0] == "token" else TREES)
    assert min(gains) > -LOSSLESS and max(gains) > 0.01


def length_differences(
    one: tuple[str, ProposalKind], other: tuple[str, ProposalKind], shapes: dict[str, tuple[int, ...]]
) -> list[float]:
    """Return, by shape and models, the expected accepted length of the second rule and kind minus the length of the
    first.
    """
    return [
        enumerated(*other, shape, models, 0).accepted_length - enumerated(*one, shape, models, 0).accepted_length
        for shape in shapes
        for models in ALL_MODELS
    ]


# --- the rules next to one another -----------------------------------------------------------------------------------


def block_forwards(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    """Block verification as in its paper: every position is tested, and the last one that passes counts."""
    tokens, q = proposal.tree.token_list, proposal.q
    assert q is not None
    length, reach, kept, weights = len(tokens) - 1, 1.0, 0, (p[0] - q[0]).clamp(min=0)
    for position in range(1, length + 1):
        reach = min(1.0, reach * float(p[position - 1, tokens[position]] / q[position - 1, tokens[position]]))
        whole = position == length
        residual = p[position] if whole else (reach * p[position] - q[position]).clamp(min=0)
        left = float(residual.sum())
        share = reach if whole else 0.0 if left == 0 else left / (left + (1 - reach))
        if source.accept(share):
            kept, weights = position, residual
    return Verdict(tuple(range(1, kept + 1)), source.draw(weights if bool(weights.any()) else p[kept]))


def every_chain(q: ContextModel, length: int, kind: ProposalKind = WITH) -> list[Proposal]:
    """Return every chain that q can draft."""
    return [proposal for proposal, _ in outcomes(sampled_draft(TreeShape.chain(length), q, kind))]


@pytest.mark.parametrize(
    ("one", "other", "kind"),
    [
        (RECURSIVE_REJECTION, TOKEN_REJECTION, WITH),
        (TRAVERSAL_VERIFICATION, BLOCK_VERIFICATION, WITH),
        (BLOCK_VERIFICATION, block_forwards, WITH),
    ],
)
@pytest.mark.parametrize("models", ALL_MODELS)
def test_on_a_chain_two_rules_agree_outcome_by_outcome(one: Rule, other: Rule, kind: ProposalKind, models: str) -> None:
    p, q = model_pair(models, 3, 3, seed=0)
    for proposal in every_chain(q, 3, kind):
        rows = target_rows(proposal.tree, p)
        first, second = (
            distribution(lambda source, rule=rule, x=proposal, t=rows: rule(x, t, source)) for rule in (one, other)
        )
        assert positive(first) == pytest.approx(positive(second), abs=LOSSLESS)


def positive(found: dict[Verdict, float]) -> dict[Verdict, float]:
    """Drop outcomes that only rounding makes possible."""
    return {verdict: chance for verdict, chance in found.items() if chance > LOSSLESS}


CHAIN = (-1, 0, 1)
PAIR = (-1, 0, 0)
TREE = (-1, 0, 1, 0, 3)


class Mutant(NamedTuple):
    """A rule in whose source ``becomes`` replaces ``was`` in one function, and the drafts that show the difference."""

    rule: str
    function: str
    was: str
    becomes: str
    kind: ProposalKind
    parents: tuple[int, ...]
    models: str = "dense"


RECURSIVE, TRAVERSAL, CHILDREN = "recursive_rejection", "traversal_verification", "_children_with_q"
RATIO, UPDATE, RESIDUAL = (
    "mass[token] / q_now[token]",
    "mass, kept = residual.div_(rest), left / rest",
    "(mass - q_now)",
)
DESCEND, SHAPE = "Verdict(*proposal.tree.descend(best))", "proposal.tree.shape.children"
SHRUNK = RESIDUAL.replace("q_now", "q_now.index_fill(0, torch.tensor(token), 0) / (1 - q_now[token])")
LAST_CHILD = f"Verdict({SHAPE}[0][-1:], best[{SHAPE}[0][-1]])"
DRAW, INVERSE, ALONE = "source.draw(p[node])", "q_now[token] / p_now[token]", "mass[token] / kept / q_now[token]"
AT_ROOT = "Verdict(proposal.tree.descend(best)[0], best[0])"
MUTANTS = {name: Mutant(*rest) for name, *rest in [  # type: ignore[misc]
    ("token: no residual", "token", RECURSIVE, "p_now = residual", "pass", WITH, CHAIN),
    ("block: no residual", "block", TRAVERSAL, "source.draw(mass)", DRAW, WITH, CHAIN),
    ("p and q swapped", "recursive", RECURSIVE, "p_now[token] / q_now[token]", INVERSE, WITH, CHAIN),
    ("p and q swapped in the residual", "recursive", "_residual", "(p - q)", "(q - p)", WITHOUT, TREE),
    ("no residual", "recursive", RECURSIVE, "p_now = residual", "pass", WITHOUT, TREE),
    ("the residual for the children only", "recursive", RECURSIVE, "source.draw(p_now)", DRAW, WITH, TREE),
    ("the residual not normalised", "recursive", "_residual", "positive / total", "positive", WITHOUT, PAIR),
    ("q not shrunk", "recursive", CHILDREN, "q_now[drawn] = 0", "pass", WITHOUT, PAIR),
    ("q not normalised", "recursive", CHILDREN, "q_now / q_now.sum()", "q_now", WITHOUT, PAIR),
    ("q shrunk where it was not", "recursive", CHILDREN, "kind is ProposalKind.SAMPLED_WITHOUT_REPLACEMENT",
     "token_list[child] != drawn", WITH, PAIR),
    ("top-k: not renormalised", "top-k", "_residual", "positive / total", "positive", DETERMINISTIC, PAIR),
    ("top-k: a refused child not zeroed", "top-k", "_residual", "(p - q).clamp(min=0)", "p", DETERMINISTIC, PAIR),
    ("traversal: p and q swapped", "traversal", TRAVERSAL, RATIO, "q_now[token] / mass[token]", WITH, CHAIN),
    ("traversal: p and q swapped in the residual", "traversal", TRAVERSAL, RESIDUAL, "(q_now - mass)", WITH, CHAIN),
    ("traversal: no residual", "traversal", TRAVERSAL, "source.draw(mass)", DRAW, WITH, TREE),
    ("the parent not updated", "traversal", TRAVERSAL, UPDATE, "pass", WITH, TREE),
    ("p updated, but not A", "traversal", TRAVERSAL, UPDATE, "mass = residual * (kept / left)", WITH, TREE),
    ("A updated, but not p", "traversal", TRAVERSAL, UPDATE, "mass, kept = mass * (left / rest / kept), left / rest",
     WITH, TREE),
    ("S for S/(S + (1 - A))", "traversal", TRAVERSAL, "left + (1 - kept)", "1.0", WITH, TREE),
    ("the residual of p, not of A p", "traversal", TRAVERSAL, RESIDUAL, "(mass / kept - q_now)", WITH, TREE),
    ("a child weighed without its parent", "traversal", TRAVERSAL, RATIO, ALONE, WITH, TREE),
    ("A not cut at 1", "traversal", TRAVERSAL, "min(1.0, ratio)", "ratio", WITH, TREE),
    ("q updated before p and A", "traversal", TRAVERSAL, RESIDUAL, SHRUNK, WITHOUT, PAIR),
    ("traversal: q not shrunk", "traversal", CHILDREN, "q_now[drawn] = 0", "pass", WITHOUT, PAIR),
    ("a node with nothing left keeps its A", "traversal", TRAVERSAL, "kept = 0.0", "pass", WITHOUT, TREE, "zeros"),
    ("siblings' branches in reverse", "traversal", CHILDREN, f"in {SHAPE}[node]", f"in reversed({SHAPE}[node])",
     WITHOUT, PAIR),
    ("greedy: the root's token at a miss", "greedy", "greedy", DESCEND, AT_ROOT,
     WITH, TREE, "one-hot target"),
    ("greedy: the last child", "greedy", "greedy", DESCEND, LAST_CHILD, WITH, PAIR, "one-hot target"),
    ("a second draw at a miss", "sampled-verify", "sampled_verify", "Verdict(tuple(path), token)",
     "Verdict(tuple(path), source.draw(p[node]))", WITH, PAIR),
    ("from the parent's p", "sampled-verify", "sampled_verify", DRAW, "source.draw(p[max(node - 1, 0)])",
     WITH, CHAIN),
]}  # fmt: skip

SORTED = "sorted(proposal.tree.shape.children[node], key=lambda x: -float(proposal.q[node, token_list[x]]))"
MUTANTS |= {
    f"{rule}: siblings sorted by q, {kind.value}": Mutant(
        rule, "_children_with_q", "proposal.tree.shape.children[node]", SORTED, kind, PAIR
    )
    for rule in ("recursive", "traversal")
    for kind in (WITH, WITHOUT)
}


def mutated(mutant: Mutant) -> Decide:
    """Return the rule from a copy of `decoding.rules.verify` in which one place of one function is changed."""
    source = Path(str(decoding.rules.verify.__file__)).read_text()
    functions = {node.name: node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)}
    function = ast.get_source_segment(source, functions[mutant.function])
    assert function is not None and function.count(mutant.was) == 1, f"{mutant.function} has changed: see its mutants"
    copy = {"__name__": "decoding.rules.verify"}
    exec(source.replace(function, function.replace(mutant.was, mutant.becomes)), copy)
    rules: dict[str, Decide] = copy["RULES"]  # type: ignore[assignment]
    return rules[mutant.rule]


@cache
def distance(decide: Decide, kind: ProposalKind, parents: tuple[int, ...], models: str) -> float:
    """Return the distance from the target on one pair of models, chosen so that every mutant shows."""
    shape = TreeShape(parents)
    p, q = model_pair(models, 3, shape.max_depth, seed=3)
    return distance_from_target(draft_of(kind, shape, q), decide, p, shape.max_depth + 1)


@pytest.mark.parametrize("name", MUTANTS)
def test_the_enumeration_catches_a_rule_with_one_thing_wrong(name: str) -> None:
    mutant = MUTANTS[name]
    drafts = (mutant.kind, mutant.parents, mutant.models)
    assert distance(RULES[mutant.rule], *drafts) < LOSSLESS
    assert distance(mutated(mutant), *drafts) > LOSSY


def test_every_lossless_rule_has_mutants() -> None:
    assert {mutant.rule for mutant in MUTANTS.values()} == {name for name, rule in RULES.items() if rule.lossless}


# --- mistakes that are more than an edit ----------------------------------------------------------------------------


def stopping_at_the_first_failure(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    """Block verification tested forwards, up to the first prefix that fails."""
    tokens, q = proposal.tree.token_list, proposal.q
    assert q is not None
    kept, reach, residual = 0, 1.0, (p[0] - q[0]).clamp(min=0)
    for position in range(1, len(tokens)):
        reach = min(1.0, reach * float(p[position - 1, tokens[position]] / q[position - 1, tokens[position]]))
        whole = position == len(tokens) - 1
        after = p[position] if whole else (reach * p[position] - q[position]).clamp(min=0)
        left = float(after.sum())
        if not source.accept(reach if whole else left / (left + (1 - reach))):
            break
        kept, residual = position, after
    return Verdict(tuple(range(1, kept + 1)), source.draw(residual))


def a_draw_per_child(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    """Sampled verification that draws again for each child of a shared node."""
    tree, path, node = proposal.tree, [], 0
    while True:
        drawn = [source.draw(p[node]) for _ in tree.shape.children[node]] or [source.draw(p[node])]
        kept = [x for x, token in zip(tree.shape.children[node], drawn, strict=False) if tree.token_list[x] == token]
        if not kept:
            return Verdict(tuple(path), drawn[-1])
        node = kept[0]
        path.append(node)


def duplicates_skipped(rule: str) -> Decide:
    """Recursive rejection with replacement, in which a duplicate is skipped instead of rejected."""

    def decide(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
        tokens = list(dict.fromkeys(proposal.tree.token_list[1:]))
        tree = TokenTree(torch.tensor([proposal.tree.token_list[0], *tokens]), TreeShape((-1, *(0 for _ in tokens))))
        return RULES[rule](Proposal(tree, proposal.kind, proposal.q), p, source)

    return decide


@pytest.mark.parametrize(
    ("mutant", "kind", "parents"),
    [
        (stopping_at_the_first_failure, WITH, CHAIN),
        (a_draw_per_child, WITHOUT, PAIR),
        (a_draw_per_child, DETERMINISTIC, TREE),
        (duplicates_skipped("recursive"), WITH, PAIR),
        (duplicates_skipped("traversal"), WITH, PAIR),
    ],
)
def test_the_enumeration_catches_a_rule_that_is_built_wrong(
    mutant: Decide, kind: ProposalKind, parents: tuple[int, ...]
) -> None:
    assert distance(mutant, kind, parents, "dense") > LOSSY


@pytest.mark.parametrize("rule", ["recursive", "traversal"])
def test_the_enumeration_catches_a_softmax_q_for_a_deterministic_draft(rule: str) -> None:
    """The draft takes the argmax but is scored as if it had been sampled from the softmax."""
    p, q = model_pair("dense", 3, 2, seed=0)

    def decide(proposal: Proposal, rows: Tensor, source: RandomSource) -> Verdict:
        softmax = torch.stack([q(context) for context in contexts(proposal.tree)[:-1]])
        return RULES[rule](Proposal(proposal.tree, WITH, softmax), rows, source)

    assert distance_from_target(deterministic_draft(TreeShape(CHAIN), top_tokens(q)), decide, p, 3) > LOSSY


# --- uniforms of zero -----------------------------------------------------------------------------------------------


class CoarseSource:
    """A source of uniform numbers on a grid of 1/4: exact for probabilities in quarters, and often 0, which shows the
    effect of 0.
    """

    def __init__(self, source: RandomSource, strict: bool) -> None:
        self._source, self._strict = source, strict
        self.draw = source.draw

    def accept(self, probability: float) -> bool:
        uniform = self._source.draw(torch.ones(4)) / 4
        return uniform < probability if self._strict else uniform <= probability


def drawn_from(row: Tensor) -> Draft:
    return sampled_draft(TreeShape.chain(1), ContextModel({(): row}), WITH)


def always_zero(row: Tensor) -> Draft:
    return deterministic_draft(TreeShape.chain(1), lambda context, count: [0] * count)


# Block and traversal verification make no request if the probability is 0, so no source can mislead them.
@pytest.mark.parametrize(
    ("rule", "draft", "asks"),
    [
        ("recursive", drawn_from, True),
        ("top-k", always_zero, True),
        ("traversal", drawn_from, False),
        ("traversal", always_zero, False),
    ],
)
@pytest.mark.parametrize("strict", [True, False])
def test_a_uniform_of_zero_must_not_accept_a_token_of_probability_zero(
    rule: str, draft: Callable[[Tensor], Draft], asks: bool, strict: bool
) -> None:
    # The ratios p/q are 0, 2 and 1, in quarters, so that the strict test on a grid of quarters is exact.
    row = torch.tensor([0.0, 0.5, 0.5], dtype=torch.float64)
    p = ContextModel({(): row, (0,): row, (1,): row, (2,): row})

    def decide(proposal: Proposal, rows: Tensor, source: RandomSource) -> Verdict:
        return RULES[rule](proposal, rows, CoarseSource(source, strict))

    error = distance_from_target(draft(torch.tensor([0.25, 0.25, 0.5], dtype=torch.float64)), decide, p, 2)
    assert error > LOSSY if asks and not strict else error < LOSSLESS


def test_two_coins_have_four_outcomes() -> None:
    def program(source: RandomSource) -> tuple[bool, bool]:
        return source.accept(0.25), source.accept(0.5)

    assert distribution(program) == {
        (True, True): 0.125,
        (True, False): 0.125,
        (False, True): 0.375,
        (False, False): 0.375,
    }


def test_every_path_is_visited_once_and_the_probabilities_sum_to_one() -> None:
    def program(source: RandomSource) -> tuple[int, ...]:
        return tuple(source.draw(torch.ones(3)) for _ in range(4))

    visited = list(outcomes(program))
    assert len(visited) == len({result for result, _ in visited}) == 81
    assert sum(probability for _, probability in visited) == pytest.approx(1, abs=1e-12)


def test_a_nan_or_an_empty_draw_is_an_error_of_the_rule_under_test() -> None:
    with pytest.raises(AssertionError, match="NaN"):
        EnumeratingSource().accept(float("nan"))
    with pytest.raises(AssertionError, match="cannot draw"):
        EnumeratingSource().draw(torch.zeros(3))


def test_a_sampled_draft_is_distributed_as_q() -> None:
    q = ContextModel.random(3, 2, "mixed", torch.Generator().manual_seed(0))
    draft = sampled_draft(TreeShape.chain(2), q, ProposalKind.SAMPLED)
    drafted = distribution(lambda source: tuple(draft(source).tree.token_list[1:]))
    assert drafted == pytest.approx({path: chance for path, chance in q.joint(2).items() if chance > 0}, abs=1e-15)


def test_the_distance_is_that_of_the_emitted_text_from_the_target() -> None:
    # p writes 0 with probability 1/4 and 1 with 3/4; a "rule" that always writes 1 first is off by 1/4.
    row = torch.tensor([0.25, 0.75], dtype=torch.float64)
    p = ContextModel({(): row, (0,): row, (1,): row})
    draft = sampled_draft(TreeShape.chain(1), p, ProposalKind.SAMPLED)

    def always_one(proposal: Proposal, rows: torch.Tensor, source: RandomSource) -> Verdict:
        return Verdict((), 1)

    assert distance_from_target(draft, always_one, p, length=1) == 0.25


def test_the_outcomes_of_a_turn_sum_to_one_and_give_the_expected_accepted_length() -> None:
    # q always drafts 0, which p keeps in a quarter of cases.
    p = ContextModel({(): torch.tensor([0.25, 0.75], dtype=torch.float64), (0,): torch.tensor([0.5, 0.5]).double()})
    q = ContextModel({(): torch.tensor([1.0, 0.0], dtype=torch.float64)})
    draft = sampled_draft(TreeShape.chain(1), q, ProposalKind.SAMPLED)
    found = verdicts(draft, TOKEN_REJECTION, p)
    assert sorted((verdict.path, verdict.token, chance) for _, verdict, chance in found) == [
        ((), 1, 0.75),
        ((1,), 0, 0.125),
        ((1,), 1, 0.125),
    ]


def test_shapes_are_checked_unless_an_enumeration_is_under_way() -> None:
    proposal = Proposal.root_only(0)
    row = torch.tensor([1.0, 0.0])
    with shapes_unchecked(), pytest.raises(IndexError):
        SAMPLED_VERIFY(proposal, row[:0], EnumeratingSource())
    with pytest.raises(TypeCheckError):
        SAMPLED_VERIFY(proposal, row[:0], EnumeratingSource())


@pytest.mark.parametrize(
    "rule",
    few([rule for name, rule in RULES.items() if name != "greedy"], [TOKEN_REJECTION, RULES["typical"]]),
    ids=lambda rule: rule.name,
)
def test_a_rule_is_proved_for_every_kind_and_shape_that_it_takes(rule: Rule) -> None:
    proof = prove_rule(rule, seeds=(0,))
    shapes = 2 if rule.chains_only else 6
    assert proof.turns == len(rule.kinds) * shapes * len(ALL_MODELS)
    assert proof.lossless == rule.lossless


def test_a_rule_that_writes_from_p_in_location_of_the_residual_is_refuted_on_a_turn_that_is_named() -> None:
    def without_residual(proposal: Proposal, p: torch.Tensor, source: RandomSource) -> Verdict:
        q, token = proposal.q, proposal.tree.token_list[1]
        assert q is not None
        if source.accept(float(p[0, token] / q[0, token])):
            return Verdict((1,), source.draw(p[1]))
        return Verdict((), source.draw(p[0]))

    proof = prove_rule(Rule("mine", True, frozenset({ProposalKind.SAMPLED}), without_residual, chains_only=True))
    assert not proof.lossless and proof.distance > 0.01 and proof.worst.startswith("sampled chain of ")
