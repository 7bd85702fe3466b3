"""Tokens to text as they come."""

from decoding.generate import Step
from decoding.stream import Detokenizer, Piece, stream_pieces


class Utf8:
    """A decoder whose tokens are bytes."""

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def step(tokens: bytes, accepted: int) -> Step:
    return Step(tuple(tokens), accepted, accepted, accepted, 0.0, 0.0, 0.0)


def test_drafted_and_written_tokens_are_told_apart() -> None:
    pieces = list(stream_pieces([step(b"a", 0), step(b"bcd", 2)], Utf8()))
    assert pieces == [Piece("a", False), Piece("b", True), Piece("c", True), Piece("d", False)]


def test_a_character_is_held_back_until_it_is_whole() -> None:
    text = "Zoë €5 😀!"
    detokenizer = Detokenizer(Utf8())
    pieces = [detokenizer.push(byte) for byte in text.encode()]
    assert "".join(pieces) == text
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in pieces)
    assert pieces[2:4] == ["", "ë"]


def test_a_long_text_comes_out_whole() -> None:
    text = "the quick brown fox – " * 30
    detokenizer = Detokenizer(Utf8())
    assert "".join(detokenizer.push(byte) for byte in text.encode()) == text
