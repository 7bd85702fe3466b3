"""Trees drawn from heads' distributions: each draw by hand, all draws enumerated, and the whole loop by chi-square."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from drafter_checks import opened
from enumerated_rules import LOSSY
from hypothesis import given
from hypothesis import strategies as st
from test_generate_sampling import FALSE_ALARM, TARGET_SEED, TEXTS, decode_many, small_llama
from tiny_models import tiny_model
from torch import Tensor

from decoding.drafters import MedusaDrafter
from decoding.drafters.base import DraftRequest, DraftSession, TextStart
from decoding.drafters.medusa import MedusaSession
from decoding.measure.proof.enumeration import LOSSLESS, ContextModel, contexts, distance_from_target, model_pair
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.rules.drawing import GeneratorSource, RandomSource, draw_without_replacement
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree, TreeShape
from decoding.rules.verify import TRAVERSAL_VERIFICATION, Verdict, lossless_rule

KINDS = ["medusa", "markov"]
ALL_KINDS = pytest.mark.parametrize("kind", KINDS)
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (2, 1), (0, 1, 0), (2, 0, 0), (2, 0, 1))
AT_ONE = SamplingConfig(1.0)
DETERMINISTIC = ProposalKind.DETERMINISTIC
WITHOUT = ProposalKind.SAMPLED_WITHOUT_REPLACEMENT


def heads_of(kind: str, vocab: int = 16, width: int = 16, count: int = 3, shared: bool = False) -> MedusaHeads:
    config = MedusaConfig(width, vocab, count, 1, ((0,),), shared)
    heads = MedusaHeads(replace(config, markov_rank=4 if kind == "markov" else 0))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return heads


@torch.no_grad()
def reference_q(heads: MedusaHeads, target: CausalLM, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
    """The distribution of the token after these ones, the root first."""
    ids = torch.tensor(list(tokens))
    logits = heads.head_logits(
        len(tokens) - 1,
        hidden,
        target.model.get_output_embeddings(),
        ids[-1] if heads.config.markov_rank else None,
    )
    return logits.softmax(-1)


class Numbers(GeneratorSource):
    """A source of these numbers, in turn."""

    def __init__(self, numbers: Sequence[float]) -> None:
        super().__init__(torch.Generator())
        self._numbers = iter(numbers)

    def uniform(self) -> float:
        return next(self._numbers)


# --- the draws ------------------------------------------------------------------------------------------------------


@ALL_KINDS
@pytest.mark.parametrize("shared", [False, True], ids=["own lm_heads", "shared lm_head"])
def test_children_are_drawn_from_the_recorded_q_of_their_path_by_the_number_of_their_node(
    tiny_llama: CausalLM, kind: str, shared: bool
) -> None:
    heads, hidden = heads_of(kind, shared=shared), torch.randn(3, 16)
    session = opened(MedusaDrafter(heads, PATHS, sampled=True), tiny_llama, AT_ONE, rows=3)
    proposals = session.propose([DraftRequest([7, row], hidden[row], 99, 99) for row in range(3)])
    for row, proposal in enumerate(proposals):
        tree, numbers = proposal.tree, GeneratorSource.from_seed(row).uniforms(len(PATHS)).tolist()
        assert len(tree) == len(PATHS) + 1 and tree.token_list[0] == row and proposal.kind is WITHOUT
        assert proposal.q is not None and len(proposal.q) == max(tree.shape.parents) + 1
        for node, children in enumerate(tree.shape.children):
            if children:
                path = [row, *(tree.token_list[ancestor] for ancestor in tree.shape.path(node))]
                torch.testing.assert_close(proposal.q[node], reference_q(heads, tiny_llama, hidden[row], path))
                source = Numbers([numbers[child - 1] for child in children])
                drawn = draw_without_replacement(proposal.q[node], len(children), source)
                assert [tree.token_list[child] for child in children] == drawn.tolist()
    assert len({tuple(proposal.tree.token_list[1:]) for proposal in proposals}) == 3


@ALL_KINDS
def test_at_temperature_zero_the_tree_holds_the_best_tokens(tiny_llama: CausalLM, kind: str) -> None:
    heads, request = heads_of(kind), DraftRequest([7, 3], torch.randn(16), 99, 99)
    best, drawn = MedusaDrafter(heads, PATHS), MedusaDrafter(heads, PATHS, sampled=True)
    assert drawn.kinds(SamplingConfig()) == {DETERMINISTIC}
    (one,), (other,) = (opened(each, tiny_llama).propose([request]) for each in (best, drawn))
    assert one.tree.token_list == other.tree.token_list and other.kind is DETERMINISTIC


@ALL_KINDS
def test_above_temperature_zero_a_tree_is_drawn_unless_it_is_not_to_be(tiny_llama: CausalLM, kind: str) -> None:
    heads, request = heads_of(kind), DraftRequest([7, 3], torch.randn(16), 99, 99)
    for options, wanted in (({}, WITHOUT), ({"sampled": False}, DETERMINISTIC)):
        drafter = MedusaDrafter(heads, PATHS, **options)
        assert drafter.kinds(AT_ONE) == {wanted}
        (proposal,) = opened(drafter, tiny_llama, AT_ONE).propose([request])
        assert proposal.kind is wanted


def test_a_label_names_a_tree_that_is_not_drawn() -> None:
    heads = heads_of("markov")
    labels = [MedusaDrafter(heads, PATHS, sampled=sampled).label for sampled in (True, False)]
    assert labels == ["markov, tree of 10", "markov, deterministic tree of 10"]
    assert MedusaDrafter(heads, dynamic_nodes=5).label == "markov, dynamic tree of 4"


def test_a_dynamic_tree_is_never_drawn() -> None:
    assert MedusaDrafter(heads_of("markov"), dynamic_nodes=5).kinds(AT_ONE) == {DETERMINISTIC}


def test_a_tree_of_single_children_is_a_sampled_chain(tiny_llama: CausalLM) -> None:
    drafter = MedusaDrafter(heads_of("markov"), [[0], [0, 0], [0, 0, 0]], sampled=True)
    (proposal,) = opened(drafter, tiny_llama, AT_ONE).propose([DraftRequest([7, 3], torch.randn(16), 99, 99)])
    assert drafter.kinds(AT_ONE) == {ProposalKind.SAMPLED} and proposal.kind is ProposalKind.SAMPLED
    assert proposal.tree.shape.is_chain and len(proposal.tree) == 4
    assert proposal.q is not None and proposal.q.shape == (3, 16)


@ALL_KINDS
@given(depth=st.integers(0, 5), nodes=st.integers(1, 12))
def test_a_smaller_request_cuts_the_shape_before_anything_is_drawn(
    tiny_llama: CausalLM, kind: str, depth: int, nodes: int
) -> None:
    heads, request = heads_of(kind), DraftRequest([7, 3], torch.zeros(16), depth, nodes)
    cuts = [opened(MedusaDrafter(heads, PATHS, sampled=which), tiny_llama, AT_ONE) for which in (False, True)]
    (best,), (drawn,) = (session.propose([request]) for session in cuts)
    assert drawn.tree.shape == best.tree.shape, "the same shape, whatever the tokens"
    numbers = GeneratorSource.from_seed(0).uniforms(len(drawn.tree) - 1).tolist()
    first = drawn.tree.shape.children[0]
    if first:
        assert drawn.q is not None
        source = Numbers([numbers[child - 1] for child in first])
        expected = draw_without_replacement(drawn.q[0], len(first), source).tolist()
        assert [drawn.tree.token_list[child] for child in first] == expected


@ALL_KINDS
def test_a_row_is_drawn_for_alike_whatever_stands_beside_it(tiny_llama: CausalLM, kind: str) -> None:
    drafter = MedusaDrafter(heads_of(kind), PATHS, sampled=True)
    hidden, bounds = torch.randn(5, 16), [(99, 99), (2, 4), (0, 9), (3, 6), (1, 2)]
    requests = [DraftRequest([row + 3], hidden[row], *bounds[row]) for row in range(5)]
    sampling = SamplingConfig(1.0, top_p=0.9, repetition_penalty=1.2)
    together = opened(drafter, tiny_llama, sampling, rows=5)
    sessions = [opened(drafter, tiny_llama, sampling, seed=row) for row in range(5)]
    for _ in range(3):
        for proposal, session, request in zip(together.propose(requests), sessions, requests, strict=True):
            (alone,) = session.propose([request])
            assert alone.tree.shape == proposal.tree.shape and alone.tree.token_list == proposal.tree.token_list
            assert alone.kind is proposal.kind
            if alone.q is not None and proposal.q is not None:
                torch.testing.assert_close(alone.q, proposal.q)


def test_a_text_that_moves_to_another_row_takes_its_source_along(tiny_llama: CausalLM) -> None:
    drafter, hidden = MedusaDrafter(heads_of("markov"), PATHS, sampled=True), torch.randn(16)
    request = DraftRequest([7, 3], hidden, 99, 99)
    moved, stayed = opened(drafter, tiny_llama, AT_ONE, rows=2), opened(drafter, tiny_llama, AT_ONE, seed=1)
    moved.move(1, 0)
    assert moved.propose([request])[0].tree.token_list == stayed.propose([request])[0].tree.token_list


@ALL_KINDS
def test_tokens_that_the_controls_rule_out_are_not_drawn_and_their_children_neither(
    tiny_llama: CausalLM, kind: str
) -> None:
    """Three children are wanted of two tokens: the third, and what would follow it, are not drafted."""
    drafter = MedusaDrafter(heads_of(kind), PATHS, sampled=True)
    session = opened(drafter, tiny_llama, SamplingConfig(1.0, top_k=2), rows=2)
    hidden = torch.randn(2, 16)
    for proposal in session.propose([DraftRequest([7, row], hidden[row], 99, 99) for row in range(2)]):
        assert proposal.tree.shape.parents == (-1, 0, 0, 1, 1, 4), "without (2), (2, 0), (2, 1), (2, 0, 0), (2, 0, 1)"
        assert proposal.q is not None
        for node, parent in enumerate(proposal.tree.shape.parents[1:], start=1):
            assert proposal.q[parent, proposal.tree.token_list[node]] > 0


def test_where_every_token_is_forbidden_the_root_stands_alone(tiny_llama: CausalLM) -> None:
    def nothing(texts: Tensor, scores: Tensor) -> Tensor:
        return torch.full_like(scores, -torch.inf)

    def no_second(texts: Tensor, scores: Tensor) -> Tensor:
        return scores if texts.shape[1] == 2 else torch.full_like(scores, -torch.inf)

    drafter = MedusaDrafter(heads_of("markov"), PATHS, sampled=True)
    for processor, sizes in ((nothing, 1), (no_second, 4)):
        session = opened(drafter, tiny_llama, SamplingConfig(1.0, processors=(processor,)))
        (proposal,) = session.propose([DraftRequest([7, 3], torch.randn(16), 99, 99)])
        assert len(proposal.tree) == sizes and proposal.tree.shape.max_depth == (sizes > 1)


def test_each_node_is_drawn_from_what_the_controls_make_of_its_own_history(tiny_llama: CausalLM) -> None:
    """A processor that forbids every token of the text: no path of the tree holds a token twice."""

    def once(texts: Tensor, scores: Tensor) -> Tensor:
        return scores.scatter(1, texts, -torch.inf)

    drafter = MedusaDrafter(heads_of("markov"), PATHS, sampled=True)
    session = opened(drafter, tiny_llama, SamplingConfig(1.0, processors=(once,)), prompt_length=2, rows=2)
    texts = [[7, 3, 9], [5, 4]]
    requests = [DraftRequest(text, hidden, 99, 99) for text, hidden in zip(texts, torch.randn(2, 16), strict=True)]
    for text, proposal in zip(texts, session.propose(requests), strict=True):
        tree = proposal.tree
        for node in range(len(tree)):
            whole = [*text, *(tree.token_list[ancestor] for ancestor in tree.shape.path(node))]
            assert len(set(whole)) == len(whole)


# --- every draw of a tree, and every verdict on it ------------------------------------------------------------------


class Enumerated:
    """The draws of heads as choices of an enumerating source, in place of uniform numbers and `inverse_cdf`."""

    def __init__(self, session: DraftSession, request: DraftRequest) -> None:
        self._session, self._request = session, request
        self._source: RandomSource | None = None
        session.admit(0, TextStart(1, self))  # type: ignore[arg-type]  # it draws nothing but `uniforms`

    def uniforms(self, count: int) -> Tensor:
        return torch.full((count,), 0.5, dtype=torch.float64)

    def inverse_cdf(self, weights: Tensor, uniforms: Tensor) -> Tensor:
        """Draw a token of each row; token 0 where no node waits for one, index ``vocab`` where no weight is left."""
        assert self._source is not None
        drawn = []
        for row, uniform in zip(weights, uniforms.tolist(), strict=True):
            left = bool((row > 0).any())
            drawn.append(0 if uniform == 0 else self._source.draw(row) if left else len(row))
        return torch.tensor(drawn)

    def __call__(self, source: RandomSource) -> Proposal:
        self._source = source
        (proposal,) = self._session.propose([self._request])
        return proposal


def by_traversal(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    rule = lossless_rule(proposal)
    assert len(proposal.tree) == 1 or proposal.tree.shape.is_chain or rule is TRAVERSAL_VERIFICATION
    return rule(proposal, p, source)


class Case(NamedTuple):
    """Real heads in fp64 on three tokens, their draws enumerated, and a target of distributions of its own."""

    draft: Enumerated
    p: ContextModel
    heads: MedusaHeads
    target: CausalLM
    hidden: Tensor


def case_of(
    kind: str, sampling: SamplingConfig, tree: Sequence[Sequence[int]], monkeypatch: pytest.MonkeyPatch
) -> Case:
    target = CausalLM(tiny_model("llama", vocab=3, hidden_size=4, num_attention_heads=1).double())
    heads = heads_of(kind, vocab=3, width=4, count=2).double()
    hidden = torch.randn(4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    session = MedusaDrafter(heads, tree, sampled=True).open(target, sampling, 1, 40)
    draft = Enumerated(session, DraftRequest([0], hidden, 99, 99))
    monkeypatch.setattr("decoding.rules.drawing.inverse_cdf", draft.inverse_cdf)
    p, _ = model_pair("mixed", vocab=3, depth=2, seed=3)
    return Case(draft, p, heads, target, hidden)


TREES = {
    "uneven": ((0,), (1,), (0, 0), (0, 1), (1, 0)),
    "three children, the second grown": ((0,), (1,), (2,), (1, 0)),
    "chain": ((0,), (0, 0)),
}
CONTROLS = {
    "all tokens": AT_ONE,
    "two tokens": SamplingConfig(1.0, top_k=2),
    "penalty": SamplingConfig(0.7, repetition_penalty=1.5),
}


def distance(kind: str, controls: str, tree: str, monkeypatch: pytest.MonkeyPatch) -> float:
    """Return how far the texts of drafting and verifying are from the target's distribution, over all outcomes."""
    case = case_of(kind, CONTROLS[controls], TREES[tree], monkeypatch)
    return distance_from_target(case.draft, by_traversal, case.p, 3)


