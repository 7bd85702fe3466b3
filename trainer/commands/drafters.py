"""Drafters as ``--drafter`` takes them: those that are asked for, and the list that `headstart drafters` prints."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from decoding.drafters.registry import REGISTRY, parse_drafter
from decoding.drafters.spec import DrafterSpec
from trainer.terminal.console import say, standard_output


def asked_drafters(texts: Sequence[str]) -> list[DrafterSpec]:
    """Read drafters, before any weights are; ValueError for one that is given twice."""
    specs = [parse_drafter(text) for text in texts]
    if again := next((spec for place, spec in enumerate(specs) if spec in specs[:place]), None):
        raise ValueError(f"--drafter {again} is given twice: give it once")
    return specs


def run_drafters(console: Console | None = None) -> None:
    """Print a row for each drafter of the registry; an option without a default is written ``name=``."""
    console = console or standard_output()
    table = Table(box=None, pad_edge=False)
    for column in ("drafter", "options, with their defaults", "what it drafts"):
        table.add_column(column, overflow="fold")
    for name, entry in REGISTRY.items():
        options = ", ".join(f"{option}={known.shown}" for option, known in entry.options.items())
        table.add_row(f"{name}:PATH" if entry.weights else name, options, entry.summary)
    console.print(table)
    say(console, "for example: --drafter lookup  --drafter lookup:ngram=4  --drafter draft:runs/draft/final,tokens=6")
