"""Options out of range or in lists, folders typed wrong, and prompts that do not fit."""

import json
from pathlib import Path

import pytest
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer
from typer.testing import CliRunner

from trainer.cli import app
from trainer.commands.usage import listed
from trainer.terminal.exit_codes import ExitCode

CLI = CliRunner()
EVALUATE = ["evaluate", "--target", "t", "--prompts", "p", "--output", "o"]
REGENERATE = ["regenerate", "--target", "t", "--prompts", "p", "--output", "o"]
REALIGN = ["realign", "--target", "t", "--draft", "d", "--prompts", "p", "--output", "o"]
GENERATE = ["generate", "--target", "t", "--prompt", "p"]
OUT_OF_RANGE = [
    *((EVALUATE, name, "0") for name in ("prompt-tokens", "limit", "max-new-tokens", "rounds")),
    (EVALUATE, "limit", "-1"),
    *((GENERATE, name, "0") for name in ("max-new-tokens",)),
    *((REGENERATE, name, "0") for name in ("limit", "n", "max-new-tokens", "batch-size")),
    *((REGENERATE, name, "0") for name in ("concurrency", "timeout")),
    (REGENERATE, "retries", "-1"),
    *((REALIGN, name, "0") for name in ("draft-tokens", "limit", "steps", "batch-size", "max-new-tokens")),
    (["data", "inspect", "x"], "rows", "-1"),
    *((["data", "inspect", "x"], name, "0") for name in ("max-rows", "max-length")),
    (["plan-training", "x"], "processes", "0"),
    (["plan-training", "x"], "zero-stage", "4"),
    (["plan-training", "x"], "steps", "-1"),
]


def error_of(arguments: list[str]) -> str:
    """What is printed for wrong usage: one line, with the exit code for it."""
    result = CLI.invoke(app, arguments)
    assert result.exit_code == ExitCode.BAD_INPUT and isinstance(result.exception, SystemExit)
    (line,) = result.output.splitlines()
    assert line.startswith("error: ")
    return line.removeprefix("error: ")


@pytest.mark.parametrize(("command", "name", "value"), OUT_OF_RANGE)
def test_a_number_out_of_range_is_refused_in_one_sentence(command: list[str], name: str, value: str) -> None:
    least = {"rows": "0", "retries": "0", "timeout": "0.001", "temperature": "0", "max-length": "8"}
    least |= {"steps": "0" if command[0] == "plan-training" else "1"}
    wanted = "less than or equal to 3" if name == "zero-stage" else f"greater than or equal to {least.get(name, '1')}"
    assert error_of([*command, f"--{name}", value]).startswith(
        f"Invalid value for '--{name}': Input should be {wanted}: see '"
    )


def test_numbers_that_are_not_finite_or_no_numbers_are_refused() -> None:
    assert error_of([*GENERATE, "--top-p", "nan"]) == "--top-p is nan: give a finite number"
    assert error_of([*REGENERATE, "--timeout", "inf"]) == "--timeout is inf: give a finite number"
    assert "'--top-k': Input should be a valid integer" in error_of([*GENERATE, "--top-k", "many"])


def test_unknown_and_missing_options_are_one_sentence_that_points_to_the_help() -> None:
    assert error_of([*EVALUATE, "--limt", "3"]).startswith("No such option: --limt")
    assert error_of(EVALUATE[:3]).startswith("Missing option '--prompts': see '")
    assert error_of(["data", "inspect"]).startswith("Missing argument 'source': see '")
    assert error_of([*GENERATE, "--limt", "3"]).endswith("generate --help'")
    assert error_of(["generate", "--target"]).startswith("Option '--target' requires an argument: see 'headstart")
    assert error_of(["evalute"]).startswith("No such command 'evalute'. Did you mean 'evaluate'?: see '")
    assert error_of(["data"]).startswith("Missing command: see '")


def test_lists_are_taken_by_commas_repeated_or_both() -> None:
    assert listed(["greedy", "sampling, typical"]) == ("greedy", "sampling", "typical")
    assert listed(None) is None
    with pytest.raises(ValueError, match="'a' is listed twice in a,b,a: give each once"):
        listed(["a,b", "a"])


# --- evaluate ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a context of 64 tokens, a draft with one of 32, and prompts of 2, 40 and 60 bytes."""
    folder = tmp_path_factory.mktemp("models")
    for name, context in (("target", 64), ("draft", 32)):
        tiny_model(vocab=128, max_position_embeddings=context).save_pretrained(folder / name)
        byte_tokenizer().save_pretrained(folder / name)
    rows = "".join(json.dumps({"prompt": "a" * length}) + "\n" for length in (2, 40, 60))
    (folder / "prompts.jsonl").write_text(rows)
    return folder


def evaluated(models: Path, output: Path, *more: str) -> list[str]:
    words = ["evaluate", "--target", models / "target", "--prompts", models / "prompts.jsonl", "--output", output]
    return [*map(str, words), "--dtype", "fp32", "--max-new-tokens", "6", *more]


def test_prompts_that_do_not_fit_are_counted_in_the_error_that_names_the_option(models: Path, tmp_path: Path) -> None:
    said = error_of(evaluated(models, tmp_path))
    assert said.startswith(
        "1 of 3 prompts, the longest of 60 tokens, do not fit with 6 new tokens into the 64 that the target can hold: "
        "leave them out with --skip-long, or lower --max-new-tokens"
    )
    said = error_of(evaluated(models, tmp_path, "--drafter", f"draft:{models}/draft"))
    assert said.startswith("2 of 3 prompts") and "into the 32 that target and draft can hold" in said
    (models / "long.jsonl").write_text(json.dumps({"prompt": "a" * 60}) + "\n")
    arguments = [word.replace("prompts.jsonl", "long.jsonl") for word in evaluated(models, tmp_path, "--skip-long")]
    assert "1 of 1 prompts" in (said := error_of(arguments)) and "--skip-long" not in said
    both = error_of(evaluated(models, tmp_path, "--skip-long", "--cut-long"))
    assert both == "--skip-long and --cut-long are both given: leave long prompts out, or cut them"


# --- names ------------------------------------------------------------------------------------------------------------


def test_a_folder_typed_wrong_is_told_from_a_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # read when it was imported
    for name in ("runs/final", "runs/other", "storyteller"):
        (tmp_path / name).mkdir(parents=True)

    def said(name: str, *more: str) -> str:
        return error_of(["generate", "--target", name, "--prompt", "a", *more])

    both = "and loading it from the Hub failed: "
    assert f"'runs/fnal': there is no such folder (runs/ holds final, other), {both}" in said("runs/fnal")
    assert f"'storyteler': there is no such folder (is it storyteller?), {both}" in said("storyteler")
    assert f"'org/name': there is no such folder, {both}" in said("org/name")
    assert said("./runs/fnal").startswith("there is no folder ./runs/fnal (runs/ holds final, other): give a folder")


def test_a_folder_of_heads_typed_wrong_says_what_stands_beside_it(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    (tmp_path / "runs" / "final").mkdir(parents=True)
    said = error_of(["generate", "--target", str(models / "target"), "--drafter", "heads:runs/fnal", "--prompt", "a"])
    assert "'runs/fnal': there is no such folder (runs/ holds final), and loading it from the Hub failed: " in said
