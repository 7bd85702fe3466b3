"""Prompt lookup: which continuations it finds, in which order, and that it keeps up with any text."""

from collections.abc import Sequence

from drafter_checks import opened, paths, request
from hypothesis import given
from hypothesis import strategies as st

from decoding.drafters import PromptLookupDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.rules.tree import Proposal, ProposalKind


def lookup(target: CausalLM, text: Sequence[int], depth: int = 99, nodes: int = 999, **settings: int) -> Proposal:
    (proposal,) = opened(PromptLookupDrafter(**settings), target).propose([request(text, depth, nodes)])
    return proposal


def every_start(path: Sequence[int]) -> set[tuple[int, ...]]:
    """Return all beginnings of a path, the path itself included."""
    return {tuple(path[:length]) for length in range(1, len(path) + 1)}


def naive_paths(tokens: list[int], depth: int, ngram: int, min_ngram: int, branches: int) -> set[tuple[int, ...]]:
    """Try every suffix, longest first, against every earlier place, latest first; four places for each branch."""
    found: set[tuple[int, ...]] = set()
    added = 0
    for size in range(min(ngram, len(tokens)), min_ngram - 1, -1):
        suffix = tokens[len(tokens) - size :]
        ends = [end for end in range(len(tokens) - 1, size - 1, -1) if tokens[end - size : end] == suffix]
        for end in ends[: 4 * branches]:
            piece = tokens[end:]
            continuation = (piece * depth if len(piece) <= size else piece)[:depth]
            if added < branches and not every_start(continuation) <= found:
                found |= every_start(continuation)
                added += 1
    return found


@given(
    text=st.lists(st.integers(0, 3), min_size=1, max_size=40),
    growth=st.lists(st.integers(1, 4), max_size=8),
    count=st.integers(1, 5),
    ngrams=st.sampled_from([(1, 1), (1, 3), (2, 4), (3, 3)]),
    branches=st.integers(1, 4),
    room=st.integers(1, 6),
)
def test_prompt_lookup_is_the_naive_search_however_the_text_grows(
    tiny_llama: CausalLM,
    text: list[int],
    growth: list[int],
    count: int,
    ngrams: tuple[int, int],
    branches: int,
    room: int,
) -> None:
    shortest, longest = ngrams
    session = opened(PromptLookupDrafter(count, longest, shortest, branches), tiny_llama)
    length = 1
    for grown in (0, *growth):
        length = min(length + grown, len(text))
        (proposal,) = session.propose([request(text[:length], room)])
        assert paths(proposal.tree) == naive_paths(text[:length], min(count, room), longest, shortest, branches)
        assert proposal.tree.token_list[0] == text[length - 1]
        assert proposal.kind is ProposalKind.DETERMINISTIC
        assert branches > 1 or proposal.tree.shape.is_chain


def test_a_proposal_tells_how_long_its_match_is_beyond_the_longest_ngram_too(tiny_llama: CausalLM) -> None:
    assert lookup(tiny_llama, [1, 2, 3]).matched == 0
    assert lookup(tiny_llama, [1, 2, 3, 2]).matched == 1
    # 1 2 3 4 5 stood before, behind another token; the n-gram that found it has three tokens.
    assert lookup(tiny_llama, [7, 1, 2, 3, 4, 5, 6, 8, 1, 2, 3, 4, 5], ngram=3).matched == 5
    # The latest occurrence of the suffix counts, as it is the one continued: 9 4 5 there, 3 4 5 before.
    assert lookup(tiny_llama, [3, 4, 5, 6, 9, 4, 5, 6, 3, 4, 5], ngram=2).matched == 2


def test_a_second_branch_is_accepted_where_the_first_is_wrong(counting: CausalLM) -> None:
    # Behind 0 there was 1 and, later, 9: the counting target wants 1 2 3, the second branch.
    prompt = [0, 1, 2, 3, 4, 0, 9, 15]
    steps = Engine(counting, PromptLookupDrafter(3, branches=2)).decode(prompt, DecodingConfig(5)).steps
    assert steps[1].accepted == 3
    assert Engine(counting, PromptLookupDrafter(3)).decode(prompt, DecodingConfig(5)).steps[1].accepted == 0
