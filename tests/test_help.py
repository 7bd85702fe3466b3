"""Help of the commands: one screen with an example, the whole by --help-all, and examples that the commands take."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from decoding.drafters.registry import parse_drafter
from trainer.cli import app
from trainer.commands.help import SCREEN, examples, first_clause, metavar, short_line
from trainer.recipe.reading import load_recipe

ROOT = Path(__file__).resolve().parents[1]


def leaves(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, *path, name)
        else:
            yield (*path, name), command


COMMANDS = dict(leaves(get_command(app)))
NAMES = [" ".join(path) for path in COMMANDS]
assert len(COMMANDS) >= 17


def page(*words: str, **environment: str) -> str:
    """Return what is printed at 80 columns without a terminal."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "80", **environment}, prog_name="headstart")
    assert result.exit_code == 0, result.output
    return result.output


def command_of(name: str) -> Any:
    return COMMANDS[tuple(name.split())]


def options_of(command: Any) -> list[Any]:
    return [option for option in command.params if not option.hidden]


# --- one screen -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["", "data", *NAMES])
def test_help_is_one_screen_of_plain_text(name: str) -> None:
    lines = page(*name.split(), "--help").splitlines()
    assert 8 <= len(lines) <= SCREEN
    assert max(map(len, lines)) <= 80
    assert not any(set(line) & set("│╭╮╰╯─\x1b") or line != line.rstrip() for line in lines)


@pytest.mark.parametrize("name", NAMES)
def test_one_screen_has_the_required_options_an_example_and_every_name(name: str) -> None:
    command, text = command_of(name), page(*name.split(), "--help")
    usage = text.partition("\n\n")[0]
    for option in options_of(command):
        shown = metavar(option) if option.param_type_name == "argument" else option.opts[0].replace("--", "")
        assert shown in text
        if option.required:
            assert shown in usage and re.search(rf"^  (--)?{re.escape(shown)}", text, re.MULTILINE)
    found = examples(command.epilog)
    assert found, "give the command epilog='Example: headstart ...'"
    flat = " ".join(text.replace("\\\n", " ").split())
    assert all(example in flat for example in found)


@pytest.mark.parametrize("name", NAMES)
def test_a_line_of_one_screen_explains_each_common_option(name: str) -> None:
    text = page(*name.split(), "--help")
    for option in options_of(command_of(name)):
        if option.rich_help_panel is None or option.required:
            assert f"  {short_line(option)}\n" in text, f"{option.name}: shorten its help's first clause, or its name"


def test_the_list_of_commands_has_a_line_for_each_by_purpose() -> None:
    text = page("--help")
    headings = re.findall(r"^(\S.*):$", text, re.MULTILINE)
    assert headings == ["Train", "Run and watch", "Measure", "Ship", "Look", "Options"]
    for name, command in zip(NAMES, COMMANDS.values(), strict=True):
        clause = first_clause(command.help)
        assert re.search(rf"^  {name} +{re.escape(clause)}$", text, re.MULTILINE), f"{name}: {clause!r} is too long"


def test_without_a_command_the_list_is_printed_and_the_exit_code_is_that_of_bad_input() -> None:
    result = CliRunner().invoke(app, [], env={"COLUMNS": "80"}, prog_name="headstart")
    assert (result.exit_code, result.output) == (2, page("--help"))


def test_a_command_typed_wrong_is_one_sentence() -> None:
    result = CliRunner().invoke(app, ["evalute"], prog_name="headstart")
    sentence = "error: No such command 'evalute'. Did you mean 'evaluate'?: see 'headstart --help'\n"
    assert (result.exit_code, result.output) == (2, sentence)


# --- the whole --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_help_has_every_option_with_all_its_words(name: str) -> None:
    command, flat = command_of(name), " ".join(page(*name.split(), "--help-all").split())
    assert all(" ".join(option.help.split()) in flat for option in options_of(command))
    assert all(f"{option.rich_help_panel}:" in flat for option in options_of(command) if option.rich_help_panel)


def test_the_whole_help_names_bounds_defaults_and_lists() -> None:
    text = page("evaluate", "--help-all")
    assert "--limit N  (default 20; at least 1)\n" in text and "--drafter NAME[:PATH]  (may be repeated)\n" in text
    assert "--target MODEL  (required)\n" in text
    assert "--[no-]chat  (default --chat)\n" in page("generate", "--help-all")
    assert "--zero-stage N  (default 0; from 0 to 3)\n" in page("plan-training", "--help-all")


def test_options_of_one_name_have_one_kind_of_value_in_every_command() -> None:
    """``--output`` is one file for answers, else a folder; ``--heldout`` shows rows, or names a file."""
    values: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        for option in options_of(command):
            if option.param_type_name == "option":
                values.setdefault(option.opts[0], set()).add(metavar(option))
    several = {name: kinds for name, kinds in values.items() if len(kinds) > 1}
    lists = {"--batch-size": {"N", "N,..."}, "--temperature": {"X", "X,..."}}
    assert several == {**lists, "--output": {"FILE", "FOLDER"}, "--heldout": {"FILE", ""}}


def test_colours_are_for_terminals_without_no_color(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    colour = "\x1b[36m"
    assert colour not in page("train", "--help")
    forced = CliRunner().invoke(app, ["train", "--help"], env={"FORCE_COLOR": "1"}, color=True).output
    assert colour in forced
    plain = CliRunner().invoke(app, ["train", "--help"], env={"FORCE_COLOR": "1", "NO_COLOR": "1"}, color=True).output
    assert colour not in plain


# --- examples ---------------------------------------------------------------------------------------------------------

EXAMPLES = [(name, example) for name in NAMES for example in examples(command_of(name).epilog)]


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_an_example_is_one_that_the_command_takes(
    name: str, example: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its options exist, their values parse, its recipe is in the repository and takes its overrides."""
    program, *words = shlex.split(example)
    assert program == "headstart" and words[: len(name.split())] == name.split()
    arguments = words[len(name.split()) :]
    context = command_of(name).make_context(name, list(arguments))
    given = context.params
    drafters = given.get("drafter") or []
    for text in [drafters] if isinstance(drafters, str) else drafters:
        parse_drafter(text)
    if recipe := given.get("recipe"):
        load_recipe(str(ROOT / recipe), list(given["overrides"] or ()))


def test_the_examples_are_those_of_every_command() -> None:
    assert {name for name, _ in EXAMPLES} == set(NAMES) and len(EXAMPLES) >= 20
