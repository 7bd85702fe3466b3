"""`headstart doctor` without models: the machine, the dtype that pays, the packages, and what to run next."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import typer
from packaging.requirements import Requirement
from typer.main import get_command

from decoding.drafters.registry import parse_drafter
from trainer.cli import app
from trainer.doctor import machine as machines
from trainer.doctor.advice import Case, next_steps
from trainer.doctor.dtypes import ROWS, Measured, best, dtype_findings, measure, medians
from trainer.doctor.finding import Finding, problem
from trainer.doctor.machine import Disk, Gpu, Machine, free_bytes, machine_findings, read_machine, size
from trainer.doctor.packages import FOR_DEVELOPERS, PURPOSES, package_findings, wanted_of
from trainer.doctor.refusals import refused
from trainer.export.task import FORMATS
from trainer.recipe.reading import load_recipe

ROOT = Path(__file__).resolve().parents[1]
IDLE = Machine(
    processor="Fast 9000",
    cores=8,
    threads=8,
    memory_free=int(20e9),
    memory_total=int(32e9),
    load=0.2,
    disks=(Disk("models of the Hub", "/cache", int(100e9)),),
)


def found(findings: list[Finding], check: str) -> Finding:
    (only,) = [finding for finding in findings if finding.check == check]
    return only


# --- findings ---------------------------------------------------------------------------------------------------------


def test_a_finding_has_a_remedy_exactly_if_something_is_wrong() -> None:
    with pytest.raises(AssertionError):
        problem("sizes", "they differ", "")
    with pytest.raises(AssertionError):
        Finding("sizes", "ok", "they are equal", "do nothing")


def test_an_error_is_split_into_what_was_found_and_what_to_do() -> None:
    error = ValueError("these heads read 64: or so but the target has 320: give heads that were trained on this target")
    finding = refused("sizes", error, "another remedy")
    assert finding.found == "these heads read 64: or so but the target has 320"
    assert finding.remedy == "give heads that were trained on this target"


def test_an_error_without_a_remedy_keeps_its_words_and_takes_the_one_of_the_check() -> None:
    finding = refused("files", ValueError("it is broken: badly"), "copy it again")
    assert (finding.found, finding.remedy) == ("it is broken: badly", "copy it again")


# --- the machine ------------------------------------------------------------------------------------------------------


def test_an_idle_machine_has_nothing_to_note() -> None:
    findings = machine_findings(IDLE, {})
    assert [finding.status for finding in findings] == ["ok"] * len(findings)
    assert "Fast 9000, 8 cores" in found(findings, "processor").found
    assert found(findings, "memory").found == "20.0 GB free of 32.0 GB"


@pytest.mark.parametrize(
    ("change", "environment", "check", "says", "remedy"),
    [
        ({"threads": 16}, {}, "threads", "16 threads on 8 cores: they wait", "OMP_NUM_THREADS=8"),
        ({"threads": 1}, {}, "threads", "1 thread on 8 cores: the others are idle", "OMP_NUM_THREADS=8"),
        ({"quota": 2.0}, {}, "threads", "8 threads on 2 cores: they wait", "OMP_NUM_THREADS=2"),
        ({}, {"OMP_WAIT_POLICY": "active"}, "threads", "OMP_WAIT_POLICY=active", "leave OMP_WAIT_POLICY out"),
        ({"load": 7.0}, {}, "load", "7.0 programs wanted one of 8 cores", "measure again when it is idle"),
        ({"memory_free": int(1e9)}, {}, "memory", "1.0 GB free of 32.0 GB", "end other programs"),
        ({"driver": "550.1"}, {}, "GPU", "built for the processor alone", "built for CUDA"),
        ({"driver": "550.1", "cuda": "13.0"}, {}, "GPU", "PyTorch sees no GPU", "CUDA 13.0"),
        ({"disks": (Disk("models of the Hub", "/c", int(1e9)),)}, {}, "disk", "1.0 GB free", "set HF_HOME"),
        ({"disks": (Disk("headstart's own cache", "/c", 0),)}, {}, "disk", "0.0 kB free", "set HEADSTART_CACHE"),
    ],
)
def test_each_fault_of_a_machine_is_noted_by_name_with_its_remedy(
    change: dict[str, object], environment: dict[str, str], check: str, says: str, remedy: str
) -> None:
    findings = machine_findings(replace(IDLE, **change), environment)  # type: ignore[arg-type]  # of one test's cases
    assert [finding.check for finding in findings if finding.status != "ok"] == [check]
    assert found(findings, check).status == "note"
    assert says in found(findings, check).found and remedy in found(findings, check).remedy


def test_gpus_are_told_with_memory_driver_and_cuda() -> None:
    gpus = (Gpu("H100", int(70e9), int(80e9)), Gpu("H100", int(60e9), int(80e9)))
    machine = replace(IDLE, gpus=gpus, cuda="13.0", driver="580.2", threads=1)
    findings = machine_findings(machine, {})
    assert found(findings, "GPU 0").found == "H100, 70.0 GB free of 80.0 GB, driver 580.2, PyTorch for CUDA 13.0"
    assert "60.0 GB free" in found(findings, "GPU 1").found
    assert found(findings, "threads").status == "ok"  # one thread feeds a GPU
    assert free_bytes(machine) == int(130e9)
    assert free_bytes(IDLE) == IDLE.memory_free


def test_keys_are_never_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "get_token", lambda: "hf_secretsecretsecret")
    findings = machine_findings(IDLE, {"HF_TOKEN": "hf_secretsecretsecret", "OPENAI_API_KEY": "sk-secretsecretsecret"})
    assert "secret" not in repr(findings)
    assert "a token is there; HF_TOKEN set, OPENAI_API_KEY set, WANDB_API_KEY not set" in found(findings, "Hub").found


def test_this_machine_can_be_read() -> None:
    machine = read_machine()
    assert machine.processor and machine.cores >= 1 and machine.threads >= 1
    assert machine.memory_free is None or machine.memory_total is None or machine.memory_free <= machine.memory_total
    assert len(machine.disks) == 2 and all(disk.free > 0 for disk in machine.disks)


def test_a_container_that_allows_less_memory_than_the_system_has_is_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = read_machine().memory_total
    if whole is None:
        pytest.skip("this system has no /proc/meminfo")
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    (tmp_path / "cpu.max").write_text("150000 100000\n")
    monkeypatch.setattr(machines, "_CGROUP", tmp_path)
    machine = read_machine()
    assert (machine.memory_total, machine.memory_free, machine.quota) == (1000000, 500000, 1.5)


def test_sizes_are_written_in_the_unit_that_reads_best() -> None:
    assert [size(count) for count in (12_340, 310e6, 24.06e9)] == ["12.3 kB", "310 MB", "24.1 GB"]


# --- dtypes -----------------------------------------------------------------------------------------------------------


def measured(**milliseconds: tuple[float, float]) -> Measured:
    """Timings in which a pass over 1 token and over 8 take these milliseconds; copying moves 10 GB/s."""
    rows = {name: {1: one / 1e3, 4: one / 1e3, 8: eight / 1e3} for name, (one, eight) in milliseconds.items()}
    return Measured(rows, {name: (100 if name == "fp32" else 50) * 10**6 for name in rows}, 10e9)


@pytest.mark.parametrize(
    ("timings", "chosen"),
    [
        ({"bf16": (3.0, 3.5), "fp16": (2.0, 17.0), "fp32": (5.0, 10.0)}, "bf16"),
        ({"bf16": (9.0, 60.0), "fp16": (2.0, 17.0), "fp32": (5.0, 10.0)}, "fp32"),
        ({"bf16": (9.0, 60.0), "fp16": (2.0, 4.0), "fp32": (5.0, 10.0)}, "fp16"),
        ({"bf16": (3.0, 4.3), "fp16": (3.0, 4.0), "fp32": (5.0, 10.0)}, "bf16"),  # a near tie
        ({"bf16": (3.0, 4.5), "fp16": (3.0, 4.0), "fp32": (5.0, 10.0)}, "fp16"),  # no near tie
        ({"bf16": (3.0, 4.2), "fp16": (9.0, 9.0), "fp32": (2.0, 4.0)}, "bf16"),  # half the memory
    ],
)
def test_the_dtype_is_chosen_by_the_pass_over_a_draft(timings: dict[str, tuple[float, float]], chosen: str) -> None:
    assert best(measured(**timings)) == chosen


def test_another_dtype_than_the_fastest_is_noted_with_its_price() -> None:
    findings = dtype_findings(measured(bf16=(3.0, 4.0), fp32=(5.0, 12.0)), asked="fp32")
    finding = found(findings, "dtype")
    assert (finding.status, finding.remedy) == ("note", "--dtype bf16")
    assert "fastest in bf16 (bf16 4 ms, fp32 12 ms" in finding.found
    assert "fp32 takes 3.0 times as long" in finding.found
    assert found(dtype_findings(measured(bf16=(3.0, 4.0), fp32=(5.0, 12.0)), "bf16"), "dtype").status == "ok"


def test_each_dtype_tells_its_times_and_its_share_of_the_bandwidth() -> None:
    finding = found(dtype_findings(measured(bf16=(10.0, 12.0)), "bf16"), "bf16")
    assert "50 MB of weights: 1 token 10 ms, 4 10 ms, 8 12 ms; one token reads" in finding.found
    assert "5 GB/s, 50% of what copying moves" in finding.found  # 50 MB in 10 ms, of 10 GB/s


def test_a_draft_that_costs_several_passes_is_noted() -> None:
    cheap, dear = (
        found(dtype_findings(measured(fp32=(5.0, eight)), "fp32"), "cost of a draft") for eight in (6.0, 20.0)
    )
    assert (cheap.status, dear.status) == ("ok", "note")
    assert "costs 1.2 times" in cheap.found and "costs 4.0 times" in dear.found
    assert "headstart plan" in dear.remedy


def test_medians_leave_out_the_rounds_that_warm_up() -> None:
    """Two warm-up rounds of 100 s, then 2, 9 and 4 s, after which the time is over."""
    durations, now = iter([100.0, 100.0, 2.0, 9.0, 4.0]), [0.0]

    def run() -> None:
        now[0] += next(durations)

    assert medians({("bf16", 8): run}, lambda: now[0]) == {("bf16", 8): 4.0}


def test_every_dtype_is_measured_here() -> None:
    taken = measure()
    assert set(taken.seconds) == {"bf16", "fp16", "fp32"} and taken.copied > 0
    assert all(set(rows) == set(ROWS) and min(rows.values()) > 0 for rows in taken.seconds.values())
    assert taken.weights["fp32"] == 2 * taken.weights["bf16"]


# --- packages ---------------------------------------------------------------------------------------------------------

LINES = ("torch>=2.11", "numpy>=2", 'openai>=3; extra == "endpoint"', 'old>=1; python_version < "3"')
EXTRAS = ("endpoint",)
HERE = {"torch": "2.13.0+cpu", "numpy": "2.4.6", "openai": "3.1"}


def test_packages_that_fit_have_nothing_to_note() -> None:
    findings = package_findings(wanted_of(LINES, EXTRAS), HERE.get)
    assert [finding.status for finding in findings] == ["ok", "ok"]
    assert found(findings, "core").found == "torch 2.13.0+cpu, numpy 2.4.6"
    assert found(findings, "extra endpoint").found == f"openai 3.1: {PURPOSES['endpoint']}"


@pytest.mark.parametrize(
    ("change", "check", "status", "says", "remedy"),
    [
        ({"torch": "2.10.1"}, "torch", "problem", "torch is 2.10.1, and headstart", "pip install 'torch>=2.11'"),
        ({"numpy": None}, "numpy", "problem", "numpy is missing", "pip install 'numpy>=2'"),
        ({"openai": None}, "extra endpoint", "note", "openai missing", "pip install 'headstart[endpoint]'"),
        ({"openai": "2.9"}, "extra endpoint", "problem", "openai is 2.9", "pip install 'headstart[endpoint]'"),
    ],
)  # fmt: skip
def test_each_fault_of_the_packages_is_found_by_name_with_its_remedy(
    change: dict[str, str | None], check: str, status: str, says: str, remedy: str
) -> None:
    findings = package_findings(wanted_of(LINES, EXTRAS), {**HERE, **change}.get)
    assert [finding.check for finding in findings if finding.status != "ok"] == [check]
    finding = found(findings, check)
    assert (finding.status, finding.remedy) == (status, remedy) and says in finding.found


def test_what_only_work_on_headstart_needs_is_not_missed() -> None:
    for name in FOR_DEVELOPERS:
        (_, extra) = package_findings(wanted_of([f'ruff>=1; extra == "{name}"'], [name]), {}.get)
        assert (extra.status, extra.figures) == ("ok", {"missing": ["ruff"]})
        assert "not needed" in extra.found


def test_a_headstart_that_is_not_installed_is_noted() -> None:
    (finding,) = package_findings(None, HERE.get)
    assert finding.status == "note" and "pip install -e ." in finding.remedy


def test_every_extra_of_the_project_has_its_purpose() -> None:
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(PURPOSES) == set(project["optional-dependencies"])


# --- what to run next -------------------------------------------------------------------------------------------------


@pytest.fixture
def at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """The repository's own folder, from which recipes are named."""
    monkeypatch.chdir(ROOT)


