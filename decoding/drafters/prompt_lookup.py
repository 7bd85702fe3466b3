"""Prompt lookup (Saxena 2023): drafts the tokens that followed an earlier occurrence of the text's last few tokens.

The longest suffix of the text, of at most ``max_ngram`` tokens, that occurs earlier is looked up, and its latest
earlier occurrence continued (`transformers`, with ``prompt_lookup_num_tokens``, continues the first one).
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from jaxtyping import Float
from torch import Tensor

from decoding.drafters.base import DraftRequest, TextDrafter, TextStart
from decoding.drafters.token_trie import TokenTrie
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig


class PromptLookupDrafter(TextDrafter):
    """Drafter of up to ``num_branches`` continuations of ``num_draft_tokens``, from the prompt and the output so far.

    The first branch continues the latest earlier occurrence of the longest suffix. Further branches are other
    continuations: those of longer suffixes first, for one suffix those of later occurrences first; common beginnings
    are shared. A continuation ends where the text ends, unless the occurrence touches or overlaps the suffix: then the
    text repeats itself, and the continuation repeats it further.

    Suffixes of fewer than ``min_ngram`` tokens are not looked up.
    """

    name = "prompt lookup"

    def __init__(
        self, num_draft_tokens: int = 10, max_ngram: int = 3, min_ngram: int = 1, num_branches: int = 1
    ) -> None:
        if num_draft_tokens < 1 or num_branches < 1:
            raise ValueError(
                f"num_draft_tokens is {num_draft_tokens} and num_branches {num_branches}: give at least 1 of each"
            )
        if not 1 <= min_ngram <= max_ngram:
            raise ValueError(f"n-grams of {min_ngram} to {max_ngram} tokens: give 1 <= min_ngram <= max_ngram")
        self.num_draft_tokens = num_draft_tokens
        self.max_ngram = max_ngram
        self.min_ngram = min_ngram
        self.num_branches = num_branches

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return tuple(Budget(depth, 1 + depth * self.num_branches) for depth in range(1, self.num_draft_tokens + 1))

    def open_text(
        self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int
    ) -> "PromptLookupSession":
        return PromptLookupSession(self, target)


class PromptLookupSession:
    """An index of the occurrences of every n-gram of one text. A token enters it when another token follows.

    A text need not continue the previous one: tokens that were taken back leave the index.
    """

    _LOOKS = 4  # occurrences of an n-gram tried per branch, as the latest ones often continue alike

    def __init__(self, drafter: PromptLookupDrafter, target: CausalLM) -> None:
        self._drafter = drafter
        self._device = target.device
        self._indexed: list[int] = []
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def observe(self, proposal: Proposal, logits: Float[Tensor, "nodes vocab"]) -> None:
        """Do nothing: the text holds everything that the session needs."""

    def propose(self, request: DraftRequest) -> Proposal:
        tokens = request.tokens
        # The index ends before the last token, so the suffix itself is not in it: every match is an earlier one.
        self._follow(request)
        depth = min(request.max_depth, self._drafter.num_draft_tokens)
        trie = TokenTrie(tokens[-1])
        branches = 0
        matched = 0
        for end, size in self._matches(tokens):
            matched = matched or _match_length(tokens, end)
            nodes = len(trie)
            trie.add(_continuation(tokens, end, size, depth), request.max_nodes)
            branches += len(trie) > nodes
            if branches == self._drafter.num_branches:
                break
        return Proposal(trie.tree(self._device), ProposalKind.DETERMINISTIC, matched=matched)

    def _matches(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the ends of earlier occurrences of the text's suffixes, and their sizes: longest first, then latest."""
        for size in range(min(self._drafter.max_ngram, len(tokens)), self._drafter.min_ngram - 1, -1):
            ends = self._ends.get(tuple(tokens[len(tokens) - size :]), ())
            for end in islice(reversed(ends), self._LOOKS * self._drafter.num_branches):
                yield end, size

    def _follow(self, request: DraftRequest) -> None:
        """Change the index from the text that it holds to the request's, one token at a time."""
        before_last = len(request.tokens) - 1
        common = min(request.common_with(self._indexed, len(self._indexed)), before_last)
        while len(self._indexed) > common:
            for ngram in self._ngrams_at_end():
                self._ends[ngram].pop()
            self._indexed.pop()
        for token in request.tokens[len(self._indexed) : before_last]:
            self._indexed.append(token)
            for ngram in self._ngrams_at_end():
                self._ends.setdefault(ngram, []).append(len(self._indexed))

    def _ngrams_at_end(self) -> list[tuple[int, ...]]:
        known = len(self._indexed)
        sizes = range(self._drafter.min_ngram, min(self._drafter.max_ngram, known) + 1)
        return [tuple(self._indexed[known - size :]) for size in sizes]


_LONGEST_MATCH = 32
"""Length up to which a match is measured."""


def _match_length(tokens: Sequence[int], end: int) -> int:
    """Return the number of tokens before ``end`` that equal the text's last ones, also beyond the longest n-gram."""
    length, most = 0, min(_LONGEST_MATCH, end)
    while length < most and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def _continuation(tokens: Sequence[int], end: int, size: int, count: int) -> list[int]:
    """Return up to ``count`` tokens from ``end`` on, where an occurrence of the text's last ``size`` tokens ends."""
    period = len(tokens) - end
    length = count if period <= size else min(count, period)
    return [tokens[end + place % period] for place in range(length)]
