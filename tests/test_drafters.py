"""The draft model, Medusa's static tree, and drafters of single texts: what they propose, and that a session keeps up.

A session keeps up with any texts: whatever is accepted, in whichever row, however long it is not asked. The other
drafters have files of their own; what all must keep is in ``drafter_checks``.
"""

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from drafter_checks import accept_some, opened, request
from hypothesis import given
from hypothesis import strategies as st
from hypothesis_profiles import examples
from scripted_drafters import ScriptedDrafter
from tiny_models import full_forward, tiny_model
from torch import Tensor

from decoding.drafters import DraftModelDrafter, MedusaDrafter
from decoding.drafters.base import DraftRequest, DraftSession, TextDrafter, TextSession, TextStart, chain_budgets
from decoding.drafters.draft_model import DraftModelSession
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.policies import Budget
from decoding.rules.drawing import GeneratorSource
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import HistoryRows, SamplingConfig, probabilities
from decoding.rules.tree import TokenTree

SAMPLED = SamplingConfig(1.0, top_p=0.9)
PENALISED = SamplingConfig(0.9, repetition_penalty=1.4)
ROOM = 80


def drafted(proposal: Proposal) -> list[int]:
    return proposal.tree.token_list[1:]


def one(session: DraftSession, tokens: Sequence[int], depth: int = 9, nodes: int = 99) -> Proposal:
    (proposal,) = session.propose([request(tokens, depth, nodes)])
    return proposal


def assert_same(proposal: Proposal, wanted: Proposal) -> None:
    assert proposal.tree.token_list == wanted.tree.token_list and proposal.tree.shape == wanted.tree.shape
    if len(wanted.tree) == 1:  # nothing drafted: there is no kind to be told
        return
    assert proposal.kind is wanted.kind
    if wanted.q is not None:
        assert proposal.q is not None
        torch.testing.assert_close(proposal.q, wanted.q, rtol=0, atol=1e-5)


# --- a draft model: what it proposes ---------------------------------------------------------------------------------


def open_session(
    draft: CausalLM,
    target: CausalLM,
    branching: tuple[int, ...] = (1, 1, 1),
    sampling: SamplingConfig | None = None,
    with_replacement: bool = False,
    seed: int = 0,
    rows: int = 1,
) -> DraftModelSession:
    session = opened(DraftModelDrafter(draft, branching, with_replacement), target, sampling, 1, seed, rows)
    assert isinstance(session, DraftModelSession)
    return session


def children_with_q(proposal: Proposal, text: Sequence[int]) -> list[tuple[list[int], list[int], Tensor]]:
    """Of each node with children: the whole text down to it, its children's tokens, and its row of q."""
    tree, q = proposal.tree, proposal.q
    assert q is not None
    return [
        (
            [*text, *(tree.token_list[ancestor] for ancestor in tree.shape.path(node))],
            [tree.token_list[child] for child in children],
            q[node],
        )
        for node, children in enumerate(tree.shape.children)
        if children
    ]


@pytest.mark.parametrize("sampling", [SAMPLED, PENALISED])
@pytest.mark.parametrize(
    ("branching", "with_replacement"), [((1, 1, 1), False), ((2, 2), False), ((3, 2), True), ((4,), False)]
)
def test_the_q_recorded_is_the_q_sampled_from(
    tiny_draft: CausalLM,
    tiny_llama: CausalLM,
    branching: tuple[int, ...],
    with_replacement: bool,
    sampling: SamplingConfig,
) -> None:
    for seed in range(4):
        session = open_session(tiny_draft, tiny_llama, branching, sampling, with_replacement, seed)
        text = [3, 1, 4]
        for _ in range(2):
            proposal = one(session, text)
            for whole, tokens, q in children_with_q(proposal, text):
                seen = torch.zeros(1, 16, dtype=torch.bool)
                seen[0, whole] = True
                logits = full_forward(tiny_draft.model, whole)[-1:]
                expected = probabilities(logits, sampling, HistoryRows(seen=seen))[0]
                torch.testing.assert_close(q, expected, rtol=0, atol=1e-5)
                assert all(q[token] > 0 for token in tokens)
                assert with_replacement or len(set(tokens)) == len(tokens)
            text = [*text, *drafted(proposal)[:1], 7]


