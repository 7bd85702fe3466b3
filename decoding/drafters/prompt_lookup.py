"""Prompt lookup (Saxena 2023): drafts the tokens that followed an earlier occurrence of the last few tokens.

The drafter looks for the longest suffix of the text, at most ``ngram`` tokens long, that also occurs earlier in the
text. Of all earlier occurrences of this suffix it takes the latest, and drafts the tokens that follow there;
`transformers` (``prompt_lookup_num_tokens``) takes the first occurrence.
"""

from collections.abc import Iterator, Sequence
from itertools import islice

from decoding.drafters.base import DraftRequest, TextDrafter, TextSession, TextStart
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal, ProposalKind, TokenTrie


class PromptLookupDrafter(TextDrafter):
    """Drafter of up to ``branches`` continuations, each of up to ``tokens`` tokens, that it finds in the prompt and in
    the output so far.

    The first branch continues the latest earlier occurrence of the longest suffix. Further branches continue other
    occurrences: first occurrences of longer suffixes, and among equal lengths the latest occurrences. Equal beginnings
    of branches are merged. A continuation ends at the text's end, unless the occurrence touches or overlaps the suffix.
    In that case the text repeats itself, and the continuation goes on repeating it.

    Suffixes of fewer than ``min_ngram`` tokens are not looked up.
    """

    name = "prompt lookup"

    def __init__(self, tokens: int = 10, ngram: int = 3, min_ngram: int = 1, branches: int = 1) -> None:
        if tokens < 1 or branches < 1:
            raise UserError(f"tokens is {tokens} and branches is {branches}: set both to at least 1")
        if not 1 <= min_ngram <= ngram:
            raise UserError(f"min_ngram is {min_ngram} and ngram is {ngram}: use 1 <= min_ngram <= ngram")
        self.tokens = tokens
        self.ngram = ngram
        self.min_ngram = min_ngram
        self.branches = branches
        self.budgets = tuple(Budget(depth, 1 + depth * branches) for depth in range(1, tokens + 1))

    def open_text(
        self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int
    ) -> "PromptLookupSession":
        return PromptLookupSession(self, target)


class PromptLookupSession(TextSession):
    """An index of every n-gram of one text. A token enters the index once another token follows it."""

    _LOOKS = 4  # number of occurrences tried per branch: the latest often continue with the same tokens

    def __init__(self, drafter: PromptLookupDrafter, target: CausalLM) -> None:
        self._drafter = drafter
        self._device = target.device
        self._indexed = 0
        self._ends: dict[tuple[int, ...], list[int]] = {}

    def propose(self, request: DraftRequest) -> Proposal:
        tokens = request.tokens
        # The index ends before the last token, so the suffix itself is not in it: every match is an earlier one.
        for end in range(self._indexed + 1, len(tokens)):
            for size in range(self._drafter.min_ngram, min(self._drafter.ngram, end) + 1):
                self._ends.setdefault(tuple(tokens[end - size : end]), []).append(end)
        self._indexed = len(tokens) - 1
        depth = min(request.max_depth, self._drafter.tokens)
        trie = TokenTrie(tokens[-1])
        branches = 0
        matched = 0
        for end, size in self._matches(tokens):
            matched = matched or _match_length(tokens, end)
            nodes = len(trie)
            trie.add(_continuation(tokens, end, size, depth), request.max_nodes)
            branches += len(trie) > nodes
            if branches == self._drafter.branches:
                break
        return Proposal(trie.tree(self._device), ProposalKind.DETERMINISTIC, matched=matched)

    def _matches(self, tokens: Sequence[int]) -> Iterator[tuple[int, int]]:
        """Yield the ends and sizes of earlier occurrences of the text's suffixes: longer suffixes first, and among
        equal lengths later occurrences first.
        """
        for size in range(min(self._drafter.ngram, len(tokens)), self._drafter.min_ngram - 1, -1):
            ends = self._ends.get(tuple(tokens[len(tokens) - size :]), ())
            for end in islice(reversed(ends), self._LOOKS * self._drafter.branches):
                yield end, size


_LONGEST_MATCH = 32


def _match_length(tokens: Sequence[int], end: int) -> int:
    """Return how many tokens before ``end`` equal the last tokens of the text, even beyond the longest n-gram."""
    length, most = 0, min(_LONGEST_MATCH, end)
    while length < most and tokens[end - 1 - length] == tokens[-1 - length]:
        length += 1
    return length


def _continuation(tokens: Sequence[int], end: int, size: int, count: int) -> list[int]:
    """Return up to ``count`` tokens, starting at index ``end``, where an occurrence of the text's last ``size`` tokens
    has just ended.
    """
    period = len(tokens) - end
    length = count if period <= size else min(count, period)
    return [tokens[end + index % period] for index in range(length)]
