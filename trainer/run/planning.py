"""Plan of a run before anything is spent: parameters, memory, disk, tokens, hours.

Parameters, tokens and disk are counted. Memory is an estimate by parts: weights and their state are counted,
activations follow a rule of thumb. Hours come from a few real steps on this machine.
"""

import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from trainer.data.batch import Example, batch_indices
from trainer.data.dataset import Dataset, load_training_data
from trainer.job import Job, Kind, Largest, trained_numbers
from trainer.learning.memory import frozen_bytes
from trainer.processes import Process
from trainer.recipe.common import TrainingSection
from trainer.recipe.recipe import AnyRecipe
from trainer.run.kinds import check_folders, kind_of
from trainer.run.loop import check_batch_divides
from trainer.run.measuring import Measured, measure, peak_memory, quiet
from trainer.run.optimizer import build_optimizers
from trainer.target.loading import Target
from trainer.target.store import estimate_bytes

_LIBRARIES = 100_000_000  # memory of PyTorch's and other libraries' own on a CPU, once they have worked


@dataclass(frozen=True)
class Launch:
    """The run's launch: processes of one device each, and DeepSpeed's ZeRO stage, 0 for none."""

    processes: int = 1
    zero_stage: int = 0

    def __post_init__(self) -> None:
        if self.processes < 1 or not 0 <= self.zero_stage <= 3:
            raise ValueError(
                f"--processes is {self.processes} and --zero-stage {self.zero_stage}: give 1 or more and 0 to 3"
            )

    def shared(self, size: float, stage: int) -> int:
        """Return the bytes on one device of ``size`` bytes that ZeRO divides from ``stage`` on."""
        return round(size / self.processes) if self.zero_stage >= stage else round(size)


@dataclass(frozen=True)
class Tokens:
    """Tokens that the steps of a run read, each sequence counted as often as it is read."""

    sequences: int
    read: int
    trained: int
    epochs: float


@dataclass(frozen=True)
class Plan:
    """Plan of a run. Bytes are those of one device for ``memory``, of the whole run for ``disk``."""

    parameters: Mapping[str, int]
    """Trained parameters by part."""
    memory: Mapping[str, int]
    disk: Mapping[str, int]
    tokens: Tokens
    steps: int
    evaluations: int
    measured: Measured | None
    measured_memory: int | None
    """Bytes held by the measured steps in one process, beyond the program itself."""

    @property
    def hours(self) -> float | None:
        """Wall-clock hours, if every process is as fast as this one; None where nothing was measured."""
        if self.measured is None:
            return None
        found = self.measured
        stepping = sum(pace.step * pace.phase.steps for pace in found.paces)
        return (stepping + found.evaluation * self.evaluations + found.writing) / 3600


def plan_training(recipe: AnyRecipe, launch: Launch | None = None, steps: int = 5) -> Plan:
    """Plan a run of the recipe by ``steps`` real steps of it (0: by none); nothing is left behind on the disk.

    A recipe with features or a teacher cache is measured on those of a few rows. Raises ValueError for what training
    refuses.
    """
    launch, before, kind = launch or Launch(), peak_memory(), kind_of(recipe)
    if steps < 0:
        raise ValueError(f"--steps is {steps}: give how many steps to measure the time by, or 0 for none")
    check_batch_divides(recipe.training, launch.processes)
    check_folders(kind)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        small = kind_of(kind.small(recipe.training.batch_size * max(steps, 1), Path(scratch)))
        job = small.assemble(device, Process(console=quiet()))
        dataset = job.dataset if kind.stored is None else load_training_data(recipe.data, job.tokenizer)
        tokens = count_tokens(dataset.examples, recipe.training)
        memory = memory_of(kind, job, launch, largest_batch(dataset.examples, recipe.training, launch.processes))
        measured = measure(small, job, launch.processes, steps, dataset.examples) if steps else None
        return Plan(
            count_parameters(job.objective.module),
            memory,
            disk_of(job, dataset),
            tokens,
            recipe.training.steps,
            _evaluations(kind),
            measured,
            measured.peak_bytes - before if measured else None,
        )


