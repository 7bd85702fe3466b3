"""One run under every launcher: the same losses, whole artefacts, and a resume that does not depend on the launcher."""

import json
import shutil
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from launched_heads import STEPS, run
from safetensors.torch import load_file
from tiny_training import Recorder, cpu_accelerator, interrupt
from torch import nn
from whole_runs import ACCELERATE, DIRECT, ROOT, SCRIPT, losses, provenance, write_recipe, write_workshop
from whole_runs import finish as run_to_an_end
from whole_runs import run as run_program

from decoding.files.fingerprint import stored_fingerprint
from trainer.run.loop import Interrupted
from trainer.run.train import consolidate

TYPES = {"ddp": "MULTI_CPU", "fsdp2": "FSDP", "zero2": "DEEPSPEED", "zero3": "DEEPSPEED"}
WRAPPERS = {"ddp": "DistributedDataParallel", "fsdp2": "FSDP_Scaled"}
WRAPPERS |= {"zero2": "DeepSpeedEngine", "zero3": "DeepSpeedEngine"}
FSDP2 = [*ACCELERATE, "--config_file", str(ROOT / "recipes" / "accelerate" / "fsdp.yaml"), "--main_process_port", "0"]
FSDP2 += [str(ROOT / "tests" / "system" / "launched_fsdp2.py")]
"""The script that two processes run follows these words."""


def command_of(kind: str, folder: Path, part: str, options: Sequence[str] = ("--main_process_port", "0")) -> list[str]:
    config = str(ROOT / "recipes" / "accelerate" / f"{kind}.yaml")
    script = str(ROOT / "tests" / "system" / "launched_heads.py")
    if kind == "fsdp2":
        return [*FSDP2, script, str(folder), part]
    return [*ACCELERATE, "--quiet", *options, "--config_file", config, script, str(folder), part]


def cpu_of(kind: str) -> str | None:
    """Return the value of ACCELERATE_USE_CPU, which accelerate needs for DDP and which DeepSpeed does not tolerate."""
    return None if kind.startswith("zero") else "true"


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, dict[str, float]], nn.Module]:
    """Return the figures of every step, and the trained weights, of the run in one process."""
    recorder = Recorder()
    with cpu_accelerator() as accelerator:
        objective = run(tmp_path_factory.mktemp("alone"), accelerator, recorder)
    assert recorder.evaluated == [3, 6]
    return recorder.figures, objective.module


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of two processes' work under a launcher; each launch happens when it is first needed."""
    folders: dict[str, Path] = {}

    def done(kind: str) -> Path:
        if kind not in folders:
            if kind.startswith("zero"):
                pytest.importorskip("deepspeed", reason="DeepSpeed is an optional extra")
            folder = tmp_path_factory.mktemp(kind)
            before = {"zero3": "ddp", "zero2": "zero3", "fsdp2": "zero3"}.get(kind)
            if kind == "ddp":
                chain_begins(folder / "chain")
            elif before:
                shutil.copytree(done(before) / "chain", folder / "chain")
            finish(kind, folder)
            folders[kind] = folder
        return folders[kind]

    return done


def chain_begins(folder: Path) -> None:
    """Do the first two steps of a run in one process."""
    recorder = Recorder()
    recorder.actions[2] = interrupt
    with cpu_accelerator() as accelerator, pytest.raises(Interrupted):
        run(folder, accelerator, recorder)


def finish(kind: str, folder: Path) -> None:
    """Run both parts; the first part ends by a kill."""
    first = run_to_an_end(command_of(kind, folder, "first"), folder, ACCELERATE_USE_CPU=cpu_of(kind))
    assert first.returncode != 0 and (folder / "straight" / "figures.json").exists(), first.stderr[-4000:]
    assert not (folder / "killed" / "figures.json").exists()
    run_program(command_of(kind, folder, "second"), folder, ACCELERATE_USE_CPU=cpu_of(kind))


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
    assert kind != "ddp" or found["bucket_views"] is True


def test_zero1_is_launched_as_zero2_is_but_for_its_stage() -> None:
    """No code here distinguishes the two."""
    one, two = (yaml.safe_load((ROOT / "recipes" / "accelerate" / f"zero{stage}.yaml").read_text()) for stage in (1, 2))
    assert (one["deepspeed_config"].pop("zero_stage"), two["deepspeed_config"].pop("zero_stage")) == (1, 2)
    assert one == two


@pytest.mark.parametrize("kind", TYPES)
def test_two_processes_train_as_one(kind: str, launched: Callable[[str], Path], alone: Any) -> None:
    """Each step has eight sequences, two micro batches of two in each process.

    Losses, gradient norms and evaluations are equal.
    """
    found, (figures, _) = noted(launched(kind) / "straight"), alone
    assert list(found["figures"]) == [str(step) for step in range(1, STEPS + 1)] and found["evaluated"] == [3, 6]
    for step, expected in figures.items():
        assert found["figures"][str(step)] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", TYPES)
def test_checkpoints_hold_whole_tensors_by_name(kind: str, launched: Callable[[str], Path], alone: Any) -> None:
    (newest,) = (launched(kind) / "straight").glob(f"step-{STEPS:08d}")
    weights, moments = load_file(newest / "weights.safetensors"), load_file(newest / "optimizer.safetensors")
    expected = {name: tuple(p.shape) for name, p in alone[1].named_parameters()}
    buffers = {name: tuple(buffer.shape) for name, buffer in alone[1].named_buffers()}
    assert {name: tuple(tensor.shape) for name, tensor in weights.items()} == {**expected, **buffers}
    for name, shape in expected.items():
        assert tuple(moments[f"{name} exp_avg"].shape) == tuple(moments[f"{name} exp_avg_sq"].shape) == shape
        assert float(moments[f"{name} step"]) == STEPS
    assert len(moments) == 3 * len(expected)


