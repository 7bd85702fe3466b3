"""Trees that grow at the draft's likeliest nodes: compared with all possible trees, in batches,
and in the whole loop.
"""

import math
from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import full_forward

from decoding.drafters import DraftTreeDrafter
from decoding.drafters.base import DraftRequest, TextStart
from decoding.drafters.draft_tree import DraftTreeSession
from decoding.model.causal_lm import CausalLM
from decoding.rules.drawing import GeneratorSource
from decoding.rules.sampling import HistoryRows, SamplingConfig, probabilities
from decoding.rules.tree import Proposal, ProposalKind

NO_HIDDEN = torch.empty(0)
PENALISED = SamplingConfig(0.9, top_p=0.9, repetition_penalty=1.4)
TOKENS = st.integers(0, 15)


def opened(drafter: DraftTreeDrafter, target: CausalLM, sampling: SamplingConfig, rows: int = 1) -> DraftTreeSession:
    session = drafter.open(target, sampling, rows, 80)
    for row in range(rows):
        session.admit(row, TextStart(1, GeneratorSource.from_seed(row)))
    return session


def propose(session: DraftTreeSession, *texts: Sequence[int], depth: int = 99, nodes: int = 99) -> list[Proposal]:
    return session.propose([DraftRequest(text, NO_HIDDEN, depth, nodes) for text in texts])


def paths(proposal: Proposal) -> set[tuple[int, ...]]:
    """Return the tree as the set of its paths of tokens."""
    tree = proposal.tree
    return {tuple(tree.token_list[at] for at in tree.shape.path(node)) for node in range(1, len(tree))}


def naive_scores(draft: CausalLM, text: Sequence[int], sampling: SamplingConfig) -> dict[int, float]:
    """Return the log-probability of every next token, from one plain forward pass over the whole text."""
    logits = full_forward(draft.model, text)[-1:]
    if sampling.greedy:
        return dict(enumerate(logits[0].log_softmax(-1).tolist()))
    seen = torch.zeros(1, logits.shape[1], dtype=torch.bool)
    seen[0, list(text)] = True
    return dict(enumerate(probabilities(logits, sampling, HistoryRows(seen=seen))[0].log().tolist()))


def naive_tree(
    draft: CausalLM, text: Sequence[int], sampling: SamplingConfig, depth: int, width: int, nodes: int
) -> set[tuple[int, ...]]:
    """Run the beam without a cache and without pruning; return the tree of the best nodes found."""
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
