"""The suite's figures as one page that needs nothing else: tables, and bars drawn by the page itself."""

from collections.abc import Iterable, Sequence
from html import escape
from typing import Any

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2330; max-width: 76rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; } h2 { margin-top: 2.2rem; border-bottom: 1px solid #d8dce4; } h3 { margin: 1.4rem 0 .3rem; }
table { border-collapse: collapse; margin: .4rem 0 1rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .7rem; text-align: right; border-bottom: 1px solid #e8ebf0; vertical-align: top; }
th:first-child, td:first-child, td.left { text-align: left; } td { white-space: nowrap; }
th { color: #5b6475; font-weight: 600; }
.bar { display: inline-block; height: .7em; background: #4c78a8; border-radius: 2px; }
.met { color: #1a7f37; } .missed { color: #b42318; } .note { color: #5b6475; } .scroll { overflow-x: auto; }
"""
_BAR = 110  # pixels of the longest


class Html(str):
    """Text that is markup already."""


def _cell(value: Any) -> str:
    if isinstance(value, Html):
        return value
    if value is None:
        return "–"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return escape(str(value))


def _td(value: Any) -> str:
    return f"<td{' class=left' if isinstance(value, Html) else ''}>{_cell(value)}</td>"


def _table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join(f"<tr>{''.join(map(_td, row))}</tr>" for row in rows)
    return f'<div class="scroll"><table><tr>{head}</tr>{body}</table></div>'


def _bar(value: float, longest: float) -> Html:
    width = round(_BAR * value / longest) if longest else 0
    return Html(f'<span class="bar" style="width:{width}px"></span>')


def _share(value: float | None) -> str | None:
    return None if value is None else f"{100 * value:.0f}%"


def _group(name: str, group: dict[str, Any]) -> str:
    longest = max(row["tokens_per_second"]["median"] for row in group["rows"])
    rows = []
    for row in sorted(group["rows"], key=lambda row: -row["tokens_per_second"]["median"]):
        speed, split, bandwidth = row["tokens_per_second"], row.get("time_split") or {}, row.get("bandwidth") or {}
        parts = [_share(split.get(part)) for part in ("draft", "verify", "overhead")]
        rows.append(
            [
                f"{row['method']}, {row['mode']}",
                _bar(speed["median"], longest),
                speed["median"],
                f"{row['over_plain']['median']:.2f}×",
                f"{row['over_transformers']['median']:.2f}×",
                row.get("tokens_per_pass"),
                " / ".join(part or "–" for part in parts) if split else None,
                row["same_as_plain"],
                " / ".join(str(_share(bandwidth[f"share_of_{what}"])) for what in ("pass", "step"))
                if bandwidth
                else None,
            ]
        )
    heads = ["method", "", "tokens/s", "over plain", "over generate", "tokens/pass", "draft / verify / loop"]
    heads += ["as plain", "bandwidth, pass / step"]
    return f"<h3>{escape(name)}</h3>" + _table(heads, rows)


def _decoding(part: str, groups: dict[str, Any]) -> str:
    first = next(iter(groups.values()))
    stand_in = first["stand_in"]
    note = escape(stand_in["note"]) if stand_in else f"{first['parameters']:,} parameters"
    body = "".join(_group(name, group) for name, group in groups.items())
    return (
        f'<h2>{escape(part.capitalize())}</h2><p class="note">{note}. Decoding without the prefill; '
        f"{first['new_tokens']} new tokens a text; medians of rounds in which all took turns.</p>{body}"
    )


def _tests(results: dict[str, Any]) -> str:
    rows = [[name, *(result[key] for key in ("passed", "failed", "skipped"))] for name, result in results.items()]
    failures = [failure for result in results.values() for failure in result["failures"]]
    text = "".join(f"<pre>{escape(failure)}</pre>" for failure in failures)
    return "<h2>Tests</h2>" + _table(["tests", "passed", "failed", "skipped"], rows) + text


def _bandwidth(results: dict[str, Any]) -> str:
    rows = [[name, result["bytes_per_second"] / 1e9] for name, result in results.items()]
    return "<h2>Memory</h2>" + _table(["", "GB/s, read and written"], rows)


def _launches(results: dict[str, Any]) -> str:
    kinds = sorted({kind for result in results.values() for kind in result["per_step"]})
    rows = [[name, *(result["per_step"].get(kind, 0.0) for kind in kinds)] for name, result in results.items()]
    parts = ["<h2>Calls per step of the loop</h2>", _table(["", *kinds], rows)]
    for name, result in results.items():
        rows = [
            [entry["name"], entry["calls_per_step"], entry["microseconds_per_step"], _share(entry["share"])]
            for entry in result["top"]
        ]
        parts.append(f"<h3>{escape(name)}</h3>" + _table(["where the time goes", "calls", "µs a step", "share"], rows))
    return "".join(parts)


def _training(results: dict[str, Any]) -> str:
    rows = [
        [
            name,
            f"{result['target_parameters']:,}",
            f"{result['trained_parameters']:,}",
            result["tokens_per_second"],
            None if result["peak_memory_bytes"] is None else result["peak_memory_bytes"] / 2**30,
            result["first_loss"],
            result["last_loss"],
        ]
        for name, result in results.items()
    ]
    heads = ["", "target's parameters", "trained", "tokens/s", "peak GiB", "first loss", "last loss"]
    return "<h2>Training</h2>" + _table(heads, rows)


_SECTIONS = {
    "tests": _tests,
    "bandwidth": _bandwidth,
    "launches": _launches,
    "training": _training,
}


def page(report: dict[str, Any]) -> str:
    """The whole page, of whatever is in the report so far."""
    machine = ", ".join(f"{name} {value}" for name, value in report["hardware"].items())
    versions = ", ".join(f"{name} {value}" for name, value in report["versions"].items())
    short = "<p><b>A short run of tiny models: it shows that everything works, its figures mean nothing.</b></p>"
    parts = [
        f"<h1>Headstart on {escape(str(report['hardware'].get('gpu', report['hardware']['processor'])))}</h1>",
        f'<p class="note">{escape(machine)} · {escape(versions)} · commit {escape(report["commit"])} · '
        f"{escape(report['dtype'])} · {escape(report['source'])}</p>",
        short if report["short"] else "",
    ]
    if report["goals"]:
        rows = [
            [
                goal["goal"],
                goal["wanted"],
                goal["measured"],
                Html(f'<span class="{"met" if goal["met"] else "missed"}">{"yes" if goal["met"] else "no"}</span>'),
            ]
            for goal in report["goals"]
        ]
        parts += ["<h2>Goals</h2>", _table(["goal", "at least", "measured", "met"], rows)]
    for name, results in report["parts"].items():
        if results:
            section = _SECTIONS.get(name)
            parts.append(section(results) if section else _decoding(name, results))
    missing = [list(entry.values()) for entry in (*report["skipped"], *report["failed"])]
    if missing:
        parts += ["<h2>Missing</h2>", _table(["part", "measurement", "why"], missing)]
    parts += ["<h2>Time</h2>", _table(["part", "seconds"], report["seconds"].items())]
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>Headstart: GPU suite</title>'
        f"<style>{_STYLE}</style></head><body>{''.join(parts)}</body></html>\n"
    )
