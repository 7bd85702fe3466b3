"""THE training loop: the only file that drives accelerate's step."""

import contextlib
import math
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer

from trainer.data.batch import Batch, collate
from trainer.data.source import BatchSource
from trainer.learning.objective import Objective
from trainer.recipe.common import TrainingSection
from trainer.run.checkpoint import Checkpoints, Progress, Saved
from trainer.run.distributed import Runner, prepare, whole_parameters
from trainer.run.optimizer import build_optimizers, set_learning_rates
from trainer.run.state import gather_moments, gather_weights, load_moments, load_weights


class Interrupted(Exception):  # not an error: the run was asked to stop, and can go on
    """A SIGTERM or SIGINT arrived; the state is saved."""


class Hooks(NamedTuple):
    """Callbacks around the steps, each called with the progress so far."""

    on_step: Callable[[Progress, dict[str, float]], None]
    """On every process, after each optimizer step, with its figures."""
    evaluate: Callable[[Progress], bool]
    """On every process, with whole parameters, and once more where a run resumes at that step; True on one ends it.

    An error must be one on all processes: see `agreed`."""
    on_begin: Callable[[Progress], None] = lambda progress: None
    """On the main process, before the first step, with the progress of the checkpoint that the run resumes."""


def learning_rate_at(step: int, section: TrainingSection) -> float:
    """Return the learning rate of a step (from 0): a linear warm-up, then a cosine down to zero."""
    warmup = round(section.warmup_fraction * section.steps)
    if step < warmup:
        return section.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, section.steps - warmup)
    return section.learning_rate * 0.5 * (1 + math.cos(math.pi * progress))


def train(
    objective: Objective,
    source: BatchSource,
    section: TrainingSection,
    accelerator: Accelerator,
    checkpoints: Checkpoints,
    checkpoint_every: int,
    evaluate_every: int,
    hooks: Hooks,
) -> Progress:
    """Train to the end of the recipe, or of an evaluation's patience, from the last checkpoint if there is one.

    Raises `Interrupted` after a SIGTERM (the state is saved first), and ValueError at a loss, a gradient, or weights
    to be saved that are not finite (the last good checkpoint stays).
    """
    optimizers = build_optimizers(objective.module, section, objective.rates(0).keys())
    saved = _saved_by_all(accelerator, checkpoints)
    progress = saved.progress if saved else Progress(0, 0)
    if saved:
        load_weights(objective.module, saved.weights)
    on_main(accelerator, lambda: hooks.on_begin(progress))
    objective.module.to(accelerator.device)
    runner = prepare(accelerator, objective.module, optimizers, section)
    if saved:
        load_moments(objective.module, optimizers, saved.moments, runner.engine)
    del saved
    with _stop_signals() as stop_requested:
        while progress.step < section.steps:
            due = progress.step > 0 and progress.step % evaluate_every == 0
            if due and _evaluate(hooks, objective, accelerator, progress):
                _save(accelerator, checkpoints, objective, optimizers, runner, progress)
                break
            written = _write(source, objective, section, accelerator, progress.step)
            try:
                figures, tokens = _step(objective, runner, optimizers, source, section, accelerator, progress)
            except _NotFinite as error:
                raise ValueError(f"{error}; {checkpoints.last_good()}: {_REMEDY}") from None
            progress = Progress(progress.step + 1, progress.tokens + tokens)
            hooks.on_step(progress, figures | written)
            last = progress.step == section.steps
            stop = any_process(accelerator, stop_requested())
            if stop or last or progress.step % checkpoint_every == 0:
                _save(accelerator, checkpoints, objective, optimizers, runner, progress)
            if stop and not last:
                raise Interrupted(f"stopped at step {progress.step} of {section.steps}; the state is saved")
    return progress


def _evaluate(hooks: Hooks, objective: Objective, accelerator: Accelerator, progress: Progress) -> bool:
    """Return True on every process if the run ends here."""
    with whole_parameters(accelerator, objective.module):
        return any_process(accelerator, hooks.evaluate(progress))


