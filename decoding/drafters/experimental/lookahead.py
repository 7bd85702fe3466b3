"""Lookahead decoding (Fu et al. 2402.02057): the target guesses ahead in otherwise idle positions of its passes.

A window of guessed tokens is kept from step to step: ``window`` columns of ``ngram - 1`` levels each. The token at
level l of column i is l + i positions after the text's last token, which is level 0 of column 0. The tokens of level 0
form a chain, the trunk. A token of a higher level is the child of the token one level below it in its column. The
window is thus a tree, and the mask of a tree replaces lookahead's own attention mask.

Each target pass also predicts the token after every column's last level. Each column is then a complete n-gram, which
goes into the pool. The levels move down by one, and the predicted tokens become the last level (a Jacobi step for all
positions together). The n-grams in the pool that begin with the text's last token are the tree's other branches: the
guesses that the same pass verifies.

The tree depends on the text and on the logits of earlier passes, never on this step's random numbers. So the tree is
fixed once all earlier steps are given, and each token is drawn from the target's distribution after the tokens before
it. Therefore the tree is deterministic, and a rule for deterministic proposals is lossless at any temperature, even if
a path of the window is accepted. The predictions are the target's argmax without sampling controls; leaving out the
controls affects only how often the predictions are accepted.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from decoding.drafters.base import Drafter, DraftRequest, TextStart
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.sampling import SamplingConfig, best_tokens
from decoding.rules.tree import Proposal, ProposalKind, TokenTree, TokenTrie


class LookaheadDrafter(Drafter):
    """Drafter without a second model: W = ``window``, N = ``ngram`` and G = ``guesses`` of the paper.

    ``guesses`` limits the number of n-grams kept for each first token, and so also the number of branches tried in a
    step. The pool also contains the n-grams of the prompt and the output. If a step has no room for the whole window,
    only the guesses run.
    """

    name = "lookahead"

    def __init__(self, window: int = 8, ngram: int = 4, guesses: int = 8) -> None:
        if window < 1 or guesses < 1:
            raise UserError(f"window is {window} and guesses is {guesses}: set both to at least 1")
        if ngram < 2:
            raise UserError(f"ngram is {ngram}: use at least 2, for the text's last token and one guess")
        self.window = window
        self.ngram = ngram
        self.guesses = guesses
        self.window_size = Budget(window + ngram - 3, window * (ngram - 1))
        depth, nodes = self.window_size
        self.budgets = (Budget(max(ngram - 1, depth), nodes + guesses * (ngram - 1)),)
        self.label_with_size = f"{self.name}, W={window} N={ngram} G={guesses}"

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "LookaheadSession":
        return LookaheadSession(self, target.device)


class LookaheadSession:
    """The windows and pools of n-grams for a batch. The predictions of a step come to the host in one transfer."""

    def __init__(self, drafter: LookaheadDrafter, device: torch.device) -> None:
        self._drafter, self._device = drafter, device
        self._windows: dict[int, _Window] = {}

    def admit(self, row: int, start: TextStart) -> None:
        self._windows[row] = _Window(self._drafter, start.prompt_length)

    def move(self, row: int, to: int) -> None:
        self._windows[to] = self._windows.pop(row)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        trees = [self._windows[row].grow(request, self._device) for row, request in enumerate(requests)]
        return [Proposal(tree, ProposalKind.DETERMINISTIC) for tree in trees]

    @torch.inference_mode()
    def observe(self, proposals: Sequence[Proposal], logits: Sequence[Tensor]) -> None:
        """Complete an n-gram in every column of each window that ran, and move the levels of the window down by one."""
        ran = [(self._windows[row], of_row) for row, of_row in enumerate(logits) if self._windows[row].ends]
        if not ran:
            return
        device = ran[0][1].device
        ends = [torch.tensor(window.ends).to(device, non_blocking=True) for window, _ in ran]
        last = torch.stack([of_row[nodes] for (_, of_row), nodes in zip(ran, ends, strict=True)])
        for (window, _), predicted in zip(ran, best_tokens(last).tolist(), strict=True):
            window.move_on(predicted)


class _Window:
    """The window and the pool of n-grams for one text."""

    def __init__(self, drafter: LookaheadDrafter, prompt_length: int) -> None:
        self._drafter = drafter
        self._prompt_length = prompt_length
        self._columns: list[list[int]] = []  # tokens of each column, from level 0 up
        self._pool: dict[int, dict[tuple[int, ...], None]] = {}
        """Maps a first token to the remaining tokens of its latest n-grams; the latest n-gram comes last."""
        self._read = 0
        self.ends: list[int] = []
        """The node at the end of each column in the last tree; empty if the window did not run."""

    def grow(self, request: DraftRequest, device: torch.device) -> TokenTree:
        """Return the tree of the guesses, and of the window if the request has room for it."""
        tokens, drafter = request.tokens, self._drafter
        if not self._columns:  # any tokens would work; tokens of the prompt are likely to recur
            prompt = tokens[: self._prompt_length]
            self._columns = [
                [prompt[(level + column) % len(prompt)] for level in range(drafter.ngram - 1)]
                for column in range(drafter.window)
            ]
        for end in range(max(self._read + 1, drafter.ngram), len(tokens) + 1):
            self._keep(tokens[end - drafter.ngram : end])
        self._read = len(tokens)
        depth, nodes = drafter.window_size
        runs = request.max_depth >= max(1, depth) and nodes <= request.max_nodes
        trie = TokenTrie(tokens[-1])
        for guess in reversed(self._pool.get(tokens[-1], {})):
            trie.add(guess[: request.max_depth], request.max_nodes - (nodes - 1 if runs else 0))
        self._columns[0][0] = tokens[-1]
        self.ends = [trie.add(path) for path in self._paths()] if runs else []
        return trie.tree(device)

    def move_on(self, predicted: Sequence[int]) -> None:
        """Append the token predicted after each column, keep the column as an n-gram, and drop its lowest level."""
        for column, token in zip(self._columns, predicted, strict=True):
            column.append(token)
            self._keep(column)
            del column[0]
        self.ends = []

    def _paths(self) -> Iterator[list[int]]:
        """Yield the path of each column, starting below the root."""
        trunk: list[int] = []
        for index, column in enumerate(self._columns):
            trunk += column[:1] if index else []
            yield [*trunk, *column[1:]]

    def _keep(self, ngram: Sequence[int]) -> None:
        """Put an n-gram into the pool. If it then has more than ``guesses`` n-grams with this first token, drop the
        oldest.
        """
        rests = self._pool.setdefault(ngram[0], {})
        rest = tuple(ngram[1:])
        rests.pop(rest, None)
        rests[rest] = None
        if len(rests) > self._drafter.guesses:
            del rests[next(iter(rests))]