@pytest.mark.parametrize(
    ("branching", "with_replacement", "sampling", "kind"),
    [
        ((1, 1), False, SamplingConfig(), ProposalKind.DETERMINISTIC),
        ((2, 2), False, SamplingConfig(), ProposalKind.DETERMINISTIC),
        ((1, 1), False, SAMPLED, ProposalKind.SAMPLED),
        ((2, 1), False, SAMPLED, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT),
        ((2, 1), True, SAMPLED, ProposalKind.SAMPLED),
    ],
)
def test_a_proposal_says_how_its_tokens_were_chosen(
    tiny_draft: CausalLM,
    tiny_llama: CausalLM,
    branching: tuple[int, ...],
    with_replacement: bool,
    sampling: SamplingConfig,
    kind: ProposalKind,
) -> None:
    session = open_session(tiny_draft, tiny_llama, branching, sampling, with_replacement)
    assert one(session, [1, 2]).kind is kind


def test_a_greedy_tree_holds_the_drafts_best_tokens_best_first(tiny_draft: CausalLM, tiny_llama: CausalLM) -> None:
    tree = one(open_session(tiny_draft, tiny_llama, (3, 2)), [1, 2]).tree
    assert tree.shape.parents == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3)
    for node, children in enumerate(tree.shape.children[:4]):
        whole = [1, 2, *(tree.token_list[ancestor] for ancestor in tree.shape.path(node))]
        best = full_forward(tiny_draft.model, whole)[-1].topk(len(children)).indices.tolist()
        assert [tree.token_list[child] for child in children] == best


@pytest.mark.parametrize(
    ("branching", "depth", "nodes", "size"),
    [
        ((1, 1, 1), 2, 99, (2, 3)),
        ((2, 2, 2), 2, 99, (2, 7)),
        ((2, 2, 2), 1, 99, (1, 3)),
        ((1, 1, 1), 9, 3, (2, 3)),
        ((2, 2, 2), 9, 14, (2, 7)),  # the third level would make it 15
        ((2, 2), 9, 2, (0, 1)),
        ((2, 2), 0, 99, (0, 1)),
    ],
)
def test_a_draft_is_the_largest_of_its_trees_within_the_bounds(
    tiny_draft: CausalLM,
    tiny_llama: CausalLM,
    branching: tuple[int, ...],
    depth: int,
    nodes: int,
    size: tuple[int, int],
) -> None:
    tree = one(open_session(tiny_draft, tiny_llama, branching, SAMPLED, True), [1, 2], depth, nodes).tree
    assert (tree.shape.max_depth, len(tree)) == size


def test_the_budgets_are_its_trees_level_by_level_with_the_root_counted(tiny_draft: CausalLM) -> None:
    drafter = DraftModelDrafter(tiny_draft, (3, 2, 1))
    assert drafter.budgets == (Budget(1, 4), Budget(2, 10), Budget(3, 16))
    assert (drafter.max_nodes, drafter.max_depth, drafter.is_chain) == (16, 3, False)
    assert DraftModelDrafter(tiny_draft, (1, 1)).is_chain


