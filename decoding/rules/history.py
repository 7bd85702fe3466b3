"""History of a text, as sampling controls read it: its tokens, how often each occurs, and their order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.rules.sampling import HistoryRows, SamplingConfig
from decoding.rules.tree import TokenTree


class GrowingText(list[int]):
    """Tokens of a text to which more are added, and of which none is ever changed or removed."""


class History:
    """The history of one text, updated as the text grows. Costs nothing if no control reads the history."""

    def __init__(
        self, sampling: SamplingConfig, prompt_length: int, vocab_size: int, device: torch.device | str
    ) -> None:
        self._sampling = sampling
        self._prompt_length = prompt_length
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._tokens: list[int] | None = None
        """The text that the tensors below describe; None before the first call and after an interrupted one."""
        self._given: Sequence[int] = ()
        """The object that the last call was given."""
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        self._text: Tensor | None = None

    def at(self, tokens: Sequence[int], tree: TokenTree, nodes: Sequence[int] | None = None) -> HistoryRows:
        """Return one row for each of ``nodes`` (None: all nodes): the history before the token that follows the node.

        It consists of ``tokens``, the whole text so far, which ends with the root of ``tree``, and of the path from
        below the root down to the node, the node included. Only tokens appended since the last call are read; a text
        that does not continue the previous call's text is read from its start. A `GrowingText` that is given again
        continues it, and is not compared with it.
        """
        if not self._sampling.needs_history:
            return HistoryRows()
        assert tokens[-1] == tree.token_list[0], "the root of the tree is the last token of the text"
        self._follow(tokens)
        path_tokens = [
            [tree.token_list[ancestor] for ancestor in tree.shape.path(node)]
            for node in (range(len(tree)) if nodes is None else nodes)
        ]
        return self._rows(path_tokens)

    def _follow(self, tokens: Sequence[int]) -> None:
        text, self._tokens = self._tokens, None  # stays None if this call is interrupted: the next one starts over
        continues = tokens is self._given and isinstance(tokens, GrowingText)
        if text is None or not (continues or list(tokens[: len(text)]) == text):
            self._start_over()
            text = []
        if fresh := list(tokens[len(text) :]):
            self._read(fresh, len(text))
            text += fresh
        self._tokens, self._given = text, tokens

    def _start_over(self) -> None:
        if self._sampling.needs_seen:
            self._seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        if self._sampling.needs_counts:
            self._counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
        if self._sampling.processors:
            self._text = torch.zeros(0, dtype=torch.long, device=self._device)

    def _read(self, fresh: list[int], known: int) -> None:
        """Add ``fresh``, the tokens after the first ``known`` ones, to the tensors."""
        new = self._on_device(fresh)
        if self._seen is not None:
            self._seen.index_fill_(0, new, True)
        if self._counts is not None:
            _count(self._counts, new[max(self._prompt_length - known, 0) :])
        if self._text is not None:
            self._text = torch.cat([self._text, new])

    def _rows(self, path_tokens: list[list[int]]) -> HistoryRows:
        """Return one row per path: the history of the text followed by the path's tokens."""
        row_count = len(path_tokens)
        seen = counts = texts = None
        lengths: tuple[int, ...] = ()
        if self._seen is not None or self._counts is not None:
            # The index of (row, token) in the flattened (rows, vocab) tensor.
            flat = [row * self._vocab_size + token for row, path in enumerate(path_tokens) for token in path]
            index = self._on_device(flat)
            if self._seen is not None:
                seen = self._seen.repeat(row_count, 1)
                seen.view(-1).index_fill_(0, index, True)
            if self._counts is not None:
                counts = self._counts.repeat(row_count, 1)
                _count(counts.view(-1), index)
        if self._text is not None:
            deepest = max(map(len, path_tokens), default=0)
            padded = [token for path in path_tokens for token in path + [0] * (deepest - len(path))]
            paths = self._on_device(padded).view(row_count, deepest)
            texts = torch.cat([self._text.expand(row_count, -1), paths], dim=1)
            lengths = tuple(len(self._text) + len(path) for path in path_tokens)
        prompt_lengths = (self._prompt_length,) * len(lengths)
        return HistoryRows(seen, counts, texts, lengths, prompt_lengths)

    def _on_device(self, values: list[int]) -> Tensor:
        # Non-blocking: does not wait for the work queued on the device.
        return torch.tensor(values, dtype=torch.long).to(self._device, non_blocking=True)


def _count(counts: Tensor, index: Tensor) -> None:
    """Add 1 to ``counts`` at each index, once per occurrence; in place."""
    counts.scatter_add_(0, index, torch.ones_like(index, dtype=counts.dtype))
