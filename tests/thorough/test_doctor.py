"""`headstart doctor`: the machine, the packages, the next commands, the printed text and the JSON."""

import json
import shlex
from pathlib import Path

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from decoding.measure.proof.finding import Finding
from trainer.cli import app
from trainer.commands.doctor import OF_ANY, next_commands
from trainer.doctor import machine as machines
from trainer.doctor.machine import (
    check_disk,
    check_no_gpu,
    check_threads,
    free_bytes,
    machine_findings,
    package_findings,
)
from trainer.recipe.reading import load_recipe

ROOT = Path(__file__).resolve().parents[2]
CLI = CliRunner()


# --- the machine ------------------------------------------------------------------------------------------------------


def test_this_machine_can_be_read_and_keys_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "get_token", lambda: "hf_secretsecretsecret")
    findings = machine_findings({"HF_TOKEN": "hf_secretsecretsecret", "OPENAI_API_KEY": "sk-secretsecretsecret"})
    assert {"processor", "threads", "memory", "disk", "Hub"} <= {finding.check for finding in findings}
    assert "secret" not in repr(findings)
    assert "token set; HF_TOKEN set, OPENAI_API_KEY set, WANDB_API_KEY not set" in findings[-1].found


@pytest.mark.parametrize(
    ("finding", "status", "remedy"),
    [
        (check_threads(8, 8, False), "ok", ""),
        (check_threads(16, 8, False), "note", "OMP_NUM_THREADS=8"),
        (check_threads(1, 8, False), "note", "OMP_NUM_THREADS=8"),
        (check_threads(1, 8, True), "ok", ""),  # one thread is enough with a GPU
        (check_no_gpu(False, None), "ok", ""),
        (check_no_gpu(True, None), "note", "built for CUDA"),
        (check_no_gpu(True, "13.0"), "note", "CUDA 13.0"),
        (check_disk("HF_HOME", Path("/c"), int(1e9)), "note", "set HF_HOME"),
        (check_disk("HF_HOME", Path("/c"), int(1e12)), "ok", ""),
    ],
)
def test_each_fault_of_a_machine_is_noted_with_its_remedy(finding: Finding, status: str, remedy: str) -> None:
    assert finding.status == status and remedy in finding.remedy and bool(finding.remedy) == (status != "ok")


def test_a_container_that_allows_less_memory_than_the_system_has_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if free_bytes() is None:
        pytest.skip("this system has no /proc/meminfo")
    monkeypatch.setattr(machines.torch.cuda, "is_available", lambda: False)
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    monkeypatch.setattr(machines, "_CGROUP", tmp_path)
    assert free_bytes() == 500000


# --- packages ---------------------------------------------------------------------------------------------------------

LINES = ("torch>=2.11", "numpy>=2", 'openai>=3; extra == "endpoint"', 'old>=1; python_version < "3"')
HERE = {"torch": "2.13.0+cpu", "numpy": "2.4.6", "openai": "3.1"}


@pytest.mark.parametrize(
    ("change", "faults", "remedy"),
    [
        ({}, [], ""),
        ({"torch": "2.10.1"}, ["torch"], "pip install 'torch>=2.11'"),
        ({"numpy": None}, ["numpy"], "pip install 'numpy>=2'"),
        ({"openai": "2.9"}, ["openai"], "pip install 'openai>=3'"),
        ({"openai": None}, [], ""),  # an extra is not needed
    ],
)
def test_each_fault_of_the_packages_is_found_by_name_with_its_remedy(
    change: dict[str, str | None], faults: list[str], remedy: str
) -> None:
    findings = package_findings(LINES, {**HERE, **change}.get)
    assert [finding.check for finding in findings if not finding.passed] == faults
    assert all(finding.remedy == remedy for finding in findings if not finding.passed)
    assert ("endpoint" in findings[-1].found) == ("openai" in change and change["openai"] is None)


# --- what to run next -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "drafters", "fits", "recipes", "names"),
    [
        (None, (), True, OF_ANY, ["train", "doctor"]),
        ("my models/target", (), True, OF_ANY, ["evaluate", "regenerate", "train", "train"]),
        ("recurrent/chains", (), True, ("medusa1", "dspark"), ["evaluate", "regenerate", "train", "train"]),
        ("recurrent/plain", (), True, (), ["generate"]),
        ("ORG/NAME", ("heads:a/b", "draft:c/d,tokens=4", "lookup"), True, OF_ANY, ["evaluate", "plan"]),
        ("ORG/NAME", ("heads:a/b",), False, OF_ANY, ["doctor"]),
    ],
)
def test_every_command_to_run_next_is_one_that_the_program_takes(
    target: str | None,
    drafters: tuple[str, ...],
    fits: bool,
    recipes: tuple[str, ...],
    names: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(ROOT)
    commands = [shlex.split(command) for command in next_commands(target, drafters, fits, recipes)]
    assert [words[1] for words in commands] == names and {words[0] for words in commands} == {"headstart"}
    for _, name, *arguments in commands:
        context = get_command(app).commands[name].make_context(name, arguments)  # type: ignore[attr-defined]  # a group
        if name == "train":
            load_recipe(context.params["recipe"], context.params["overrides"] or ())


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> tuple[int, str]:
    result = CLI.invoke(app, ["doctor", *arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout


def test_without_models_the_screen_has_the_machine_the_packages_and_what_to_run(tmp_path: Path) -> None:
    file = tmp_path / "new" / "doctor.json"
    _, output = run("--json", str(file))
    titles = [line for line in output.splitlines() if line and not line.startswith(" ")]
    assert titles[:3] == ["machine", "packages", "next"] and "checks" in titles[3]
    content = json.loads(file.read_text())
    assert {"check", "status", "found", "remedy", "figures"} == set(content["findings"]["machine"][0])
    assert content["hardware"]["cores"] >= 1 and content["next"][0].startswith("headstart ")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--drafter", "lookup"], "can be checked only with a target"),
        (["--target", "nowhere/at/all"], "there is no folder nowhere/at/all"),
        (["--dtype", "int3"], "dtype is 'int3'"),
    ],
)
def test_bad_input_is_one_sentence_with_code_2(arguments: list[str], says: str) -> None:
    result = CLI.invoke(app, ["doctor", *arguments])
    last = result.stderr.splitlines()[-1]
    assert result.exit_code == 2 and result.stdout == "" and last.startswith("error: ") and says in last
