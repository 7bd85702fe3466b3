"""Text and running figures to show while a text is decoded."""

from collections import Counter
from collections.abc import Container, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from decoding.text import Step, TextDecoder


class Piece(NamedTuple):
    """A piece of text. ``drafted`` is True if its last token was drafted, not written by the target."""

    text: str
    drafted: bool


class Detokenizer:
    """Converter of a growing token list into text; it holds back incomplete characters.

    Each token is decoded together with a few tokens before it, because its text may depend on its neighbours.
    """

    def __init__(self, tokenizer: TextDecoder) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0  # number of tokens whose text was returned
        self._context = 0  # index where decoding starts, a few tokens earlier as context

    def push(self, token: int) -> str:
        """Add a token; return the text that it completes, possibly empty."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        text: str = self._tokenizer.decode(self._tokens[self._context :])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context = max(0, self._shown - 4)
        self._shown = len(self._tokens)
        return text[len(before) :]

    def flush(self) -> str:
        """Return the rest of the text; incomplete characters become U+FFFD."""
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        text: str = self._tokenizer.decode(self._tokens[self._context :])
        return text[len(before) :]


def stream_pieces(steps: Iterable[Step], tokenizer: TextDecoder, hidden: Container[int] = ()) -> Iterator[Piece]:
    """Yield the text of each token once its step is done; tokens in ``hidden`` (the EOS) yield nothing."""
    detokenizer = Detokenizer(tokenizer)
    for step in steps:
        yield from step_pieces(step, detokenizer, hidden)
    if rest := detokenizer.flush():
        yield Piece(rest, drafted=False)


def step_pieces(step: Step, detokenizer: Detokenizer, hidden: Container[int] = ()) -> Iterator[Piece]:
    """Yield the text that each token of a step completes."""
    for index, token in enumerate(step.tokens):
        if token not in hidden and (text := detokenizer.push(token)):
            yield Piece(text, drafted=index < step.accepted)


def decode_text(tokens: Iterable[int], tokenizer: TextDecoder, hidden: Container[int] = ()) -> str:
    """Return the text of new tokens as `stream_pieces` streams it."""
    detokenizer = Detokenizer(tokenizer)
    return "".join([*(detokenizer.push(token) for token in tokens if token not in hidden), detokenizer.flush()])


@dataclass
class Tally:
    """Figures of the steps added so far. A prefill counts only in ``prefill_seconds``.

    ``lengths`` counts passes by their number of accepted drafted tokens. Seconds exclude the caller's work between two
    steps.
    """

    passes: int = 0
    tokens: int = 0
    accepted: int = 0
    drafted: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    total_seconds: float = 0.0
    prefill_seconds: float = 0.0
    lengths: Counter[int] = field(default_factory=Counter)

    @staticmethod
    def of(steps: Iterable[Step]) -> "Tally":
        tally = Tally()
        for step in steps:
            tally.add(step)
        return tally

    def add(self, step: Step) -> None:
        if step.is_prefill:
            self.prefill_seconds += step.total_seconds
            return
        self.passes += 1
        self.tokens += len(step.tokens)
        self.accepted += step.accepted
        self.drafted += step.drafted
        self.draft_seconds += step.draft_seconds
        self.verify_seconds += step.verify_seconds
        self.total_seconds += step.total_seconds
        self.lengths[step.accepted] += 1

    def watch(self, steps: Iterable[Step]) -> Iterator[Step]:
        """Count each step and pass it on."""
        for step in steps:
            self.add(step)
            yield step

    @property
    def overhead_seconds(self) -> float:
        """Seconds of the loop outside the draft and the target pass."""
        return max(0.0, self.total_seconds - self.draft_seconds - self.verify_seconds)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target pass, including the target's own; 0 before the first pass."""
        return self.tokens / self.passes if self.passes else 0.0

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of decoding; 0 before the first pass."""
        return self.tokens / self.total_seconds if self.total_seconds else 0.0
