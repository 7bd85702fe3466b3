"""Tables of `train_medusa.py`'s report."""

import statistics
from typing import Any

from rich.console import Console
from rich.table import Table

WAYS = ("fused", "plain")


def show(report: dict[str, Any], console: Console) -> None:
    """Print the figures as tables."""
    columns = (
        "variant",
        "vocabulary",
        "fused, tokens/s",
        "plain, tokens/s",
        "ratio (quartiles)",
        "w/o AdamW",
        "CPU time",
    )
    table = Table(*columns, "fused, step MB", "plain, step MB", "ratio", title="one step of 4 heads")
    for row in report["losses"]:
        speed, memory_ratio = row["speedup"], row["step_memory"]
        middle = {
            (way, figure): statistics.median(run[figure] for run in runs)
            for way, runs in row["runs"].items()
            for figure in ("tokens_per_second", "step_bytes")
        }
        table.add_row(
            row["variant"],
            f"{row['vocabulary']:,}",
            *(f"{middle[way, 'tokens_per_second']:,.0f}" for way in WAYS),
            f"{speed['median']:.2f} ({speed['low']:.2f}–{speed['high']:.2f})",
            f"{row['speedup_without_optimizer']['median']:.2f}",
            f"{row['processor_time']['median']:.2f}",
            *(f"{middle[way, 'step_bytes'] / 1e6:,.0f}" for way in WAYS),
            f"{memory_ratio['median']:.2f}",
        )
    console.print(table)
    if "features" in report:
        part = report["features"]
        table = Table("target", "features, tokens/s", "online, tokens/s", "ratio (quartiles)", "writing, tokens/s")
        speed = part["speedup"]
        table.add_row(
            f"widened to {part['target']['parameters'] / 1e6:.0f}M",
            *(f"{part['tokens_per_second'][name]:,.0f}" for name in ("features", "online")),
            f"{speed['median']:.2f} ({speed['low']:.2f}–{speed['high']:.2f})",
            f"{part['writing_tokens_per_second']:,.0f}",
        )
        console.print(table)
    table = Table("goal", "wanted", "measured", "met")
    for goal in report["goals"]:
        bound = f"{'≤' if goal['at_most'] else '≥'} {goal['wanted']:.2f}"
        table.add_row(goal["goal"], bound, f"{goal['measured']:.3f}", "yes" if goal["met"] else "no")
    console.print(table)
