"""What a run will take, said before anything is spent: parameters, memory, disk, tokens, hours.

Parameters, tokens and disk are counted. Memory is an estimate by parts: what is held is counted, what passes through a
step is a rule of thumb. Hours come from a few real steps on this machine.
"""

import shutil
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from rich.table import Table
from torch import nn

from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Example, batch_indices
from trainer.data.dataset import Dataset, load_dataset
from trainer.drafts.distill import DistillTraining
from trainer.learning.fused import CHUNK_BYTES
from trainer.quickstart import resolve
from trainer.recipe.common import TrainingSection
from trainer.recipe.draft import DraftRecipe
from trainer.recipe.heads import FeaturesSection, MedusaRecipe
from trainer.recipe.pretrain import PretrainRecipe
from trainer.recipe.recipe import AnyRecipe
from trainer.run.assemble import Job, assemble, check_folders
from trainer.run.loop import check_batch_divides
from trainer.run.measuring import Measured, measure, peak_memory, quiet, writer_of
from trainer.run.optimizer import build_optimizers
from trainer.run.train import ensure_built
from trainer.target.store import estimate_bytes
from trainer.terminal.console import standard_output, title

_LIBRARIES = 100_000_000  # what PyTorch and others load and keep of their own once they work, on a CPU
_SOFTMAXED = 8  # tensors of fp32 that a divergence makes of a chunk's logits on a GPU; on a CPU they are in its cache


@dataclass(frozen=True)
class Launch:
    """How the run will be launched: processes of one device each, and DeepSpeed's ZeRO stage, 0 for none."""

    processes: int = 1
    zero_stage: int = 0

    def __post_init__(self) -> None:
        if self.processes < 1 or not 0 <= self.zero_stage <= 3:
            raise ValueError(
                f"--processes is {self.processes} and --zero-stage {self.zero_stage}: give 1 or more and 0 to 3"
            )

    def shared(self, size: float, stage: int) -> int:
        """What a device holds of ``size`` bytes that ZeRO divides from ``stage`` on."""
        return round(size / self.processes) if self.zero_stage >= stage else round(size)


@dataclass(frozen=True)
class Tokens:
    """What the steps of a run read, each sequence counted as often as it is read."""

    sequences: int
    read: int
    trained: int
    epochs: float


@dataclass(frozen=True)
class Plan:
    """What a run will take. Bytes are those of one device for ``memory``, of the whole run for ``disk``."""

    parameters: Mapping[str, int]
    """Trained ones, by part."""
    memory: Mapping[str, int]
    disk: Mapping[str, int]
    tokens: Tokens
    steps: int
    evaluations: int
    measured: Measured | None
    measured_memory: int | None
    """What the steps measured, in one process, held beyond the program itself."""

    @property
    def hours(self) -> float | None:
        """Of all processes together, if each is as fast as this one."""
        if self.measured is None:
            return None
        found = self.measured
        stepping = sum(pace.step * pace.phase.steps for pace in found.paces)
        return (stepping + found.evaluation * self.evaluations + found.writing) / 3600


def plan_training(recipe: AnyRecipe, launch: Launch | None = None, steps: int = 5) -> Plan:
    """The plan of a recipe, from ``steps`` real ones (0: from none); nothing is left behind on the disk.

    A recipe with features or a teacher cache is measured on those of a few rows. Raises ValueError for what training
    refuses.
    """
    launch, before = launch or Launch(), peak_memory()
    if steps < 0:
        raise ValueError(f"--steps is {steps}: give how many steps to measure the time by, or 0 for none")
    check_batch_divides(recipe.training, launch.processes)
    check_folders(recipe)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        job = assemble(_small(recipe, Path(scratch), steps), device, quiet())
        dataset = job.dataset
        if _stores(recipe):
            dataset = load_dataset(resolve(recipe.data.train), recipe.data, job.tokenizer)
        tokens = count_tokens(dataset.examples, recipe.training)
        memory = memory_of(recipe, job, launch, largest_batch(dataset.examples, recipe.training, launch.processes))
        measured = measure(job, launch.processes, steps, dataset.examples) if steps else None
        return Plan(
            count_parameters(job.objective.module),
            memory,
            disk_of(recipe, job, dataset),
            tokens,
            recipe.training.steps,
            _evaluations(recipe),
            measured,
            measured.peak_bytes - before if measured else None,
        )


