"""The command `headstart compare`: prints the paired differences between two evaluations or methods."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from decoding.measure.compare import ComparedRow, Comparison, RatioConclusion, compare, read_evaluation
from decoding.measure.figures import NONE, estimate
from decoding.measure.markdown import one_line
from trainer.commands.findings import PRINTED, write_findings
from trainer.commands.options import CompareOptions
from trainer.terminal.console import say, standard_error, standard_output, title, wide

_COLOURS = {"real": "green", "none": None, "open": "yellow", "unmeasured": "dim"}


def run_compare(options: CompareOptions, console: Console | None = None) -> Comparison:
    """Print the paired differences, write them to --json, and return them."""
    console = console or standard_output()
    a = read_evaluation(options.a)
    b = a if options.b is None else read_evaluation(options.b)
    comparison = compare(a, b, options.method, options.other)
    if options.json is not None:
        write_findings(options.json, comparison)
    if options.json == PRINTED:
        return comparison
    for warning in comparison.warnings:
        say(standard_error(), Text.assemble(("warning:", "bold yellow"), f" {warning}"))
    table = Table(title=title(one_line(f"B ({comparison.b}) over A ({comparison.a}), paired by prompt, 95% intervals")))
    for column in (
        "setting",
        comparison.load,
        "context",
        "method",
        "pairs",
        "tokens per target pass, ratio",
        "",
        "speed, ratio",
        "",
    ):
        table.add_column(column, overflow="fold")
    for row in comparison.rows:
        table.add_row(*_cells(row))
    wide(console).print(table)
    return comparison


def _cells(row: ComparedRow) -> list[Text | str]:
    names = row.method if row.method == row.other else f"A: {row.method}\nB: {row.other}"
    context = NONE if row.context is None else str(row.context)
    cells: list[Text | str] = [row.setting, str(row.batch_size), context, names, str(row.pairs)]
    for figure, judged in ((row.tokens_per_pass, row.tokens_per_pass_conclusion), (row.speed, row.speed_conclusion)):
        judged = judged or RatioConclusion("unmeasured", "not compared")
        cells += [estimate(figure, "×"), Text(judged.text, style=_COLOURS[judged.kind] or "")]
    return cells
