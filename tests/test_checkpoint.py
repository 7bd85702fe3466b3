"""Checkpoints exist whole or not at all, belong to their recipe, and are read back bit-equal."""

import errno
import json
import math
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import tiny_model
from torch import Tensor, nn
from torch.optim import Optimizer

import trainer.run.checkpoint
from trainer.files import folders
from trainer.files.folders import LOCK_NAME, hold, write_folder
from trainer.recipe.common import TrainingSection
from trainer.run.checkpoint import Best, Checkpoints, Progress, Saved
from trainer.run.distributed import build_optimizers
from trainer.run.state import gather_moments, gather_weights, load_moments, load_weights

IDENTITY: dict[str, Any] = {"kind": "medusa", "training": {"steps": 10, "betas": (0.9, 0.95)}, "data": {"train": "a"}}
FILES = ["SHA256SUMS", "optimizer.safetensors", "state.json", "weights.safetensors"]


def trained_model(seed: int = 0, steps: int = 3, **changes: Any) -> tuple[nn.Module, list[Optimizer]]:
    """Make a tiny Llama and train it for a few steps of Muon and AdamW on random gradients."""
    model = tiny_model("llama", seed=seed, **changes)
    optimizers = build_optimizers(model, TrainingSection(steps=10, optimizer="muon"))
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        for optimizer in optimizers:
            optimizer.step()
    return model, optimizers


def checkpoints(folder: Path, keep: int = 2, origin: dict[str, Any] | None = None) -> Checkpoints:
    return Checkpoints(folder, keep, origin or IDENTITY)


def save(to: Checkpoints, model: nn.Module, optimizers: list[Optimizer], progress: Progress) -> None:
    to.save(Saved(progress, gather_weights(model), gather_moments(model, optimizers)), to.best)


def load(source: Checkpoints, model: nn.Module, optimizers: list[Optimizer]) -> Progress | None:
    saved = source.latest()
    if saved is None:
        return None
    load_weights(model, saved.weights)
    load_moments(model, optimizers, saved.moments)
    return saved.progress


def save_steps(folder: Path, *steps: int, keep: int = 2) -> nn.Module:
    model, optimizers = trained_model()
    for step in steps:
        save(checkpoints(folder, keep), model, optimizers, Progress(step, 100 * step))
    return model


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def optimizer_tensors(optimizers: list[Optimizer]) -> list[Tensor]:
    states = [optimizer.state_dict()["state"] for optimizer in optimizers]
    return [value for state in states for index in sorted(state) for _, value in sorted(state[index].items())]


def disk_full_after_a_part(monkeypatch: pytest.MonkeyPatch, calls: int = 2) -> None:
    """In the call with this number, half of the file is written before the disk is full."""
    whole, numbers = trainer.run.checkpoint.save_file, count(1)

    def save_file(tensors: dict[str, Tensor], path: Path) -> None:
        whole(tensors, path)
        if next(numbers) == calls:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(trainer.run.checkpoint, "save_file", save_file)


def test_weights_optimizers_and_progress_come_back_bit_equal(tmp_path: Path) -> None:
    model, optimizers = trained_model()
    save(checkpoints(tmp_path), model, optimizers, Progress(3, 777))
    other, other_optimizers = trained_model(seed=1, steps=0)
    assert load(checkpoints(tmp_path), other, other_optimizers) == Progress(3, 777)
    theirs = other.state_dict()
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in model.state_dict().items())
    before, after = optimizer_tensors(optimizers), optimizer_tensors(other_optimizers)
    assert len(before) == len(after) > 20
    assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("zero", [False, True], ids=["plain", "ZeRO-2"])