def check_command(command: str) -> None:
    """Parse a command as the shell and the program would; a recipe is read with its overrides."""
    program, *words = shlex.split(command)
    if program == "pip":
        assert words[0] == "install" and Requirement(words[1])
        return
    assert program == "headstart"
    name, *arguments = words
    named = get_command(app).commands[name]  # type: ignore[attr-defined]  # a group of commands
    context = named.make_context(name, arguments)
    if name == "train":
        load_recipe(context.params["recipe"], context.params["overrides"] or ())
    if name == "export":
        assert context.params["format"] in FORMATS


WEIGHTS = tuple(map(parse_drafter, ("heads:a/b", "draft:c/d,tokens=4", "parallel:e/f", "heads:g/h", "lookup")))
CASES = {
    "nothing": Case(None),
    "nothing, and an old package": Case(None, faults=("pip install 'torch>=2.11'",)),
    "a target": Case("ORG/NAME"),
    "a target in a folder with a blank": Case("my models/target"),
    "the embedded target": Case("quickstart"),
    "a lookup": Case("ORG/NAME", WEIGHTS[-1:], (None,)),
    "every kind of weights": Case("ORG/NAME", WEIGHTS, ("vllm", "draft", "headstart", None, None)),
    "weights for the embedded target": Case("quickstart", WEIGHTS[:1], ("headstart",)),
    "a target that does not fit": Case("ORG/NAME", WEIGHTS, (), target_fits=False),
    "heads that do not fit": Case("ORG/NAME", WEIGHTS[:1], (None,), drafters_fit=False),
}


