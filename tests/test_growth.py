"""Trees of a fixed shape from heads, DSpark, EAGLE-3 and ordinary drafts: choices checked by hand, all draws
enumerated.
"""

import itertools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from drafter_checks import Follower, hidden_before, request
from enumerated_rules import LOSSY
from tiny_dspark import block_logits, logits_after, states_at, tiny_dflash, tiny_dspark
from tiny_eagle3 import logits_after as eagle3_logits
from tiny_eagle3 import tiny_eagle3
from tiny_models import full_forward, tiny_model
from torch import Tensor

from decoding.drafters import (
    Drafter,
    DraftModelDrafter,
    DraftSession,
    DSparkDrafter,
    Eagle3Drafter,
    HybridDrafter,
    MedusaDrafter,
    PromptLookupDrafter,
)
from decoding.drafters.base import DraftRequest, TextStart
from decoding.drafters.growth import Growth, StaticTree
from decoding.generate import DecodingConfig, Engine
from decoding.measure.proof.enumeration import LOSSLESS, ROOT_TOKEN, ContextModel, Draft, contexts, distance_from_target
from decoding.model.causal_lm import CausalLM
from decoding.model.eagle3_draft import Eagle3Draft
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.rules.drawing import RandomSource
from decoding.rules.sampling import HistoryRows, SamplingConfig, probabilities
from decoding.rules.tree import Proposal, ProposalKind, TokenTree, TreeShape
from decoding.rules.verify import BLOCK_VERIFICATION, TOKEN_REJECTION, Rule, Verdict, lossless_rule

PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (2, 1), (0, 1, 0), (2, 0, 0), (2, 0, 1))
CHAIN = ((0,), (0, 0), (0, 0, 0))
TEXT = [1, 2, ROOT_TOKEN]
AT_ONE = SamplingConfig(1.0)
PENALISED = SamplingConfig(0.8, top_p=0.9, repetition_penalty=1.3)
PROCESSED = SamplingConfig(
    0.9, processors=(lambda texts, scores: scores + torch.arange(scores.shape[1]) * (texts[:, -1:] % 3) / 8,)
)
SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 1}
KINDS = ["heads", "shared heads", "Markov heads", "DSpark", "DFlash", "EAGLE-3", "draft model"]


class Case(NamedTuple):
    """A drafter, its target, and the logits, with and without a bias, that plain forward passes give after ``TEXT`` and
    a path.
    """

    drafter: Drafter
    target: CausalLM
    logits: Callable[[Sequence[int]], Tensor]
    unbiased: Callable[[Sequence[int]], Tensor]


@cache
def models(kind: str, vocab: int) -> tuple[CausalLM, object]:
    """Make a target and random weights that draft for it: in fp64 with three tokens, or otherwise in fp32."""
    sizes = SMALL if vocab < 16 else {}
    target = CausalLM(tiny_model(vocab=vocab, **sizes).to(torch.float64 if vocab < 16 else torch.float32))
    if kind == "draft model":
        return target, CausalLM(tiny_model(vocab=vocab, seed=1, **sizes).to(target.dtype))
    if kind in ("DSpark", "DFlash"):
        return target, (tiny_dspark if kind == "DSpark" else tiny_dflash)(target, 3).to(target.dtype)
    if kind == "EAGLE-3":
        return target, tiny_eagle3(target).to(target.dtype)
    config = MedusaConfig(target.hidden_size, vocab, 3, 1, ((0,),), "shared" in kind)
    heads = MedusaHeads(replace(config, markov_rank=4 if kind == "Markov heads" else 0)).to(target.dtype)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return target, heads


