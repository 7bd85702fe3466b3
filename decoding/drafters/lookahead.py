"""Lookahead decoding (Fu et al. 2402.02057): the target itself guesses ahead, in the positions a pass leaves idle.

A window of guessed tokens is kept from step to step: ``window`` columns of ``ngram - 1`` levels each. The token at
level l of column i stands l + i positions after the text's last token, which is level 0 of column 0. The tokens of
level 0 form a chain, the trunk. A token of a higher level is the child of the token one level below it in its column.
So the window is a tree, and a tree's mask does the work of lookahead's own attention mask.

Each target pass also predicts the token after every column's last level. That completes one n-gram per column, which
goes into the pool. The levels then move down by one, and the predicted tokens become the last level (a Jacobi step for
all positions at once). The pool's n-grams that begin with the text's last token are the tree's other branches, the
guesses to be accepted.

The tree depends on the text and on the logits of earlier passes, never on random numbers of this step's verification.
So it is deterministic, and a rule for deterministic proposals is lossless at any temperature: given all earlier steps
the tree is fixed, and each token is drawn from the target's distribution in its context. The guesses are the target's
argmax without sampling controls; that changes only how often they are accepted.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from math import ceil

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.drafters.base import DraftRequest, TextDrafter, TextStart
from decoding.drafters.token_trie import TokenTrie
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig


class LookaheadDrafter(TextDrafter):
    """Drafter without a model besides the target: W = ``window``, N = ``ngram`` and G = ``guesses`` of the paper.

    ``guesses`` bounds the n-grams kept for each first token, and so the branches tried in a step. ``text_ngrams`` adds
    the n-grams of the prompt and the output to the pool. A smaller budget runs fewer columns and fewer guesses.
    """

    name = "lookahead"

    def __init__(self, window: int = 15, ngram: int = 5, guesses: int = 15, text_ngrams: bool = True) -> None:
        if window < 1 or guesses < 1:
            raise ValueError(f"window is {window} and guesses {guesses}: give at least 1 of each")
        if ngram < 2:
            raise ValueError(f"ngram is {ngram}: give at least 2, the text's last token and one guess")
        self.window = window
        self.ngram = ngram
        self.guesses = guesses
        self.text_ngrams = text_ngrams

    @property
    def budgets(self) -> tuple[Budget, ...]:
        sizes = []
        for columns in range(1, self.window + 1):
            guesses = ceil(self.guesses * columns / self.window)
            depth = max(self.ngram - 1, self.window_depth(columns))
            sizes.append(Budget(depth, 1 + self.window_nodes(columns) + guesses * (self.ngram - 1)))
        return tuple(sizes)

    def window_depth(self, columns: int) -> int:
        """Return the depth of the last level of the last of ``columns`` columns."""
        return columns - 1 + self.ngram - 2

    def window_nodes(self, columns: int) -> int:
        """Return the greatest number of nodes of the first ``columns`` columns, without the root."""
        return max(0, columns * (self.ngram - 1) - 1)

    def open_text(
        self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int
    ) -> "LookaheadSession":
        return LookaheadSession(self, target, start.prompt_length)


class LookaheadSession:
    """Window and pool of one text."""

    def __init__(self, drafter: LookaheadDrafter, target: CausalLM, prompt_length: int) -> None:
        self._drafter = drafter
        self._device = target.device
        self._prompt_length = prompt_length
        self._columns: list[list[int]] = []
        """Tokens of each column, from level 0 up."""
        self._pool = _NgramPool(drafter.guesses)
        self._read = 0
        self._last: Proposal | None = None
        self._last_nodes: list[int] = []
        """Node of the last proposal at the end of each column that ran."""

    def propose(self, request: DraftRequest) -> Proposal:
        tokens, size = request.tokens, self._drafter.ngram
        if not self._columns:
            self._fill_window(tokens[: self._prompt_length])
        if self._drafter.text_ngrams:
            for end in range(max(self._read + 1, size), len(tokens) + 1):
                self._pool.add(tokens[end - size : end])
            self._read = len(tokens)
        root, columns = tokens[-1], self._columns_within(request)
        trie = TokenTrie(root)
        for guess in self._pool.behind(root):
            trie.add(guess[: request.max_depth], request.max_nodes - self._drafter.window_nodes(columns))
        self._last_nodes = [trie.add(path) for path in islice(self._window_paths(), columns)]
        self._last = Proposal(trie.tree(self._device), ProposalKind.DETERMINISTIC)
        self._columns[0][0] = root
        return self._last

    @torch.inference_mode()
    def observe(self, proposal: Proposal, logits: Float[Tensor, "nodes vocab"]) -> None:
        """Complete an n-gram in every column that ran, and move the levels down by one."""
        if proposal is not self._last or not self._last_nodes:
            return
        predicted: list[int] = logits[self._last_nodes].argmax(-1).tolist()
        for column, token in zip(self._columns, predicted, strict=False):
            column.append(token)
            self._pool.add(column)
            del column[0]
        self._last_nodes = []

    def _fill_window(self, prompt: Sequence[int]) -> None:
        """Fill the window with the prompt from its start: any tokens would do, and these occur in the text."""
        self._columns = [
            [prompt[(level + column) % len(prompt)] for level in range(self._drafter.ngram - 1)]
            for column in range(self._drafter.window)
        ]

    def _window_paths(self) -> Iterator[list[int]]:
        """Yield each column's path from below the root."""
        trunk: list[int] = []
        for index, column in enumerate(self._columns):
            trunk += column[:1] if index else []
            yield [*trunk, *column[1:]]

    def _columns_within(self, request: DraftRequest) -> int:
        """Return the greatest number of columns whose budget and depth fit the request."""
        fitting = [
            columns
            for columns, budget in enumerate(self._drafter.budgets, start=1)
            if budget.nodes <= request.max_nodes and self._drafter.window_depth(columns) <= request.max_depth
        ]
        return max(fitting, default=0)


class _NgramPool:
    """Pool of the latest n-grams by their first token: at most ``limit`` for each first token."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest: dict[int, dict[tuple[int, ...], None]] = {}

    def add(self, ngram: Sequence[int]) -> None:
        rests = self._rest.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        rests.pop(rest, None)
        rests[rest] = None
        if len(rests) > self._limit:
            del rests[next(iter(rests))]

    def behind(self, token: int) -> Iterator[tuple[int, ...]]:
        """Return the rests of the n-grams that begin with ``token``, the latest first."""
        return reversed(self._rest.get(token, {}))