def test_a_nucleus_smaller_than_the_branching_gives_fewer_children(tiny_draft: CausalLM, tiny_llama: CausalLM) -> None:
    session = open_session(tiny_draft, tiny_llama, (3, 3), SamplingConfig(1.0, top_k=2))
    assert one(session, [1, 2]).tree.shape.parents == (-1, 0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize("branching", [(), (2, 0)])
def test_a_branching_without_children_is_refused(tiny_draft: CausalLM, branching: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"branching is .* at least one child"):
        DraftModelDrafter(tiny_draft, branching)


def test_more_children_than_there_are_tokens_are_refused(tiny_draft: CausalLM, tiny_llama: CausalLM) -> None:
    with pytest.raises(ValueError, match=r"branching is \[17\] but target and draft share 16 tokens"):
        open_session(tiny_draft, tiny_llama, (17,))


# --- stopping early --------------------------------------------------------------------------------------------------


def test_a_chain_ends_after_the_token_that_the_draft_is_unsure_of(tiny_draft: CausalLM, tiny_llama: CausalLM) -> None:
    """Not before it: a sampled token that is dropped for its value would bias what is left."""
    lengths = set()
    for seed in range(12):
        session = opened(DraftModelDrafter(tiny_draft, (1,) * 6, stop_below=0.3), tiny_llama, SAMPLED, seed=seed)
        proposal = one(session, [seed, 3, 1])
        assert proposal.q is not None
        chances = [float(q[token]) for q, token in zip(proposal.q, drafted(proposal), strict=True)]
        assert all(chance >= 0.3 for chance in chances[:-1])
        assert len(chances) == 6 or chances[-1] < 0.3
        lengths.add(len(chances))
    assert len(lengths) > 3, "they end at different places"


def test_a_greedy_chain_stops_by_the_drafts_own_softmax(tiny_draft: CausalLM, tiny_llama: CausalLM) -> None:
    for first in range(6):
        session = opened(DraftModelDrafter(tiny_draft, (1,) * 6, stop_below=0.4), tiny_llama)
        text = [first, 3, 1]
        chain = drafted(one(session, text))
        best = full_forward(tiny_draft.model, [*text, *chain])[2:-1].softmax(-1).amax(-1).tolist()
        assert all(chance >= 0.4 for chance in best[:-1])
        assert len(chain) == 6 or best[-1] < 0.4


def test_rows_end_their_chains_by_themselves(tiny_draft: CausalLM, tiny_llama: CausalLM) -> None:
    drafter = DraftModelDrafter(tiny_draft, (1,) * 6, stop_below=0.3)
    batch = opened(drafter, tiny_llama, SAMPLED, rows=4)
    loners = [opened(drafter, tiny_llama, SAMPLED, seed=row) for row in range(4)]
    texts = [[row, 3, 1] for row in range(4)]
    for _ in range(3):
        proposals = batch.propose([request(text) for text in texts])
        assert len({len(proposal.tree) for proposal in proposals}) > 1
        for text, proposal, lone in zip(texts, proposals, loners, strict=True):
            assert_same(proposal, one(lone, text, 9, 999))
            text += [*drafted(proposal)[:2], 5]


def test_settings_of_an_early_stop_that_make_no_sense_are_refused(tiny_draft: CausalLM) -> None:
    with pytest.raises(ValueError, match=r"stop_below is 1.0: give a probability in \[0, 1\)"):
        DraftModelDrafter(tiny_draft, stop_below=1.0)
    with pytest.raises(ValueError, match=r"branching \[2, 1\] is a tree: give one or the other"):
        DraftModelDrafter(tiny_draft, (2, 1), stop_below=0.5)


# --- vocabularies of other sizes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("vocab", [12, 20])
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(1.5), PENALISED])
@pytest.mark.parametrize("branching", [(1, 1, 1), (3, 2)])
def test_a_draft_of_another_padding_never_proposes_what_either_does_not_know(
    tiny_llama: CausalLM, vocab: int, sampling: SamplingConfig, branching: tuple[int, ...]
) -> None:
    draft = CausalLM(tiny_model("llama", vocab=vocab, seed=2))
    for seed in range(2):
        session = open_session(draft, tiny_llama, branching, sampling, seed=seed)
        for text in ([1, 2], [1, 2, 15], [1, 2, 15, 14, 13]):  # a draft of 12 does not know 13 to 15
            proposal = one(session, text)
            assert max(drafted(proposal)) < min(vocab, 16)
            if proposal.q is not None:
                assert proposal.q.shape[1] == 16 and not proposal.q[:, vocab:].any()


# --- keeping up ------------------------------------------------------------------------------------------------------


