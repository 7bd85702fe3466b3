"""Trees that grow where the draft is surest: against all trees there are, in batches, and through the whole loop."""

import itertools
import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import full_forward

from decoding.drafters import DraftTreeDrafter
from decoding.drafters.base import DraftRequest, TextStart
from decoding.drafters.draft_tree import DraftTreeSession
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.rules.drawing import GeneratorSource
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import HistoryRows, SamplingConfig, probabilities

NO_HIDDEN = torch.empty(0)
PENALISED = SamplingConfig(0.9, top_p=0.9, repetition_penalty=1.4)
TOKENS = st.integers(0, 15)


def opened(drafter: DraftTreeDrafter, target: CausalLM, sampling: SamplingConfig, rows: int = 1) -> DraftTreeSession:
    session = drafter.open(target, sampling, rows, 80)
    for slot in range(rows):
        session.admit(slot, TextStart(1, GeneratorSource.from_seed(slot)))
    return session


def propose(session: DraftTreeSession, *texts: Sequence[int], depth: int = 99, nodes: int = 99) -> list[Proposal]:
    return session.propose([DraftRequest(text, NO_HIDDEN, depth, nodes) for text in texts])


def paths(proposal: Proposal) -> set[tuple[int, ...]]:
    """The tree as the set of its paths of tokens."""
    tree = proposal.tree
    return {tuple(tree.token_list[at] for at in tree.shape.path(node)) for node in range(1, len(tree))}


def naive_scores(draft: CausalLM, text: Sequence[int], sampling: SamplingConfig) -> dict[int, float]:
    """Log-probability of every next token, by one plain forward over the whole text."""
    logits = full_forward(draft.model, text)[-1:]
    if sampling.greedy:
        return dict(enumerate(logits[0].log_softmax(-1).tolist()))
    seen = torch.zeros(1, logits.shape[1], dtype=torch.bool)
    seen[0, list(text)] = True
    return dict(enumerate(probabilities(logits, sampling, HistoryRows(seen=seen))[0].log().tolist()))


def naive_tree(
    draft: CausalLM, text: Sequence[int], sampling: SamplingConfig, depth: int, width: int, nodes: int
) -> set[tuple[int, ...]]:
    """The beam without a cache and without leaving anything out, then the best of all it met."""
    met: dict[tuple[int, ...], float] = {}
    beam: dict[tuple[int, ...], float] = {(): 0.0}
    for _ in range(depth):
        level: dict[tuple[int, ...], float] = {}
        for path, score in beam.items():
            scores = naive_scores(draft, [*text, *path], sampling)
            for token in sorted(scores, key=scores.__getitem__, reverse=True)[:width]:
                if scores[token] > -math.inf:
                    level[*path, token] = score + scores[token]
        met |= level
        beam = dict(sorted(level.items(), key=lambda entry: -entry[1])[:width])
    return set(sorted(met, key=met.__getitem__, reverse=True)[: nodes - 1])


# --- what is drafted -----------------------------------------------------------------------------------------------


@given(
    text=st.lists(TOKENS, min_size=1, max_size=5),
    depth=st.integers(1, 4),
    width=st.integers(1, 5),
    more=st.integers(1, 20),
    sampling=st.sampled_from([SamplingConfig(), SamplingConfig(0.7), PENALISED]),
)
def test_the_tree_is_the_best_of_all_that_the_beam_meets(
    tiny_draft: CausalLM,
    tiny_llama: CausalLM,
    text: list[int],
    depth: int,
    width: int,
    more: int,
    sampling: SamplingConfig,
) -> None:
    drafter = DraftTreeDrafter(tiny_draft, depth, width, depth + more)
    (proposal,) = propose(opened(drafter, tiny_llama, sampling), text)
    assert paths(proposal) == naive_tree(tiny_draft, text, sampling, depth, width, drafter.max_nodes)
    assert len(proposal.tree) - 1 == len(paths(proposal)), "no path is drafted twice"
    assert proposal.kind is ProposalKind.DETERMINISTIC and proposal.q is None
    assert proposal.tree.token_list == proposal.tree.tokens.tolist()


@given(depth=st.integers(0, 6), nodes=st.integers(1, 30))
def test_a_request_bounds_depth_and_nodes(tiny_draft: CausalLM, tiny_llama: CausalLM, depth: int, nodes: int) -> None:
    drafter = DraftTreeDrafter(tiny_draft, 4, 3, 20)
    (proposal,) = propose(opened(drafter, tiny_llama, SamplingConfig()), [3, 1, 4], depth=depth, nodes=nodes)
    assert proposal.tree.shape.max_depth <= min(depth, 4) and len(proposal.tree) <= min(nodes, 20)
    if depth and nodes > 1:
        wanted = naive_tree(tiny_draft, [3, 1, 4], SamplingConfig(), min(depth, 4), 3, min(nodes, 20))
        assert paths(proposal) == wanted
    else:
        assert len(proposal.tree) == 1


