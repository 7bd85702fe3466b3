"""The list that `headstart drafters` prints: every drafter that ``--drafter`` takes, with its options."""

from rich.console import Console
from rich.table import Table

from decoding.drafters.registry import REGISTRY
from trainer.terminal.console import say, standard_output


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