def _stores(recipe: AnyRecipe) -> bool:
    """Whether it writes features or a teacher cache."""
    if isinstance(recipe, DraftRecipe):
        return recipe.draft.teacher is not None
    return _features(recipe) is not None


def _small(recipe: AnyRecipe, scratch: Path, steps: int) -> AnyRecipe:
    """The recipe with what it stores for a few rows in a scratch folder; any other as it is."""
    if not _stores(recipe):
        return recipe
    rows = min(recipe.data.max_rows or 1 << 30, recipe.training.batch_size * max(steps, 1))
    few = {"data": recipe.data.model_copy(update={"max_rows": rows})}
    if isinstance(recipe, DraftRecipe):
        assert recipe.draft.teacher is not None
        teacher = recipe.draft.teacher.model_copy(update={"folder": str(scratch / "teacher")})
        return recipe.model_copy(update={"draft": recipe.draft.model_copy(update={"teacher": teacher}), **few})
    assert isinstance(recipe, MedusaRecipe) and recipe.features is not None
    features = recipe.features.model_copy(update={"folder": str(scratch / "features"), "keep_target": True})
    return recipe.model_copy(update={"features": features, **few})


def _evaluations(recipe: AnyRecipe) -> int:
    """Those in between, if the target stays for them, and the last."""
    features = _features(recipe)
    if isinstance(recipe, PretrainRecipe):
        return 0
    if features is not None and not features.keep_target:
        return 1
    return (recipe.training.steps - 1) // recipe.evaluation.every + 1


def count_parameters(module: nn.Module) -> dict[str, int]:
    """Trained parameters by part: heads, adapters, a draft, a model."""
    counts: Counter[str] = Counter()
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            counts["adapters" if "lora_" in name else name.partition(".")[0]] += parameter.numel()
    return dict(counts)


def count_tokens(examples: Sequence[Example], section: TrainingSection) -> Tokens:
    """Exactly what the run's steps read, in its own order."""
    sequences = section.steps * section.batch_size
    whole, rest = divmod(sequences, len(examples))
    last = batch_indices(whole, len(examples), len(examples), section.seed)[:rest]
    read = [len(example.tokens) for example in examples]
    trained = [sum(example.trained) for example in examples]
    return Tokens(
        sequences,
        whole * sum(read) + sum(read[index] for index in last),
        whole * sum(trained) + sum(trained[index] for index in last),
        sequences / len(examples),
    )


class Largest(NamedTuple):
    """Of the micro batches: the most positions of one, padding included, and the most trained tokens of one."""

    positions: int
    trained: int


