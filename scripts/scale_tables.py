"""Tables of docs/results/scale.md: what data, training, evaluation and batches cost, each from one program's report."""

import statistics
from collections.abc import Callable
from typing import Any

from decoding.measure.figures import number
from decoding.measure.markdown import text

Report = dict[str, Any]


def data_table(report: Report) -> str:
    """Return a row for each start of `benchmarks/data_scale.py`."""
    lines = [
        "| rows | processes | tokens on disk | first step after, s | private MB of each process |",
        "|---|---:|---|---:|---:|",
    ]
    for run in report["runs"]:
        few = run["data"] == "few"
        cells = (
            "64 chats" if few else f"{report['chats']:,} chats",
            str(run["processes"]),
            "none" if few else {"empty": "made", "full": "found"}[run["cache"]],
            number(run["seconds_to_first_step"], 1),
            ", ".join(number(rank["private_MB"], 0) for rank in run["ranks"]),
        )
        lines.append(f"| {' | '.join(cells)} |")
    size = max(run["cache_MB"] for run in report["runs"])
    return "\n".join(lines) + (
        f"\n\n{report['tokens'] / 1e6:,.0f}M tokens, {size:,.0f} MB on the disk; one step of Medusa-1 on "
        f"{text(report['target'])}. Private: what a process shares with no other and cannot drop. {_machine(report)}."
    )


def stored_table(report: Report) -> str:
    """Return a row for each target and kind of `benchmarks/train_stored.py`."""
    lines = [
        "| target | what trains | stored | tokens/s, target at every step | tokens/s, from disk | ratio |",
        "|---:|---|---|---:|---:|---:|",
    ]
    for run in report["runs"]:
        pace = run["tokens_per_second"]
        cells = (
            f"{run['parameters'] / 1e6:.0f}M",
            run["kind"],
            "teacher's likeliest tokens" if run["kind"] == "draft" else "hidden states",
            number(pace["online"], 0),
            number(pace["stored"], 0),
            f"{number(run['speedup']['clock'])}×",
        )
        lines.append(f"| {' | '.join(cells)} |")
    share = statistics.mean(run["trained_tokens_per_step"] / run["positions_per_step"] for run in report["runs"])
    return "\n".join(lines) + (
        "\n\nMedians; the ratio is that of the steps' own ratios. Answers alone are trained, "
        f"{share:.0%} of the tokens that the target reads. {report['threads']} threads. {_machine(report)}."
    )


def overhead_table(report: Report) -> str:
    """Return a row for each method of `benchmarks/overhead.py`, with a column for each batch size and temperature."""
    places = sorted({(row["batch"], row["temperature"]) for row in report["splits"]})
    names = [f"batch {batch}, {'greedy' if heat == 0 else f'T={heat:g}'}" for batch, heat in places]
    lines = [f"| drafted by | {' | '.join(names)} |", "|---|" + "---:|" * len(places)]
    for method in dict.fromkeys(row["method"] for row in report["splits"]):
        mine = {(row["batch"], row["temperature"]): row for row in report["splits"] if row["method"] == method}
        cells = (f"{mine[place]['overhead']:.1%} ({mine[place]['outside']:.1%})" for place in places)
        lines.append(f"| {text(method)} | {' | '.join(cells)} |")
    return "\n".join(lines) + f"\n\n{text(report['target'])}. {_machine(report)}."


def launchers_table(report: Report) -> str:
    """Return a row for each kind of training and a column for each launcher of `benchmarks/launchers.py`."""
    fresh = [run for run in report["runs"] if run["resumed_at"] == 0 and run["launcher"] != "one"]
    launchers = list(dict.fromkeys((run["launcher"], run["processes"]) for run in fresh))
    heads = [f"{name} × {count}" for name, count in launchers]
    lines = [f"| | {' | '.join(heads)} | resumed across |", "|---|" + "---:|" * (len(launchers) + 1)]
    for kind in dict.fromkeys(run["kind"] for run in report["runs"]):
        mine = {(run["launcher"], run["processes"]): run for run in fresh if run["kind"] == kind}
        cells = [f"{mine[each]['weight_difference']:.0e}" if each in mine else "" for each in launchers]
        crossed = [run["weight_difference"] for run in report["runs"] if run["kind"] == kind and run["resumed_at"]]
        lines.append(f"| {text(kind)} | {' | '.join(cells)} | {max(crossed, default=0.0):.0e} |")
    right = sum(run["is_right"] for run in report["runs"])
    return "\n".join(lines) + (
        f"\n\nLargest difference of a weight from one process's after {report['steps']} steps. {right} of "
        f"{len(report['runs'])} runs right. {_machine(report)}."
    )


def elastic_table(report: Report) -> str:
    """Return a row for each event of `benchmarks/elastic.py`."""
    lines = ["| | processes | from one process | from two undisturbed |", "|---|---|---:|---:|"]
    for run in report["runs"]:
        stretches = ", ".join(f"{processes} from step {first + 1}" for first, processes in run["stretches"])
        lines.append(f"| {text(run['event'])} | {stretches} | {run['from_one']:.0e} | {run['from_two']:.0e} |")
    return "\n".join(lines) + (
        f"\n\nLargest difference of a finished weight after {report['steps']} steps. {_machine(report)}."
    )


def heldout_table(report: Report) -> str:
    """Return a row for each batch size of `benchmarks/heldout.py`."""
    lines = ["| evaluation.batch_size | seconds | tokens per pass |", "|---:|---:|---:|"]
    for row in report["sizes"]:
        lines.append(f"| {row['batch_size']} | {number(row['seconds'], 1)} | {number(row['tokens_per_pass'], 4)} |")
    return "\n".join(lines) + f"\n\n{report['prompts']} prompts, {text(report['dtype'])}. {_machine(report)}."


def endpoints_table(report: Report) -> str:
    """Return the pace of `benchmarks/endpoints.py` with both servers, with one, and with both again."""
    lines = ["| servers | answers/s |", "|---|---:|"]
    for name, pace in zip(("two", "one, the other killed", "two again"), report["answers_per_second"], strict=True):
        lines.append(f"| {name} | {number(pace, 1)} |")
    return "\n".join(lines) + (
        f"\n\n{report['rows']:,} rows: {report['answered']:,} answered, {report['set_aside']} set aside, "
        f"{report['missing']} missing, {report['twice']} twice. {_machine(report)}."
    )


def _machine(report: Report) -> str:
    machine = report["hardware"]
    processor = machine.get("gpu") or f"{machine['cores']} cores of {machine['processor']}"
    return f"On {text(processor)}; commit {text(report['commit'])}"


TABLES: dict[str, Callable[[Report], str]] = {
    "data_scale": data_table,
    "launchers": launchers_table,
    "elastic": elastic_table,
    "train_stored": stored_table,
    "heldout": heldout_table,
    "endpoints": endpoints_table,
    "overhead": overhead_table,
}
"""Name of a report, and of its block in the page -> what writes it."""