@pytest.mark.parametrize("case", CASES)
def test_every_command_to_run_next_is_one_that_the_program_takes(case: str, at_home: None) -> None:
    steps = next_steps(CASES[case])
    assert steps
    for step in steps:
        assert step.reason
        check_command(step.command)


def test_a_misspelt_option_in_a_command_would_be_seen(at_home: None) -> None:
    with pytest.raises(typer.TyperException, match="--targets"):
        check_command("headstart doctor --targets ORG/NAME")
    with pytest.raises(ValueError, match="nam"):
        check_command("headstart train recipes/quickstart/medusa1.yaml nam=heads")


def commands(case: str) -> list[str]:
    return [step.command for step in next_steps(CASES[case])]


def names(case: str) -> list[str]:
    return [command.split()[1] for command in commands(case)]


def test_without_drafter_the_way_leads_from_answers_over_training_to_a_measurement() -> None:
    assert names("a target") == ["generate", "regenerate", "train", "train", "train", "evaluate"]
    assert all("ORG/NAME" in command for command in commands("a target"))
    assert "'my models/target'" in commands("a target in a folder with a blank")[0]
    assert names("a lookup") == names("a target")


def test_the_embedded_target_is_measured_on_its_own_held_out_files() -> None:
    assert names("the embedded target") == ["generate", "train", "train", "train", "evaluate"]
    assert "--prompts quickstart/heldout.jsonl --context 64" in commands("the embedded target")[-1]


def test_with_weights_the_way_leads_to_an_export_of_each_that_has_a_format() -> None:
    told = commands("every kind of weights")
    assert names("every kind of weights") == ["generate", "evaluate", "plan", *["export"] * 3]
    written = [shlex.split(command) for command in told[-3:]]
    assert [(words[2], words[5]) for words in written] == [("a/b", "vllm"), ("c/d", "draft"), ("e/f", "headstart")]
    assert len({words[3] for words in written}) == 3  # each to a folder of its own


def test_after_a_problem_the_checks_come_again_before_anything_is_spent() -> None:
    assert names("a target that does not fit") == ["doctor"]
    assert names("heads that do not fit")[:2] == ["doctor", "regenerate"]
    assert commands("nothing, and an old package")[0] == "pip install 'torch>=2.11'"
