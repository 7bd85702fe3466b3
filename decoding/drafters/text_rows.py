"""The texts of a batch as drafters see them that draw tokens: a random source and a history for each row."""

from collections.abc import Sequence

import torch

from decoding.drafters.base import TextStart
from decoding.rules.drawing import GeneratorSource
from decoding.rules.history import History
from decoding.rules.sampling import HistoryRows, SamplingConfig
from decoding.rules.tree import TokenTree


class TextRows:
    """Random source and history of the text in each row, under the same sampling controls.

    ``vocab_size``: the target's. ``device``: that of the logits to which the controls apply.
    """

    def __init__(self, sampling: SamplingConfig, vocab_size: int, device: torch.device | str) -> None:
        self.sampling = sampling
        self.vocab_size = vocab_size
        self.device = device
        self.sources: dict[int, GeneratorSource] = {}
        self._histories: dict[int, History] = {}

    def admit(self, slot: int, start: TextStart) -> None:
        """Begin a new text in row ``slot``, and forget the row's last text."""
        self.sources[slot] = start.source
        self._histories[slot] = History(self.sampling, start.prompt_length, self.vocab_size, self.device)

    def move(self, slot: int, to: int) -> None:
        """Move the text in row ``slot`` to row ``to``."""
        self.sources[to] = self.sources.pop(slot)
        self._histories[to] = self._histories.pop(slot)

    def history_at(self, slot: int, text: Sequence[int], tree: TokenTree, nodes: Sequence[int]) -> HistoryRows:
        """Return the history that the sampling controls read at ``nodes`` of a row's tree."""
        return self._histories[slot].at(text, tree, nodes)
