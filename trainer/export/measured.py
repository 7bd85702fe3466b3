"""Figures for an artefact's card, from a report by `decoding.measure.evaluate`, as texts for tables."""

from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

from decoding.measure.figures import NONE, estimate, greedy_sentence, identical, shares, speedup

_LABELS = ("lossless", "lossy")


@dataclass(frozen=True)
class MeasuredRow:
    """One method under one setting. Every figure has its interval or quartiles; a dash stands for a missing one."""

    setting: str
    method: str
    label: str
    tokens_per_pass: str
    acceptance: str
    speedup: str
    speedup_with_prefill: str
    over_transformers: str
    identical: str
    positions: tuple[tuple[str, str], ...]
    """At each drafted position, from 1: conditional and unconditional acceptance, with interval and count."""


@dataclass(frozen=True)
class Measured:
    """The measured rows for a card, with the hardware, the prompts and the commit behind them."""

    hardware: str
    dtype: str
    prompts: str
    cell: str
    """Length of the prompts and texts decoded at a time; empty for prompts of their own lengths, one at a time."""
    rounds: str
    max_new_tokens: str
    commit: str
    greedy: str
    """A sentence on the greedy texts of these rows."""
    rows: tuple[MeasuredRow, ...]

    @property
    def lossy(self) -> bool:
        return any(row.label == "lossy" for row in self.rows)


def read_measured(report: dict[str, Any], name: str, kind: str, drafters: Container[str] | None = None) -> Measured:
    """Read the figures for the card of heads or a draft; ``name`` is the report's, for errors.

    Rows of ``kind`` ("heads" or "draft") by one of ``drafters`` (None: by any) are kept, those of plain decoding, and
    those of peers without an artefact.
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
    shown = list(_rows_of(rows, kind, drafters))
    try:
        return Measured(
            hardware=_hardware(report.get("hardware") or {}),
            dtype=_said(report.get("dtype")),
            prompts=_count(report.get("prompts")),
            cell=_cell(rows[0]),
            rounds=_count(report.get("rounds")),
            max_new_tokens=_count(report.get("max_new_tokens")),
            commit=_said(report.get("commit")),
            greedy=greedy_sentence({**report, "rows": shown}),
            rows=tuple(_row(row) for row in shown),
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{name} holds something else than a figure ({error!r}): evaluate again") from error


def _cell(row: dict[str, Any]) -> str:
    batch_size, context = row.get("batch_size") or 1, row.get("context")
    length = "" if context is None else f" of at most {_count(context)} tokens"
    return length + ("" if batch_size == 1 else f", decoded {_count(batch_size)} at a time")


def _rows_of(rows: list[dict[str, Any]], kind: str, drafters: Container[str] | None) -> Iterator[dict[str, Any]]:
    for row in rows:
        drafted_by, method = row.get("artefact"), str(row.get("method"))
        own = drafted_by == kind and (drafters is None or row.get("drafter") in drafters)
        if own or (drafted_by is None and (method == "plain" or method.startswith("transformers"))):
            yield row


def _row(row: dict[str, Any]) -> MeasuredRow:
    conditional = row.get("conditional_acceptance") or []
    unconditional = row.get("unconditional_acceptance") or []
    return MeasuredRow(
        setting=_said(row.get("setting")),
        method=_said(row.get("method")),
        label=row["label"],
        tokens_per_pass=estimate(row.get("tokens_per_pass")),
        acceptance=shares(conditional, between=" / "),
        speedup=speedup(row),
        speedup_with_prefill=speedup(row, "speedup_with_prefill"),
        over_transformers=speedup(row, "speedup_over_transformers"),
        identical=identical(row.get("identical_to_plain")),
        positions=tuple((_of(share), _of(other)) for share, other in zip(conditional, unconditional, strict=True)),
    )


def _of(share: dict[str, Any]) -> str:
    """Write a share as ``0.48 [0.45, 0.51] of 1,996``"""
    text = estimate(share)
    return text if text == NONE else f"{text} of {share['observations']:,}"


def _hardware(hardware: dict[str, Any]) -> str:
    """Name the accelerator, if there was one, and the processor with its threads."""
    processor = _said(hardware.get("processor"))
    if hardware.get("threads"):
        processor += f" ({hardware['threads']} threads)"
    return f"{_said(hardware['gpu'])}, {processor}" if hardware.get("gpu") else processor


def _count(value: Any) -> str:
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{value!r} is no count")
    return _said(value)


def _said(value: Any) -> str:
    return NONE if value is None else str(value)
