"""A text while it is decoded: its tokens, its two streams of random numbers, its history."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.rules.drawing import GeneratorSource
from decoding.rules.history import GrowingText, History
from decoding.stopping import StopCheck


class Text:
    """A prompt and the tokens written after it. ``place`` (from 0) is the prompt's place among all prompts."""

    def __init__(self, place: int, prompt: Sequence[int], seed: int, max_new_tokens: int, history: History) -> None:
        self.place = place
        self.tokens = GrowingText(map(int, prompt))
        self.prompt_length = len(prompt)
        self.finished = False
        self.hidden = torch.empty(0)
        """Input of the lm_head from which the target wrote the last token, (hidden,)."""
        self._states: list[Tensor] = []
        self._asked = 0
        # Two streams of one seed: draws for the draft do not change the target's draws.
        self.source = GeneratorSource.from_seed(seed, "verify")
        self.draft_source = GeneratorSource.from_seed(seed, "draft")
        self.history = history
        self._longest = len(prompt) + max_new_tokens

    @property
    def draft_room(self) -> int:
        """Depth of the deepest draft that fits as a whole, with one more token by the target."""
        return self._longest - len(self.tokens) - 1

    def keep_states(self, states: Float[Tensor, "tokens hidden"]) -> None:
        """Keep the states from which the target wrote further tokens, for a drafter that reads them."""
        self._states.append(states)

    def hand_over_states(self) -> Float[Tensor, "tokens hidden"] | None:
        """Return the states kept since the last call, and forget them; None if there are none."""
        states, self._states = self._states, []
        return torch.cat(states) if states else None

    def asked_before(self) -> int | None:
        """Return the number of tokens at the last call, all of them kept since; None at the first call."""
        before, self._asked = self._asked, len(self.tokens)
        return before or None

    def emit(self, tokens: tuple[int, ...], stop: StopCheck) -> tuple[int, ...]:
        """Append ``tokens`` up to the end of the text, if it is among them; return the appended ones."""
        room = self._longest - len(self.tokens)
        begin = max(self.prompt_length, len(self.tokens) - stop.reach)
        kept, ended = stop.cut(self.tokens[begin:], tokens[:room])
        self.tokens += kept
        self.finished = ended or len(kept) >= room
        return kept