def cached(session: DraftModelSession, length: int, row: int = 0) -> Tensor:
    """Keys and values of the draft for a row's text."""
    layers: list[Any] = list(session._state.cache.layers)
    return torch.stack([torch.stack([layer.keys[row], layer.values[row]])[..., :length, :] for layer in layers])


@examples(20)
@given(
    seed=st.integers(0, 2**32 - 1),
    branching=st.sampled_from([(1,), (1, 1, 1), (3, 2), (2, 1, 2)]),
    rounds=st.integers(1, 6),
)
def test_a_session_after_any_acceptances_is_a_fresh_session(
    tiny_draft: CausalLM, tiny_llama: CausalLM, seed: int, branching: tuple[int, ...], rounds: int
) -> None:
    chance = random.Random(seed)
    session = open_session(tiny_draft, tiny_llama, branching)
    text = [chance.randrange(16) for _ in range(chance.randint(1, 4))]
    for _ in range(rounds):
        depth = chance.randint(1, 4)
        proposal = one(session, text, depth)
        fresh = open_session(tiny_draft, tiny_llama, branching)
        assert_same(proposal, one(fresh, text, depth))
        kept, wanted = cached(session, len(text)), cached(fresh, len(text))
        torch.testing.assert_close(kept, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
        text += accept_some(proposal, chance)


def test_a_text_that_begins_in_a_row_forgets_the_one_before(tiny_draft: CausalLM, tiny_llama: CausalLM) -> None:
    session = open_session(tiny_draft, tiny_llama, (2, 2), SAMPLED, rows=2)
    session.propose([request([1, 2, 3, 4, 5]), request([6, 7])])
    session.admit(0, TextStart(1, GeneratorSource.from_seed(5)))
    late, early = session.propose([request([9, 8]), request([6, 7, 1])])
    assert_same(late, one(open_session(tiny_draft, tiny_llama, (2, 2), SAMPLED, seed=5), [9, 8]))
    assert early.tree.token_list[0] == 1


@pytest.mark.parametrize("branching", [(1, 1, 1), (2, 2)])
def test_a_row_that_moves_keeps_its_text_its_tree_and_its_chance(
    tiny_draft: CausalLM, tiny_llama: CausalLM, branching: tuple[int, ...]
) -> None:
    session = open_session(tiny_draft, tiny_llama, branching, PENALISED, rows=3)
    lone = open_session(tiny_draft, tiny_llama, branching, PENALISED, seed=2)
    texts = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    proposals = session.propose([request(text) for text in texts])
    assert_same(proposals[2], one(lone, texts[2]))
    longer = [*texts[2], *drafted(proposals[2])[:1], 4]
    session.move(2, 0)
    moved, _ = session.propose([request(longer), request([*texts[1], 3])])
    assert_same(moved, one(lone, longer))


def test_a_row_that_moves_before_it_was_drafted_for_leaves_no_tree_of_the_other_text_behind(
    tiny_draft: CausalLM, tiny_llama: CausalLM
) -> None:
    session = open_session(tiny_draft, tiny_llama, (1, 1, 1), rows=2)
    left, _ = session.propose([request([1, 2, 3]), request([6, 7])])
    session.admit(1, TextStart(1, GeneratorSource.from_seed(5)))
    session.move(1, 0)
    text = [*drafted(left)[:2], 5]  # which begins as the other's draft went on
    assert_same(one(session, text), one(open_session(tiny_draft, tiny_llama, (1, 1, 1)), text))


def positions_run(model: CausalLM) -> list[tuple[int, int]]:
    """A list that grows by (rows, positions) with every forward of the model."""
    shapes: list[tuple[int, int]] = []
    embeddings = model.model.get_input_embeddings()
    embeddings.register_forward_pre_hook(lambda module, args: shapes.append(tuple(args[0].shape)))
    return shapes


def test_what_was_accepted_is_not_run_again(tiny_llama: CausalLM) -> None:
    draft = CausalLM(tiny_model("llama", seed=1))
    shapes = positions_run(draft)
    session = open_session(draft, tiny_llama, (1, 1, 1))
    text = [1, 2, 3, 4]
    text += drafted(one(session, text))  # all three accepted, and then
    text.append(9)  # the target's own
    assert shapes == [(1, 3), (1, 1), (1, 1), (1, 1)], "the prompt, its last token, two of the chain"
    del shapes[:]
    one(session, text)
    # The third drafted token never ran: it had nobody behind it.
    assert shapes == [(1, 2), (1, 1), (1, 1)]


def test_a_row_that_has_just_begun_is_caught_up_alone(tiny_llama: CausalLM) -> None:
    """Else every other row would be as wide as its prompt."""
    draft = CausalLM(tiny_model("llama", seed=1))
    shapes = positions_run(draft)
    session = open_session(draft, tiny_llama, (1,), rows=2)
    session.propose([request([1, 2, 3]), request([4])])
    session.admit(1, TextStart(1, GeneratorSource.from_seed(5)))
    del shapes[:]
    session.propose([request([1, 2, 3, 5]), request([6] * 20)])
    assert shapes == [(1, 19), (2, 1)]


# --- drafters of one text at a time ----------------------------------------------------------------------------------


class Repeats(TextDrafter):
    """Drafts the text's last token over and over; remembers what it was told."""

    name = "repeats"
    budgets = chain_budgets(3)

    def __init__(self) -> None:
        self.starts: list[TextStart] = []
        self.sessions: list[RepeatsSession] = []

    def open_text(
        self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int
    ) -> "RepeatsSession":
        self.starts.append(start)
        self.sessions.append(RepeatsSession())
        return self.sessions[-1]


class RepeatsSession(TextSession):
    def __init__(self) -> None:
        self.asked: list[int] = []
        self.observed: list[tuple[int, ...]] = []

    def propose(self, request: DraftRequest) -> Proposal:
        self.asked.append(request.tokens[-1])
        depth = min(request.max_depth, request.max_nodes - 1, 3)
        return Proposal(TokenTree.chain([request.tokens[-1]] * (depth + 1)), ProposalKind.DETERMINISTIC)

    def observe(self, proposal: Proposal, logits: Tensor) -> None:
        self.observed.append(tuple(logits.shape))


def test_each_text_has_a_session_of_its_own_that_moves_with_it(tiny_llama: CausalLM) -> None:
    drafter = Repeats()
    session = opened(drafter, tiny_llama, rows=3)
    proposals = session.propose([request([1]), request([2], depth=0), request([3], depth=2)])
    assert [proposal.tree.token_list for proposal in proposals] == [[1] * 4, [2], [3] * 3]
    assert [text.asked for text in drafter.sessions] == [[1], [], [3]], "a text without room is not asked for"
    session.observe(proposals, [torch.zeros(4, 16), torch.zeros(1, 16), torch.zeros(3, 16)])
    assert [text.observed for text in drafter.sessions] == [[(4, 16)], [(1, 16)], [(3, 16)]]
    session.move(2, 0)
    session.propose([request([7]), request([8])])
    assert [text.asked for text in drafter.sessions] == [[1], [8], [3, 7]]
    session.admit(1, TextStart(4, GeneratorSource.from_seed(9)))
    session.propose([request([7]), request([8])])
    assert drafter.sessions[3].asked == [8] and drafter.starts[3].prompt_length == 4


def test_a_session_of_a_text_drafter_may_be_the_drafter_itself(counting: CausalLM) -> None:
    drafter = ScriptedDrafter(((0,), (2,)))
    for _ in range(2):
        assert Engine(counting, drafter).decode([0], DecodingConfig(5)).tokens == (1, 2, 3, 4, 5)
        assert drafter.asked == [([0, 1], 3), ([0, 1, 2, 3], 1)]


# --- Medusa: a static tree -------------------------------------------------------------------------------------------

PATHS = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0]]


