"""The GPU suite, on a CPU: every part runs, in little time, with little installed, and nothing measured is lost."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.drafts.start import draft_from_target

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu_suite.py"
sys.path.insert(0, str(SCRIPT.parent))
import gpu_suite  # noqa: E402  # a script beside the package

LEFT_OUT = {"accelerate", "beartype", "datasets", "deepspeed", "headstart", "hypothesis", "jaxtyping", "jinja2"}
LEFT_OUT |= {"matplotlib", "peft", "platformdirs", "pydantic", "pytest", "_pytest", "rich", "typer", "wandb"}
PARTS = ["tests", "bandwidth", "decoding, trained size", "decoding, wide", "decoding, wider", "launches", "training"]


def few_packages(folder: Path) -> Path:
    """This environment's packages as links, without those that the suite does without."""
    folder.mkdir()
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        name = re.split(r"[-.]", entry.name.lower())[0]
        if name not in LEFT_OUT and not entry.name.endswith((".pth", ".egg-link")) and "editable" not in entry.name:
            (folder / entry.name).symlink_to(entry)
    return folder


def run_suite(*arguments: str, packages: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Without ``packages`` in this environment, else with no others than those."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable]
    if packages is not None:
        environment["PYTHONPATH"] = str(packages)
        command += ["-S"]  # no site-packages
    return subprocess.run(
        [*command, str(SCRIPT), *arguments], env=environment, capture_output=True, text=True, timeout=300, cwd="/"
    )


def read(folder: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads((folder / "suite.json").read_text())
    return report


def test_the_suite_runs_on_folders_with_torch_and_transformers_alone(tmp_path: Path) -> None:
    model = tiny_model("llama", vocab=128)
    draft = draft_from_target(model, (0,))
    heads = MedusaHeads.for_target(model, MedusaConfig(16, 128, num_heads=3, tree=((0,), (1,), (0, 0))))
    for name, part in (("target", model), ("draft", draft), ("heads", heads)):
        part.save_pretrained(tmp_path / name)
        if name != "heads":
            byte_tokenizer().save_pretrained(tmp_path / name)
    rows = [{"text": f"In the {word} there was a house, and nobody lived in it."} for word in ("wood", "town")]
    for name in ("prompts", "train"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = [f"--{name}={tmp_path / name}" for name in ("target", "draft", "heads")]
    given += [f"--{name}={tmp_path / name}.jsonl" for name in ("prompts", "train")]
    given += [f"--parts={','.join({part.split(',')[0] for part in PARTS})}"]
    output = tmp_path / "out"
    done = run_suite("--short", "--output", str(output), *given, packages=few_packages(tmp_path / "packages"))
    assert done.returncode == 0, done.stderr
    report = read(output)
    assert {"jaxtyping", "pydantic", "jinja2"} <= set(report["not_installed"])
    assert report["schema"] == "headstart-gpu-suite/2" and report["short"] and report["failed"] == []
    assert report["skipped"] == [{"part": "tests", "item": "tests/gpu", "why": "not installed: pytest"}]
    assert list(report["parts"]) == PARTS and set(PARTS) < set(report["seconds"])
    check_figures(report)
    page = (output / "suite.md").read_text()
    assert all(f"## {part}" in page for part in ("Bandwidth", "Decoding, wider", "Launches", "Training", "Missing"))


def check_figures(report: dict[str, Any]) -> None:
    parts = report["parts"]
    assert parts["bandwidth"]["copy"]["bytes_per_second"] > 0
    for name in PARTS[2:5]:
        groups = parts[name]
        assert list(groups) == ["greedy, batch 1", "T=1, batch 1", "greedy, batch 2", "T=1, batch 2"]
        assert bool(groups["greedy, batch 1"]["stand_in"]) == (name != "decoding, trained size")
        of_one = {(row["method"], row["mode"]): row for row in groups["greedy, batch 1"]["rows"]}
        assert len(of_one) == 8 and ("assisted generation, 4 tokens", "transformers") in of_one
        assert len(groups["T=1, batch 2"]["rows"]) == 4
        for row in of_one.values():
            assert row["same_as_plain"] == "1/1", row
            assert row["tokens_per_second"]["median"] > 0
        plain = of_one["plain", "graphs"]
        assert plain["tokens_per_pass"] == 1 and sum(plain["time_split"].values()) == pytest.approx(1)
        assert plain["bandwidth"]["share_of_step"] <= plain["bandwidth"]["share_of_pass"]
        assert of_one["draft model", "graphs"]["tokens_per_pass"] > 1
    assert {result["mode"] for result in parts["launches"].values()} == {"graphs", "eager"}
    assert all(result["per_step"]["operators"] > 0 and result["top"] for result in parts["launches"].values())
    assert {result["kind"] for result in parts["training"].values()} == {"medusa", "draft"}
    assert all(result["tokens_per_second"] > 0 for result in parts["training"].values())


def run_part(items: list[gpu_suite.Item], seconds: float) -> tuple[dict[str, Any], list[list[str]]]:
    """The report, and what was written of it after each item."""
    report: dict[str, Any] = {"parts": {}, "seconds": {}, "skipped": [], "failed": []}
    written: list[list[str]] = []
    gpu_suite.run_part(
        gpu_suite.Part("part", seconds, items), seconds, report, lambda: written.append(list(report["parts"]["part"]))
    )
    return report, written


def test_a_measurement_that_does_not_end_is_cut_and_those_behind_it_are_named() -> None:
    def endless(seconds: float) -> None:
        while True:
            try:
                time.perf_counter()
            except Exception:  # noqa: BLE001  # what libraries do
                continue

    report, written = run_part(
        [gpu_suite.Item("first", lambda s: 1), gpu_suite.Item("endless", endless), gpu_suite.Item("last", lambda s: 3)],
        0.1,
    )
    assert report["parts"] == {"part": {"first": 1}} and report["failed"] == []
    assert [entry["item"] for entry in report["skipped"]] == ["endless", "last"]
    assert written == [["first"]] * 3


def test_a_measurement_that_fails_leaves_the_others_their_figures() -> None:
    def fails(seconds: float) -> None:
        raise ValueError("out of luck")

    def absent(seconds: float) -> None:
        raise ImportError("no module", name="pytest")

    items = [gpu_suite.Item("fails", fails), gpu_suite.Item("absent", absent), gpu_suite.Item("last", lambda s: 3)]
    report, _ = run_part(items, 60)
    assert report["parts"]["part"] == {"last": 3}
    assert report["failed"] == [{"part": "part", "item": "fails", "why": "ValueError: out of luck"}]
    assert report["skipped"] == [{"part": "part", "item": "absent", "why": "not installed: pytest"}]
