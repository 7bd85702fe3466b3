"""`headstart data inspect`: shows rows with their trained tokens marked, and counts the whole source."""

from collections.abc import Sequence
from itertools import groupby, islice
from typing import NamedTuple

from pydantic import ValidationError
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.model.loading import eos_token_ids, load_tokenizer
from trainer.commands.options import InspectOptions
from trainer.data.batch import Example, cut
from trainer.data.chat import Encoded
from trainer.data.dataset import Dataset, load_dataset
from trainer.data.encoding import RowEncoder
from trainer.data.sources import Row, open_source
from trainer.recipe.common import DataSection
from trainer.recipe.reading import load_recipe, overridden
from trainer.terminal.console import say, standard_output, title

_BEGIN, _END = "⟦", "⟧"


class _Task(NamedTuple):
    path: str
    section: DataSection
    tokenizer: PreTrainedTokenizerBase
    ends: tuple[int, ...]


def run_inspect(options: InspectOptions, console: Console | None = None) -> Dataset:
    """Print the first rows and a table of the whole source; return the data set."""
    console = console or standard_output()
    task = _task(options)
    colour = console.is_terminal and not console.no_color
    shown = ("green", "green") if colour else f"between {_BEGIN} and {_END}"
    say(console, Text.assemble(f"{task.path}: the trained tokens are {'in ' if colour else ''}", shown))
    source = open_source(task.path, task.section)
    encoder = RowEncoder(task.section, task.tokenizer, task.ends)
    for row in islice(source.read(), min(options.rows, task.section.max_rows or options.rows)):
        _print_row(console, task, row, encoder.encode(row), colour)
    dataset = load_dataset(task.path, task.section, task.tokenizer, task.ends)
    console.print(_table(dataset))
    return dataset


def _task(options: InspectOptions) -> _Task:
    """Read the task from a recipe or from a plain source, and apply the overrides."""
    overrides = options.overrides or ()
    if options.source.endswith((".yaml", ".yml")):
        recipe = load_recipe(options.source, overrides)
        section, of_recipe = recipe.data, recipe.target
    else:
        section, of_recipe = _section_of(options.source, overrides), ""
    target = options.target or of_recipe
    if not target:
        raise UserError("the tokenizer is unknown", "name the target with --target, or name a recipe")
    if options.heldout:
        section = section.model_copy(update={"train": section.heldout, "split": section.heldout_split})
    tokenizer = load_tokenizer(target, options.trust_remote_code)
    ends = eos_token_ids(target, tokenizer, options.trust_remote_code)
    return _Task(section.train, section, tokenizer, ends)


def _section_of(source: str, overrides: Sequence[str]) -> DataSection:
    content = overridden({"data": {"train": source, "heldout": source}}, overrides)
    if others := content.keys() - {"data"}:
        raise UserError(
            f"{source} is data and not a recipe, so it has no section {min(others)}", "override only data.key=value"
        )
    try:
        return DataSection.model_validate(content["data"])
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, ("data", *first["loc"])))
        raise UserError(f"{name}: {first['msg'].removeprefix('Value error, ')} (got {first['input']!r})") from None


def _print_row(console: Console, task: _Task, row: Row, encoded: Encoded | UserError, colour: bool) -> None:
    console.print()
    if isinstance(encoded, UserError):
        say(console, Text(f"skipped: {encoded}", style="red"))
        return
    format = encoded.transcript.format
    for example in encoded.examples:
        kept = cut(example, task.section.max_length)
        length = f"{len(example.tokens)} tokens"
        if kept is None:
            heading = f"{length}, left out: no answer begins in the first {task.section.max_length} tokens"
        else:
            cut_at = f", cut to {len(kept.tokens)}" if len(kept.tokens) < len(example.tokens) else ""
            heading = f"{length}{cut_at}, {kept.trained.sum()} trained ({encoded.mask_source})"
        say(console, Text(f"{row.where}: {format}, {heading}", style="bold"))
        say(console, marked_text(kept or example, task.tokenizer, colour))
    if not encoded.examples:
        why = "too short" if format == "text" else encoded.mask_source
        say(console, Text(f"{row.where}: {format}, left out: {why}", style="bold"))


def marked_text(example: Example, tokenizer: PreTrainedTokenizerBase, colour: bool) -> Text:
    """Return a sequence as text with special tokens. Trained tokens are green; without colours they are in brackets."""
    text, end, before = Text(), 0, ""
    for trained, run in groupby(example.trained.tolist()):
        end += len(list(run))
        tokens = example.tokens[:end].tolist()
        whole = str(tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False))
        piece = whole[len(before) :]  # the text that these tokens add
        text.append(f"{_BEGIN}{piece}{_END}" if trained and not colour else piece, "green" if trained else None)
        before = whole
    return text


def _table(dataset: Dataset) -> Table:
    account = dataset.account
    table = Table(title=title(dataset.path), title_justify="left", show_header=False)
    rows = [(f"rows, {name}", f"{count:,}") for name, count in account.formats.items()]
    rows += [(f"rows, {name}", f"{count:,}") for name, count in account.fields.items()]
    rows += [
        ("rows, bad and skipped", f"{account.bad_rows:,}"),
        ("trained parts", " and ".join(account.mask_sources)),
        ("sequences", f"{len(dataset.examples):,}"),
        ("tokens", f"{account.tokens:,}"),
        ("tokens trained", f"{account.trained_tokens:,} ({account.trained_tokens / account.tokens:.0%})"),
        ("longest sequence", f"{max(len(example.tokens) for example in dataset.examples):,} tokens"),
        (f"sequences cut at {dataset.max_length:,} tokens", f"{account.truncated:,}"),
        ("sequences left out", f"{account.skipped:,}"),
        ("packed" if dataset.packed else "not packed", f"{dataset.fill:.0%} full"),
        ("sha256", dataset.sha256[:16]),
    ]
    for name, value in rows:
        table.add_row(Text(name), value)
    return table
