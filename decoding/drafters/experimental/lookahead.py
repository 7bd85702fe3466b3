"""Lookahead decoding (Fu et al. 2402.02057): the target guesses ahead in idle positions of its own passes.

A window of guessed tokens is kept from step to step: ``window`` columns of ``ngram - 1`` levels each. The token at
level l of column i is l + i positions after the text's last token, which is level 0 of column 0. The tokens of level 0
form a chain, the trunk. A token of a higher level is the child of the token one level below it in its column. So the
window is a tree, and a tree's mask replaces lookahead's own attention mask.

Each target pass also predicts the token after every column's last level. That completes one n-gram per column for the
pool. The levels then move down by one, and the predicted tokens become the last level (a Jacobi step for all positions
at once). The pool's n-grams that begin with the text's last token are the tree's other branches, the guesses to be
accepted.

The tree depends on the text and on the logits of earlier passes, never on this step's random numbers. So it is
deterministic, and a rule for deterministic proposals is lossless at any temperature: given all earlier steps the tree
is fixed, and each token is drawn from the target's distribution in its context. The guesses are the target's argmax
without sampling controls; that changes only how often they are accepted.
"""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.drafters.base import DraftRequest, TextDrafter, TextStart
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTrie


class LookaheadDrafter(TextDrafter):
    """Drafter without a second model: W = ``window``, N = ``ngram`` and G = ``guesses`` of the paper.

    ``guesses`` limits the n-grams kept for each first token, and thereby the branches tried in a step. The n-grams of
    the prompt and the output are in the pool too. A step without room for the whole window runs only guesses.
    """

    name = "lookahead"

    def __init__(self, window: int = 15, ngram: int = 5, guesses: int = 15) -> None:
        if window < 1 or guesses < 1:
            raise ValueError(f"window is {window} and guesses {guesses}: give at least 1 of each")
        if ngram < 2:
            raise ValueError(f"ngram is {ngram}: give at least 2 (the text's last token and one guess)")
        self.window = window
        self.ngram = ngram
        self.guesses = guesses
        self.window_size = Budget(window + ngram - 3, window * (ngram - 1))
        depth, nodes = self.window_size
        self.budgets = (Budget(max(ngram - 1, depth), nodes + guesses * (ngram - 1)),)

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
        self._columns: list[list[int]] = []  # tokens of each column, from level 0 up
        self._pool: dict[int, dict[tuple[int, ...], None]] = {}
        """First token -> the rests of its latest n-grams, the latest last."""
        self._read = 0
        self._last_nodes: list[int] = []  # node of the last proposal at the end of each column; empty if no column ran

    def propose(self, request: DraftRequest) -> Proposal:
        tokens, drafter = request.tokens, self._drafter
        if not self._columns:  # any tokens would do; prompt tokens are likely to recur
            prompt = tokens[: self._prompt_length]
            self._columns = [
                [prompt[(level + column) % len(prompt)] for level in range(drafter.ngram - 1)]
                for column in range(drafter.window)
            ]
        for end in range(max(self._read + 1, drafter.ngram), len(tokens) + 1):
            self._keep(tokens[end - drafter.ngram : end])
        self._read = len(tokens)
        runs = drafter.window_size.depth <= request.max_depth and drafter.window_size.nodes <= request.max_nodes
        room = request.max_nodes - (drafter.window_size.nodes - 1 if runs else 0)
        trie = TokenTrie(tokens[-1])
        for guess in reversed(self._pool.get(tokens[-1], {})):
            trie.add(guess[: request.max_depth], room)
        self._last_nodes = [trie.add(path) for path in self._window_paths()] if runs else []
        self._columns[0][0] = tokens[-1]
        return Proposal(trie.tree(self._device), ProposalKind.DETERMINISTIC)

    @torch.inference_mode()
    def observe(self, proposal: Proposal, logits: Float[Tensor, "nodes vocab"]) -> None:
        """If the window ran, complete an n-gram in every column and move the levels down by one."""
        if not self._last_nodes:
            return
        predicted: list[int] = logits[self._last_nodes].argmax(-1).tolist()
        for column, token in zip(self._columns, predicted, strict=True):
            column.append(token)
            self._keep(column)
            del column[0]
        self._last_nodes = []

    def _window_paths(self) -> Iterator[list[int]]:
        """Yield each column's path from below the root."""
        trunk: list[int] = []
        for index, column in enumerate(self._columns):
            trunk += column[:1] if index else []
            yield [*trunk, *column[1:]]

    def _keep(self, ngram: Sequence[int]) -> None:
        """Put an n-gram into the pool; drop the oldest with the same first token if there are too many."""
        rests = self._pool.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        rests.pop(rest, None)
        rests[rest] = None
        if len(rests) > self._drafter.guesses:
            del rests[next(iter(rests))]
