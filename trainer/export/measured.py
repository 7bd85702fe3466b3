"""Figures for an artefact's card, from a report by `decoding.measure.evaluate`, as texts for tables."""

import math
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from decoding.measure.figures import NONE, estimate, greedy_sentence, identical, speedup, spread
from decoding.measure.names import TRANSFORMERS
from decoding.model.stored import read_object

_LOSSLESS = "lossless"
_LABELS = (_LOSSLESS, "lossy")
_PEERS = TRANSFORMERS.split()[0]
"""Beginning of the names of the methods that ``transformers`` itself decodes by."""


class Ratio(NamedTuple):
    """A speed-up: all tokens over all seconds with a 95% interval, and the median [quartiles] of paired runs."""

    totals: str
    median: str


@dataclass(frozen=True)
class MeasuredRow:
    """One method under one setting. Every figure has its interval or quartiles; a dash stands for a missing one.

    ``own``: the artefact drafted.
    """

    own: bool
    setting: str
    method: str
    label: str
    tokens_per_pass: str
    speedup: Ratio
    speedup_with_prefill: Ratio
    over_transformers: Ratio
    identical: str
    passes: str
    """Target passes and the prompts that they were counted on."""
    positions: tuple[tuple[str, str], ...]
    """At each drafted position, from 1: conditional and unconditional acceptance, with interval and count."""


@dataclass(frozen=True)
class Headline:
    """The artefact's fastest method at one temperature, in short. Lossless methods come before lossy ones."""

    setting: str
    method: str
    label: str
    speedup: str
    """Ratio of the totals with its 95% interval; the median of paired runs where a report has no totals."""
    over_transformers: str
    tokens_per_pass: str
    values: tuple[tuple[str, str, float], ...]
    """(the metric's type, its name, its value) of each figure that was measured, for the Hub's metadata."""
    of_tree: bool
    """True for the figures of a tree in a format of which servers draft one chain."""
    limits: str
    """A sentence on where this method does not gain; empty where it was not seen."""


@dataclass(frozen=True)
class Measured:
    """The measured rows for a card, with the hardware, the prompts and the commit behind them."""

    hardware: str
    dtype: str
    prompts: str
    prompts_from: str
    """Name of the prompts' file; empty where the report has none."""
    cell: str
    """Length of the prompts and texts decoded at a time; empty for prompts of their own lengths, one at a time."""
    rounds: str
    max_new_tokens: str
    commit: str
    greedy: str
    """A sentence on the greedy texts of these rows."""
    rows: tuple[MeasuredRow, ...]
    best: tuple[Headline, ...]
    """One for each temperature, greedy first."""

    @property
    def lossy(self) -> bool:
        return any(row.label == "lossy" for row in self.rows)


def read_report(path: Path) -> dict[str, Any]:
    """Read a report by `decoding.measure.evaluate`; `ValueError` if it is missing or no JSON object."""
    remedy = "give the report.json that `headstart evaluate` wrote"
    if not path.is_file():
        raise ValueError(f"there is no report {path}: {remedy}, or export without one")
    return read_object(path, remedy)


def read_measured(
    report: dict[str, Any], name: str, kind: str, drafters: Container[str] | None = None, chains: bool = False
) -> Measured:
    """Read the figures for the card of heads or a draft; ``name`` is the report's, for errors.

    Rows of ``kind`` ("heads" or "draft") by one of ``drafters`` (None: by any) are kept, and those of methods without
    an artefact: plain decoding, ``transformers``, prompt lookup. ``chains``: servers draft chains with the artefact, so
    a row of one comes before any row of a tree.
    `ValueError` if a row lacks its label or holds something else than a figure.
    """
    rows = report.get("rows")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{name} holds no rows of figures: give the report.json that `headstart evaluate` wrote")
    for row in rows:
        if not isinstance(row, dict):
            raise ValueError(f"{name} holds {row!r:.60} as a row of figures: evaluate again")
        if row.get("label") not in _LABELS:
            raise ValueError(
                f"{name} labels {row.get('method')!r} {row.get('label')!r}, not lossless or lossy: evaluate again"
            )
    own = [row for row in rows if row.get("artefact") == kind and (drafters is None or row.get("drafter") in drafters)]
    shown = [row for row in rows if row in own or row in _without_weights(rows)]
    try:
        return Measured(
            hardware=_hardware(report.get("hardware") or {}),
            dtype=_said(report.get("dtype")),
            prompts=_count(report.get("prompts")),
            prompts_from=str(report.get("prompts_from") or ""),
            cell=_cell(rows[0]),
            rounds=_count(report.get("rounds")),
            max_new_tokens=_count(report.get("max_new_tokens")),
            commit=_said(report.get("commit")),
            greedy=greedy_sentence({**report, "rows": shown}),
            rows=tuple(_row(row) for row in shown),
            best=tuple(_headline(report, row, chains) for row in _fastest(own, chains)),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name} holds something else than a figure ({error!r}): evaluate again") from error


def _cell(row: dict[str, Any]) -> str:
    batch_size, context = row.get("batch_size") or 1, row.get("context")
    length = "" if context is None else f" of at most {_count(context)} tokens"
    return length + ("" if batch_size == 1 else f", decoded {_count(batch_size)} at a time")


def _fastest(rows: Sequence[dict[str, Any]], chains: bool) -> Iterator[dict[str, Any]]:
    """Yield the best row of each temperature in the report's order: a lossless one if there is any, then by speed.

    With ``chains`` a chain comes before any tree that is as lossless, whatever their speeds. Rows that ``transformers``
    decoded are passed over.
    """
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        if not str(row.get("method")).startswith(_PEERS):
            groups.setdefault(_temperature(row), []).append(row)
    for group in groups.values():
        yield max(group, key=lambda row: _merit(row, chains))


