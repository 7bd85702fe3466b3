"""The command `headstart doctor`: its screen, its exit codes, its JSON."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from doctor_models import save, save_heads
from rich.console import Console
from typer.testing import CliRunner

from trainer.cli import app
from trainer.commands import doctor as command
from trainer.doctor import models
from trainer.doctor.advice import Advice
from trainer.doctor.dtypes import Measured
from trainer.doctor.finding import Finding, Section
from trainer.terminal.console import standard_output

CLI = CliRunner()


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("doctor") / "target")


@pytest.fixture(autouse=True)
def taken_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Timings of another machine, on which bf16 pays."""
    rows = {"bf16": {1: 1e-3, 4: 1e-3, 8: 1e-3}, "fp16": {1: 1.0, 4: 2.0, 8: 4.0}, "fp32": {1: 2e-3, 4: 3e-3, 8: 4e-3}}
    monkeypatch.setattr(command, "measure", lambda: Measured(rows, dict.fromkeys(rows, 10**6), 1e10))
    monkeypatch.setattr(command, "read_wanted", lambda: None)


def run(*arguments: str) -> tuple[int, str]:
    result = CLI.invoke(app, ["doctor", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def test_without_models_the_screen_has_the_machine_the_dtypes_the_packages_and_what_to_run() -> None:
    code, output = run()
    assert code == 0
    assert [line for line in output.splitlines() if line and not line.startswith(" ")][:4] == [
        "machine",
        "dtypes, measured here",
        "packages",
        "next",
    ]
    assert "fastest in bf16" in output and "headstart doctor --target quickstart" in output


def test_without_a_target_transformers_is_not_imported() -> None:
    """It takes longer to import than all the checks of the machine."""
    code = "import sys, trainer.commands.doctor; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_fitting_set_decodes_and_leaves_with_code_0(target: Path, tmp_path: Path) -> None:
    heads, draft = save_heads(tmp_path / "heads", target), save(tmp_path / "draft", seed=1)
    code, output = run("--target", str(target), "--drafter", f"heads:{heads}", "--drafter", f"draft:{draft}")
    assert code == 0
    assert "ok: decoding: 16 tokens decoded in fp32" in output
    assert output.count("greedy text equal to plain decoding's") == 2
    assert f"headstart export {heads}" in output and "problem:" not in output


def test_a_misfit_leaves_with_code_1_and_is_named_in_the_last_line(target: Path, tmp_path: Path) -> None:
    code, output = run("--target", str(target), "--drafter", f"heads:{save_heads(tmp_path / 'heads', target, 24)}")
    assert code == 1
    assert output.splitlines()[-1].startswith("1 problem (sizes), ")
    assert "decoding" not in output  # nothing is loaded that cannot fit
    assert "after the problems above are solved" in output and "headstart train recipes/any/medusa1.yaml" in output


def test_nothing_is_loaded_where_the_user_says_so(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*given: Any) -> Any:
        raise AssertionError("models were loaded")

    monkeypatch.setattr(models, "prove", load)
    assert run("--target", str(target), "--no-decode")[0] == 0
    monkeypatch.setattr(models, "SMALL", 1)
    assert run("--target", str(target))[0] == 0  # larger than what is loaded unasked


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--drafter", "lookup"], "--drafter is lookup, which is checked against a target"),
        (["--target", "nowhere/at/all"], "there is no folder nowhere/at/all"),
        (["--target", "TARGET", "--drafter", "heads:nowhere/at/all"], "there is no folder nowhere/at/all"),
        (["--target", "TARGET", "--drafter", "tails:x"], "no drafter is called 'tails'"),
        (["--target", "TARGET", "--drafter", "lookup", "--drafter", "lookup"], "given twice"),
        (["--dtype", "int3"], "dtype is 'int3'"),
    ],
)
def test_bad_input_is_one_sentence_with_code_2(target: Path, arguments: list[str], says: str) -> None:
    result = CLI.invoke(app, ["doctor", *(str(target) if word == "TARGET" else word for word in arguments)])
    assert result.exit_code == 2 and result.stdout == ""
    assert says in result.stderr.splitlines()[-1] and result.stderr.splitlines()[-1].startswith("error: ")


def test_all_findings_are_json_without_local_paths(target: Path, tmp_path: Path) -> None:
    code, output = run("--target", str(target), "--drafter", "lookup", "--json", "-")
    content = json.loads(output)
    assert code == 0 and content["problems"] == 0
    assert [section["title"].split()[0] for section in content["sections"]] == [
        "machine", "dtypes,", "packages", "target", "drafter",
    ]  # fmt: skip
    assert {"check", "status", "found", "remedy", "figures"} == set(content["sections"][0]["findings"][0])
    assert content["hardware"]["cores"] >= 1 and content["next"][0]["command"].startswith("headstart ")
    assert str(target.parent) not in output
    run("--json", str(tmp_path / "new" / "doctor.json"))
    assert json.loads((tmp_path / "new" / "doctor.json").read_text())["sections"]


def test_the_embedded_target_is_not_trained_by_a_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    code, output = run("--target", "quickstart", "--drafter", "heads:runs/quickstart/medusa1/final")
    assert code == 0 and "not built yet" in output
    assert "headstart train recipes/quickstart/medusa1.yaml, which builds it first" in output
    assert not (tmp_path / "cache").exists()


def test_a_terminal_wraps_each_finding_beside_its_name_and_a_pipe_gets_whole_lines() -> None:
    fault = Finding("sizes", "problem", "word " * 40 + "end", "give others")
    sections = [Section("drafter heads:x", (fault,))]

    def shown(**options: Any) -> str:
        console = Console(width=60, markup=False, highlight=False, **options)
        with console.capture() as captured:
            command.show(sections, [], console)
        return captured.get()

    piped, terminal = shown(force_terminal=False), shown(force_terminal=True, no_color=True)
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal).splitlines()
    assert f"  problem: sizes: {'word ' * 40}end; give others" in piped.splitlines()
    assert len(lines) > 4 and all(len(line) <= 60 for line in lines) and any("→ give others" in line for line in lines)
    assert "\x1b[3" not in terminal  # no colour


@pytest.mark.parametrize("is_terminal", [False, True])
def test_names_that_others_wrote_send_no_escape_sequence_to_the_terminal(is_terminal: bool) -> None:
    evil = "x\x1b[31m\x9b1A"
    sections = [Section(f"target {evil}", (Finding("origin", "note", f"trained on {evil}", f"give {evil}"),))]
    console = standard_output(width=190, force_terminal=is_terminal, color_system=None)
    with console.capture() as captured:
        command.show(sections, [Advice(f"write {evil}", f"headstart export {evil}")], console)
    assert captured.get().count("x[31m1A") == 5
    assert not set("\x1b\x9b") & set(captured.get())