def counting_heads(num_heads: int = 3) -> MedusaHeads:
    """Heads for the counting target: of a hidden state at token x, head k's best is x + 2 + k, then x + 3 + k, ..."""
    heads = MedusaHeads(MedusaConfig(16, 16, num_heads, tree=((0,),)))
    with torch.no_grad():
        lm_heads: list[Any] = [head.lm_head for head in heads.heads]
        for k, lm_head in enumerate(lm_heads):
            for x in range(16):
                for rank in range(16):
                    lm_head.weight[(x + 2 + k + rank) % 16, x] = -float(rank)
    return heads


def medusa_proposals(target: CausalLM, heads: MedusaHeads, texts: list[list[int]], rooms: list[int]) -> list[Proposal]:
    """What the loop would ask for: the hidden state is the one the root, the last of the text, was written from."""
    hidden = target.prefill([text[:-1] for text in texts], target.new_cache(16, len(texts))).hidden
    session = MedusaDrafter(heads, PATHS).open(target, SamplingConfig(), len(texts), 99)
    requests = [DraftRequest(text, hidden[row], rooms[row], 99) for row, text in enumerate(texts)]
    return session.propose(requests)


def test_head_k_drafts_the_token_k_plus_two_after_its_hidden_state(counting: CausalLM) -> None:
    (proposal,) = medusa_proposals(counting, counting_heads(), [[4, 5, 6]], [9])
    # The hidden state is that of 5; the root is 6; head 0 wants 7, head 1 wants 8, head 2 wants 9; rank r is r more.
    assert proposal.tree.shape.parents == (-1, 0, 0, 0, 1, 1, 3, 5)
    assert proposal.tree.token_list == [6, 7, 8, 9, 8, 9, 8, 9]
    assert proposal.kind is ProposalKind.DETERMINISTIC and proposal.q is None