def case_of(kind: str, tree: Sequence[Sequence[int]] = PATHS, vocab: int = 16, sampled: bool = True) -> Case:
    target, weights = models(kind, vocab)
    if isinstance(weights, CausalLM):
        own = lambda path: full_forward(weights.model, [*TEXT, *path])[-1]  # noqa: E731
        return Case(DraftModelDrafter(weights, max(map(len, tree)), sampled), target, own, own)
    if isinstance(weights, MedusaHeads):
        lm_head = target.model.get_output_embeddings()

        @torch.no_grad()
        def of_heads(path: Sequence[int], biased: bool = True) -> Tensor:
            hidden = hidden_before(target, TEXT)
            logits = weights.heads[len(path)](hidden, lm_head)
            if weights.markov is None or not biased:
                return logits
            return logits + weights.markov.output.weight @ weights.markov.embedding.weight[[ROOT_TOKEN, *path][-1]]

        drafter = MedusaDrafter(weights, tree, sampled)
        return Case(drafter, target, of_heads, lambda path: of_heads(path, biased=False))
    if isinstance(weights, Eagle3Draft):
        after = lambda path: eagle3_logits(weights, target, TEXT, path)  # noqa: E731
        return Case(Eagle3Drafter(weights, tree=tree, sampled=sampled), target, after, after)
    return Case(
        DSparkDrafter(weights, tree=tree, sampled=sampled),
        target,
        lambda path: logits_after(weights, target, TEXT, path),
        lambda path: block_logits(weights, target, TEXT)[len(path)],
    )


def q_of(logits: Tensor, sampling: SamplingConfig, text: Sequence[int]) -> Tensor:
    seen = torch.zeros(1, len(logits), dtype=torch.bool)
    seen[0, list(text)] = True
    history = HistoryRows(seen, torch.tensor([text]), (len(text),), (len(TEXT),))
    return probabilities(logits[None], sampling, history)[0]


def families(tree: TokenTree) -> list[tuple[int, list[int], list[int]]]:
    """Return, for each node with children, its number, its path of tokens from below the root, and the tokens of its
    children.
    """
    return [
        (node, [tree.token_list[at] for at in tree.shape.path(node)], [tree.token_list[child] for child in children])
        for node, children in enumerate(tree.shape.children)
        if children
    ]


# --- each choice ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", [AT_ONE, PENALISED, PROCESSED], ids=["plain", "penalised", "processed"])
@pytest.mark.parametrize("kind", KINDS)
def test_children_are_drawn_from_the_recorded_q_of_their_path(kind: str, sampling: SamplingConfig) -> None:
    case, drawn = case_of(kind), set()
    for seed in range(4):
        (proposal,) = Follower(case.drafter, case.target, sampling, seed).propose(TEXT)
        drawn.add(tuple(proposal.tree.token_list))
        is_chain = proposal.tree.shape.is_chain
        assert proposal.kind is (ProposalKind.SAMPLED if is_chain else ProposalKind.SAMPLED_WITHOUT_REPLACEMENT)
        assert case.drafter.kinds(sampling) == {proposal.kind} and proposal.q is not None
        for node, path, tokens in families(proposal.tree):
            wanted = q_of(case.logits(path), sampling, [*TEXT, *path])
            q = proposal.q[proposal.q_rows[node]]
            torch.testing.assert_close(q, wanted, rtol=0, atol=2e-5)
            assert bool((q[wanted == 0] == 0).all())
            assert len(set(tokens)) == len(tokens) and all(q[token] > 0 for token in tokens)
    assert len(drawn) > 1


@pytest.mark.parametrize(("sampling", "sampled"), [(SamplingConfig(), True), (AT_ONE, False)])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_not_drawn_holds_the_best_tokens_after_each_path(
    kind: str, sampling: SamplingConfig, sampled: bool
) -> None:
    case = case_of(kind, sampled=sampled)
    (proposal,) = Follower(case.drafter, case.target, sampling).propose(TEXT)
    assert proposal.kind is ProposalKind.DETERMINISTIC and proposal.q is None
    assert case.drafter.kinds(sampling) == {proposal.kind}
    for _, path, tokens in families(proposal.tree):
        assert tokens == case.logits(path).topk(len(tokens)).indices.tolist()