def _merit(row: dict[str, Any], chains: bool) -> tuple[bool, bool, float, float]:
    return row["label"] == _LOSSLESS, not (chains and _is_tree(row)), _speed(row) or 0.0, _tokens(row) or 0.0


def _is_tree(row: dict[str, Any]) -> bool:
    return row.get("shape") == "tree"


def _without_weights(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    return [row for row in rows if row.get("artefact") is None]


def _temperature(row: dict[str, Any]) -> Any:
    """Return the temperature, or the setting's name in a report without temperatures."""
    return row.get("temperature", row.get("setting"))


def _speed(row: dict[str, Any]) -> float | None:
    return _finite((row.get("speedup_of_totals") or {}).get("value")) or _finite(
        (row.get("speedup") or {}).get("median")
    )


def _tokens(row: dict[str, Any]) -> float | None:
    return _finite((row.get("tokens_per_pass") or {}).get("value"))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _headline(report: dict[str, Any], row: dict[str, Any], chains: bool) -> Headline:
    speed, tokens = _speed(row), _tokens(row)
    told = f"{_said(row.get('setting'))}, {_said(row.get('method'))}, {row['label']}"
    values = (
        ("speedup", f"speed-up over plain decoding ({told})", speed),
        ("tokens_per_target_pass", f"tokens per target pass ({told})", tokens),
    )
    return Headline(
        setting=_said(row.get("setting")),
        method=_said(row.get("method")),
        label=row["label"],
        speedup=_short(row, "speedup"),
        over_transformers=_short(row, "speedup_over_transformers"),
        tokens_per_pass=estimate(row.get("tokens_per_pass")),
        values=tuple((type, name, round(value, 4)) for type, name, value in values if value is not None),
        of_tree=chains and _is_tree(row),
        limits=_limits(report, row),
    )


def _short(row: dict[str, Any], name: str) -> str:
    """Format the ratio of the totals; the medians alone where there is none."""
    totals = estimate(row.get(f"{name}_of_totals"), "×")
    return speedup(row, name) if totals == NONE else totals


def _limits(report: dict[str, Any], row: dict[str, Any]) -> str:
    """Say where the row's method gains nothing, by the cells of the report, or less than a method without weights."""
    speed, setting = _speed(row), _said(row.get("setting"))
    if speed is None:
        return ""
    if speed <= 1:
        return f"{setting}: no faster than plain decoding on these prompts."
    low = _finite((row.get("speedup_of_totals") or {}).get("low"))
    if low is not None and low <= 1:
        return f"{setting}: these prompts do not show a gain, as the interval holds 1×."
    falls = _falls(report, row)
    faster = [
        f"{_said(other.get('method'))}, {_short(other, 'speedup')}"
        for other in _without_weights(report["rows"])
        if other["label"] == row["label"]
        and _temperature(other) == _temperature(row)
        and (_speed(other) or 0.0) > speed
    ]
    told = [f"slower than plain decoding from {falls} on"] if falls else []
    told += [f"faster on these prompts, and without any weights, was {' and '.join(faster)}"] if faster else []
    return f"{setting}: {'; '.join(told)}." if told else ""


def _falls(report: dict[str, Any], row: dict[str, Any]) -> str:
    """Return the batch size and the context from which on the row's method is slower than plain decoding; or ""."""
    if not report.get("grid"):
        return ""
    from decoding.measure.report.words import below_from, curve  # imports matplotlib

    falls = (("batch ", below_from(curve(report, row, "batch_size"))), ("", below_from(curve(report, row, "context"))))
    places = [f"{unit}{place:,}{'' if unit else ' tokens of context'}" for unit, place in falls if place is not None]
    return " and ".join(places)


def _row(row: dict[str, Any]) -> MeasuredRow:
    conditional = row.get("conditional_acceptance") or []
    unconditional = row.get("unconditional_acceptance") or []
    return MeasuredRow(
        own=row.get("artefact") is not None,
        setting=_said(row.get("setting")),
        method=_said(row.get("method")),
        label=row["label"],
        tokens_per_pass=estimate(row.get("tokens_per_pass")),
        speedup=_ratio(row, "speedup"),
        speedup_with_prefill=_ratio(row, "speedup_with_prefill"),
        over_transformers=_ratio(row, "speedup_over_transformers"),
        identical=identical(row.get("identical_to_plain")),
        passes=_passes(row),
        positions=tuple((_of(share), _of(other)) for share, other in zip(conditional, unconditional, strict=True)),
    )


def _ratio(row: dict[str, Any], name: str) -> Ratio:
    return Ratio(estimate(row.get(f"{name}_of_totals"), "×"), spread(row.get(name), "×"))


def _passes(row: dict[str, Any]) -> str:
    """Write ``294 (12)``: target passes, and the prompts that they were counted on."""
    prompts = f" ({_count(row['prompts'])})" if row.get("prompts") is not None else ""
    return NONE if row.get("passes") is None else f"{row['passes']:,}{prompts}"


def _of(share: dict[str, Any]) -> str:
    """Write a share as ``0.48 [0.45, 0.51] of 1,996``"""
    text = estimate(share)
    return text if text == NONE else f"{text} of {share['observations']:,}"


def _hardware(hardware: dict[str, Any]) -> str:
    """Name the accelerator, if there was one, and the processor with its threads."""
    processor = _said(hardware.get("processor"))
    if hardware.get("threads"):
        processor += f" ({hardware['threads']} thread{'' if hardware['threads'] == 1 else 's'})"
    return f"{_said(hardware['gpu'])}, {processor}" if hardware.get("gpu") else processor


def _count(value: Any) -> str:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{value!r} is no count")
    return _said(value)


def _said(value: Any) -> str:
    return NONE if value is None else str(value)
