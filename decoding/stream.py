"""Token ids to text as they come."""

from collections.abc import Container, Iterable, Iterator
from typing import NamedTuple

from decoding.generate import Step
from decoding.stopping import TextDecoder


class Piece(NamedTuple):
    """A stretch of text, and whether the token that completed it was drafted or written by the target."""

    text: str
    drafted: bool


class Detokenizer:
    """Turns a growing list of tokens into text, holding back characters that are not whole yet.

    Each token is decoded together with the few before it, for what a token reads as may depend on its neighbours.
    """

    def __init__(self, tokenizer: TextDecoder) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0  # tokens whose text is out
        self._context = 0  # where decoding starts: some tokens before those

    def push(self, token: int) -> str:
        """The text that became readable with this token; may be empty."""
        self._tokens.append(token)
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        text: str = self._tokenizer.decode(self._tokens[self._context :])
        if text.endswith("\N{REPLACEMENT CHARACTER}"):
            return ""
        self._context = max(0, self._shown - 4)
        self._shown = len(self._tokens)
        return text[len(before) :]

    def flush(self) -> str:
        """What is held back at the end, as far as it can be read."""
        before = self._tokenizer.decode(self._tokens[self._context : self._shown])
        text: str = self._tokenizer.decode(self._tokens[self._context :])
        return text[len(before) :]


def stream_pieces(steps: Iterable[Step], tokenizer: TextDecoder, hidden: Container[int] = ()) -> Iterator[Piece]:
    """The text of each token as soon as its step is done; ``hidden`` tokens (the EOS) are not shown."""
    detokenizer = Detokenizer(tokenizer)
    for step in steps:
        for index, token in enumerate(step.tokens):
            text = "" if token in hidden else detokenizer.push(token)
            if text:
                yield Piece(text, drafted=index < step.accepted)
    if rest := detokenizer.flush():
        yield Piece(rest, drafted=False)
