"""Trains small heads, with everything that depends on the whole batch, under any launcher.

Usage: launched_heads.py FOLDER first|second. The first time, it does a whole run in FOLDER/straight and, if
FOLDER/chain exists, two steps of the run there. It also starts a run in FOLDER/killed that kills itself after a step
without a checkpoint. The second time, it finishes the killed run.
"""

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from tiny_models import tiny_model
from tiny_training import Recorder, await_file, interrupt, toy_examples
from torch import Tensor, nn

import trainer.run.loop
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Offline
from trainer.heads.medusa1 import HeadInputs, MedusaObjective, MedusaTraining
from trainer.learning.objective import TermSums
from trainer.processes import build_accelerator, describe, zero_stage
from trainer.recipe.common import LossSection, TrainingSection
from trainer.recipe.heads import HeadsSection
from trainer.run.checkpoint import Checkpoints, Progress
from trainer.run.distributed import Runner, prepare, whole_parameters
from trainer.run.loop import Hooks, Interrupted, train
from trainer.target.loading import OnlineTarget

STEPS = 8
SETTINGS: dict[str, Any] = {"batch_size": 8, "micro_batch_size": 2, "mixed_precision": "no", "learning_rate": 1e-2}
SECTION = TrainingSection(steps=STEPS, **SETTINGS)
SECTION_OF_HEADS = HeadsSection(num_heads=3, markov_rank=5, loss=LossSection(cross_entropy=1, forward_kl=1))
EXAMPLES = toy_examples(12, vocab=15)  # odd, so that no tensor divides into equal parts by chance


WRAPPERS: list[str] = []
BUCKET_VIEWS: list[bool | None] = []
"""For DDP, whether gradients are views of the buffers that are sent."""


def noting_prepare(*args: Any) -> Runner:
    """Prepare in the same way as the loop, and record the wrapper through which the loop trains."""
    runner = prepare(*args)
    WRAPPERS.append(type(runner.module).__name__)
    BUCKET_VIEWS.append(getattr(runner.module, "gradient_as_bucket_view", None))
    return runner


trainer.run.loop.prepare = noting_prepare


def target() -> CausalLM:
    return CausalLM(tiny_model("llama", vocab=15))


class _Scaled(MedusaTraining):
    """A module with three more parameters, which two processes cannot divide evenly."""

    def __init__(self, training: MedusaTraining) -> None:
        super().__init__(training.heads, SECTION_OF_HEADS)
        self.scale = nn.Parameter(torch.tensor([1.0, 0.9, 0.8]))

    def forward(self, inputs: HeadInputs, scale: Tensor | None = None) -> TermSums:
        factors = self.scale if scale is None else scale * self.scale
        losses, hits, total = super().forward(inputs, factors.detach())
        own = (losses * factors).sum()  # adds only the gradient of the three parameters
        return TermSums(losses * self.scale.detach(), hits, total + own - own.detach())


class _TwoRates(MedusaObjective):
    """An objective whose second head learns twice as fast, so there are two groups of parameters."""

    def rates(self, step: int) -> Mapping[str, float]:
        return {"heads.heads.1.": 2.0, "": 1.0}


def heads_objective(seed: int, dtype: torch.dtype = torch.float32) -> MedusaObjective:
    """Make three heads that start from noise, which depends on the seed, on the same target in ``dtype``."""
    states = OnlineTarget(CausalLM(target().model.to(dtype)))
    objective = _TwoRates(states, SECTION_OF_HEADS, STEPS, torch.float32)
    objective.module = _Scaled(objective.module)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in objective.module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return objective


def accelerator_of_the_launcher() -> Accelerator:
    accelerator = build_accelerator(SECTION.mixed_precision)
    if zero_stage(accelerator) == 3:  # DeepSpeed would not shard parameters as small as these
        zero = accelerator.state.deepspeed_plugin.deepspeed_config["zero_optimization"]
        zero["stage3_param_persistence_threshold"] = 0
    return accelerator


def run(folder: Path, accelerator: Accelerator, recorder: Recorder, seed: int = 0) -> MedusaObjective:
    """Train in ``folder``; decode with the heads at steps 3 and 6, like an evaluation."""
    accelerator.free_memory()  # the state of the previous run is no longer needed
    objective = heads_objective(seed)

    def evaluate(progress: Progress) -> None:
        drafted = Engine(target(), objective.drafter()).decode([1, 2, 3], DecodingConfig(max_new_tokens=6))
        assert drafted.tokens == Engine(target()).decode([1, 2, 3], DecodingConfig(max_new_tokens=6)).tokens
        recorder.evaluated.append(progress.step)

    hooks = Hooks(recorder.hooks().on_step, evaluate)
    source = Offline(EXAMPLES, SECTION.batch_size, SECTION.seed)
    train(objective, source, SECTION, accelerator, Checkpoints(folder, 2, {}), 2, 3, hooks)
    return objective


def kill_with(checkpoint: Path) -> None:
    await_file(checkpoint)
    os.kill(os.getpid(), signal.SIGKILL)


def note(folder: Path, recorder: Recorder, accelerator: Accelerator, **more: Any) -> None:
    if accelerator.is_main_process:
        content = {"figures": recorder.figures, "evaluated": recorder.evaluated, **describe(accelerator), **more}
        (folder / "figures.json").write_text(json.dumps(content))


def save(folder: Path, objective: MedusaObjective, accelerator: Accelerator) -> None:
    with whole_parameters(accelerator, objective.module):
        if accelerator.is_main_process:
            objective.save(folder / "heads")
        accelerator.wait_for_everyone()


def first(folder: Path, accelerator: Accelerator) -> None:
    straight = Recorder()
    objective = run(folder / "straight", accelerator, straight)
    save(folder / "straight", objective, accelerator)
    note(folder / "straight", straight, accelerator, wrapper=WRAPPERS[-1], bucket_views=BUCKET_VIEWS[-1])
    if (folder / "chain").exists():
        chained = Recorder()
        begun = max(int(path.name.removeprefix("step-")) for path in (folder / "chain").glob("step-*"))
        chained.actions[begun + 1] = interrupt  # several processes stop after the next step
        with suppress(Interrupted):
            run(folder / "chain", accelerator, chained, seed=1)
        note(folder / "chain", chained, accelerator)
    killed = Recorder()
    killed.actions[5] = lambda: kill_with(folder / "killed" / "step-00000004")
    run(folder / "killed", accelerator, killed)


def second(folder: Path, accelerator: Accelerator) -> None:
    resumed = Recorder()
    save(folder / "killed", run(folder / "killed", accelerator, resumed, seed=2), accelerator)
    note(folder / "killed", resumed, accelerator)


if __name__ == "__main__":
    accelerator = accelerator_of_the_launcher()
    {"first": first, "second": second}[sys.argv[2]](Path(sys.argv[1]), accelerator)
    accelerator.end_training()
    AcceleratorState._reset_state(True)