def largest_batch(examples: Sequence[Example], section: TrainingSection, processes: int) -> Largest:
    """Among the micro batches of the run's first epoch."""
    positions = trained = 0
    for step in range(min(section.steps, -(-len(examples) // section.batch_size))):
        indices = batch_indices(step, section.batch_size, len(examples), section.seed)
        for process in range(processes):
            share = indices[process::processes]
            for start in range(0, len(share), section.micro_batch_size):
                batch = [examples[index] for index in share[start : start + section.micro_batch_size]]
                positions = max(positions, len(batch) * max(len(example.tokens) for example in batch))
                trained = max(trained, sum(sum(example.trained) for example in batch))
    return Largest(positions, trained)


def memory_of(recipe: AnyRecipe, job: Job, launch: Launch, largest: Largest) -> dict[str, int]:
    """Bytes on one device at the height of a step, by part."""
    trained = sum(count_parameters(job.objective.module).values())
    parts: dict[str, int] = {}
    features = _features(recipe)
    if job.target is not None and (features is None or features.keep_target):
        assert job.target.model is not None
        parts["target"] = _frozen_bytes(job, job.target.model)
    buckets = 2 if launch.processes > 1 and launch.zero_stage == 0 else 1  # DDP sums gradients in a copy
    parts["trained weights, fp32"] = launch.shared(4 * trained, 3)
    parts["gradients, fp32"] = launch.shared(4 * trained * buckets, 2)
    parts["optimizer's moments, fp32"] = launch.shared(_moment_bytes(job, recipe.training), 1)
    if recipe.training.mixed_precision == "bf16":
        parts["weights in bf16"] = 2 * trained
    parts["activations and logits, roughly"] = _passing_bytes(recipe, job, largest)
    if next(job.objective.module.parameters()).device.type == "cpu":
        parts["libraries, roughly"] = _LIBRARIES
    return parts


def _frozen_bytes(job: Job, target: CausalLM) -> int:
    """Of a target without its adapters."""
    trained = {id(p) for p in job.objective.module.parameters() if p.requires_grad}
    return sum(p.numel() * p.itemsize for p in target.model.parameters() if id(p) not in trained)


def _moment_bytes(job: Job, section: TrainingSection) -> int:
    """AdamW keeps two moments of each parameter, Muon one."""
    return sum(
        parameter.numel() * (4 if isinstance(optimizer, torch.optim.Muon) else 8)
        for optimizer in build_optimizers(job.objective.module, section, job.objective.rates(0).keys())
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


def _passing_bytes(recipe: AnyRecipe, job: Job, largest: Largest) -> int:
    """What passes through a step.

    A trained transformer layer keeps about 10 hidden and 4 inner numbers of each position for its backward pass; a
    frozen one is at work on 4 and 3, and keeps nothing. A head keeps its input, and three states of each block, in
    fp32. An adapted linear layer keeps what it reads twice in fp32, with a mask for dropout. Logits of heads and
    drafts exist a chunk at a time, and so do those they are held against.
    """
    positions, trained = largest
    wide = 2 if recipe.training.mixed_precision == "bf16" else 4
    if isinstance(recipe, PretrainRecipe):
        shape = recipe.model
        layer = 10 * shape.hidden_size + 4 * shape.intermediate_size
        vocab = job.objective.module.get_parameter("model.lm_head.weight").shape[0]
        return positions * layer * shape.num_hidden_layers * wide + trained * vocab * (2 * wide + 8)
    assert job.target is not None and job.target.model is not None
    target = job.target.model
    hidden, inner = target.hidden_size, _inner_size(target)
    frozen = positions * (4 * hidden + 3 * inner) * target.dtype.itemsize
    if isinstance(recipe, DraftRecipe):
        return _draft_bytes(recipe, job, largest, wide) + (0 if recipe.draft.teacher else frozen)
    heads = trained * hidden * 4 * recipe.heads.num_heads * (2 + 3 * recipe.heads.num_layers)
    heads += min(CHUNK_BYTES, trained * target.vocab_size * wide) * (1 if target.device.type == "cpu" else 3)
    if recipe.adapters is None:
        return heads + (0 if recipe.features else frozen)
    if recipe.adapters.gradient_checkpointing:  # layers keep what they read, and are run again one by one
        layers = target.num_layers * hidden * wide + _layer_bytes(target, wide, adapted=True)
    else:
        layers = target.num_layers * _layer_bytes(target, wide, adapted=True)
    return heads + positions * layers


def _layer_bytes(model: CausalLM, wide: int, adapted: bool) -> int:
    """What a layer keeps of a position."""
    hidden, inner = model.hidden_size, _inner_size(model)
    return (10 * hidden + 4 * inner) * wide + (9 * (6 * hidden + inner) if adapted else 0)


def _draft_bytes(recipe: DraftRecipe, job: Job, largest: Largest, wide: int) -> int:
    """What passes through a draft: its layers, chunks of logits, and the gradients of what they are made from."""
    module = job.objective.module
    assert isinstance(module, DistillTraining)
    draft, lm_head = CausalLM(module.base), module.base.get_output_embeddings().weight
    on_cpu, softmaxed = lm_head.device.type == "cpu", 4 * _SOFTMAXED // wide
    chunk = min(CHUNK_BYTES, largest.trained * len(lm_head) * wide)
    logits = chunk * ((1 if recipe.draft.teacher else 2) + (0 if on_cpu else softmaxed))
    gradients = largest.trained * draft.hidden_size * wide + (8 * lm_head.numel() if lm_head.requires_grad else 0)
    layer = _layer_bytes(draft, wide, adapted=recipe.draft.lora is not None)
    return largest.positions * draft.num_layers * layer + logits + gradients


def _inner_size(target: CausalLM) -> int:
    config = target.model.config.get_text_config(decoder=True)
    inner: int = getattr(config, "intermediate_size", None) or 4 * target.hidden_size
    return inner


def disk_of(recipe: AnyRecipe, job: Job, dataset: Dataset) -> dict[str, int]:
    """Bytes of all a run writes. One checkpoint more than are kept exists while it is written."""
    trained = sum(count_parameters(job.objective.module).values())
    parts: dict[str, int] = {}
    wide = 4
    if job.target is not None:
        wide = job.target.dtype.itemsize
        writer = writer_of(recipe, job.target, job.tokenizer, dataset)
        if writer is not None:
            parts[writer.identity.noun] = estimate_bytes(dataset.examples, writer.identity)
    checkpoint = 4 * trained + _moment_bytes(job, recipe.training)
    parts[f"checkpoints, {recipe.checkpoint.keep} and one being written"] = (recipe.checkpoint.keep + 1) * checkpoint
    if recipe.evaluation.keep == "best":  # of each checkpoint's time the best, for a run that goes on from it
        parts[f"the best weights, {recipe.checkpoint.keep + 1} times"] = (recipe.checkpoint.keep + 1) * 4 * trained
    if isinstance(job.objective.module, DistillTraining):
        trained = sum(parameter.numel() for parameter in job.objective.module.base.parameters())
    parts["the finished artefact"] = trained * wide
    if isinstance(recipe, MedusaRecipe) and recipe.adapters is not None and recipe.adapters.export == "merged":
        assert job.target is not None and job.target.model is not None
        parts["the merged target"] = _frozen_bytes(job, job.target.model)
    return parts


def _features(recipe: AnyRecipe) -> FeaturesSection | None:
    return recipe.features if isinstance(recipe, MedusaRecipe) else None


def table_of(plan: Plan, recipe: AnyRecipe, launch: Launch) -> Table:
    """The plan to read."""
    table = Table("what", "part", "amount", title=title(f"{recipe.name}: what it will take"))

    def add(what: str, parts: Mapping[str, str]) -> None:
        for part, amount in parts.items():
            table.add_row(what, part, amount)
            what = ""
        table.add_section()

    add("trained parameters", {part: f"{count:,}" for part, count in plan.parameters.items()})
    add(_memory_title(launch), {**_sizes(plan.memory), **_measured_peak(plan)})
    add("disk", {**_sizes(plan.disk), "free now": _size(_free(recipe))})
    tokens = plan.tokens
    add(
        "data",
        {
            "steps × batch": f"{plan.steps:,} × {recipe.training.batch_size} = {tokens.sequences:,} sequences",
            "epochs": f"{tokens.epochs:.2f}",
            "tokens read": f"{tokens.read:,}",
            "of them trained": f"{tokens.trained:,}",
        },
    )
    add("time, by what was measured here", _time(plan))
    return table


def _memory_title(launch: Launch) -> str:
    if launch.processes == 1:
        return "memory, estimated"
    zero = f", ZeRO-{launch.zero_stage}" if launch.zero_stage else ""
    return f"memory of each of {launch.processes} devices, estimated{zero}"


def _sizes(parts: Mapping[str, int]) -> dict[str, str]:
    return {**{part: _size(size) for part, size in parts.items()}, "together": _size(sum(parts.values()))}


def _size(count: float) -> str:
    return f"{count / 1e9:,.3f} GB"


def _measured_peak(plan: Plan) -> dict[str, str]:
    if plan.measured_memory is None:
        return {}
    return {"measured here, one process": _size(plan.measured_memory)}


def _free(recipe: AnyRecipe) -> int:
    output = Path(recipe.output).absolute()
    return shutil.disk_usage(next(path for path in (output, *output.parents) if path.exists())).free


def _time(plan: Plan) -> dict[str, str]:
    if plan.measured is None or plan.hours is None:
        return {"not measured": "--steps 5 measures five steps"}
    found = plan.measured
    rows = {}
    for pace in found.paces:
        seconds = f"{pace.step:.2f} s ({pace.fastest:.2f} to {pace.slowest:.2f})"
        rows[pace.phase.name] = seconds if len(found.paces) == 1 else f"{seconds} × {pace.phase.steps:,}"
    if plan.evaluations:
        rows["an evaluation"] = f"{found.evaluation:.1f} s × {plan.evaluations}"
    if found.writing:
        rows["writing what it learns from"] = f"{found.writing / 3600:.2f} h"
    return {**rows, "together": f"{plan.hours:.2f} h"}


def print_plan(recipe: AnyRecipe, launch: Launch, steps: int) -> None:
    """`headstart plan-training`; the embedded target is built first if it is not there."""
    ensure_built(getattr(recipe, "target", None))
    standard_output().print(table_of(plan_training(recipe, launch, steps), recipe, launch))
