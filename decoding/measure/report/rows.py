"""Rows of a report: their settings, methods and cells."""

from collections.abc import Iterable
from typing import Any

from decoding.measure.names import PLAIN

Row = dict[str, Any]


def cells(report: Row) -> list[Row]:
    """Return the rows of every batch size and context length."""
    return [*report["rows"], *(report.get("grid") or [])]


def settings(report: Row) -> list[str]:
    """Return the report's settings in its order."""
    return list(dict.fromkeys(row["setting"] for row in report["rows"]))


def named(rows: Iterable[Row], setting: str) -> list[Row]:
    """Return the rows of one setting."""
    return [row for row in rows if row["setting"] == setting]


def methods(report: Row) -> list[str]:
    """Return the measured methods but plain decoding; a method's place is that of its colour in all pictures."""
    return list(dict.fromkeys(row["method"] for row in report["rows"] if row["method"] != PLAIN))


def is_peer(row: Row) -> bool:
    """Return True for plain decoding and for methods of other software."""
    return bool(row["method"] == PLAIN or str(row["method"]).startswith("transformers"))


def speed_of(row: Row) -> float | None:
    """Return the speed-up of all tokens/s; the median of paired runs where only this was measured."""
    totals, pairs = row.get("speedup_of_totals") or {}, row.get("speedup") or {}
    found: float | None = totals.get("value")
    return pairs.get("median") if found is None else found
