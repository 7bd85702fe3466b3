"""Help of the commands: a page with an example, the names of its rare options, and examples that the commands take."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from decoding.drafters.registry import parse_drafter
from decoding.measure.methods import SETTINGS
from decoding.model.architecture import STATIC_CHOICES
from decoding.model.dtypes import DTYPES
from decoding.policies import _POLICIES
from decoding.rules.verify import RULES
from trainer.cli import app
from trainer.export.adapted import ADAPTER, MERGED
from trainer.export.formats import FORMATS
from trainer.export.serve import SERVERS
from trainer.recipe.common import DataSection
from trainer.recipe.reading import load_recipe

ROOT = Path(__file__).resolve().parents[1]
LINES = 40


def leaves(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, *path, name)
        else:
            yield (*path, name), command


COMMANDS = dict(leaves(get_command(app)))
NAMES = [" ".join(path) for path in COMMANDS]
assert len(COMMANDS) >= 17


def page(*words: str) -> str:
    """Return what is printed at 80 columns."""
    result = CliRunner().invoke(app, list(words), env={"COLUMNS": "80"}, prog_name="headstart")
    assert result.exit_code == 0, result.output
    return result.output


def command_of(name: str) -> Any:
    return COMMANDS[tuple(name.split())]


def examples(name: str) -> list[str]:
    """The command lines that a help ends with, each on one line."""
    return re.findall(r"^ *(headstart .*)$", re.sub(r"\\\n *", "", command_of(name).epilog), re.MULTILINE)


def test_no_module_uses_a_private_part_of_typer() -> None:
    """Any version may change them, and no upper bound stands in pyproject.toml."""
    files = [path for folder in ("trainer", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    private = re.compile(r"typer(\.\w+)*\.(_\w+|completion\b)|from typer(\.\w+)* import .*\b_\w+")
    assert len(files) > 300
    assert [str(path) for path in files if private.search(path.read_text())] == []


@pytest.mark.parametrize("name", ["", "data", *NAMES])
def test_help_is_a_page_of_plain_text(name: str) -> None:
    lines = page(*name.split(), "--help").splitlines()
    assert 8 <= len(lines) <= LINES
    assert max(map(len, lines)) <= 80 and not set("".join(lines)) & set("│╭╮╰╯─\x1b\b")


@pytest.mark.parametrize("name", NAMES)
def test_a_help_has_an_example_and_names_every_option(name: str) -> None:
    flat = " ".join(re.sub(r"\\\n *", "", page(*name.split(), "--help")).split())
    assert examples(name), "give the command an example"
    for example in examples(name):
        assert example in flat
    for option in command_of(name).params:
        assert option.opts[0] in flat and option.help
        assert not (option.hidden and option.required)


def test_the_list_of_commands_says_what_each_is_for() -> None:
    text = page("--help")
    for path, command in COMMANDS.items():
        assert path[0] == "data" or f"{command.help.partition('.')[0]}.\n" in text, (
            f"{path}: shorten the first sentence"
        )


def test_without_a_command_the_list_is_printed_and_the_exit_code_is_that_of_bad_input() -> None:
    result = CliRunner().invoke(app, [], env={"COLUMNS": "80"}, prog_name="headstart")
    assert (result.exit_code, result.output) == (2, page("--help"))


@pytest.mark.parametrize("words", ["--help", "evaluate --help", "data inspect --help"])
def test_help_waits_neither_for_torch_nor_for_pydantic(words: str) -> None:
    program = "import sys\nfrom trainer.cli import main\ntry: main()\nexcept SystemExit: pass\n"
    slow = "{'torch', 'transformers', 'huggingface_hub', 'pydantic', 'typer.rich_utils'}"
    program += f"print(*{slow} & sys.modules.keys(), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", program, *words.split()], capture_output=True, text=True, check=True)
    assert done.stderr.split() == [] and "Usage: " in done.stdout


def test_a_shell_completes_commands_and_options() -> None:
    for line, expected in (("headstart gen", "generate"), ("headstart generate --max", "--max-new-tokens")):
        asked = {"COMP_WORDS": line, "COMP_CWORD": str(line.count(" ")), "_HEADSTART_COMPLETE": "complete_bash"}
        assert CliRunner().invoke(app, [], env=asked, prog_name="headstart").output.split() == [expected]


def test_the_help_names_the_values_that_the_code_takes() -> None:
    """The code that reads them lies behind imports of seconds, so that the help repeats the names."""
    data = DataSection.model_fields
    values = {
        "generate --dtype": DTYPES,
        "doctor --dtype": DTYPES,
        "generate --static": STATIC_CHOICES,
        "generate --rule": RULES,
        "generate --policy": _POLICIES,
        "evaluate --policies": _POLICIES,
        "evaluate --settings": SETTINGS,
        "export --format": FORMATS,
        "export --type": FORMATS["gguf"].types,
        "export --adapters": (MERGED, ADAPTER),
        "serve-command --server": SERVERS,
        "data inspect --format": data["format"].annotation.__args__,  # type: ignore[union-attr]  # a Literal
    }
    for place, names in values.items():
        command, _, name = place.partition(" --")
        (text,) = [option.help for option in command_of(command).params if option.opts[0] == f"--{name}"]
        assert set(names) <= set(re.findall(r"[\w.-]*\w", text)), place


def test_options_of_one_name_have_one_kind_of_value_in_every_command() -> None:
    """``--output`` is one file for answers, else a folder; ``--heldout`` shows rows, or names a file."""
    values: dict[str, set[str]] = {}
    for command in COMMANDS.values():
        for option in command.params:
            if option.param_type_name == "option":
                values.setdefault(option.opts[0], set()).add(option.metavar or "")
    several = {name: kinds for name, kinds in values.items() if len(kinds) > 1}
    lists = {"--batch-size": {"", "N,..."}, "--temperature": {"", "X,..."}}
    assert several == {**lists, "--output": {"FILE", "FOLDER"}, "--heldout": {"FILE", ""}}


EXAMPLES = [(name, example) for name in NAMES for example in examples(name)]


@pytest.mark.parametrize(("name", "example"), EXAMPLES)
def test_an_example_is_one_that_the_command_takes(name: str, example: str) -> None:
    """Its options exist, their values parse, its recipe is in the repository and takes its overrides."""
    program, *words = shlex.split(example)
    assert program == "headstart" and words[: len(name.split())] == name.split()
    arguments = words[len(name.split()) :]
    given = command_of(name).make_context(name, list(arguments)).params
    drafters = given.get("drafter") or []
    for text in [drafters] if isinstance(drafters, str) else drafters:
        parse_drafter(text)
    if recipe := given.get("recipe"):
        load_recipe(str(ROOT / recipe), list(given["overrides"] or ()))


def test_the_examples_are_those_of_every_command() -> None:
    assert {name for name, _ in EXAMPLES} == set(NAMES) and len(EXAMPLES) >= 20