FEW_CASES = [("all tokens", "uneven"), ("two tokens", "three children, the second grown")]
"""They stand for all in `make check`."""


@ALL_KINDS
@pytest.mark.parametrize(("controls", "tree"), FEW_CASES)
def test_drafting_and_verifying_as_a_whole_give_the_targets_distribution(
    kind: str, controls: str, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert distance(kind, controls, tree, monkeypatch) < LOSSLESS


def misread(kind: str, path: Sequence[int]) -> list[int]:
    """Another path than the one that a node's children were drawn after: of another depth, or of another parent."""
    if kind == "medusa":
        return [*path, 0] if len(path) == 1 else list(path[:1])
    return [*path[:-1], (path[-1] + 1) % 3]


@ALL_KINDS
def test_the_enumeration_catches_the_q_of_another_node(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of(kind, AT_ONE, TREES["uneven"], monkeypatch)

    @cache
    def wrong_row(path: tuple[int, ...]) -> Tensor:
        return reference_q(case.heads, case.target, case.hidden, misread(kind, path))

    def draft(source: RandomSource) -> Proposal:
        proposal = case.draft(source)
        assert proposal.q is not None
        paths = contexts(proposal.tree)[: len(proposal.q)]
        return replace(proposal, q=torch.stack([wrong_row((0, *path)) for path in paths]))

    assert distance_from_target(draft, by_traversal, case.p, 3) > LOSSY


def test_the_enumeration_catches_a_drawn_child_that_is_dropped_for_its_q(monkeypatch: pytest.MonkeyPatch) -> None:
    case = case_of("markov", AT_ONE, ((0,), (1,)), monkeypatch)

    def draft(source: RandomSource) -> Proposal:
        proposal = case.draft(source)
        assert proposal.q is not None
        if proposal.q[0, proposal.tree.token_list[1]] >= 1 / 3:
            return proposal
        return replace(proposal, tree=TokenTree(proposal.tree.tokens[[0, 2]], TreeShape.chain(1)))

    assert distance_from_target(draft, by_traversal, case.p, 3) > LOSSY


# --- through the loop -----------------------------------------------------------------------------------------------


def nudged_heads(kind: str, target: CausalLM, count: int = 2) -> MedusaHeads:
    """Heads that say nearly what the target's lm_head says, right now and then, but hear the tokens as well."""
    config = MedusaConfig(target.hidden_size, target.vocab_size, count, 1, ((0,),))
    heads = MedusaHeads.for_target(target.model, replace(config, markov_rank=3 if kind == "markov" else 0))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for name, weight in heads.named_parameters():
            if "markov" in name:
                weight.copy_(torch.randn(weight.shape, generator=generator))
    return heads


LOOP_TREE = [[0], [1], [0, 0], [0, 1], [1, 0]]


FEW_KINDS = ["markov"]
"""They stand for all in `make check`, where every kind is enumerated."""


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_the_loop_writes_the_targets_distribution(kind: str) -> None:
    """Chi-square of texts with fixed seeds; were they not, it would fail by accident once in 10**6."""
    target = small_llama(TARGET_SEED)
    drafter = MedusaDrafter(nudged_heads(kind, target), LOOP_TREE, sampled=True)
    found, accepted = decode_many(target, drafter, AT_ONE)
    assert found > FALSE_ALARM
    assert accepted > TEXTS / 10, "a draft that is never accepted proves little"


class UnbiasedQ(MedusaDrafter):
    """A drafter with a bug: the bias takes part in the draws, but not in the q that is recorded."""

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> MedusaSession:
        session = super().open(target, sampling, rows, max_length)
        unbiased, right = copy.deepcopy(self.heads), session.propose
        assert unbiased.markov is not None
        torch.nn.init.zeros_(unbiased.markov.output.weight)

        def propose(requests: Sequence[DraftRequest]) -> list[Proposal]:
            return [wrong(request, proposal) for request, proposal in zip(requests, right(requests), strict=True)]

        def wrong(request: DraftRequest, proposal: Proposal) -> Proposal:
            if proposal.q is None:
                return proposal
            paths = [[0, *context] for context in contexts(proposal.tree)[: len(proposal.q)]]
            q = [reference_q(unbiased, target, request.hidden, path) for path in paths]
            return replace(proposal, q=torch.stack(q))

        session.propose = propose  # type: ignore[method-assign]
        return session


def test_the_chi_square_catches_a_q_without_the_bias() -> None:
    target = small_llama(TARGET_SEED)
    found, _ = decode_many(target, UnbiasedQ(nudged_heads("markov", target), LOOP_TREE, sampled=True), AT_ONE)
    assert found < FALSE_ALARM / 100, "caught, and not only just"