def test_the_budgets_are_the_tree_to_every_depth_its_chain_and_its_narrower_cuts() -> None:
    tree = StaticTree(((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0)))
    # (0) | the chain (0) (0,0) | depth 1: (0) (1) (2) | ranks 0 and 1: (0) (1) (0,0) (0,1) (0,1,0) | depth 2 | all
    assert tree.budgets == ((1, 2), (2, 3), (1, 4), (3, 6), (2, 7), (3, 8))
    for budget in tree.budgets:
        shape, _ = tree.cut(request([0], *budget))
        assert (shape.max_depth, len(shape)) == budget
    every = [path for length in (1, 2, 3) for path in itertools.product(range(5), repeat=length)]
    assert StaticTree(every).budgets == ((1, 2), (2, 3), (3, 4), (1, 6), (3, 15), (2, 31), (3, 85), (3, 156))
    assert StaticTree.chain(3).budgets == ((1, 2), (2, 3), (3, 4))
    with pytest.raises(ValueError, match="the tree is empty"):
        StaticTree([])


# --- every draw of a tree, and every verdict on it --------------------------------------------------------------------


class EnumeratedDraws:
    """Replaces uniform numbers and `inverse_cdf`, so that the draws of a session are choices of an enumerating
    source.
    """

    def __init__(self, session: DraftSession, asked: DraftRequest) -> None:
        self._session, self._request = session, asked
        self._source: RandomSource | None = None

    def uniforms(self, count: int) -> Tensor:
        return torch.full((count,), 0.5, dtype=torch.float64)

    def inverse_cdf(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Draw a token in each row; token 0 if no node waits for a token, and index ``vocab`` if no weight is left."""
        assert self._source is not None
        drawn = []
        for row, uniform in zip(weights, uniforms.tolist(), strict=True):
            left = bool((row > 0).any())
            drawn.append(0 if uniform == 0 else self._source.draw(row) if left else len(row))
        return torch.tensor(drawn)

    def __call__(self, source: RandomSource) -> Proposal:
        self._source = source
        self._session.admit(0, TextStart(1, self))  # type: ignore[arg-type]  # it draws nothing but `uniforms`
        (proposal,) = self._session.propose([self._request])
        return proposal


def every_draw(case: Case, sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch) -> Draft:
    states = states_at(case.target, TEXT, case.drafter.taps)[:-1] if case.drafter.taps else None
    session = case.drafter.open(case.target, sampling, 1, 40)
    draft = EnumeratedDraws(session, DraftRequest(TEXT, hidden_before(case.target, TEXT), 99, 99, states))
    monkeypatch.setattr("decoding.rules.drawing.inverse_cdf", draft.inverse_cdf)
    return draft


def by_default(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    return lossless_rule(proposal)(proposal, p, source)


@cache
def target_table(seed: int) -> ContextModel:
    return ContextModel.random(3, 3, "mixed" if seed % 2 else "dense", torch.Generator().manual_seed(seed))


TREES = {
    "uneven": ((0,), (1,), (0, 0), (0, 1), (1, 0)),
    "three children, the second grown": ((0,), (1,), (2,), (1, 0)),
    "chain": CHAIN[:2],
}


@pytest.mark.parametrize(
    ("kind", "tree", "sampling"),
    [
        ("heads", "uneven", AT_ONE),
        ("Markov heads", "three children, the second grown", SamplingConfig(1.0, top_k=2)),
        ("Markov heads", "uneven", SamplingConfig(0.7, repetition_penalty=1.5)),
        ("Markov heads", "chain", AT_ONE),
        ("DSpark", "uneven", AT_ONE),
        ("DSpark", "chain", SamplingConfig(0.7, top_k=2)),
        ("DFlash", "three children, the second grown", AT_ONE),
        ("EAGLE-3", "uneven", AT_ONE),
        ("EAGLE-3", "chain", SamplingConfig(0.7, top_k=2)),
        ("draft model", "chain", SamplingConfig(0.7, repetition_penalty=1.5)),
    ],
)
def test_drafting_and_verifying_as_a_whole_give_the_targets_distribution(
    kind: str, tree: str, sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = every_draw(case_of(kind, TREES[tree], vocab=3), sampling, monkeypatch)
    for seed in range(2):
        assert distance_from_target(draft, by_default, target_table(seed), 3) < LOSSLESS


@pytest.mark.parametrize("rule", [TOKEN_REJECTION, BLOCK_VERIFICATION])
def test_every_draw_of_a_long_chain_verified_gives_the_targets_distribution(
    rule: Rule, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = every_draw(case_of("DSpark", CHAIN, vocab=3), AT_ONE, monkeypatch)
    assert distance_from_target(draft, rule, target_table(1), 4) < LOSSLESS


@pytest.mark.parametrize("tree", ["uneven", "chain"])
@pytest.mark.parametrize("kind", ["Markov heads", "DSpark"])
@pytest.mark.parametrize("misread", ["another parent", "no bias"])
def test_the_enumeration_catches_the_q_of_another_node(
    kind: str, tree: str, misread: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = case_of(kind, TREES[tree], vocab=3)
    draw = every_draw(case, AT_ONE, monkeypatch)

    @cache
    def wrong_q(path: tuple[int, ...]) -> Tensor:
        if misread == "no bias":
            return case.unbiased(path).softmax(-1)
        return case.logits([*path[:-1], (path[-1] + 1) % 3] if path else path).softmax(-1)

    def draft(source: RandomSource) -> Proposal:
        proposal = draw(source)
        assert proposal.q is not None
        return replace(proposal, q=torch.stack([wrong_q(contexts(proposal.tree)[node]) for node in proposal.q_rows]))

    assert distance_from_target(draft, by_default, target_table(1), 3) > LOSSY


def test_the_enumeration_catches_a_drawn_child_that_is_dropped_for_its_q(monkeypatch: pytest.MonkeyPatch) -> None:
    draw = every_draw(case_of("Markov heads", ((0,), (1,)), vocab=3), AT_ONE, monkeypatch)

    def draft(source: RandomSource) -> Proposal:
        proposal = draw(source)
        assert proposal.q is not None
        if proposal.q[0, proposal.tree.token_list[1]] >= 1 / 3:
            return proposal
        return replace(proposal, tree=TokenTree(proposal.tree.tokens[[0, 2]], TreeShape.chain(1)))

    assert distance_from_target(draft, by_default, target_table(0), 3) > LOSSY


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["Markov heads", "draft model"])
def test_q_takes_a_row_for_each_node_with_children_and_is_freed_before_the_next_draft(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For 32 trees of 64 nodes and 152k tokens, a row for each node would take 1.2 GB, of which 0.8 GB would be rows of
    leaves.
    """
    drafter, target = case_of(kind)[:2]
    held: list[weakref.ref[Tensor]] = []
    propose = Growth.propose

    def noted(*given: Any) -> list[Proposal]:
        proposals = propose(*given)
        drawn = [(proposal.tree.shape, proposal.q) for proposal in proposals if proposal.q is not None]
        stored = {q.untyped_storage().data_ptr(): q.untyped_storage().nbytes() for _, q in drawn}
        assert sum(stored.values()) == sum(len({*shape.parents[1:]}) for shape, _ in drawn) * 16 * 4
        held.extend(weakref.ref(q) for _, q in drawn)
        return proposals

    monkeypatch.setattr(Growth, "propose", noted)
    texts = Engine(target, HybridDrafter(drafter, PromptLookupDrafter(4), least_gain=0)).steps(
        [TEXT * 4, [7, 7]], DecodingConfig(12, AT_ONE), batch_size=2
    )
    assert all(not any(ref() is not None for ref in held) for _ in texts) and len(held) > 5
