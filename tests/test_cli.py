"""The command line: help pages, options and their values, and usage errors in one line."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer
from typer import BadParameter
from typer.main import get_command
from typer.testing import CliRunner

from decoding.drafters.registry import parse_drafter
from decoding.dtypes import DTYPES
from decoding.errors import UserError
from decoding.measure.methods import SETTINGS
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.rules.verify import RULES
from trainer.cli import app
from trainer.commands.shared_options import names, numbers, whole_numbers
from trainer.commands.usage import guarded
from trainer.export.task import FORMATS
from trainer.recipe.reading import load_recipe
from trainer.terminal.exit_codes import ExitCode

CLI = CliRunner()
ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny target, a draft, heads, and two prompts."""
    folder = tmp_path_factory.mktemp("models")
    for name, seed in (("target", 0), ("draft", 1)):
        tiny_model(vocab=128, seed=seed, max_position_embeddings=256).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    MedusaHeads.for_target(tiny_model(vocab=128), MedusaConfig(16, 128)).save_pretrained(folder / "heads")
    (folder / "prompts.jsonl").write_text('{"prompt": "def f(x):"}\n{"prompt": "import "}\n')
    return folder


def run(*arguments: str) -> tuple[int, str]:
    result = CLI.invoke(app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, " ".join(result.output.split())


def leaves(group: Any, *path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from leaves(command, *path, name)
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(leaves(get_command(app)))
assert len(COMMANDS) >= 15


def page(*words: str) -> str:
    """Return what is printed at 80 columns."""
    result = CLI.invoke(app, list(words), env={"COLUMNS": "80"}, prog_name="headstart")
    assert result.exit_code == 0, result.output
    return result.output


def examples(name: str) -> list[str]:
    """Return the command lines at the end of a help text, each on one line."""
    return re.findall(r"^ *(headstart .*)$", re.sub(r"\\\n *", "", COMMANDS[name].epilog), re.MULTILINE)


# --- help -------------------------------------------------------------------------------------------------------------


def test_no_module_uses_a_private_part_of_typer() -> None:
    """Any version may change private parts, and pyproject.toml sets no upper bound."""
    files = [path for folder in ("trainer", "scripts", "tests") for path in (ROOT / folder).rglob("*.py")]
    private = re.compile(r"typer(\.\w+)*\.(_\w+|completion\b)|from typer(\.\w+)* import .*\b_\w+")
    assert len(files) > 200
    assert [str(path) for path in files if private.search(path.read_text())] == []


@pytest.mark.parametrize("name", ["", "data", *COMMANDS])
def test_help_is_a_page_of_plain_text(name: str) -> None:
    lines = page(*name.split(), "--help").splitlines()
    assert 8 <= len(lines) <= 40
    assert max(map(len, lines)) <= 80 and not set("".join(lines)) & set("│╭╮╰╯─\x1b\b")


@pytest.mark.parametrize("name", COMMANDS)
def test_a_help_has_examples_that_the_command_takes_and_names_every_option(name: str) -> None:
    flat = " ".join(re.sub(r"\\\n *", "", page(*name.split(), "--help")).split())
    for option in COMMANDS[name].params:
        assert option.opts[0] in flat and option.help
        assert not (option.hidden and option.required)
    assert examples(name)
    for example in examples(name):
        assert example in flat
        program, *words = shlex.split(example)
        assert program == "headstart" and words[: len(name.split())] == name.split()
        given = COMMANDS[name].make_context(name, words[len(name.split()) :]).params
        drafters = given.get("drafter") or []
        for text in [drafters] if isinstance(drafters, str) else drafters:
            parse_drafter(text)
        if recipe := given.get("recipe"):
            load_recipe(str(ROOT / recipe), list(given["overrides"] or ()))


def test_the_list_of_commands_says_what_each_is_for() -> None:
    text = page("--help")
    for name, command in COMMANDS.items():
        assert name.startswith("data ") or f"{command.help.partition('.')[0]}.\n" in text, "shorten the first sentence"
    result = CLI.invoke(app, [], env={"COLUMNS": "80"}, prog_name="headstart")
    assert (result.exit_code, result.output) == (ExitCode.BAD_INPUT, text), "printed too if no command is given"


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
        assert CLI.invoke(app, [], env=asked, prog_name="headstart").output.split() == [expected]


def test_the_help_names_the_values_that_the_code_takes() -> None:
    """The code that reads these values takes seconds to import, so the help repeats the names."""
    values = {
        "generate --dtype": DTYPES,
        "doctor --dtype": DTYPES,
        "generate --rule": RULES,
        "evaluate --settings": SETTINGS,
        "export --format": FORMATS,
    }
    for place, known in values.items():
        command, _, name = place.partition(" --")
        (text,) = [option.help for option in COMMANDS[command].params if option.opts[0] == f"--{name}"]
        assert set(known) <= set(re.findall(r"[\w.-]*\w", text)), place


# --- usage ------------------------------------------------------------------------------------------------------------

GENERATE = ["generate", "--target", "t", "--prompt", "p"]
EVALUATE = ["evaluate", "--target", "t", "--prompts", "p", "--output", "o"]
WRONG = {
    "below its range": ([*EVALUATE, "--limit", "0"], "Invalid value for '--limit': Input should be greater than or"),
    "no number": ([*GENERATE, "--seed", "many"], "'--seed': Input should be a valid integer"),
    "given twice": ([*GENERATE, "--seed", "1", "--seed=2"], "--seed is given twice: pass it once"),
    "unknown": ([*EVALUATE, "--limt", "3"], "No such option: --limt"),
    "missing": (EVALUATE[:3], "Missing option '--prompts': see 'headstart evaluate --help'"),
    "a command misspelt": (["evalute"], "No such command 'evalute'. Did you mean 'evaluate'?: see 'headstart --help'"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_usage_is_one_sentence(case: str) -> None:
    words, sentence = WRONG[case]
    result = CLI.invoke(app, words, prog_name="headstart")
    assert result.exit_code == ExitCode.BAD_INPUT
    (line,) = result.output.splitlines()
    assert line.startswith("error: ") and sentence in line


def test_lists_are_values_with_commas_between_them_each_once() -> None:
    assert names("greedy, sampling") == ("greedy", "sampling")
    assert whole_numbers("1,8") == (1, 8) and numbers("0.5,1") == (0.5, 1.0) and numbers((1.0,)) == (1.0,)
    assert whole_numbers("8,08") == (8,)
    for read, text in ((whole_numbers, "1,0"), (numbers, "warm"), (numbers, "inf")):
        with pytest.raises(BadParameter, match=text):
            read(text)


def test_a_folder_typed_wrong_names_those_that_are_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # it was read on import
    (tmp_path / "runs" / "final").mkdir(parents=True)
    for name, hint in (("runs/fnal", " (is it runs/final?)"), ("o/n", "")):
        _, said = run("generate", "--target", name, "--prompt", "a")
        assert f"'{name}' cannot be loaded: there is no such folder{hint}, and loading it from the Hub failed: " in said


# --- errors -----------------------------------------------------------------------------------------------------------

ERRORS = {
    "a target that is not there": (
        ["generate", "--target", "./nowhere", "--prompt", "a"],
        "there is no folder ./nowhere",
    ),
    "a prompt longer than the context": (
        ["generate", "--target", "TARGET", "--prompt", "a" * 300],
        "a prompt of 300 tokens and 128 new tokens exceed the target's context of 256",
    ),
    "a negative temperature": (
        ["generate", "--target", "TARGET", "--prompt", "a", "--temperature", "-1"],
        "temperature is -1.0: use 0 for greedy decoding, or a positive number",
    ),
    "an unknown drafter": (
        ["generate", "--target", "TARGET", "--drafter", "lokup", "--prompt", "a"],
        "no drafter is called 'lokup': choose one of heads, draft, draft-tree, dspark, eagle3, eagle3-tree, lookup",
    ),
    "a plan besides a drafter": (
        ["generate", "--target", "TARGET", "--drafter", "lookup", "--plan", "p.json", "--prompt", "a"],
        "both --plan and --drafter are set: omit one",
    ),
    "a recipe that is not there": (["train", "nowhere.yaml"], "recipe nowhere.yaml does not exist"),
    "an export of nothing": (["export", "nowhere", "out", "--format", "heads"], "nowhere"),
    "a push of nothing": (["push", "nowhere", "org/name"], "nowhere"),
}


@pytest.mark.parametrize("case", ERRORS)
def test_bad_input_is_one_line_and_exit_code_two(models: Path, case: str) -> None:
    arguments, complaint = ERRORS[case]
    places = {"TARGET": str(models / "target"), "PROMPTS": str(models / "prompts.jsonl")}
    result = CLI.invoke(app, [places.get(word, word) for word in arguments])
    assert result.exit_code == ExitCode.BAD_INPUT
    assert complaint in " ".join(result.output.split())
    assert len(result.output.strip().splitlines()) == 1 and "Traceback" not in result.output


def test_debug_shows_the_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_DEBUG", "0")
    result = CLI.invoke(app, ["--debug", "generate", "--target", "./nowhere", "--prompt", "a"])
    assert result.exit_code == ExitCode.BAD_INPUT and "Traceback" in result.output


def test_no_secret_and_no_control_character_of_a_file_reaches_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    def work() -> None:
        raise UserError("no https://u:hf_0123456789abcdefABCD@host/x?token=swordfish in \x1b[31m\u202ex")

    assert guarded(work) == 2
    assert capsys.readouterr().err == "error: no https://(withheld)@host/x?token=(withheld) in [31mx\n"