@pytest.mark.parametrize("kind", TYPES)
def test_a_run_resumed_after_kill_9_equals_the_one_that_was_never_killed(
    kind: str, launched: Callable[[str], Path]
) -> None:
    """The weights are equal bit by bit. The kill came after step 5, and the last checkpoint was of step 4."""
    straight, killed = (launched(kind) / name for name in ("straight", "killed"))
    resumed, whole = noted(killed)["figures"], noted(straight)["figures"]
    assert resumed == {step: whole[step] for step in ("5", "6", "7", "8")}
    ours, theirs = (load_file(folder / "heads" / "model.safetensors") for folder in (straight, killed))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("last", ["zero2", "fsdp2"])
def test_a_run_may_change_its_launcher_at_every_resume(last: str, launched: Callable[[str], Path], alone: Any) -> None:
    """One process, DDP, ZeRO-3 and the last launcher run two steps each; the losses equal the losses of one run."""
    chained = {}
    for kind in ("ddp", "zero3", last):
        chained |= noted(launched(kind) / "chain")["figures"]
    assert list(chained) == ["3", "4", "5", "6", "7", "8"]
    for step, figures in chained.items():
        assert figures == pytest.approx(alone[0][int(step)], abs=1e-4)


def test_two_launchers_that_know_of_each_other_train_as_one(tmp_path: Path, alone: Any) -> None:
    """This simulates two machines: each has a launcher with one process, and both see one folder."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    machines = ["--num_machines", "2", "--num_processes", "2", "--main_process_ip", "127.0.0.1"]
    chain_begins(tmp_path / "killed")
    with ThreadPoolExecutor() as pool:
        ranks = [[*machines, "--machine_rank", str(rank), "--main_process_port", str(port)] for rank in range(2)]
        ended = list(
            pool.map(lambda options: run_to_an_end(command_of("ddp", tmp_path, "second", options), tmp_path), ranks)
        )
    assert [done.returncode for done in ended] == [0, 0], ended[0].stderr[-3000:] + ended[1].stderr[-3000:]
    found = noted(tmp_path / "killed")
    assert found["num_processes"] == 2 and list(found["figures"]) == ["3", "4", "5", "6", "7", "8"]
    for step, figures in found["figures"].items():
        assert figures == pytest.approx(alone[0][int(step)], abs=1e-4)


def own_zero3(folder: Path) -> str:
    """Write a launcher's configuration with a DeepSpeed file in which no parameter is too small to be sharded."""
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    (folder / "deepspeed.json").write_text(json.dumps({"zero_optimization": zero}))
    content = yaml.safe_load((ROOT / "recipes" / "accelerate" / "zero3.yaml").read_text())
    content["deepspeed_config"] = {"deepspeed_config_file": str(folder / "deepspeed.json"), "zero3_init_flag": False}
    (folder / "zero3.yaml").write_text(yaml.safe_dump(content))
    return str(folder / "zero3.yaml")


@pytest.fixture(scope="module")
def joint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a workshop in which ``one`` contains a run of Medusa-2 in one process."""
    workshop = write_workshop(tmp_path_factory.mktemp("joint"))
    run_program([*DIRECT, *joint_recipe(workshop, "one")], workshop)
    return workshop


def joint_recipe(workshop: Path, name: str) -> list[str]:
    """Return the words of a recipe for heads and adapters, with overrides."""
    overrides = ["evaluation.every=3", "adapters.rank=4", "adapters.dropout=0.0", "adapters.heads_first_steps=2"]
    overrides += ["adapters.base_loss=forward_kl"]
    return [write_recipe(workshop, "medusa", workshop / name, steps=5, micro_batch_size=2), *overrides]


@pytest.mark.parametrize("kind", ["zero3", "fsdp2"])
def test_heads_and_adapters_train_together_with_every_weight_sharded_as_in_one_process(
    kind: str, joint: Path, tmp_path: Path
) -> None:
    """scripts/train.py runs Medusa-2; the sharded target is evaluated, and saved whole with the adapters merged in."""
    if kind == "zero3":
        pytest.importorskip("deepspeed", reason="DeepSpeed is an optional extra")
    zero3 = [*ACCELERATE, "--config_file", own_zero3(tmp_path), "--main_process_port", "0"]
    command = [*(zero3 if kind == "zero3" else FSDP2), SCRIPT, *joint_recipe(joint, kind)]
    run_program(command, joint, ACCELERATE_USE_CPU=cpu_of(kind))
    assert losses(joint / kind) == pytest.approx(losses(joint / "one"), abs=1e-4)
    found = provenance(joint / kind)
    stage = 3 if kind == "zero3" else 0
    assert (found["distributed_type"], found["zero_stage"], found["num_processes"]) == (TYPES[kind], stage, 2)
    for part in ("model.safetensors", "target/model.safetensors"):
        ours, theirs = (load_file(joint / name / "final" / part) for name in ("one", kind))
        assert {name: tensor.shape for name, tensor in ours.items()} == {name: t.shape for name, t in theirs.items()}
        assert all(torch.allclose(ours[name], theirs[name], atol=1e-3) for name in ours)
    consolidate(joint / kind / "checkpoints" / "step-00000005", tmp_path / "made" / "final")
    for part in (".", "target"):
        assert stored_fingerprint(tmp_path / "made" / "final" / part) == stored_fingerprint(
            joint / kind / "final" / part
        )
    assert found == {key: value for key, value in provenance(tmp_path / "made").items() if key != "checkpoint"}
