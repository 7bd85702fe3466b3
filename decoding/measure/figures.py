"""Figures of a report as text for tables. A figure that was not measured is null in the report and a dash here."""

import math
from collections.abc import Sequence
from typing import Any

from decoding.measure.names import PLAIN
from decoding.metrics import FEWEST, Estimate

NONE = "–"
NEAR = {"bfloat16": 0.5, "float16": 0.1, "float32": 0.01}
"""Largest gap between two logits, by dtype, that rounding can reverse (for logits of some tens)."""

Figure = dict[str, Any] | None
"""A `decoding.metrics.Estimate` or `Spread` as JSON; None if it was not measured."""


def told(found: Estimate) -> dict[str, Any]:
    """Return an estimate as JSON; without an interval if too few observations make it narrower than the truth."""
    few = {"low": math.nan, "high": math.nan} if found.observations < FEWEST else {}
    plain: dict[str, Any] = without_nan({**found._asdict(), **few})
    return plain


def without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by null: the figure could not be measured."""
    if isinstance(value, dict):
        return {key: without_nan(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def number(value: float | None, digits: int = 2) -> str:
    """Format a number: ``2.31``."""
    return NONE if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def estimate(figure: Figure, unit: str = "") -> str:
    """Format an estimate: ``2.31 [2.20, 2.43]``, without the brackets if it has no interval."""
    return _with_range(figure, "value", "low", "high", unit)


def spread(figure: Figure, unit: str = "") -> str:
    """Format a median and its quartiles: ``2.52× [2.36, 2.57]``."""
    return _with_range(figure, "median", "low_quartile", "high_quartile", unit)


def counted(figure: Figure) -> str:
    """Format a share and its number of observations: ``0.89 (312)``."""
    text = number(figure["value"]) if figure else NONE
    return text if text == NONE or figure is None else f"{text} ({figure['observations']:,})"


def shares(figures: Sequence[Figure] | None, most: int | None = None) -> str:
    """Format the shares of the first ``most`` positions (None: all), each with its number of observations."""
    return " ".join(counted(figure) for figure in (figures or [])[:most]) or NONE


def speedup(row: dict[str, Any], name: str = "speedup") -> str:
    """Format a row's speed-up: ``2.12× [1.95, 2.30]; median 2.52× [2.36, 2.57]``.

    First comes the ratio of all tokens/s, then the median ratio of paired runs.
    """
    median = spread(row.get(name), "×")
    totals = estimate(row.get(f"{name}_of_totals"), "×")
    parts = [part for part in (totals, f"median {median}" if median != NONE else NONE) if part != NONE]
    return "; ".join(parts) or NONE


def _with_range(figure: Figure, middle: str, low: str, high: str, unit: str) -> str:
    text = number(figure.get(middle)) if figure else NONE
    if text == NONE or figure is None:
        return NONE
    ends = [number(figure.get(end)) for end in (low, high)]
    if NONE not in ends and not 0 <= figure[low] <= figure[middle] <= figure[high]:
        raise ValueError(f"{figure[middle]!r} is not between {figure[low]!r} and {figure[high]!r}")
    return text + unit + ("" if NONE in ends else f" [{ends[0]}, {ends[1]}]")


def identical(compared: Figure) -> str:
    """Format a comparison with plain decoding's texts.

    ``11 of 12, largest logit margin where they part 0.0312, one ended early``
    """
    if not compared:
        return ""
    text = f"{compared['identical']} of {compared['of']}"
    margin, early = compared.get("largest_margin"), compared.get("ended_early", 0)
    if compared["identical"] + early < compared["of"]:
        text += f", largest logit margin where they part {NONE if margin is None else format(margin, '.3g')}"
    return text + (f", {_count_of(early)} ended early" if early else "")


def _count_of(number: int) -> str:
    return "one" if number == 1 else str(number)


def greedy_sentence(report: dict[str, Any]) -> str:
    """Write a sentence that compares the report's greedy texts with plain decoding's; empty if it has none."""
    compared = [
        row["identical_to_plain"] for row in report["rows"] if row.get("identical_to_plain") and row["method"] != PLAIN
    ]
    texts = sum(each["of"] for each in compared)
    differing = texts - sum(each["identical"] for each in compared)
    if not texts:
        return ""
    if not differing:
        return f"All {texts} greedy texts are identical to plain decoding's."
    sentence = f"{differing} of {texts} greedy texts differ from plain decoding's"
    early = sum(each.get("ended_early", 0) for each in compared)
    margins = [each["largest_margin"] for each in compared if each["largest_margin"] is not None]
    dtype, largest = str(report.get("dtype")), max(margins, default=None)
    if differing > early and largest is not None:
        sentence += f"; where they part, the two candidates' logits are at most {largest:.3g} apart"
    exact = dtype == "float32" and not (report.get("hardware") or {}).get("gpu")
    if exact:
        return f"{sentence}. In fp32 on a CPU none may: this is a fault, please report it."
    if differing > early:
        sentence += f", {_judged(largest, dtype)}"
    if early:
        sentence += (
            f"; {_count_of(early)} ended where the other went on, which rounding does not explain: a fault to report"
        )
    return f"{sentence}."


def _judged(largest: float | None, dtype: str) -> str:
    if largest is None:
        return "by a margin that was not measured"
    if largest <= NEAR.get(dtype, 0.0):
        return f"near-ties, which a pass over several tokens may round the other way in {dtype}"
    return f"more than rounding in {dtype} explains: look at these texts, and report a fault"
