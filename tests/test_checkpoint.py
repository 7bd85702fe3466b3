"""Checkpoints exist whole or not at all, belong to their recipe, and are read back bit-equal."""

import errno
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from safetensors.torch import load_file
from tiny_models import counting_model, tiny_model
from tiny_training import recipe_content, tiny_tokenizer, write_corpus
from torch import Tensor, nn
from torch.optim import Optimizer

import trainer.run.checkpoint
from trainer.files import folders
from trainer.files.folders import LOCK_NAME, hold, write_folder
from trainer.learning.objective import Objective
from trainer.recipe.common import EvaluationSection, TrainingSection
from trainer.recipe.reading import parse_recipe
from trainer.run import heldout
from trainer.run.checkpoint import Checkpoints, Progress, Saved
from trainer.run.distributed import build_optimizers
from trainer.run.heldout import Evaluator
from trainer.run.log import Evaluation
from trainer.run.state import gather_moments, gather_weights, load_moments, load_weights
from trainer.run.train import run_recipe

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


def checkpoints(folder: Path, keep: int = 2, identity: dict[str, Any] | None = None) -> Checkpoints:
    return Checkpoints(folder, keep, identity or IDENTITY)


def save(to: Checkpoints, model: nn.Module, optimizers: list[Optimizer], progress: Progress) -> None:
    to.save(Saved(progress, gather_weights(model), gather_moments(model, optimizers)))


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
    count = 0
    whole = trainer.run.checkpoint.save_file

    def save_file(tensors: dict[str, Tensor], path: Path) -> None:
        nonlocal count
        count += 1
        whole(tensors, path)
        if count == calls:
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
        load(checkpoints(tmp_path, identity=other), *trained_model())
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


def workshop(folder: Path, kind: str, **evaluation: Any) -> dict[str, Any]:
    """Write a recipe of ten steps that evaluates at every second step and writes a checkpoint at every step."""
    folder.mkdir(exist_ok=True)
    counting_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    write_corpus(folder)
    content = recipe_content(folder, kind, steps=10)
    content["evaluation"] |= {"every": 2, "keep": "best", **evaluation}
    return {**content, "checkpoint": {"every": 1, "keep": 100}}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[int, float]]]:
    """Make evaluations return these figures one after the other; return the tree nodes and temperature of each
    evaluation. There are eight prompts with ten passes each. Every second prompt has ``apart`` tokens more and the
    others as many fewer, alternating from evaluation to evaluation.
    """
    asked: list[tuple[int, float]] = []

    def script(figures: list[float], apart: int = 0) -> list[tuple[int, float]]:
        left = iter(figures)

        def found(self: Evaluator, objective: Objective) -> Evaluation:
            drafter = objective.drafter()
            assert drafter is not None
            asked.append((drafter.max_nodes, self.config.sampling.temperature))
            figure, shift = next(left), apart * (-1) ** len(asked)
            texts = tuple((round(10 * figure) + sign * shift, 10) for sign in (1, -1) * 4)
            return Evaluation({"tokens_per_pass": figure}, drafter.label, texts)

        monkeypatch.setattr(Evaluator, "evaluate", found)
        return asked

    return script


def run(content: dict[str, Any]) -> str:
    """Run the recipe; return what it printed."""
    AcceleratorState._reset_state(True)
    console = Console(width=200, record=True, file=(Path(content["output"]).parent / "said.txt").open("a"))
    try:
        run_recipe(parse_recipe(content), console)
    finally:
        AcceleratorState._reset_state(True)
    return console.export_text()


