"""Streaming: token ids to text, step by step."""

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from decoding.generate import Step
from decoding.stopping import TextDecoder


class Piece(NamedTuple):
    """A stretch of text. ``drafted``: the token that completed it was drafted, not written by the target."""

    text: str
    drafted: bool


class Detokenizer:
    """Converter of a growing list of tokens into text; it holds back incomplete characters.

    Each token is decoded together with the few before it, as its text may depend on its neighbours.
    """

    def __init__(self, tokenizer: TextDecoder) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0  # number of tokens whose text was returned
        self._context = 0  # index where decoding starts, a few tokens before them

    def push(self, token: int) -> str:
        """Add a token; return the text that it completes, which may be empty."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        text: str = self._tokenizer.decode(self._tokens[self._context :])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context = max(0, self._shown - 4)
        self._shown = len(self._tokens)
        return text[len(before) :]

    def flush(self) -> str:
        """Return the text held back at the end; incomplete characters become U+FFFD."""
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        text: str = self._tokenizer.decode(self._tokens[self._context :])
        return text[len(before) :]


def stream_pieces(steps: Iterable[Step], tokenizer: TextDecoder, hidden: Container[int] = ()) -> Iterator[Piece]:
    """Yield the text of each token as soon as its step is done; tokens in ``hidden`` (the EOS) have none."""
    detokenizer = Detokenizer(tokenizer)
    for step in steps:
        yield from step_pieces(step, detokenizer, hidden)
    if rest := detokenizer.flush():
        yield Piece(rest, drafted=False)


def step_pieces(step: Step, detokenizer: Detokenizer, hidden: Container[int] = ()) -> Iterator[Piece]:
    """Yield the text that each token of a text's next step completes."""
    for index, token in enumerate(step.tokens):
        if token not in hidden and (text := detokenizer.push(token)):
            yield Piece(text, drafted=index < step.accepted)


def decode_text(tokens: Iterable[int], tokenizer: TextDecoder, hidden: Container[int] = ()) -> str:
    """Return the text of new tokens as `stream_pieces` streams it."""
    detokenizer = Detokenizer(tokenizer)
    return "".join([*(detokenizer.push(token) for token in tokens if token not in hidden), detokenizer.flush()])