def _step(
    objective: Objective,
    runner: Runner,
    optimizers: Sequence[Optimizer],
    source: BatchSource,
    section: TrainingSection,
    accelerator: Accelerator,
    progress: Progress,
) -> tuple[dict[str, float], int]:
    """Do one step over the whole batch: the loss is Σ weight * sum / count with counts over all processes."""
    step = progress.step
    _seed_step(section.seed, step, accelerator.process_index)
    learning_rate = learning_rate_at(step, section)
    set_learning_rates(optimizers, learning_rate, objective.rates(step))
    micro_batches = _my_micro_batches(step, source, section, accelerator)
    counts: Tensor = accelerator.reduce(sum(objective.counts(batch, step) for batch in micro_batches), "sum")
    weights = torch.tensor(objective.weights(step), device=counts.device)
    scale: Float[Tensor, " terms"] = weights / counts.clamp(min=1)
    sums = torch.zeros(2, len(objective.terms), dtype=_widest(counts.device), device=counts.device)
    for index, batch in enumerate(micro_batches):
        with runner.accumulating(last=index == len(micro_batches) - 1):
            losses, hits = runner.module(*objective.inputs(batch, step))
            # Data parallelism averages gradients over processes; the counts are of all of them, so the sum is wanted.
            runner.backward((losses * scale).sum() * accelerator.num_processes)
        sums += torch.stack([losses.detach(), hits.detach()])
    sums = accelerator.reduce(sums, "sum") / counts.clamp(min=1)
    loss = float((sums[0] * weights).sum())
    _check_finite("loss", loss, progress)
    norm = runner.clip()
    _check_finite("gradient's norm", norm, progress)
    runner.step()
    objective.observe(sums[1], counts)
    figures = {"loss": loss, "learning_rate": learning_rate, "grad_norm": norm}
    for position, term in enumerate(objective.terms):
        figures[f"loss/{term}"] = float(sums[0, position])
        if not sums[1, position].isnan():
            figures[f"{objective.hit_name}/{term}"] = float(sums[1, position])
    return figures, int(counts[0])


def _widest(device: torch.device) -> torch.dtype:
    """Return the dtype of sums over a batch: fp64, except on Apple's GPUs, which lack it."""
    return torch.float32 if device.type == "mps" else torch.float64


class _NotFinite(Exception):  # which the loop turns into a sentence that knows the checkpoints
    """A figure of a step is NaN or infinite."""


_REMEDY = "lower training.learning_rate, or set training.mixed_precision=no, and start again to resume"


def _check_finite(name: str, value: float, progress: Progress) -> None:
    if not math.isfinite(value):
        raise _NotFinite(f"the {name} is {value} at step {progress.step + 1}")


def check_batch_divides(section: TrainingSection, processes: int) -> None:
    """Raise ValueError unless every process gets the same number of whole micro batches."""
    if section.batch_size % (section.micro_batch_size * processes):
        raise ValueError(
            f"training.batch_size ({section.batch_size}) is not a multiple of training.micro_batch_size "
            f"({section.micro_batch_size}) times {processes} processes"
        )


def _my_positions(section: TrainingSection, accelerator: Accelerator) -> range:
    """Return this process's share of a batch, dealt out in turn so that every process count trains the same batch."""
    check_batch_divides(section, accelerator.num_processes)
    return range(accelerator.process_index, section.batch_size, accelerator.num_processes)


def _write(
    source: BatchSource, objective: Objective, section: TrainingSection, accelerator: Accelerator, step: int
) -> dict[str, float]:
    """Let the source write where a step needs it; its figures, of all processes together."""
    if not source.writes_at(step):
        return {}
    with whole_parameters(accelerator, objective.module):
        figures = source.write(step, _my_positions(section, accelerator))
    values = torch.tensor(list(figures.values()), dtype=_widest(accelerator.device), device=accelerator.device)
    sums: Tensor = accelerator.reduce(values, "sum")
    return dict(zip(figures, sums.tolist(), strict=True))


def _my_micro_batches(
    step: int, source: BatchSource, section: TrainingSection, accelerator: Accelerator
) -> list[Batch]:
    examples = source.examples_at(step, _my_positions(section, accelerator))
    size = section.micro_batch_size
    shares = [examples[start : start + size] for start in range(0, len(examples), size)]
    batches = (collate([each.example for each in share], [each.place for each in share]) for share in shares)
    return [batch.to(accelerator.device) for batch in batches]


def _seed_step(seed: int, step: int, process: int) -> None:
    """Seed dropout and the like by nothing but these, so that a resumed run repeats them."""
    torch.manual_seed((seed * 1_000_003 + step) * 4_099 + process)


