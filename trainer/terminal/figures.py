"""Figures of a text in one line: while it is decoded, and when it is done."""

from typing import NamedTuple

from decoding.tally import Tally


class PlainSpeed(NamedTuple):
    """Measured speed of plain decoding. ``origin`` says on what; empty for the whole text."""

    tokens_per_second: float
    origin: str = ""


def live_line(tally: Tally, plain: PlainSpeed | None) -> str:
    """Return the figures of a growing text; empty before its first pass."""
    if not tally.passes:
        return ""
    line = f"{tally.tokens_per_pass:.2f} tokens per pass, {tally.tokens_per_second:.0f} tokens/s"
    return line if plain is None else f"{line}, {_gain(tally, plain)}"


def summary(tally: Tally, plain: PlainSpeed | None, name: str) -> str:
    """Return one line: tokens per target pass, tokens/s, speed-up; ``name`` is that of the drafter with its label."""
    if not tally.passes:
        return f"{name}: no token behind the prefill"
    line = (
        f"{name}: {tally.tokens_per_pass:.2f} tokens per target pass "
        f"({tally.accepted} of {tally.tokens} tokens drafted), {tally.tokens_per_second:.0f} tokens/s"
    )
    if plain is not None:
        line += f", {_gain(tally, plain)} ({plain.tokens_per_second:.0f} tokens/s{plain.origin})"
    return line


def _gain(tally: Tally, plain: PlainSpeed) -> str:
    return f"{tally.tokens_per_second / plain.tokens_per_second:.2f}× plain decoding"
