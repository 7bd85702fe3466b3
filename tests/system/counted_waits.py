"""Counts how often a training step of each kind waits for its device, on a simulated device; prints the counts as JSON.

Run this in a process that has not run a backward pass yet, because PyTorch's engine would not know the device.
Everything counts for which the host would wait for a GPU: numbers that leave it, copies from and to it, and sizes that
it computes.
"""

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import distilling
import dspark_training
import eagle3_training
import torch
import two_devices
from tiny_models import tiny_model
from tiny_training import medusa_on, tiny_tokenizer, toy_examples
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import PreTrainedModel
from two_devices import counting, moved

from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Offline, pack
from trainer.heads.medusa2 import Medusa2Objective
from trainer.learning.objective import Objective
from trainer.recipe.common import TrainingSection
from trainer.recipe.heads import AdaptersSection, HeadsSection
from trainer.run.checkpoint import Progress
from trainer.run.distributed import build_optimizers
from trainer.run.loop import _STOP, Feed, Parts, _step

MICRO_BATCHES = 2
SECTION = TrainingSection(steps=3, batch_size=8, micro_batch_size=8 // MICRO_BATCHES, mixed_precision="no")


def heads(**section: Any) -> Callable[[PreTrainedModel], Objective]:
    return lambda model: medusa_on(CausalLM(model), HeadsSection(num_heads=2, **section))


def joint(model: PreTrainedModel) -> Objective:
    """Make the objective of Medusa-2, whose adapters join the heads at the second step."""
    adapters = AdaptersSection(heads_first_steps=1, base_loss="forward_kl", gradient_checkpointing=False)
    return Medusa2Objective(CausalLM(model), tiny_tokenizer(), HeadsSection(num_heads=2), adapters, SECTION.steps)


KINDS: dict[str, Callable[[PreTrainedModel], Objective]] = {
    "heads": heads(shared_lm_head=True, loss={"acceptance": 1.0}, markov_rank=3),
    "Medusa-2": joint,
    "draft": lambda model: distilling.objective_for(model, loss={"forward_kl": 1.0}),
    "DSpark draft": lambda model: dspark_training.objective_for(model),
    "EAGLE-3 draft": lambda model: eagle3_training.eagle3_for(model),
}


class PlainRunner:
    """A runner for one process without accelerate, which does not know the device."""

    engine = None

    def __init__(self, module: nn.Module, optimizers: list[Optimizer]) -> None:
        self.module, self._optimizers = module, optimizers

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]  # torch's

    def clip(self) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), 1.0)

    def step(self) -> list[float]:
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return []


def waits_of(kind: str, packed: bool) -> list[dict[str, int]]:
    """Count the waits of two steps."""
    model, examples = tiny_model("llama"), pack(toy_examples(), 24) if packed else toy_examples()
    objective, found = KINDS[kind](model), []
    with counting() as waits, two_devices.two_devices() as (device, _):
        moved(model, device), moved(objective.module, device)
        optimizers = build_optimizers(objective.module, SECTION, objective.rates(0).keys())
        runner = PlainRunner(objective.module, optimizers)
        accelerator: Any = SimpleNamespace(
            device=device, num_processes=1, process_index=0, reduce=lambda tensor, how: tensor
        )
        with Feed(objective, Offline(examples, 8, 0), SECTION, range(8), device) as feed:
            for step in range(2):
                waits.clear()
                checkpoints: Any = None  # a step that diverged would be written here
                notes = {"generated/texts": 2.0, _STOP: 0.0}
                parts = Parts(objective, runner, optimizers, SECTION, accelerator, checkpoints)
                done = _step(parts, feed, Progress(step, 0), notes)
                assert done.figures["generated/texts"] == 2.0 and done.figures["loss"] > 0
                found.append(dict(waits))
    return found


def waits_that_are_seen() -> int:
    """Run six operations that wait, once each; return their counts."""
    with counting() as waits, two_devices.two_devices() as (device, _):
        tensor = torch.arange(4).to(device, non_blocking=True)
        assert not waits
        float(tensor[0])
        tensor.nonzero()
        tensor[tensor > 1]
        tensor.cpu()
        torch.arange(4).to(device)
        bool((tensor > 1).any())
    return waits.total()


if __name__ == "__main__":
    both = {"padded": False, "packed": True}
    counts = {f"{kind}, {name}": waits_of(kind, packed) for kind in KINDS for name, packed in both.items()}
    print(json.dumps({"seen": waits_that_are_seen(), "steps": counts}))