def _evaluations(kind: Kind) -> int:
    """Count the evaluations: the last, and those before it if the target stays; 0 without a target."""
    if kind.target is None:
        return 0
    if not kind.keeps_target:
        return 1
    return (kind.recipe.training.steps - 1) // kind.recipe.evaluation.every + 1


def count_parameters(module: nn.Module) -> dict[str, int]:
    """Count the trained parameters by part: heads, adapters, a draft, a model."""
    counts: Counter[str] = Counter()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            counts["adapters" if "lora_" in name else name.partition(".")[0]] += parameter.numel()
    return dict(counts)


def count_tokens(examples: Sequence[Example], section: TrainingSection) -> Tokens:
    """Count the tokens that the run's steps read, exactly, in the run's own order."""
    sequences = section.steps * section.batch_size
    whole, rest = divmod(sequences, len(examples))
    last = batch_indices(whole, len(examples), len(examples), section.seed)[:rest]
    read = [len(example.tokens) for example in examples]
    trained = [int(example.trained.sum()) for example in examples]
    return Tokens(
        sequences,
        whole * sum(read) + sum(read[index] for index in last),
        whole * sum(trained) + sum(trained[index] for index in last),
        sequences / len(examples),
    )


def largest_batch(examples: Sequence[Example], section: TrainingSection, processes: int) -> Largest:
    """Return the largest sizes among the micro batches of the run's first epoch."""
    positions = trained = 0
    for step in range(min(section.steps, -(-len(examples) // section.batch_size))):
        indices = batch_indices(step, section.batch_size, len(examples), section.seed)
        for process in range(processes):
            share = indices[process::processes]
            for start in range(0, len(share), section.micro_batch_size):
                batch = [examples[index] for index in share[start : start + section.micro_batch_size]]
                positions = max(positions, len(batch) * max(len(example.tokens) for example in batch))
                trained = max(trained, sum(int(example.trained.sum()) for example in batch))
    return Largest(positions, trained)


def memory_of(kind: Kind, job: Job, launch: Launch, largest: Largest) -> dict[str, int]:
    """Return the bytes on one device at the height of a step, by part."""
    section, trained = job.recipe.training, trained_numbers(job.objective)
    parts: dict[str, int] = {}
    if kind.keeps_target and isinstance(job.target, Target):
        parts["target"] = frozen_bytes(job.target.model, job.objective.module)
    buckets = 2 if launch.processes > 1 and launch.zero_stage == 0 else 1  # DDP sums gradients in a copy
    parts["trained weights, fp32"] = launch.shared(4 * trained, 3)
    parts["gradients, fp32"] = launch.shared(4 * trained * buckets, 2)
    parts["optimizer's moments, fp32"] = launch.shared(_moment_bytes(job), 1)
    if section.mixed_precision == "bf16":
        parts["weights in bf16"] = 2 * trained
    parts["activations and logits, roughly"] = job.passing_bytes(largest)
    if next(job.objective.module.parameters()).device.type == "cpu":
        parts["libraries, roughly"] = _LIBRARIES
    return parts


def _moment_bytes(job: Job) -> int:
    """Return the bytes of the optimizers' moments: AdamW keeps two of each parameter, Muon one."""
    objective = job.objective
    return sum(
        parameter.numel() * (4 if isinstance(optimizer, torch.optim.Muon) else 8)
        for optimizer in build_optimizers(objective.module, job.recipe.training, objective.rates(0).keys())
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def disk_of(job: Job, dataset: Dataset) -> dict[str, int]:
    """Return the bytes of all a run writes. One checkpoint more than are kept exists while it is written.

    ``dataset`` holds all training rows, where the job has few.
    """
    trained, keep = trained_numbers(job.objective), job.recipe.checkpoint.keep
    parts: dict[str, int] = {}
    if (writer := job.writer(dataset.examples)) is not None:
        parts[writer.identity.noun] = estimate_bytes(dataset.examples, writer.identity)
    parts[f"checkpoints, {keep} and one being written"] = (keep + 1) * (4 * trained + _moment_bytes(job))
    if job.recipe.evaluation.keep == "best":  # at each checkpoint, for a run resumed from it
        parts[f"the best weights, {keep + 1} times"] = (keep + 1) * 4 * trained
    return parts | job.artefact_bytes()