def finished(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    final = Path(content["output"]) / "final"
    return json.loads((final / "provenance.json").read_text()), load_file(final / "model.safetensors")


def checkpointed(content: dict[str, Any], step: int) -> dict[str, Tensor]:
    return load_file(Path(content["output"]) / "checkpoints" / f"step-{step:08d}" / "weights.safetensors")


SCRIPT = [1.5, 3.0, 2.0, 2.5, 2.9, 3.5]
"""Figures of steps 2, 4, 6, 8 and 10, and of the finished weights."""


def test_the_heads_of_the_best_step_are_finished_with_a_tree_of_their_own(
    tmp_path: Path, scripted: Callable[..., list[tuple[int, float]]]
) -> None:
    """All steps, including the last, are compared with chains; the tree is fitted afterwards."""
    content = workshop(tmp_path, "medusa", temperature=0.7)
    content["heads"] = {"num_heads": 3, "tree_nodes": 9}
    asked = scripted(SCRIPT)
    said = run(content)
    nodes, temperatures = zip(*asked, strict=True)
    assert nodes[:5] == (4,) * 5 and nodes[5] != 4 and set(temperatures) == {0.7}
    provenance, heads = finished(content)
    best, last = checkpointed(content, 4), checkpointed(content, 10)
    assert all(torch.equal(tensor, best[f"heads.{name}"]) for name, tensor in heads.items())
    assert not all(torch.equal(tensor, last[f"heads.{name}"]) for name, tensor in heads.items())
    assert provenance["steps"] == 4 and provenance["tokens"] > 0
    assert "final, with the best weights (step 4)" in said and ": the best weights, of step 4, held out, T=0.7" in said
    assert "step 10, held out, T=0.7 (medusa, chain of 3): " in said
    assert re.search(rf"of step 4, held out, T=0\.7 \(medusa, \w+ of {nodes[5] - 1}\): ", said)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (lines[-1]["step"], lines[-1]["heldout/step"], lines[-1]["heldout/tokens_per_pass"]) == (10, 4, 3.5)


@pytest.mark.parametrize(("apart", "kept"), [(0, 4), (5, 10)])
def test_the_last_weights_are_kept_unless_others_are_better_beyond_their_interval(
    apart: int, kept: int, tmp_path: Path, scripted: Callable[..., list[tuple[int, float]]]
) -> None:
    """The figures are 3.0 and 2.9 tokens per pass: equal on every prompt, or with prompts that differ by a third either
    way.
    """
    content = workshop(tmp_path, "medusa")
    scripted([*SCRIPT[:1], 3.0, 2.0, 2.0, 2.9, 2.9], apart)
    said = run(content)
    provenance, heads = finished(content)
    weights = checkpointed(content, kept)
    assert provenance["steps"] == kept
    assert all(torch.equal(tensor, weights[f"heads.{name}"]) for name, tensor in heads.items())
    noted = "step 4 had the best evaluation, 3.000 tokens per target pass, but not beyond its interval over the last"
    assert (noted in said) == ("with the best weights" not in said) == (kept == 10)


def test_evaluations_the_choice_of_weights_and_the_tree_have_prompts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(examples: Any, count: int, *lengths: int) -> list[tuple[int, ...]]:
        asked.append(count)
        return found(examples, min(count, 2), *lengths)

    found = heldout.heldout_prompts
    monkeypatch.setattr(heldout, "heldout_prompts", counted)
    sizes = {"prompts": 3, "best_prompts": 9, "tree_prompts": 5}
    for keep, evaluated in (("last", 3), ("best", 9)):
        run(workshop(tmp_path / keep, "medusa", keep=keep, every=10, **sizes))
        assert asked == [evaluated, evaluated, 5], "evaluations during training, at its end, and the tree"
        asked.clear()
    assert (EvaluationSection().prompts, EvaluationSection(keep="best").evaluated) == (8, 64)


HOLDER = "import sys; from pathlib import Path; from trainer.files.folders import hold\n"
HOLDER += "with hold(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


@contextmanager
def another_holds(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another process that locks the folder until its standard input ends."""
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
        other.send_signal(signal.SIGKILL)
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


def test_a_process_may_hold_a_folder_twice_and_keeps_it_until_the_last_end(tmp_path: Path) -> None:
    with hold(tmp_path):
        with hold(tmp_path):
            pass
        assert (tmp_path / LOCK_NAME).exists()
        done = subprocess.run(
            [sys.executable, "-c", HOLDER, str(tmp_path)], capture_output=True, text=True, check=False
        )
        assert done.returncode == 1 and f"process {os.getpid()} on" in done.stderr
    assert not (tmp_path / LOCK_NAME).exists()