def test_resumed_moments_are_on_the_device_of_their_parameters_with_adamws_step(
    zero: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused AdamW on a GPU crashes at its first step if ``step`` is on the host.

    Here the meta device replaces the GPU.
    """
    moments = gather_moments(*trained_model())
    model = tiny_model("llama").to("meta")
    optimizers, engine = build_optimizers(model, TrainingSection(steps=10, optimizer="muon")), None
    if zero:
        part = torch.empty(8, device="meta", requires_grad=True)
        moments = {key: value for key, value in moments.items() if not key.endswith("momentum_buffer")}
        optimizers = [torch.optim.AdamW([part], fused=True)]
        inner = SimpleNamespace(single_partition_of_fp32_groups=[part], optimizer=optimizers[0])
        inner._lazy_init_hp_params_optimizer_state = lambda: None
        engine = SimpleNamespace(optimizer=inner, device="meta", zero_optimization_stage=lambda: 2)
        setters = dict.fromkeys(("safe_set_full_optimizer_state", "safe_set_local_optimizer_state"), lambda *_: None)
        monkeypatch.setitem(sys.modules, "deepspeed.utils", SimpleNamespace(**setters))
    load_moments(model, optimizers, moments, engine)
    assert all(
        set(state) in ({"step", "exp_avg", "exp_avg_sq"}, {"momentum_buffer"}) for state in states_of(optimizers)
    )
    assert {value.device.type for state in states_of(optimizers) for value in state.values()} == {"meta"}


def test_the_best_weights_so_far_come_back_with_the_newest_checkpoint(tmp_path: Path) -> None:
    model, optimizers = trained_model()
    before, after = checkpoints(tmp_path), checkpoints(tmp_path)
    before.best = Best(Progress(2, 200), 3.5, gather_weights(model), ((30, 10), (7, 2)))
    save(before, model, optimizers, Progress(4, 400))
    after.latest()
    assert after.best is not None and after.best._replace(weights={}) == before.best._replace(weights={})
    assert all(torch.equal(tensor, before.best.weights[name]) for name, tensor in after.best.weights.items())


def states_of(optimizers: list[Optimizer]) -> list[dict[str, Tensor]]:
    return [state for optimizer in optimizers for state in optimizer.state.values()]


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path) -> None:
    model, optimizers = trained_model(tie_word_embeddings=True)
    save(checkpoints(tmp_path), model, optimizers, Progress(1, 0))
    stored = load_file(tmp_path / "step-00000001" / "weights.safetensors")
    assert stored.keys() == {name for name, _ in model.named_parameters()} and "lm_head.weight" not in stored
    other, other_optimizers = trained_model(seed=1, tie_word_embeddings=True)
    load(checkpoints(tmp_path), other, other_optimizers)
    embedding, lm_head = other.get_input_embeddings().weight, other.get_output_embeddings().weight
    assert embedding is lm_head and torch.equal(embedding, model.get_input_embeddings().weight)


def test_no_file_of_a_checkpoint_is_a_pickle(tmp_path: Path) -> None:
    save_steps(tmp_path, 1)
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.name for path in files) == FILES
    for path in files:
        assert path.suffix in (".json", ".safetensors") or path.name == "SHA256SUMS"
        assert not path.read_bytes().startswith((b"\x80", b"PK"))
    json.loads((tmp_path / "step-00000001" / "state.json").read_text())


@pytest.mark.parametrize("failing_call", [1, 2], ids=["weights", "optimizer"])
def test_a_full_disk_leaves_the_last_good_checkpoint_whole_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing_call: int
) -> None:
    save_steps(tmp_path, 2, keep=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / "step-00000002").iterdir()}
    disk_full_after_a_part(monkeypatch, failing_call)
    with pytest.raises(OSError) as error:
        save_steps(tmp_path, 4, keep=1)
    assert names(tmp_path) == ["step-00000002"]
    assert {path.name: path.read_bytes() for path in (tmp_path / "step-00000002").iterdir()} == before
    for part in ("of step 4 could not be written", "No space left", f"{tmp_path}/step-00000002", "make room and start"):
        assert part in str(error.value)
    assert load(checkpoints(tmp_path), *trained_model()) == Progress(2, 200)


def test_what_a_kill_left_half_written_is_ignored_and_then_cleared_away(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    for step in (3, 4):  # step 4 will be written again, and step 3 never
        partial = tmp_path / f".step-{step:08d}.partial"
        partial.mkdir()
        (partial / "weights.safetensors").write_bytes(b"half")
    assert load(checkpoints(tmp_path), *trained_model()) == Progress(2, 200)
    save_steps(tmp_path, 4)
    assert names(tmp_path) == ["step-00000002", "step-00000004"]
    assert load(checkpoints(tmp_path), *trained_model()) == Progress(4, 400)


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def test_a_flipped_bit_is_found_by_the_checksum(tmp_path: Path) -> None:
    """The file has the same length and can be read as safetensors, so only the checksum finds the change."""
    save_steps(tmp_path, 2, 4)
    weights = tmp_path / "step-00000004" / "weights.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert len(load_file(weights)) > 2
    found = checkpoints(tmp_path)
    assert load(found, *trained_model()) == Progress(2, 200)
    assert found.unreadable.keys() == {tmp_path / "step-00000004"}
    assert "weights.safetensors is damaged" in found.unreadable[tmp_path / "step-00000004"]


def test_if_none_can_be_read_the_run_does_not_start_over(tmp_path: Path) -> None:
    save_steps(tmp_path, 2, 4)
    truncate(tmp_path / "step-00000002" / "weights.safetensors")
    shutil.rmtree(tmp_path / "step-00000004")
    (tmp_path / "step-00000004").mkdir()
    with pytest.raises(ValueError) as error:
        load(checkpoints(tmp_path), *trained_model())
    said = str(error.value)
    assert said.startswith(f"none of the 2 checkpoints can be read: {tmp_path}/step-00000004 (SHA256SUMS is missing); ")
    assert f"{tmp_path}/step-00000002 (weights.safetensors is damaged: its " in said
    assert f"another output folder or without {tmp_path}" in said
    assert names(tmp_path) == ["step-00000002", "step-00000004"]


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("part", ["weights", "moments"])
def test_a_checkpoint_whose_values_are_not_finite_is_passed_over(tmp_path: Path, part: str, value: float) -> None:
    save_steps(tmp_path, 2)
    model, optimizers = trained_model()
    saved = Saved(Progress(4, 400), gather_weights(model), gather_moments(model, optimizers))
    tensors: dict[str, Tensor] = getattr(saved, part)
    name = next(name for name, tensor in tensors.items() if tensor.ndim)
    tensors[name].view(-1)[0] = value
    assert saved.non_finite() == [name]
    checkpoints(tmp_path).save(saved)
    found = checkpoints(tmp_path)
    assert load(found, *trained_model()) == Progress(2, 200)
    assert next(iter(found.unreadable.values())) == f"{name} contains values that are not finite"


def test_another_recipe_is_refused_naming_what_differs(tmp_path: Path) -> None:
    save_steps(tmp_path, 2)
    other = {**IDENTITY, "training": {"steps": 11, "betas": (0.9, 0.95)}, "kind": "draft"}
    with pytest.raises(ValueError) as error:
        load(checkpoints(tmp_path, origin=other), *trained_model())
    assert f"{tmp_path}/step-00000002 was made by a recipe with another kind, training.steps (10, now 11): " in str(
        error.value
    )
    assert f"another output folder in the recipe, or remove {tmp_path} to start over" in str(error.value)


def writer(name: str, text: str) -> Callable[[Path], None]:
    def write(folder: Path) -> None:
        (folder / name).write_text(text)

    return write


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    destination = tmp_path / "final"
    write_folder(destination, writer("a", "first"))

    def fails(folder: Path) -> None:
        (folder / "a").write_text("second")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_folder(destination, fails)
    assert names(tmp_path) == ["final"] and (destination / "a").read_text() == "first"


HOLDER = "import sys; from pathlib import Path; from trainer.files.folders import hold\n"
HOLDER += "with hold(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


@contextmanager
def another_holds(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start a process that holds the folder until its standard input ends."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_folder_held_elsewhere_is_refused_naming_process_and_host(tmp_path: Path) -> None:
    with another_holds(tmp_path / "run") as other:
        with pytest.raises(ValueError) as error, hold(tmp_path / "run"):
            raise AssertionError("held twice")
        said = str(error.value)
        assert said.startswith(f"{tmp_path / 'run'} is being written by process {other.pid} on {socket.gethostname()}")
        assert said.endswith("wait until it ends, or use another output")
        (tmp_path / "run" / LOCK_NAME).write_text("{")
        with pytest.raises(ValueError, match="is being written by another process: wait"), hold(tmp_path / "run"):
            raise AssertionError("held twice")


def test_a_killed_process_holds_nothing(tmp_path: Path) -> None:
    with another_holds(tmp_path) as other:
        other.kill()
        other.wait()
        assert (tmp_path / LOCK_NAME).exists()
        with hold(tmp_path):
            assert json.loads((tmp_path / LOCK_NAME).read_text())["process"] == os.getpid()
    assert not list(tmp_path.iterdir())


def test_waiting_for_the_other_run_says_so_and_then_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_PATIENCE", 0.05)
    said: list[str] = []
    with another_holds(tmp_path) as other:

        def on_wait(line: str) -> None:
            said.append(line)
            other.kill()
            other.wait()

        with hold(tmp_path, on_wait):
            assert said == [said[0]] and said[0].startswith(f"waiting for process {other.pid} on ")
