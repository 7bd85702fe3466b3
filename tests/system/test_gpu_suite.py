"""The GPU suite on a CPU: every step runs in little time with few packages, and no measurement is lost."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_suite.py"
sys.path.insert(0, str(SCRIPT.parent))
import gpu_suite  # noqa: E402  # a script beside the package
import suite_measurements  # noqa: E402

LEFT_OUT = {"accelerate", "beartype", "datasets", "deepspeed", "headstart", "hypothesis", "jaxtyping", "jinja2"}
LEFT_OUT |= {"matplotlib", "peft", "platformdirs", "pydantic", "pytest", "_pytest", "rich", "typer", "wandb"}


def few_packages(folder: Path) -> Path:
    """Link this environment's packages, except those that the suite does not need."""
    folder.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        name = re.split(r"[-.]", entry.name.lower())[0]
        if name not in LEFT_OUT and not entry.name.endswith((".pth", ".egg-link")) and "editable" not in entry.name:
            (folder / entry.name).symlink_to(entry)
    return folder


def test_the_suite_pretends_with_torch_and_transformers_alone(tmp_path: Path) -> None:
    packages, output = few_packages(tmp_path / "packages"), tmp_path / "out"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(packages)}
    command = [sys.executable, "-S", str(SCRIPT), "--pretend", "--output", str(output)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, cwd="/")
    assert done.stdout.startswith("not installed and not used: accelerate"), done.stderr
    assert done.stdout.endswith("Nothing is left.\n"), done.stdout
    assert sorted(path.name for path in output.iterdir()) == ["suite.json", "suite.md"]
    report = read(output)
    assert report["schema"] == "headstart-gpu-suite/5" and report["pretended"]
    assert list(report["steps"]) == list(gpu_suite.STEPS)
    errors = {name: step["errors"] for name, step in report["steps"].items() if step["errors"]}
    assert errors == {"tests": {"tests/gpu": "not installed: pytest"}}
    check_figures({name: step["results"] for name, step in report["steps"].items()})
    assert "## Speculation, 8b" in (output / "suite.md").read_text()


def check_figures(steps: dict[str, dict[str, Any]]) -> None:
    assert steps["machine"]["copy"]["bytes_per_second"] > 0 and steps["machine"]["product"]["flop_per_second"] > 0
    for size in ("8B", "1B"):
        plain, drafted = steps[f"decoding, {size}"], steps[f"speculation, {size}"]
        assert len(plain) == 6 and len(drafted) == 10
        assert all(
            row["tokens_per_second"] > 0 and row["share_of_ideal"] > 0 for row in (*plain.values(), *drafted.values())
        )
        assert all(row["right_tokens"] == 1 for row in drafted.values()), "the models count"
        better, worse = (
            [row["tokens_per_pass"] for name, row in drafted.items() if f"{share} forced, graphs" in name]
            for share in (0.8, 0.6)
        )
        assert better[0] == better.pop(), "acceptance of a sampled chain is forced too"
        assert sum(better) > sum(worse) and all(b >= w > 1 for b, w in zip(better, worse, strict=True))
        assert all(len(row) == 2 for row in steps[f"verification, {size}"].values())
        trained = {**steps[f"training, {size}, heads"], **steps[f"training, {size}, dspark"]}
        assert len(trained) == 3 and all(row["last_loss"] < row["first_loss"] for row in trained.values())
        online, stored = steps[f"training, {size}, heads"].values()
        assert online["flop_per_step"] > stored["flop_per_step"] and online["first_loss"] == stored["first_loss"]
    assert len(steps["compiled, 8B"]) == 2
    assert all(step["kernels"] and step["output"] for step in steps["kernels, 8B"].values())
    fused, plain = steps["losses"].values()
    assert fused["loss"] == pytest.approx(plain["loss"], rel=1e-5)


def step_of(seconds: float, **runs: Callable[[], Any]) -> gpu_suite.Step:
    return gpu_suite.Step(seconds, lambda bench: iter(runs.items()))


def fails() -> None:
    raise ValueError("out of luck")


def endless() -> None:
    while True:
        try:
            time.perf_counter()
        except Exception:  # noqa: BLE001  # what libraries do
            continue


