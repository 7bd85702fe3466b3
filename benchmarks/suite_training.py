"""Training throughput and memory: the trainer's own objectives and losses on a target of the wanted cost."""

import time
from collections.abc import Sequence
from statistics import median
from typing import Any

import torch
from suite_decoding import synchronize
from suite_models import Stage
from torch import Tensor

from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Batch, Example, collate
from trainer.drafts.distill import DistillObjective, OnlineTeacher
from trainer.drafts.start import initial_draft
from trainer.heads.medusa import MedusaObjective
from trainer.learning.objective import Objective
from trainer.recipe.common import TrainingSection
from trainer.recipe.draft import DraftSection, FromTargetSection, InitSection
from trainer.recipe.heads import HeadsSection
from trainer.run.feed import send
from trainer.run.optimizer import build_optimizers
from trainer.target.hidden import OnlineTarget


def objective_for(kind: str, stage: Stage, steps: int) -> Objective:
    """Medusa heads, or a draft made of the target's first layer."""
    target = CausalLM(stage.model)
    if kind == "medusa":
        return MedusaObjective(OnlineTarget(target), HeadsSection(num_heads=4), steps, target.dtype)
    # The tokenizer is only written beside what is saved, and nothing is.
    no_tokenizer: Any = None
    start = InitSection(from_target=FromTargetSection())  # in words: where pydantic is missing, nothing fills them in
    section = DraftSection(init=start)
    initial = initial_draft(target, no_tokenizer, section, ())
    return DistillObjective(target, OnlineTeacher(target), no_tokenizer, initial, section)


def measure_training(
    kind: str, stage: Stage, examples: Sequence[Example], batch_size: int, steps: int, seconds: float
) -> dict[str, Any]:
    """Tokens per second of whole optimizer steps, median, and the most memory held, weights included."""
    began = time.perf_counter()
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    objective = objective_for(kind, stage, steps)
    device = stage.model.device
    section = TrainingSection(steps=steps, batch_size=batch_size, micro_batch_size=batch_size)
    optimizers = build_optimizers(objective.module, section)
    samples: list[tuple[int, float]] = []
    losses = []
    for step in range(steps + 2):
        chosen = [examples[(step * batch_size + index) % len(examples)] for index in range(batch_size)]
        on_host = collate(chosen)
        ahead, tokens = objective.ahead(on_host, step), int(on_host.attention_mask.sum())
        batch, ahead = send((on_host, ahead), device)
        synchronize()
        begin = time.perf_counter()
        losses.append(_train_step(objective, batch, ahead, step, optimizers, section))
        synchronize()
        samples.append((tokens, time.perf_counter() - begin))
        if len(samples) >= 4 and time.perf_counter() - began > seconds:
            break
    trained = sum(parameter.numel() for parameter in objective.module.parameters() if parameter.requires_grad)
    return {
        "kind": kind,
        "target_parameters": stage.parameters,
        "trained_parameters": trained,
        "batch_size": batch_size,
        "tokens_per_step": samples[-1][0],
        "steps": len(samples) - 2,
        "tokens_per_second": median(tokens / seconds for tokens, seconds in samples[2:]),
        "peak_memory_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
        "first_loss": losses[0],
        "last_loss": losses[-1],
    }


def _train_step(
    objective: Objective,
    batch: Batch,
    ahead: Any,
    step: int,
    optimizers: Sequence[torch.optim.Optimizer],
    section: TrainingSection,
) -> float:
    """Do a step as `trainer.run.loop` does in one process, without accelerate; return the loss before the step."""
    counts: Tensor = objective.counts(batch, step)
    weights = torch.tensor(objective.weights(step), device=counts.device)
    inputs = objective.inputs(batch, step, ahead)
    with torch.autocast(counts.device.type, torch.bfloat16):
        losses, _ = objective.module(*inputs)
    loss = (losses * weights / counts.clamp(min=1)).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(objective.module.parameters(), section.max_grad_norm)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())