def _save(
    accelerator: Accelerator,
    checkpoints: Checkpoints,
    objective: Objective,
    optimizers: Sequence[Optimizer],
    runner: Runner,
    progress: Progress,
) -> None:
    """Gather the state by all processes and write it by the first; ValueError on all for values that are not finite."""
    main = accelerator.is_main_process
    weights = gather_weights(objective.module, runner.engine, keep=main)
    moments = gather_moments(objective.module, optimizers, runner.engine, keep=main)
    saved = Saved(progress, weights, moments)
    broken = saved.non_finite()
    if any_process(accelerator, bool(broken)):
        named = f" ({broken[0]}{f' and {len(broken) - 1} more tensors' if broken[1:] else ''})" if broken else ""
        raise ValueError(
            f"step {progress.step} left weights or moments that are not finite{named}, which are not saved; "
            f"{checkpoints.last_good()}: {_REMEDY}"
        )
    on_main(accelerator, lambda: checkpoints.save(saved))


def _saved_by_all(accelerator: Accelerator, checkpoints: Checkpoints) -> Saved | None:
    """Return the state to go on from: the first process chooses and verifies it, all others read the same."""
    found: list[Saved | None] = []
    on_main(accelerator, lambda: found.append(checkpoints.latest()))
    if accelerator.num_processes == 1:
        return found[0]
    chosen = found[0].progress.step if found and found[0] else 0
    total: Tensor = accelerator.reduce(torch.tensor(chosen, device=accelerator.device), "sum")  # of the others 0
    step, steps = int(total), checkpoints.steps()
    here = step if step in steps or accelerator.is_main_process else max(steps, default=0)
    _check_one_run(accelerator, Progress(here, 0))

    def read_it_too() -> None:
        if not found:
            found.append(checkpoints.read(step) if step else None)

    agreed(accelerator, read_it_too)
    return found[0]


def _check_one_run(accelerator: Accelerator, progress: Progress) -> None:
    """Check that all processes go on from the same step: each reads the checkpoint, and the first alone writes it."""
    steps = accelerator.gather(torch.tensor([progress.step], device=accelerator.device)).tolist()
    if len(set(steps)) > 1:
        raise ValueError(
            f"the processes find checkpoints of different steps ({', '.join(map(str, steps))}): the recipe's output "
            "must be a folder that all machines share"
        )


def on_main(accelerator: Accelerator, work: Callable[[], object]) -> None:
    """Do work on the first process alone; an error of it becomes an error on all, as by `agreed`."""
    agreed(accelerator, work if accelerator.is_main_process else lambda: None)


def agreed(accelerator: Accelerator, work: Callable[[], object]) -> None:
    """Do work whose error on one process becomes an error on all, which would wait for that process for ever.

    All must call this, inside of any context that they have entered together.
    """
    refusal: ValueError | OSError | None = None
    try:
        work()
    except (ValueError, OSError) as error:
        refusal = error
    if any_process(accelerator, refusal is not None):
        raise refusal or ValueError("another process cannot go on: its own message says why")


def any_process(accelerator: Accelerator, flag: bool) -> bool:
    """Return True on every process if it is on one: all must leave the loop at the same step."""
    if accelerator.num_processes == 1:
        return flag
    total: Tensor = accelerator.reduce(torch.tensor(float(flag), device=accelerator.device), "sum")
    return bool(total > 0)


@contextlib.contextmanager
def _stop_signals() -> Iterator[Callable[[], bool]]:
    """Yield a function that is True once a SIGTERM or SIGINT has come; a second signal acts as usual.

    ``accelerate launch`` does not pass a SIGTERM on to its only process: there, the launcher's death counts as one.
    """
    received: list[int] = []
    parent = os.getppid() if "ACCELERATE_MIXED_PRECISION" in os.environ else None  # which the launcher sets
    previous: dict[int, Any] = {}

    def note(number: int, frame: FrameType | None) -> None:
        received.append(number)
        signal.signal(number, previous[number])

    for number in (int(signal.SIGTERM), int(signal.SIGINT)):
        previous[number] = signal.signal(number, note)
    try:
        yield lambda: bool(received) or (parent is not None and os.getppid() != parent)
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
