"""The launch that is requested and the launch that runs; and errors before anything is trained."""

import importlib.util
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from accelerate.utils import DistributedType
from rich.console import Console
from tiny_training import recipe_content, write_corpus, write_target
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from decoding.errors import UserError
from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.processes import build_accelerator, join_processes, sharded_precision
from trainer.recipe.reading import parse_recipe
from trainer.run import train
from trainer.run.distributed import Runner
from trainer.target import loading


@pytest.fixture(autouse=True)
def no_state_of_accelerate() -> Any:
    AcceleratorState._reset_state(True)
    yield
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize(
    ("precision", "expected"),
    [
        ("bf16", MixedPrecisionPolicy(torch.bfloat16, torch.float32, None, cast_forward_inputs=False)),
        ("no", MixedPrecisionPolicy()),
    ],
)
def test_fsdp2_rounds_products_and_neither_sums_of_gradients_nor_losses(
    monkeypatch: pytest.MonkeyPatch, precision: str, expected: MixedPrecisionPolicy
) -> None:
    """The policy of accelerate has bf16 in all three places."""
    plugin = SimpleNamespace(mixed_precision_policy=MixedPrecisionPolicy(*[torch.bfloat16] * 3))
    of_fsdp2 = SimpleNamespace(
        distributed_type=DistributedType.FSDP, is_fsdp2=True, num_processes=1, state=SimpleNamespace(fsdp_plugin=plugin)
    )
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    monkeypatch.setattr("trainer.processes.Accelerator", lambda **options: of_fsdp2)
    assert build_accelerator(precision).state.fsdp_plugin.mixed_precision_policy == expected
    assert sharded_precision(precision) == expected


@pytest.fixture
def group() -> Iterator[None]:
    """Make this process the only process of a group."""
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_fsdp2_does_not_round_what_a_module_is_given(group: None) -> None:
    """The logsumexp of stored logits is fp32; rounded to bf16, it would change probabilities by up to 6%."""
    mesh, total = init_device_mesh("cpu", (1,)), torch.tensor(25.43)
    assert fully_shard(nn.Identity(), mesh=mesh, mp_policy=sharded_precision("bf16"))(total) == total


def test_the_gradients_of_ddp_stay_in_its_buckets(group: None) -> None:
    """A step of several micro batches would otherwise need the memory of the gradients twice."""
    runner: Any = object.__new__(Runner)
    runner.module = DistributedDataParallel(nn.Linear(2, 2), gradient_as_bucket_view=True)
    runner._optimizers = [torch.optim.SGD(runner.module.parameters())]
    places = []
    for last in (True, True, False, True):  # DDP arranges its buckets anew after the first step
        with nullcontext() if last else runner.module.no_sync():
            runner.module(torch.ones(1, 2)).sum().backward()
        places.append([parameter.grad.data_ptr() for parameter in runner.module.parameters()])
        if last:
            runner.step()
    assert places[1] == places[2] == places[3]


def test_fsdp_on_a_cpu_is_refused_and_not_quietly_something_else(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ValueError, match=r"asks for FSDP, but accelerate starts no FSDP on cpu\. .* use .*ddp\.yaml"):
        build_accelerator()


def test_deepspeed_is_not_passed_over_for_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    with pytest.raises(ValueError, match="accelerate ignores DeepSpeed while ACCELERATE_USE_CPU is set"):
        build_accelerator()


def test_processes_that_would_each_train_alone_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes are launched, but without the variables by which they find each other."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    monkeypatch.setattr("trainer.processes.os.environ", {"WORLD_SIZE": "2"})
    with pytest.raises(ValueError, match="2 processes were launched, but accelerate sees 1: on a CPU, launch with"):
        build_accelerator()


def heads_of_another_shape(folder: Path) -> dict[str, Any]:
    MedusaHeads(MedusaConfig(16, 16, num_heads=2, tree=((0,),))).save_pretrained(folder / "heads")
    return {"heads": {"init": str(folder / "heads"), "num_heads": 3}}


REFUSED_WITHOUT_THE_MODEL: dict[str, tuple[str, Any, str]] = {
    "batches": ("medusa", {}, r"batch_size \(8\) is not a multiple of .*micro_batch_size \(8\) times 3 processes"),
    "optimizers": (
        "medusa",
        {"training": {"optimizer": "muon"}},
        "muon needs 2 optimizers.*: set training.optimizer=adamw",
    ),
    "rows": ("draft", {"data": {"train": "nowhere.jsonl", "heldout": "nowhere.jsonl"}}, "nowhere.jsonl"),
    "lengths": ("draft", {"data": {"max_length": 4096}}, "max_length is 4096, but the target's context has 64 tokens"),
    "room": ("medusa", {"evaluation": {"max_new_tokens": 64}}, "no held-out prompt has at most 0 tokens"),
    "heads": ("medusa", heads_of_another_shape, "heads.init, .*, have num_heads 2 and not 3"),
    "draft": ("draft", {"draft": {"init": {"from_model": "no/such/folder"}}}, "there is no folder no/such/folder"),
}


@pytest.mark.parametrize("name", REFUSED_WITHOUT_THE_MODEL)
def test_what_needs_no_model_is_checked_before_the_target_is_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, changes, message = REFUSED_WITHOUT_THE_MODEL[name]
    write_target(tmp_path / "target", max_position_embeddings=64)
    write_corpus(tmp_path)
    content = recipe_content(tmp_path, kind)
    for key, value in (changes(tmp_path) if callable(changes) else changes).items():
        content.setdefault(key, {}).update(value)
    if name in ("batches", "optimizers"):
        of_type = DistributedType.MULTI_CPU if name == "batches" else DistributedType.DEEPSPEED
        launched = SimpleNamespace(distributed_type=of_type, num_processes=3 if name == "batches" else 1)
        monkeypatch.setattr(train, "build_accelerator", lambda *given, **options: launched)
    monkeypatch.setattr(loading, "load_model", lambda *given: pytest.fail("the target was loaded first"))
    with pytest.raises(UserError, match=message):
        train.run_recipe(parse_recipe(content), Console(quiet=True))
    AcceleratorState._reset_state(True)


@pytest.mark.parametrize("name", ["DeepSpeed", "FSDP"])
def test_processes_that_do_not_train_are_refused_a_launcher_of_training(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv(f"ACCELERATE_USE_{name.upper()}", "true")
    with pytest.raises(ValueError, match=f"asks for {name}, but this command does not train: launch with recipes"):
        join_processes()
