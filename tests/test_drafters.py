"""What each drafter proposes, and that a session keeps up with any text."""

import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_models import full_forward, tiny_model

from decoding.drafters import DraftModelDrafter, MedusaDrafter, PromptLookupDrafter
from decoding.drafters.draft_model import DraftModelSession
from decoding.generate import DecodingConfig, decode
from decoding.heads import MedusaConfig, MedusaHeads
from decoding.proposal import Proposal, ProposalKind
from decoding.sampling import GeneratorSource, SamplingConfig, probabilities
from decoding.target import CausalLM

NO_HIDDEN = torch.empty(0)
SAMPLED = SamplingConfig(1.0, top_p=0.9)
PENALISED = SamplingConfig(0.9, repetition_penalty=1.4)


def seeded(seed: int = 0) -> GeneratorSource:
    return GeneratorSource(torch.Generator().manual_seed(seed))


def drafted(proposal: Proposal) -> list[int]:
    return proposal.tree.token_list[1:]


# --- prompt lookup --------------------------------------------------------------------------------------------------


def naive_lookup(tokens: Sequence[int], count: int, max_ngram: int) -> list[int]:
    """Try every suffix, longest first, against every earlier place, latest first."""
    for size in range(min(max_ngram, len(tokens)), 0, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if list(tokens[end - size : end]) == list(tokens[len(tokens) - size :]):
                return list(tokens[end : end + count])
    return []


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    growth=st.lists(st.integers(1, 4), max_size=8),
    count=st.integers(1, 5),
    max_ngram=st.integers(1, 4),
    room=st.integers(1, 6),
)
def test_prompt_lookup_is_the_naive_search_however_the_text_grows(
    tiny_llama: CausalLM, text: list[int], growth: list[int], count: int, max_ngram: int, room: int
) -> None:
    session = PromptLookupDrafter(count, max_ngram).open(tiny_llama, SamplingConfig(), seeded(), 99)
    length = 1
    for grown in (0, *growth):
        length = min(length + grown, len(text))
        proposal = session.propose(text[:length], NO_HIDDEN, room)
        assert drafted(proposal) == naive_lookup(text[:length], min(count, room), max_ngram)
        assert proposal.tree.token_list[0] == text[length - 1]
        assert proposal.kind is ProposalKind.DETERMINISTIC and proposal.tree.shape.is_chain


def test_prompt_lookup_continues_the_latest_occurrence_of_the_longest_suffix(tiny_llama: CausalLM) -> None:
    def lookup(tokens: list[int]) -> list[int]:
        session = PromptLookupDrafter(3, 2).open(tiny_llama, SamplingConfig(), seeded(), 99)
        return drafted(session.propose(tokens, NO_HIDDEN, 9))

    assert lookup([1, 2, 7, 8, 9, 2, 5, 1, 2]) == [7, 8, 9], "the pair (1, 2) wins over the later 2"
    assert lookup([1, 2, 7, 1, 2, 8, 1, 2]) == [8, 1, 2], "the later pair wins"
    assert lookup([4, 4]) == [4]
    assert lookup([1, 2, 3]) == [], "nothing occurs twice"


def test_prompt_lookup_refuses_to_draft_nothing() -> None:
    with pytest.raises(ValueError, match=r"num_draft_tokens \(0\)"):
        PromptLookupDrafter(0)
    with pytest.raises(ValueError, match=r"max_ngram \(0\)"):
        PromptLookupDrafter(3, 0)


# --- draft model ----------------------------------------------------------------------------------------------------


def open_session(
    draft: CausalLM,
    target: CausalLM,
    branching: tuple[int, ...],
    sampling: SamplingConfig,
    with_replacement: bool = False,
    seed: int = 0,
) -> DraftModelSession:
    return DraftModelDrafter(draft, branching, with_replacement).open(target, sampling, seeded(seed), 80)


def cache_of(session: DraftModelSession, length: int) -> torch.Tensor:
    return torch.stack([torch.stack([layer.keys, layer.values])[..., :length, :] for layer in session._cache.layers])


