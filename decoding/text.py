"""One text while it is decoded: its tokens, its two streams of random numbers, its history."""

from collections.abc import Sequence

import torch

from decoding.rules.history import History
from decoding.rules.sampling import GeneratorSource
from decoding.stopping import StopCheck


class Text:
    """A prompt and the tokens written behind it. ``place`` (from 0) is the prompt's among all that are decoded."""

    def __init__(self, place: int, prompt: Sequence[int], seed: int, max_new_tokens: int, history: History) -> None:
        self.place = place
        self.tokens = list(map(int, prompt))
        self.prompt_length = len(prompt)
        self.finished = False
        self.hidden = torch.empty(0)
        """The lm_head's input when the target wrote the last token, (hidden,)."""
        # Two streams of one seed: drafting does not shift what the target draws.
        self.source = GeneratorSource.from_seed(seed, "verify")
        self.draft_source = GeneratorSource.from_seed(seed, "draft")
        self.history = history
        self._longest = len(prompt) + max_new_tokens

    @property
    def draft_room(self) -> int:
        """The deepest draft that could be emitted whole: one more token is the target's own."""
        return self._longest - len(self.tokens) - 1

    def emit(self, tokens: tuple[int, ...], stop: StopCheck) -> tuple[int, ...]:
        """Append ``tokens`` up to the text's end, if the end is among them; returns those appended."""
        room = self._longest - len(self.tokens)
        kept, ended = stop.cut(self.tokens[self.prompt_length :], tokens[:room])
        self.tokens += kept
        self.finished = ended or len(kept) >= room
        return kept
