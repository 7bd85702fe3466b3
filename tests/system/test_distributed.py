"""One run under every launcher: the same losses, whole artefacts, and a resume that does not ask who wrote."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from launched_heads import STEPS, interrupt, run
from safetensors.torch import load_file
from tiny_training import Recorder, cpu_accelerator

from decoding.heads import MedusaHeads
from trainer.loop import Interrupted

pytestmark = pytest.mark.system

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 240.0
TYPES = {"ddp": "MULTI_CPU", "zero1": "DEEPSPEED", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
WRAPPERS = {"ddp": "DistributedDataParallel", "zero1": "DeepSpeedEngine", "zero2": "DeepSpeedEngine"}
WRAPPERS["zero3"] = "DeepSpeedEngine"


def launch(kind: str, folder: Path, part: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith(("ACCELERATE_", "HF_"))}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    if kind == "ddp":
        env["ACCELERATE_USE_CPU"] = "true"
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", "--main_process_port", "0"]
    command += ["--config_file", str(ROOT / "recipes" / "accelerate" / f"{kind}.yaml")]
    command += [str(ROOT / "tests" / "system" / "launched_heads.py"), str(folder), part]
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=DEADLINE, check=False)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, dict[str, float]], MedusaHeads]:
    """The run in one process: every step's figures, and the heads."""
    recorder = Recorder()
    with cpu_accelerator() as accelerator:
        objective = run(tmp_path_factory.mktemp("alone"), accelerator, recorder)
    assert recorder.evaluated == [3, 6]
    return recorder.figures, objective.module.heads


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of what two processes did under a launcher, each of which is launched when first asked for."""
    folders: dict[str, Path] = {}

    def done(kind: str) -> Path:
        if kind not in folders:
            if kind != "ddp":
                pytest.importorskip("deepspeed", reason="DeepSpeed is an optional extra")
            folder = tmp_path_factory.mktemp(kind)
            before = {"zero3": "ddp", "zero2": "zero3"}.get(kind)
            if kind == "ddp":
                chain_begins(folder / "chain")
            elif before:
                shutil.copytree(done(before) / "chain", folder / "chain")
            finish(kind, folder)
            folders[kind] = folder
        return folders[kind]

    return done


def chain_begins(folder: Path) -> None:
    """The first two steps of a run, in one process."""
    recorder = Recorder()
    recorder.actions[2] = interrupt
    with cpu_accelerator() as accelerator, pytest.raises(Interrupted):
        run(folder, accelerator, recorder)


def finish(kind: str, folder: Path) -> None:
    """Both parts: the first ends as it was killed."""
    first = launch(kind, folder, "first")
    assert first.returncode != 0 and (folder / "straight" / "figures.json").exists(), first.stderr[-4000:]
    assert not (folder / "killed" / "figures.json").exists()
    second = launch(kind, folder, "second")
    assert second.returncode == 0, second.stderr[-4000:]


def noted(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "figures.json").read_text())
    return content


@pytest.mark.parametrize("kind", TYPES)
def test_what_was_asked_for_is_what_ran(kind: str, launched: Callable[[str], Path]) -> None:
    found = noted(launched(kind) / "straight")
    assert found["distributed_type"] == TYPES[kind] and found["wrapper"] == WRAPPERS[kind]
    assert found["num_processes"] == 2 and found["zero_stage"] == int(
        kind.removeprefix("zero") if "zero" in kind else 0
    )


@pytest.mark.parametrize("kind", TYPES)
def test_two_processes_train_as_one(kind: str, launched: Callable[[str], Path], alone: Any) -> None:
    """Eight sequences a step, as two micro batches of two in each: losses, gradient norms and evaluations."""
    found, (figures, _) = noted(launched(kind) / "straight"), alone
    assert list(found["figures"]) == [str(step) for step in range(1, STEPS + 1)] and found["evaluated"] == [3, 6]
    for step, expected in figures.items():
        assert found["figures"][str(step)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", TYPES)
def test_heads_are_saved_whole(kind: str, launched: Callable[[str], Path], alone: Any) -> None:
    heads = MedusaHeads.from_pretrained(launched(kind) / "straight" / "heads")
    for saved, expected in zip(heads.parameters(), alone[1].parameters(), strict=True):
        assert saved.shape == expected.shape and torch.allclose(saved, expected, atol=1e-3)


@pytest.mark.parametrize("kind", TYPES)
def test_checkpoints_hold_whole_tensors_by_name(kind: str, launched: Callable[[str], Path], alone: Any) -> None:
    (newest,) = (launched(kind) / "straight").glob(f"step-{STEPS:08d}")
    weights, moments = load_file(newest / "weights.safetensors"), load_file(newest / "optimizer.safetensors")
    expected = {f"heads.{name}": tuple(p.shape) for name, p in alone[1].named_parameters()}
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == expected
    for name, shape in expected.items():
        assert tuple(moments[f"{name} exp_avg"].shape) == tuple(moments[f"{name} exp_avg_sq"].shape) == shape
        assert float(moments[f"{name} step"]) == STEPS
    assert len(moments) == 3 * len(weights)


@pytest.mark.parametrize("kind", TYPES)
def test_a_run_resumed_after_kill_9_equals_the_one_that_was_never_killed(
    kind: str, launched: Callable[[str], Path]
) -> None:
    """Bit by bit. The kill fell after step 5, of which the checkpoint of step 4 knows nothing."""
    straight, killed = (launched(kind) / name for name in ("straight", "killed"))
    resumed, whole = noted(killed)["figures"], noted(straight)["figures"]
    assert resumed == {step: whole[step] for step in ("5", "6", "7", "8")}
    ours, theirs = (load_file(folder / "heads" / "model.safetensors") for folder in (straight, killed))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_run_may_change_its_launcher_at_every_resume(launched: Callable[[str], Path], alone: Any) -> None:
    """Two steps in one process, two each under DDP, ZeRO-3 and ZeRO-2: the losses are those of one run."""
    chained = {}
    for kind in ("ddp", "zero3", "zero2"):
        chained |= noted(launched(kind) / "chain")["figures"]
    assert list(chained) == ["3", "4", "5", "6", "7", "8"]
    for step, figures in chained.items():
        assert figures == pytest.approx(alone[0][int(step)], abs=1e-4)


def test_what_zero_wrote_is_gone_on_from_in_one_process(
    tmp_path: Path, launched: Callable[[str], Path], alone: Any
) -> None:
    shutil.copytree(launched("zero3") / "chain", tmp_path / "chain")
    recorder = Recorder()
    with cpu_accelerator() as accelerator:
        run(tmp_path / "chain", accelerator, recorder, seed=3)
    assert list(recorder.figures) == [7, 8]
    for step, figures in recorder.figures.items():
        assert figures == pytest.approx(alone[0][step], abs=1e-4)