@given(
    seed=st.integers(0, 2**32 - 1),
    branching=st.sampled_from([(1,), (1, 1, 1), (3, 2), (2, 1, 2)]),
    rounds=st.integers(1, 6),
)
def test_a_session_after_any_acceptances_is_a_fresh_session(
    tiny_draft: CausalLM, tiny_llama: CausalLM, seed: int, branching: tuple[int, ...], rounds: int
) -> None:
    chance = random.Random(seed)
    session = open_session(tiny_draft, tiny_llama, branching, SamplingConfig())
    text = [chance.randrange(16) for _ in range(chance.randint(1, 4))]
    for _ in range(rounds):
        depth = chance.randint(1, 4)
        proposal = session.propose(text, NO_HIDDEN, depth)
        fresh = open_session(tiny_draft, tiny_llama, branching, SamplingConfig())
        expected = fresh.propose(text, NO_HIDDEN, depth)
        assert proposal.tree.token_list == expected.tree.token_list and proposal.tree.shape == expected.tree.shape
        kept, wanted = cache_of(session, len(text)), cache_of(fresh, len(text))
        torch.testing.assert_close(kept, wanted, rtol=0, atol=1e-6 * float(wanted.abs().max()))
        # Accept any path, then whatever the target writes: under a lossy rule it may be a token that was refused.
        node = chance.randrange(len(proposal.tree))
        refused = [proposal.tree.token_list[child] for child in proposal.tree.shape.children[node]]
        text += [proposal.tree.token_list[ancestor] for ancestor in proposal.tree.shape.path(node)]
        text.append(chance.choice([*refused, chance.randrange(16)]))


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
            proposal = session.propose(text, NO_HIDDEN, 9)
            tree, q = proposal.tree, proposal.q
            assert q is not None
            for node, children in enumerate(tree.shape.children):
                if not children:
                    continue
                whole = [*text, *(tree.token_list[ancestor] for ancestor in tree.shape.path(node))]
                seen = torch.zeros(1, 16, dtype=torch.bool)
                seen[0, whole] = True
                expected = probabilities(full_forward(tiny_draft.model, whole)[-1:], sampling, seen)[0]
                torch.testing.assert_close(q[node], expected, rtol=0, atol=1e-5)
                tokens = [tree.token_list[child] for child in children]
                assert all(q[node, token] > 0 for token in tokens)
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
    assert session.propose([1, 2], NO_HIDDEN, 9).kind is kind


def test_a_greedy_tree_holds_the_drafts_best_tokens_best_first(tiny_draft: CausalLM, tiny_llama: CausalLM) -> None:
    tree = open_session(tiny_draft, tiny_llama, (3, 2), SamplingConfig()).propose([1, 2], NO_HIDDEN, 9).tree
    assert tree.shape.parents == (-1, 0, 0, 0, 1, 1, 2, 2, 3, 3)
    for node, children in enumerate(tree.shape.children[:4]):
        whole = [1, 2, *(tree.token_list[ancestor] for ancestor in tree.shape.path(node))]
        best = full_forward(tiny_draft.model, whole)[-1].topk(len(children)).indices.tolist()
        assert [tree.token_list[child] for child in children] == best


@pytest.mark.parametrize(("branching", "depth", "nodes"), [((1, 1, 1), 2, 3), ((2, 2, 2), 2, 7), ((2, 2, 2), 1, 3)])
def test_a_draft_is_no_deeper_than_the_room(
    tiny_draft: CausalLM, tiny_llama: CausalLM, branching: tuple[int, ...], depth: int, nodes: int
) -> None:
    tree = open_session(tiny_draft, tiny_llama, branching, SAMPLED, True).propose([1, 2], NO_HIDDEN, depth).tree
    assert tree.shape.max_depth == depth and len(tree) == nodes


def test_the_largest_tree_is_counted_with_its_root(tiny_draft: CausalLM) -> None:
    drafter = DraftModelDrafter(tiny_draft, (3, 2, 1))
    assert (drafter.max_nodes, drafter.max_depth, drafter.is_chain) == (1 + 3 + 6 + 6, 3, False)
    assert DraftModelDrafter(tiny_draft, (1, 1)).is_chain


