"""What the sampling controls have to know of a text: which tokens it holds, how often, and in which order."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.rules.sampling import HistoryRows, SamplingConfig
from decoding.rules.tree import TokenTree


class History:
    """The history of one text, kept up as it grows. Free of cost where no control needs it."""

    def __init__(
        self, sampling: SamplingConfig, prompt_length: int, vocab_size: int, device: torch.device | str
    ) -> None:
        self._sampling = sampling
        self._prompt_length = prompt_length
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._tokens: list[int] | None = None
        """The text read so far, of which the tensors tell; None if they tell of nothing that is whole."""
        self._seen: Tensor | None = None
        self._counts: Tensor | None = None
        self._text: Tensor | None = None

    def at(self, tokens: Sequence[int], tree: TokenTree, nodes: Sequence[int] | None = None) -> HistoryRows:
        """One row per node (all of them if None): the history when the token after that node is chosen.

        That is ``tokens``, the whole text so far, whose last is the root of ``tree``, and the path below the root down
        to the node, itself included. Only what was appended since the last call is read again; a text that is no
        continuation of the one seen before is read from its start.
        """
        if not self._sampling.needs_history:
            return HistoryRows()
        assert tokens[-1] == tree.token_list[0], "the root of the tree is the last token of the text"
        self._follow(tokens if isinstance(tokens, list) else list(tokens))
        path_tokens = [
            [tree.token_list[ancestor] for ancestor in tree.shape.path(node)]
            for node in (range(len(tree)) if nodes is None else nodes)
        ]
        return self._rows(path_tokens)

    def _follow(self, tokens: list[int]) -> None:
        text, self._tokens = self._tokens, None  # so an interrupted call leaves it, and the next one starts over
        known = 0
        if text is not None:
            known = len(text)
            text += tokens[known:]
        # This reads the whole text, but comparing lists of the same objects takes two nanoseconds per token.
        if text != tokens:
            self._start_over()
            known, text = 0, list(tokens)
        if len(tokens) > known:
            self._read(tokens[known:], known)
        self._tokens = text

    def _start_over(self) -> None:
        if self._sampling.needs_seen:
            self._seen = torch.zeros(self._vocab_size, dtype=torch.bool, device=self._device)
        if self._sampling.needs_counts:
            self._counts = torch.zeros(self._vocab_size, dtype=torch.int32, device=self._device)
        if self._sampling.processors:
            self._text = torch.zeros(0, dtype=torch.long, device=self._device)

    def _read(self, fresh: list[int], known: int) -> None:
        """What follows the first ``known`` tokens of the text."""
        new = self._on_device(fresh)
        if self._seen is not None:
            self._seen.index_fill_(0, new, True)
        if self._counts is not None:
            _count(self._counts, new[max(self._prompt_length - known, 0) :])
        if self._text is not None:
            self._text = torch.cat([self._text, new])

    def _rows(self, path_tokens: list[list[int]]) -> HistoryRows:
        """The text followed by each of these paths."""
        row_count = len(path_tokens)
        seen = counts = texts = None
        lengths: tuple[int, ...] = ()
        if self._seen is not None or self._counts is not None:
            # Where (row, token) lies in the rows laid end to end.
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
        # Without waiting for the work queued there.
        return torch.tensor(values, dtype=torch.long).to(self._device, non_blocking=True)


def _count(counts: Tensor, index: Tensor) -> None:
    """Add 1 at each index, as often as it occurs."""
    counts.scatter_add_(0, index, torch.ones_like(index, dtype=counts.dtype))
