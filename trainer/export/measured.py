"""The figures of a report by `decoding.evaluate`, as texts for tables."""

import math
from dataclasses import dataclass
from typing import Any

_LABELS = ("lossless", "lossy")
_NONE = "–"


@dataclass(frozen=True)
class MeasuredRow:
    """One method under one setting. Every figure comes with its interval or quartiles; a dash stands for none."""

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
    """At each drafted position, from 1: conditional and unconditional acceptance, with interval and count"""


@dataclass(frozen=True)
class Measured:
    """What was measured, on what."""

    hardware: str
    dtype: str
    prompts: str
    rounds: str
    max_new_tokens: str
    commit: str
    rows: tuple[MeasuredRow, ...]

    @property
    def lossy(self) -> bool:
        return any(row.label == "lossy" for row in self.rows)


def read_measured(report: dict[str, Any], name: str) -> Measured:
    """A report's figures; ``name`` is the report's, for errors. `ValueError` if a row lacks its promise."""
    rows = report.get("rows")
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{name} holds no rows of figures: give the report.json that `headstart evaluate` wrote")
    for row in rows:
        if row.get("label") not in _LABELS:
            raise ValueError(
                f"{name} labels {row.get('method')!r} {row.get('label')!r}, not lossless or lossy: evaluate again"
            )
    return Measured(
        hardware=_hardware(report.get("hardware") or {}),
        dtype=_cell(report.get("dtype")),
        prompts=_cell(report.get("prompts")),
        rounds=_cell(report.get("rounds")),
        max_new_tokens=_cell(report.get("max_new_tokens")),
        commit=_cell(report.get("commit")),
        rows=tuple(_row(row) for row in rows),
    )


def _row(row: dict[str, Any]) -> MeasuredRow:
    conditional = row.get("conditional_acceptance") or []
    unconditional = row.get("unconditional_acceptance") or []
    return MeasuredRow(
        setting=_cell(row.get("setting")),
        method=_cell(row.get("method")),
        label=row["label"],
        tokens_per_pass=_estimate(row.get("tokens_per_pass")),
        acceptance=" / ".join(_number(share["value"]) for share in conditional) or _NONE,
        speedup=_spread(row.get("speedup")),
        speedup_with_prefill=_spread(row.get("speedup_with_prefill")),
        over_transformers=_spread(row.get("speedup_over_transformers")),
        identical=_identical(row.get("identical_to_plain")),
        positions=tuple(
            (_estimate(share, counted=True), _estimate(other, counted=True))
            for share, other in zip(conditional, unconditional, strict=True)
        ),
    )


def _hardware(hardware: dict[str, Any]) -> str:
    """The accelerator if there was one, and the processor with the threads it ran."""
    processor = _cell(hardware.get("processor"))
    if hardware.get("threads"):
        processor += f" ({hardware['threads']} threads)"
    return f"{_cell(hardware['gpu'])}, {processor}" if hardware.get("gpu") else processor


def _number(value: float | None) -> str:
    return _NONE if value is None or math.isnan(value) else f"{value:.2f}"


def _estimate(estimate: dict[str, Any] | None, counted: bool = False) -> str:
    """``2.31 [2.20–2.43]``, with ``of 812`` if counted."""
    if estimate is None or _number(estimate["value"]) == _NONE:
        return _NONE
    text = f"{_number(estimate['value'])} [{_number(estimate['low'])}–{_number(estimate['high'])}]"
    return f"{text} of {estimate['observations']:,}" if counted else text


def _spread(spread: dict[str, Any] | None) -> str:
    """``1.71× (1.62–1.80)``"""
    if spread is None or _number(spread["median"]) == _NONE:
        return _NONE
    return f"{_number(spread['median'])}× ({_number(spread['low_quartile'])}–{_number(spread['high_quartile'])})"


def _identical(compared: dict[str, Any] | None) -> str:
    """``11 of 12, largest logit margin 0.03``"""
    if compared is None:
        return ""
    text = f"{compared['identical']} of {compared['of']}"
    if compared["identical"] == compared["of"]:
        return text
    return f"{text}, largest logit margin where they part {compared['largest_margin']:.3g}"


def _cell(value: Any) -> str:
    """A text that stays inside its table cell."""
    return _NONE if value is None else " ".join(str(value).split()).replace("|", "\\|")
