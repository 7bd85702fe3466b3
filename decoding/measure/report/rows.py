"""Rows of a report: those measured, their twins with drafts by argmax, and their settings, methods and cells."""

from collections.abc import Iterable
from typing import Any

from decoding.measure.names import ARGMAX_DRAFTS, PLAIN

Row = dict[str, Any]


def is_twin(row: Row) -> bool:
    """Return True for a row that only counts what drafts by argmax would have accepted."""
    return str(row["method"]).endswith(ARGMAX_DRAFTS) and row.get("drafts") == "greedy"


def measured(report: Row) -> list[Row]:
    """Return the rows of the first batch size and context, without twins."""
    return [row for row in report["rows"] if not is_twin(row)]


def twins(report: Row) -> list[tuple[Row, Row]]:
    """Return pairs of a row whose drafts are sampled and its twin, in the report's order."""
    by_name = {(row["setting"], row["method"]): row for row in report["rows"]}
    pairs = [
        (by_name.get((row["setting"], str(row["method"]).removesuffix(ARGMAX_DRAFTS))), row)
        for row in report["rows"]
        if is_twin(row)
    ]
    return [(sampled, twin) for sampled, twin in pairs if sampled is not None]


def cells(report: Row) -> list[Row]:
    """Return the rows of every batch size and context length, without twins."""
    return [row for row in (*report["rows"], *(report.get("grid") or [])) if not is_twin(row)]


def settings(report: Row) -> list[str]:
    """Return the report's settings in its order."""
    return list(dict.fromkeys(row["setting"] for row in report["rows"]))


def named(rows: Iterable[Row], setting: str) -> list[Row]:
    """Return the rows of one setting."""
    return [row for row in rows if row["setting"] == setting]


def methods(report: Row) -> list[str]:
    """Return the measured methods but plain decoding; a method's place is that of its colour in all pictures."""
    return list(dict.fromkeys(row["method"] for row in measured(report) if row["method"] != PLAIN))


def is_peer(row: Row) -> bool:
    """Return True for plain decoding and for methods of other software."""
    return bool(row["method"] == PLAIN or str(row["method"]).startswith("transformers"))


def speed_of(row: Row) -> float | None:
    """Return the speed-up of all tokens/s; the median of paired runs where only this was measured."""
    totals, pairs = row.get("speedup_of_totals") or {}, row.get("speedup") or {}
    found: float | None = totals.get("value")
    return pairs.get("median") if found is None else found
