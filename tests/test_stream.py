"""From tokens to text during decoding, and running figures with separate prefills."""

from decoding.text import Detokenizer, Piece, Step, Tally, stream_pieces

PREFILL = Step((7,), 0, 0, 0, 0.0, 0.5, 0.75, is_prefill=True)
LONG = Step((1, 2, 3), 2, 4, 4, 0.25, 0.5, 1.0)
SHORT = Step((4,), 0, 4, 4, 0.25, 0.5, 1.0)


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


def test_a_tally_counts_passes_and_keeps_the_prefill_apart() -> None:
    tally = Tally.of([PREFILL, LONG, SHORT])
    assert (tally.passes, tally.tokens, tally.accepted, tally.drafted) == (2, 4, 2, 8)
    assert (tally.tokens_per_pass, tally.tokens_per_second, tally.prefill_seconds) == (2.0, 2.0, 0.75)
    assert (tally.draft_seconds, tally.verify_seconds, tally.overhead_seconds) == (0.5, 1.0, 0.5)
    assert tally.lengths == {2: 1, 0: 1}