def test_budgets_grow_in_depth_and_nodes_to_what_was_asked_for(tiny_draft: CausalLM) -> None:
    drafter = DraftTreeDrafter(tiny_draft, depth=4, width=3, nodes=21)
    assert drafter.budgets == ((1, 4), (2, 11), (3, 16), (4, 21)), "at depth 1 there are three candidates and the root"
    assert (drafter.max_depth, drafter.max_nodes) == (4, 21)
    assert DraftTreeDrafter(tiny_draft, 2, 2, 99).max_nodes == 1 + 2 + 4, "there are no more candidates"
    assert DraftTreeDrafter(tiny_draft, 3, 3, 4).budgets == ((1, 2), (2, 3), (3, 4))


@pytest.mark.parametrize(
    ("sizes", "complaint"),
    [
        ((0, 2, 9), r"depth \(0\)"),
        ((2, 0, 9), r"width \(0\)"),
        ((4, 2, 4), "nodes is 4.* a tree 4 deep has at least 5"),
    ],
)
def test_sizes_that_make_no_tree_are_refused(tiny_draft: CausalLM, sizes: tuple[int, int, int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        DraftTreeDrafter(tiny_draft, *sizes)


# --- how it is drafted ---------------------------------------------------------------------------------------------


def test_a_level_of_all_rows_is_one_pass_and_what_cannot_be_kept_is_not_run(
    tiny_draft: CausalLM, tiny_llama: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[list[int]] = []
    verify = CausalLM.verify

    def counted(self: CausalLM, trees, cache, first):  # type: ignore[no-untyped-def]
        sizes.append([len(tree) - skipped for tree, skipped in zip(trees, first, strict=True)])
        return verify(self, trees, cache, first)

    monkeypatch.setattr(CausalLM, "verify", counted)
    session = opened(DraftTreeDrafter(tiny_draft, 4, 3, 20), tiny_llama, SamplingConfig(), rows=3)
    propose(session, [1, 2, 3], [4], [5, 6])
    assert len(sizes) <= 3 and all(size <= 3 for level in sizes for size in level)
    # Of a tree of one drafted node only that node can have children, and they only push it out.
    sizes.clear()
    propose(session, [1, 2, 3, 4], [4, 9], [5, 6, 1], nodes=3)
    assert all(size <= 2 for level in sizes for size in level)


def test_the_keys_of_accepted_nodes_are_kept(tiny_draft: CausalLM, tiny_llama: CausalLM) -> None:
    session = opened(DraftTreeDrafter(tiny_draft, 3, 3, 12), tiny_llama, SamplingConfig())
    (proposal,) = propose(session, [1, 2])
    deepest = max(range(len(proposal.tree)), key=proposal.tree.shape.depths.__getitem__)
    path = [proposal.tree.token_list[at] for at in proposal.tree.shape.path(deepest)]
    assert len(path) == 3
    kept: list[int] = []
    session._state.draft.model.register_forward_pre_hook(
        lambda module, args, named: kept.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    propose(session, [1, 2, *path, 7], depth=1)
    assert kept == [2], "of three accepted two had run; the last, and the token the target wrote, are run now"


@pytest.mark.parametrize("nodes", [4, 17])
def test_a_beam_as_wide_as_the_vocabulary_and_the_tree_finds_the_best_of_all_trees(
    tiny_draft: CausalLM, tiny_llama: CausalLM, nodes: int
) -> None:
    """The likeliest of all 16 + 256 paths, which are a tree, since a product falls along a path."""
    text, scores = [1, 2, 1], {(): 0.0}
    for length in (1, 2):
        for before in itertools.product(range(16), repeat=length - 1):
            following = naive_scores(tiny_draft, [*text, *before], SamplingConfig())
            scores |= {(*before, token): scores[before] + following[token] for token in following}
    best = sorted(scores, key=scores.__getitem__, reverse=True)[:nodes]
    assert best[0] == () and max(map(len, best)) > 1
    (proposal,) = propose(opened(DraftTreeDrafter(tiny_draft, 2, 16, nodes), tiny_llama, SamplingConfig()), text)
    assert paths(proposal) == set(best[1:])


def test_of_a_draft_that_is_the_target_the_best_child_is_always_accepted(tiny_llama: CausalLM) -> None:
    steps = Engine(tiny_llama, DraftTreeDrafter(tiny_llama, 3, 3, 12)).decode([1, 2, 3], DecodingConfig(20)).steps
    assert sum(step.accepted for step in steps) > 10
    assert all(step.accepted >= 1 for step in steps if step.offered)