def test_a_nucleus_smaller_than_the_branching_gives_fewer_children(tiny_draft: CausalLM, tiny_llama: CausalLM) -> None:
    session = open_session(tiny_draft, tiny_llama, (3, 3), SamplingConfig(1.0, top_k=2))
    tree = session.propose([1, 2], NO_HIDDEN, 9).tree
    assert tree.shape.parents == (-1, 0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize("branching", [(), (2, 0)])
def test_a_branching_without_children_is_refused(tiny_draft: CausalLM, branching: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"branching is .* at least one child"):
        DraftModelDrafter(tiny_draft, branching)


def test_more_children_than_there_are_tokens_are_refused(tiny_draft: CausalLM, tiny_llama: CausalLM) -> None:
    with pytest.raises(ValueError, match=r"branching is \[17\] but target and draft share 16 tokens"):
        open_session(tiny_draft, tiny_llama, (17,), SamplingConfig())


@pytest.mark.parametrize("vocab", [12, 20])
@pytest.mark.parametrize("sampling", [SamplingConfig(), SamplingConfig(1.5), PENALISED])
@pytest.mark.parametrize("branching", [(1, 1, 1), (3, 2)])
def test_a_draft_of_another_padding_never_proposes_what_either_does_not_know(
    tiny_llama: CausalLM, vocab: int, sampling: SamplingConfig, branching: tuple[int, ...]
) -> None:
    draft = CausalLM(tiny_model("llama", vocab=vocab, seed=2))
    for seed in range(5):
        session = open_session(draft, tiny_llama, branching, sampling, seed=seed)
        for text in ([1, 2], [1, 2, 15], [1, 2, 15, 14, 13]):  # a draft of 12 does not know 13 to 15
            proposal = session.propose(text, NO_HIDDEN, 9)
            assert max(drafted(proposal)) < min(vocab, 16)
            if proposal.q is not None:
                assert proposal.q.shape[1] == 16 and not proposal.q[:, vocab:].any()


@pytest.mark.parametrize("vocab", [12, 20])
def test_greedy_output_is_plain_greedy_with_a_draft_of_another_padding(tiny_llama: CausalLM, vocab: int) -> None:
    draft = CausalLM(tiny_model("llama", vocab=vocab, seed=2))
    for prompt in ([1, 2], [15, 13, 14], [9]):
        plain = decode(tiny_llama, None, prompt, DecodingConfig(16)).tokens
        for branching in ((1, 1), (2, 2)):
            drafter = DraftModelDrafter(draft, branching)
            assert decode(tiny_llama, drafter, prompt, DecodingConfig(16)).tokens == plain


# --- Medusa ---------------------------------------------------------------------------------------------------------

PATHS = [[0], [1], [2], [0, 0], [0, 1], [2, 0], [0, 1, 0]]


def counting_heads(num_heads: int = 3) -> MedusaHeads:
    """Heads for the counting target: of a hidden state at token x, head k's best is x + 2 + k, then x + 3 + k, ..."""
    heads = MedusaHeads(MedusaConfig(16, 16, num_heads, tree=((0,),)))
    with torch.no_grad():
        for k, head in enumerate(heads.heads):
            for x in range(16):
                for rank in range(16):
                    head.lm_head.weight[(x + 2 + k + rank) % 16, x] = -float(rank)
    return heads


def medusa_proposal(target: CausalLM, heads: MedusaHeads, text: list[int], room: int) -> Proposal:
    """What the loop would ask for: the hidden state is the one the root, the last of the text, was written from."""
    hidden = target.append(torch.tensor(text[:-1]), target.new_cache(16)).hidden[-1]
    drafter = MedusaDrafter(heads, PATHS)
    return drafter.open(target, SamplingConfig(), seeded(), 99).propose(text, hidden, room)


def test_head_k_drafts_the_token_k_plus_two_after_its_hidden_state(counting: CausalLM) -> None:
    proposal = medusa_proposal(counting, counting_heads(), [4, 5, 6], room=9)
    # The hidden state is that of 5; the root is 6; head 0 wants 7, head 1 wants 8, head 2 wants 9; rank r is r more.
    assert proposal.tree.shape.parents == (-1, 0, 0, 0, 1, 1, 3, 5)
    assert proposal.tree.token_list == [6, 7, 8, 9, 8, 9, 8, 9]
    assert proposal.kind is ProposalKind.DETERMINISTIC and proposal.q is None


def test_a_medusa_tree_is_cut_by_depth_and_never_by_value(counting: CausalLM) -> None:
    heads = counting_heads()
    for room, tokens in ((2, [6, 7, 8, 9, 8, 9, 8]), (1, [6, 7, 8, 9])):
        proposal = medusa_proposal(counting, heads, [4, 5, 6], room)
        assert proposal.tree.token_list == tokens and proposal.tree.shape.max_depth == room


def test_heads_that_are_right_are_accepted_whole_through_the_loop(counting: CausalLM) -> None:
    drafter = MedusaDrafter(counting_heads(), [[0], [0, 0], [0, 0, 0]])
    generation = decode(counting, drafter, [0], DecodingConfig(13))
    assert generation.tokens == tuple(range(1, 14))
    # The prefill writes one, then three times three drafted and one written.
    assert [(step.accepted, len(step.tokens)) for step in generation.steps] == [(0, 1), (3, 4), (3, 4), (3, 4)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_medusa_kind_is_deterministic_at_any_temperature(counting: CausalLM, temperature: float) -> None:
    drafter = MedusaDrafter(counting_heads(), PATHS)
    config = DecodingConfig(12, SamplingConfig(temperature))
    assert len(decode(counting, drafter, [0], config).tokens) == 12


def test_heads_of_another_target_are_refused_before_anything_runs(tiny_llama: CausalLM) -> None:
    for width, vocab in ((8, 16), (16, 8)):
        drafter = MedusaDrafter(MedusaHeads(MedusaConfig(width, vocab)))
        with pytest.raises(ValueError, match="give heads that were trained on this target"):
            decode(tiny_llama, drafter, [1], DecodingConfig(4))


def test_a_medusa_tree_must_have_a_node_and_no_more_levels_than_heads() -> None:
    heads = counting_heads(num_heads=1)
    with pytest.raises(ValueError, match="the tree is 2 deep but there are 1 heads"):
        MedusaDrafter(heads, [[0], [0, 0]])
    with pytest.raises(ValueError, match="the tree is empty"):
        MedusaDrafter(heads, [])
