"""Drafts that read states, under several launchers: two processes, whole or sharded, train the same as one process."""

from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_distributed import FSDP2, cpu_of
from whole_runs import (
    ACCELERATE,
    DIRECT,
    ROOT,
    SCRIPT,
    TORCHRUN,
    losses,
    provenance,
    repeated,
    run,
    write_recipe,
    write_workshop,
)

DRAFTS = {
    "dspark": {"block_size": 3, "markov_rank": 5, "anchors": 4, "layers": 1, "mask_token": "<user>"},
    "eagle3": {"steps": 3, "anchors": 4, "taps": [0]},
}
KILLED = str(ROOT / "tests" / "system" / "launched_killed.py")
RESTARTING = [*TORCHRUN, "--standalone", "--nproc_per_node", "2", "--max-restarts", "2", KILLED]
POLICY = {"offline": 0.5, "loop": 0.5, "loop_trains": "all", "max_new_tokens": 6, "every": 3}
AGAIN = "draft.gradient_checkpointing=true"  # runs the draft's layers again; the weights stay the same


@pytest.fixture(scope="module", params=DRAFTS)
def kind(request: pytest.FixtureRequest) -> str:
    found: str = request.param
    return found


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_workshop(tmp_path_factory.mktemp("workshop"))


def recipe(workshop: Path, kind: str, name: str) -> tuple[str, Path]:
    """Write a recipe in which the loop writes half of the rows, with evaluations during the run."""
    name = f"{kind}-{name}"
    path = Path(write_recipe(workshop, "draft", workshop / name, steps=6, micro_batch_size=2, learning_rate=1e-2))
    content = yaml.safe_load(path.read_text())
    content["draft"] = {kind: DRAFTS[kind], "policy": POLICY}
    content["evaluation"] |= {"every": 3}
    path.write_text(yaml.safe_dump(content))
    return str(path), workshop / name


@pytest.fixture(scope="module")
def alone(workshop: Path, kind: str) -> Path:
    path, output = recipe(workshop, kind, "alone")
    run([*DIRECT, path], workshop)
    return output


def check_equal(output: Path, alone: Path) -> None:
    assert losses(output) == pytest.approx(losses(alone), rel=1e-4)
    ours, theirs = (load_file(folder / "final" / "model.safetensors") for folder in (output, alone))
    assert {name: tensor.shape for name, tensor in ours.items()} == {name: t.shape for name, t in theirs.items()}
    assert all(torch.allclose(ours[name], theirs[name], atol=1e-3) for name in ours)


def test_two_processes_train_the_draft_as_one_does_though_two_are_killed(
    alone: Path, workshop: Path, kind: str
) -> None:
    """After each kill -9 torchrun restarts both processes, which resume from the last whole checkpoint, inside a
    window.
    """
    path, output = recipe(workshop, kind, "pair")
    run([*RESTARTING, path, "checkpoint.every=2", AGAIN], workshop)
    assert provenance(output)["num_processes"] == 2
    # The second kill may come after step 5 or 6, because the checkpoint of step 4 is written during these steps.
    steps = [line["step"] for line in repeated(output) if "loss" in line]
    assert steps in ([3, 3, 4], [3, 3, 4, 5], [3, 3, 4, 5, 6])
    check_equal(output, alone)


@pytest.mark.parametrize("launch", ["fsdp2", "zero3"])
def test_two_processes_that_shard_the_draft_train_it_as_one_does(
    alone: Path, workshop: Path, kind: str, launch: str
) -> None:
    if launch == "zero3":
        pytest.importorskip("deepspeed", reason="DeepSpeed is an optional extra")
    path, output = recipe(workshop, kind, launch)
    config = str(ROOT / "recipes" / "accelerate" / "zero3.yaml")
    zero = [*ACCELERATE, "--main_process_port", "0", "--config_file", config]
    run([*(FSDP2 if launch == "fsdp2" else zero), SCRIPT, path, AGAIN], workshop, ACCELERATE_USE_CPU=cpu_of(launch))
    assert provenance(output)["num_processes"] == 2
    check_equal(output, alone)
