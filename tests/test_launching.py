"""What a launcher asks for and what runs; what is refused before anything is trained."""

import importlib.util
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from tiny_training import ToyObjective
from torch.distributed.fsdp import MixedPrecisionPolicy

from trainer.processes import build_accelerator, join_processes, sharded_precision
from trainer.recipe.common import TrainingSection
from trainer.run.distributed import build_optimizers, prepare


@pytest.fixture(autouse=True)
def _no_state_of_accelerate() -> Any:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("bf16", MixedPrecisionPolicy(torch.bfloat16, torch.float32, None)), ("no", MixedPrecisionPolicy())],
)
def test_fsdp2_rounds_products_and_neither_sums_of_gradients_nor_losses(
    monkeypatch: pytest.MonkeyPatch, precision: str, expected: MixedPrecisionPolicy
) -> None:
    """accelerate's own policy has bf16 in all three places."""
    plugin = SimpleNamespace(mixed_precision_policy=MixedPrecisionPolicy(*[torch.bfloat16] * 3))
    of_fsdp2 = SimpleNamespace(
        distributed_type=DistributedType.FSDP, is_fsdp2=True, num_processes=1, state=SimpleNamespace(fsdp_plugin=plugin)
    )
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr("trainer.processes.Accelerator", lambda **options: of_fsdp2)
    assert build_accelerator(precision).state.fsdp_plugin.mixed_precision_policy == expected
    assert sharded_precision(precision) == expected


def test_fsdp_on_a_cpu_is_refused_and_not_quietly_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"asks for FSDP, but accelerate starts none on cpu\. .* with .*ddp\.yaml"):
        build_accelerator()


def test_deepspeed_is_not_passed_over_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="accelerate ignores DeepSpeed while ACCELERATE_USE_CPU is set"):
        build_accelerator()


def test_processes_that_would_each_train_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launched as two, but without what tells them of each other."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("trainer.processes.os.environ", {"WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="2 processes were launched, but accelerate sees 1: on a CPU launch with"):
        build_accelerator()


def test_muon_under_deepspeed_is_refused() -> None:
    section = TrainingSection(steps=1, optimizer="muon")
    module = ToyObjective().module
    accelerator: Any = SimpleNamespace(distributed_type=DistributedType.DEEPSPEED)
    with pytest.raises(
        ValueError, match=r"training\.optimizer=muon needs 2 optimizers.*: set training\.optimizer=adamw"
    ):
        prepare(accelerator, module, build_optimizers(module, section), section)


@pytest.mark.parametrize("name", ["DeepSpeed", "FSDP"])
def test_processes_that_do_not_train_are_refused_a_launcher_of_training(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
    with pytest.raises(ValueError, match=f"asks for {name}, but this command does not train: launch with recipes"):
        join_processes()