def test_a_step_that_fails_or_does_not_end_keeps_what_it_measured_and_is_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = {
        "fails": step_of(2, first=lambda: {"ms": 1}, fails=fails, last=lambda: {"ms": 3}),
        "endless": step_of(2, first=lambda: {"ms": 1}, endless=endless, last=lambda: {"ms": 3}),
        "dies": step_of(2, first=lambda: {"ms": 1}, dies=lambda: os._exit(7)),
    }
    monkeypatch.setattr(gpu_suite, "STEPS", steps)
    given = ["--pretend", "--output", str(tmp_path), "--commit", "abc", "--minutes", "0.17"]
    assert gpu_suite.main(given) == 1
    report = read(tmp_path)
    found, one = report["steps"], {"first": {"ms": 1}}
    expected = [{**one, "last": {"ms": 3}}, one, one]
    assert [found[name]["results"] for name in steps] == expected
    assert found["fails"]["errors"] == {"fails": "ValueError: out of luck"}
    assert found["endless"]["errors"]["the rest"].startswith("stopped after its time limit")
    assert found["dies"]["errors"] == {"the rest": "its process exited with code 7"}
    assert not any(step["done"] for step in found.values())
    assert gpu_suite.left_of(report) == ["Left: fails; endless; dies. Run `make gpu` again."]
    # A second run keeps the finished steps.
    steps["dies"] = step_of(2, again=lambda: {"ms": 5})
    gpu_suite.main([*given, "--steps", "dies"])
    steps["dies"] = step_of(2, third=lambda: {"ms": 6})
    gpu_suite.main([*given, "--steps", "dies;fails"])
    assert read(tmp_path)["steps"]["dies"]["results"] == {"again": {"ms": 5}}
    with pytest.raises(ValueError, match="is of commit abc, not other: use another --output"):
        gpu_suite.main([*given, "--commit", "other"])


INTERRUPTED = """
import pytest
pytestmark = pytest.mark.gpu
@pytest.mark.parametrize("index", range(200))  # more than is kept of the output
def test_right(index): pass
def test_wrong(): assert 1 == 2
def test_endless():
    while True: pass
"""


def test_interrupted_tests_keep_what_they_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\nmarkers = gpu")  # as in pyproject.toml
    (tmp_path / "test_cut.py").write_text(INTERRUPTED)
    (tmp_path / "test_whole.py").write_text(INTERRUPTED.partition("def test_wrong")[0])
    without_torch = suite_measurements._RUN_TESTS.replace(", torch, transformers", "")
    for name, value in {"GPU_TESTS": tmp_path, "TEST_SECONDS": 15, "_RUN_TESTS": without_torch}.items():
        monkeypatch.setattr(suite_measurements, name, value)
    ((_, run),) = suite_measurements.gpu_tests(gpu_suite.Bench(pretend=False))
    found = run()
    assert (found["passed"], found["failed"], found["exit_codes"]) == (400, 1, (2, 0))
    assert "assert 1 == 2" in found["output"][0] and "KeyboardInterrupt" in found["output"][0]


def test_everything_together_fits_the_time() -> None:
    seconds = {name: step.seconds for name, step in gpu_suite.STEPS.items()}
    assert seconds["tests"] >= suite_measurements.TEST_SECONDS + 10
    assert sum(seconds.values()) - seconds["tests"] <= 5.6 * 60
    assert sum(seconds.values()) <= 60 * gpu_suite.parse([]).minutes - 15, "the start takes time too"


@pytest.mark.parametrize(("init", "method"), [(lambda: None, "fork"), (fails, "spawn")])
def test_steps_fork_if_a_fork_can_use_the_gpu(
    init: Callable[[], None], method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_suite.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu_suite.torch.cuda, "init", init)
    assert gpu_suite.start_method() == method


def test_the_page_runs_the_suite() -> None:
    page = (ROOT / "docs/how-to/one-gpu.md").read_text().partition("## Measure your GPU")[2]
    makefile = (ROOT / "Makefile").read_text()
    blocks = re.findall(r"```sh\n(.*?)```", page, flags=re.DOTALL)
    assert [line.split("#")[0].strip() for block in blocks for line in block.splitlines()] == [
        "git clone REPOSITORY headstart && cd headstart",
        "make gpu PRETEND=1",
        "make gpu",
        "python3 benchmarks/gpu_suite.py --commit COMMIT",
    ]
    assert "benchmarks/gpu_suite.py $(if $(PRETEND),--pretend)" in makefile
    form = (ROOT / ".github/ISSUE_TEMPLATE/gpu-results.yml").read_text()
    assert all("suite.json" in text and "runs/gpu" in text for text in (page, form))


def read(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "suite.json").read_text())
    return report