def test_a_medusa_tree_is_cut_by_depth_and_never_by_value(counting: CausalLM) -> None:
    proposals = medusa_proposals(counting, counting_heads(), [[4, 5, 6]] * 3, [2, 1, 0])
    assert [proposal.tree.token_list for proposal in proposals] == [[6, 7, 8, 9, 8, 9, 8], [6, 7, 8, 9], [6]]
    assert [proposal.tree.shape.max_depth for proposal in proposals] == [2, 1, 0]


def test_rows_of_a_batch_are_drafted_for_from_their_own_hidden_states(counting: CausalLM) -> None:
    proposals = medusa_proposals(counting, counting_heads(), [[4, 5, 6], [1, 2]], [9, 1])
    assert [proposal.tree.token_list for proposal in proposals] == [[6, 7, 8, 9, 8, 9, 8, 9], [2, 3, 4, 5]]


def test_heads_that_are_right_are_accepted_whole_through_the_loop(counting: CausalLM) -> None:
    drafter = MedusaDrafter(counting_heads(), [[0], [0, 0], [0, 0, 0]])
    generation = Engine(counting, drafter).decode([0], DecodingConfig(13))
    assert generation.tokens == tuple(range(1, 14))
    # The prefill writes one, then three times three drafted and one written.
    assert [(step.accepted, len(step.tokens)) for step in generation.steps] == [(0, 1), (3, 4), (3, 4), (3, 4)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_medusa_kind_is_deterministic_at_any_temperature(counting: CausalLM, temperature: float) -> None:
    drafter = MedusaDrafter(counting_heads(), PATHS)
    config = DecodingConfig(12, SamplingConfig(temperature))
    assert len(Engine(counting, drafter).decode([0], config).tokens) == 12


def test_heads_of_another_target_are_refused_before_anything_runs(tiny_llama: CausalLM) -> None:
    for width, vocab in ((8, 16), (16, 8)):
        drafter = MedusaDrafter(MedusaHeads(MedusaConfig(width, vocab)))
        with pytest.raises(ValueError, match="give heads that were trained on this target"):
            Engine(tiny_llama, drafter).decode([1], DecodingConfig(4))


def test_a_medusa_tree_must_have_a_node_and_no_more_levels_than_heads() -> None:
    heads = counting_heads(num_heads=1)
    with pytest.raises(ValueError, match="the tree is 2 deep but there are 1 heads"):
        MedusaDrafter(heads, [[0], [0, 0]])
    with pytest.raises(ValueError, match="the tree is empty"):
        MedusaDrafter(heads, [])
