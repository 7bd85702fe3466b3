"""What a user wrote is printed as it is, brackets and all; other libraries say nothing of their own."""

import io
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState
from rich.console import Console
from rich.table import Table
from tiny_training import recipe_content, write_corpus, write_target

from trainer.recipe.reading import parse_recipe
from trainer.run.train import run_recipe
from trainer.terminal.console import say_error, standard_output

BRACKETS = "a[/x] :smile: [red]b"


def test_a_console_prints_brackets_and_colons_as_they_are() -> None:
    heard = io.StringIO()
    console = standard_output(file=heard, width=200, force_terminal=True, no_color=True)
    table = Table(BRACKETS, title=BRACKETS)
    table.add_row(BRACKETS)
    console.print(BRACKETS)
    console.print(table)
    assert heard.getvalue().count(BRACKETS) == 4


def test_an_error_keeps_the_brackets_of_what_it_names_behind_a_red_word() -> None:
    heard = io.StringIO()
    say_error(Console(file=heard, width=20, force_terminal=True, color_system="standard"), f"{BRACKETS} is wrong")
    assert heard.getvalue() == f"\x1b[1;31merror:\x1b[0m {BRACKETS} is wrong\n"


@pytest.mark.parametrize("terminal", [False, True])
def test_a_recipe_with_brackets_in_its_name_trains_to_its_end(tmp_path: Path, terminal: bool) -> None:
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    heard, content = io.StringIO(), {**recipe_content(tmp_path, "medusa", steps=2), "name": BRACKETS}
    AcceleratorState._reset_state(True)
    try:
        final = run_recipe(parse_recipe(content), Console(file=heard, width=300, force_terminal=terminal))
    finally:
        AcceleratorState._reset_state(True)
    assert final.is_dir() and heard.getvalue().count(f"{BRACKETS}") >= 2
