"""The best draft size for a machine, as a picture: speed-up against parameters, tokens per pass against tokens."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure


def plot(results: dict[str, Any], names: Sequence[str], path: Path) -> None:
    """Draw the arms ``names``: the speed-up at each one's best draft length, and tokens per pass while it trained."""
    prompt_set = next(iter(results["decoding"]))
    names = sorted((name for name in names if name in results["arms"]), key=lambda n: results["arms"][n]["parameters"])
    figure = Figure(figsize=(9, 4), layout="constrained")
    sizes, curves = figure.subplots(1, 2)
    _draw_sizes(sizes, results, names, prompt_set)
    _draw_curves(curves, results, names)
    figure.suptitle(
        f"Drafts for an 11M-parameter target, {prompt_set}; {results['hardware']['processor']}", fontsize=10
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def _draw_sizes(axes: Axes, results: dict[str, Any], names: Sequence[str], prompt_set: str) -> None:
    millions = [results["arms"][name]["parameters"] / 1e6 for name in names]
    for setting, colour in (("greedy", "C0"), ("sampling", "C1")):
        by_length = [results["decoding"][prompt_set][name][setting] for name in names]
        best = [max(each.values(), key=lambda found: found["speedup"]["median"]) for each in by_length]
        label = "greedy" if setting == "greedy" else "T=1"
        spread = [[each["speedup"][key] for each in best] for key in ("median", "low_quartile", "high_quartile")]
        errors = [
            [m - low for m, low in zip(spread[0], spread[1], strict=True)],
            [high - m for m, high in zip(spread[0], spread[2], strict=True)],
        ]
        axes.errorbar(millions, spread[0], errors, color=colour, marker="o", capsize=3, label=f"{label}, measured")
        predicted = [each["predicted_speedup"] for each in best]
        axes.plot(millions, predicted, color=colour, linestyle=":", marker="x", label=f"{label}, predicted")
    axes.axhline(1, color="grey", linewidth=0.8)
    axes.set(xlabel="parameters of the draft, millions", ylabel="speed-up over plain (best of 2, 4, 6 drafted)")
    axes.legend(fontsize=8)


def _draw_curves(axes: Axes, results: dict[str, Any], names: Sequence[str]) -> None:
    for name in names:
        tokens, values = zip(*results["arms"][name]["curve"], strict=True)
        label = f"{results['arms'][name]['parameters'] / 1e6:.2f}M ({name})"
        axes.plot([count / 1000 for count in tokens], values, marker=".", label=label)
    axes.set(xlabel="trained tokens, thousands", ylabel="tokens per target pass, held out, greedy")
    axes.legend(fontsize=7)
