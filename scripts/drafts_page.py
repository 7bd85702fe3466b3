"""The page of drafts by size and loss: every table and the picture, from the JSON that was measured."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from drafts_plot import plot

from decoding.measure.figures import NONE, estimate, number

SETTINGS = {"greedy": "greedy", "sampling": "T=1"}


def publish(results: dict[str, Any], folder: Path) -> None:
    """Write ``drafts.md`` and ``drafts.svg`` into a folder."""
    (folder / "drafts.md").write_text(page(results))
    plot(results, comparisons_of(results)["sizes"], folder / "drafts.svg")


def comparisons_of(results: dict[str, Any]) -> dict[str, list[str]]:
    """Return the arms of each comparison, in order."""
    found: dict[str, list[str]] = {}
    for name, arm in results["arms"].items():
        for part in arm["comparisons"]:
            found.setdefault(part, []).append(name)
    return found


def page(results: dict[str, Any]) -> str:
    """Return the page as Markdown."""
    return "\n".join(_lines(results, comparisons_of(results))) + "\n"


def _lines(results: dict[str, Any], comparisons: Mapping[str, Sequence[str]]) -> Iterator[str]:
    machine, first = results["hardware"], next(iter(results["decoding"]))
    yield "# Drafts, measured"
    yield ""
    yield (
        f"Measured on {machine['processor']}, {machine['cores']} cores, {machine['threads']} threads, by a script that "
        "`benchmarks/accepted.py` has replaced; "
        f"target storyteller-11m in bf16; every arm trained for {results['steps']} steps over the same prompts in the "
        f"same order; commit {results['commit'][:12]}. {results['note']} Narrow drafts, but for the one of random "
        "weights, started as the target's most active channels; that start has been removed since."
    )
    yield ""
    yield (
        "Tokens per target pass count the target's own token and leave the prefill out, with 95% intervals over the "
        f"prompts ({', '.join(f'{name} {count}' for name, count in results['prompts'].items())}). Four tokens are "
        "drafted unless a table says otherwise. Every arm is in "
        "its tables, the losing ones too."
    )
    for part, names in comparisons.items():
        yield f"\n## {part.capitalize()}\n"
        yield from _acceptance_table(results, [name for name in names if name in results["arms"]])
    yield f"\n## Speed-up by size, {first}\n"
    in_full = any("speedup_of_totals" in found for found in _measured(results, first))
    totals = "All tokens/s over plain decoding's, with its 95% interval; then the" if in_full else "The"
    yield f"{totals} median of paired runs over plain decoding, and in brackets what the cost curve predicts.\n"
    yield from _speed_table(results, [name for name in comparisons["sizes"] if name in results["arms"]], first)
    yield "\n![Speed-up against draft size, tokens per pass against trained tokens](drafts.svg)"


def _acceptance_table(results: dict[str, Any], names: Sequence[str]) -> Iterator[str]:
    sets = list(results["decoding"])
    yield from _header(
        ["arm", "parameters", *(f"{name}, {label}" for name in sets for label in SETTINGS.values()), "trained tokens"]
    )
    for name in names:
        arm = results["arms"][name]
        cells = [
            "{value:.2f} [{low:.2f}, {high:.2f}]".format(
                **results["decoding"][chosen][name][setting]["4"]["tokens_per_pass"]
            )
            for chosen in sets
            for setting in SETTINGS
        ]
        yield _row([name, f"{arm['parameters'] / 1e6:.2f}M", *cells, f"{arm['tokens']:,}"])


def _speed_table(results: dict[str, Any], names: Sequence[str], prompt_set: str) -> Iterator[str]:
    lengths = list(results["decoding"][prompt_set][names[0]]["greedy"])
    yield from _header(["arm", *(f"{label}, {length}" for label in SETTINGS.values() for length in lengths)])
    for name in sorted(names, key=lambda name: results["arms"][name]["parameters"]):
        measured = results["decoding"][prompt_set][name]
        yield _row([name, *(_speed(measured[setting][length]) for setting in SETTINGS for length in lengths)])


def _measured(results: dict[str, Any], prompt_set: str) -> Iterator[dict[str, Any]]:
    """Each arm's figures under each setting at each length."""
    for by_setting in results["decoding"][prompt_set].values():
        for by_length in by_setting.values():
            yield from by_length.values()


def _speed(found: dict[str, Any]) -> str:
    median = f"{found['speedup']['median']:.2f}× ({number(found['predicted_speedup'])})"
    totals = estimate(found.get("speedup_of_totals"), "×")
    return median if totals == NONE else f"{totals}; median {median}"


def _header(names: Sequence[str]) -> Iterator[str]:
    yield _row(names)
    yield "|---" * len(names) + "|"


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
