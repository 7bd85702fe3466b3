"""THE training loop: the only file that drives accelerate's step."""

import math
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import torch
from accelerate import Accelerator
from jaxtyping import Float
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from decoding.errors import UserError
from trainer.data.batch import Batch, BatchSource, collate
from trainer.learning.objective import Objective
from trainer.learning.spans import span
from trainer.processes import agreed, any_process, from_first, on_first
from trainer.recipe.common import TrainingSection
from trainer.run.checkpoint import Checkpoints, Progress, Saved
from trainer.run.distributed import Runner, build_optimizers, prepare, set_learning_rates, whole_parameters
from trainer.run.state import gather_moments, gather_weights, load_moments, load_weights
from trainer.terminal.exit_codes import ExitCode, Stopped, stop_signals


class Interrupted(Stopped):
    """A SIGTERM or SIGINT stopped the run, and its state is saved."""


class Hooks(NamedTuple):
    """Callbacks around the steps, each called with the progress so far."""

    on_step: Callable[[Progress, dict[str, float]], None]
    """Called on every process after each optimizer step.

    If it raises an error, the state is saved and the run ends on all processes.
    """
    evaluate: Callable[[Progress], None]
    """Called on every process with whole parameters, and again if the run resumes at that step.

    It must raise an error either on all processes or on none: see `agreed`.
    """
    on_begin: Callable[[Progress], None] = lambda progress: None
    """Called on the main process before the first step, with the progress from which the run resumes."""


def learning_rate_at(step: int, section: TrainingSection) -> float:
    """Return the learning rate of a step (from 0): it warms up linearly and then follows a cosine to zero."""
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
    """Train to the end of the recipe, resuming from the last checkpoint if there is one.

    Raises `Interrupted` after a SIGTERM or SIGINT, once the state is saved. Raises UserError if the loss, a gradient or
    a weight is not finite; the last good checkpoint stays.
    """
    optimizers = build_optimizers(objective.module, section, objective.rates(0).keys())
    saved = _saved_by_all(checkpoints)
    progress = saved.progress if saved else Progress(0, 0)
    if saved:
        load_weights(objective.module, saved.weights)
    on_first(lambda: hooks.on_begin(progress))
    objective.module.to(accelerator.device)
    runner = prepare(accelerator, objective.module, optimizers, section)
    if saved:
        load_moments(objective.module, optimizers, saved.moments, runner.engine)
    del saved
    parts = Parts(objective, runner, optimizers, section, accelerator, checkpoints)
    feed = Feed(objective, source, section, _my_positions(section, accelerator), accelerator.device)
    failed: BaseException | None = None
    with stop_signals() as stop_requested, feed, ThreadPoolExecutor(1, "checkpoint") as thread, checkpoints.settled():
        writing: Future[None] = thread.submit(lambda: None)
        agreed(lambda: feed.begin(progress.step))
        while progress.step < section.steps:
            if progress.step > 0 and progress.step % evaluate_every == 0:
                feed.settle()  # a CUDA graph cannot be captured while another thread allocates
                with whole_parameters(accelerator, objective.module):
                    hooks.evaluate(progress)
            written = _write(source, objective, section, accelerator, progress.step)
            notes = {**written, _STOP: float(bool(stop_requested() or failed))}
            done = _step(parts, feed, progress, notes)
            progress = Progress(progress.step + 1, progress.tokens + done.tokens)
            try:
                hooks.on_step(progress, done.figures)
            except Exception as error:  # noqa: BLE001  # raised below, once the state is saved
                failed = failed or error  # the others learn this together with the figures of the next step
            failed = failed or (writing.exception() if writing.done() else None)
            last = progress.step == section.steps
            # A single process checks once more; several have already agreed on stopping, with the step's figures.
            stop = done.stop if accelerator.num_processes > 1 else bool(stop_requested() or failed)
            if stop or last or progress.step % checkpoint_every == 0:
                on_first(writing.exception)  # waits, so that memory holds only one copy of the state
                failed = failed or writing.exception()  # raised below or after the next step, once the state is saved
                checkpoints.writing = writing = _save(thread, parts, progress)
            if stop or last:
                on_first(writing.exception)
                agreed(partial(_raise, failed, writing.exception()))
            if stop and not last:
                code = ExitCode.STOPPED if stop_requested() == signal.SIGINT else ExitCode.TERMINATED
                raise Interrupted(f"stopped at step {progress.step} of {section.steps}; the state is saved", code)
    return progress


def _raise(first: BaseException | None, unwritten: BaseException | None) -> None:
    if first and unwritten:
        raise OSError(f"{unwritten}. The run was ending because of {first!r}") from first
    if error := first or unwritten:
        raise error


class Parts(NamedTuple):
    """Everything that each step of a run needs."""

    objective: Objective
    runner: Runner
    optimizers: Sequence[Optimizer]
    section: TrainingSection
    accelerator: Accelerator
    checkpoints: Checkpoints


class _Done(NamedTuple):
    """The result of a step over all processes: figures, and number of tokens; ``stop``: some process must stop."""

    figures: dict[str, float]
    tokens: int
    stop: bool


def _step(parts: Parts, feed: "Feed", progress: Progress, notes: Mapping[str, float]) -> _Done:
    """Do one step over the whole batch. The loss is Σ weight * sum / count, with sums and counts over all processes.

    ``notes`` are figures to sum over the processes. All figures reach the host before the optimizers step, so a loss or
    gradient that is not finite changes neither weights nor moments.
    """
    step, (objective, runner, optimizers, section, accelerator, checkpoints) = progress.step, parts
    # Dropout and similar draws depend only on seed, step and process, so a resumed run repeats them.
    torch.manual_seed((section.seed * 1_000_003 + step) * 4_099 + accelerator.process_index)
    learning_rate = learning_rate_at(step, section)
    set_learning_rates(optimizers, learning_rate, objective.rates(step))
    mine, micro_batches = feed.step(step)
    counts, trained = _summed(accelerator, mine).split([len(objective.terms), 1])
    weights = send(torch.tensor(objective.weights(step)), counts.device)
    scale: Float[Tensor, " terms"] = weights / counts.clamp(min=1)
    sums = _accumulate(parts, micro_batches, step, scale)
    noted = send(torch.tensor(list(notes.values()), dtype=sums.dtype), sums.device)
    summed, noted = _summed(accelerator, torch.cat([sums.flatten(), noted])).split([sums.numel(), len(notes)])
    means = summed.view_as(sums) / counts.clamp(min=1)
    norm = runner.clip()
    on_host = _on_host((means[0] * weights).sum(), means, trained, noted, torch.zeros(0) if norm is None else norm)
    (loss,), terms, (tokens,), said, norms = on_host
    _check_finite("loss", [loss], progress, checkpoints)
    _check_finite("gradient's norm", norms, progress, checkpoints)
    norms += runner.step()
    _check_finite("gradient's norm", norms, progress, checkpoints)
    said_by_name = dict(zip(notes, said, strict=True))
    stop = said_by_name.pop(_STOP) > 0
    figures = {"loss": loss, "learning_rate": learning_rate, "grad_norm": norms[0]}
    return _Done(figures | _by_term(objective, terms) | said_by_name, round(tokens), stop)


def _accumulate(
    parts: Parts, micro_batches: Iterable["MicroBatch"], step: int, scale: Float[Tensor, " terms"]
) -> Float[Tensor, "2 terms"]:
    """Add up the gradients of a step; return the sums of this process's losses and hits."""
    sums = torch.zeros(2, len(scale), dtype=_widest(scale.device), device=scale.device)
    for batch, prefetched, last, _ in micro_batches:
        with parts.runner.accumulating(last):
            inputs = parts.objective.inputs(batch, step, prefetched)
            losses, hits, total = parts.runner.module(*inputs, scale)
            # Data parallelism averages gradients, but with counts over all processes they must be summed.
            parts.runner.backward(total * parts.accelerator.num_processes)
        sums += torch.stack([losses, hits])
    return sums


def _summed(accelerator: Accelerator, values: Tensor) -> Tensor:
    summed: Tensor = accelerator.reduce(values, "sum")
    return summed


def _on_host(*values: Tensor) -> list[list[float]]:
    """Copy tensors to the host as flat lists of numbers; this is the only transfer of a step."""
    wide, device = _widest(values[0].device), values[0].device
    flat = torch.cat([value.detach().flatten().to(device, wide) for value in values])
    numbers = iter(flat.tolist())
    return [list(islice(numbers, value.numel())) for value in values]


def _by_term(objective: Objective, means: Sequence[float]) -> dict[str, float]:
    """Return the figures of each term by name. ``means`` are the means of all losses, then the means of all hits."""
    figures = {}
    for term, loss, hit in zip(objective.terms, means, means[len(objective.terms) :], strict=False):
        figures[f"loss/{term}"] = loss
        if not math.isnan(hit):
            figures[f"{objective.hit_name}/{term}"] = hit
    return figures


def _widest(device: torch.device) -> torch.dtype:
    """Return the dtype of sums over a batch: fp64, or fp32 on Apple's GPUs."""
    return torch.float32 if device.type == "mps" else torch.float64


_STOP = "stop"  # the figure by which a process says that it must stop
_REMEDY = "To resume, lower training.learning_rate or set training.mixed_precision=no"


def _check_finite(name: str, values: Iterable[float], progress: Progress, checkpoints: Checkpoints) -> None:
    for value in values:
        if not math.isfinite(value):
            raise UserError(f"the {name} is {value} at step {progress.step + 1}; {checkpoints.last_good()}. {_REMEDY}")


def _my_positions(section: TrainingSection, accelerator: Accelerator) -> range:
    """Return this process's positions in a batch, dealt in turn: the number of processes does not change the result."""
    return range(accelerator.process_index, section.batch_size, accelerator.num_processes)


def _write(
    source: BatchSource, objective: Objective, section: TrainingSection, accelerator: Accelerator, step: int
) -> Mapping[str, float]:
    """Let the source write texts if the step needs texts; return this process's figures."""
    if not source.writes_at(step):
        return {}
    with whole_parameters(accelerator, objective.module):
        return agreed(lambda: source.write(step, _my_positions(section, accelerator)))


def _save(thread: ThreadPoolExecutor, parts: Parts, progress: Progress) -> Future[None]:
    """Gather the state from all processes, and begin to write it in a thread of the first process.

    Training waits for the copy and for the check of the values, but not for the disk. Raises UserError on all processes
    if the state is not finite.
    """
    objective, runner, optimizers, _, accelerator, checkpoints = parts
    main = accelerator.is_main_process
    weights = gather_weights(objective.module, runner.engine, keep=main)
    moments = gather_moments(objective.module, optimizers, runner.engine, keep=main)
    saved = Saved(progress, weights, moments)
    broken = saved.non_finite()
    if any_process(bool(broken)):
        named = f" ({broken[0]}{f' and {len(broken) - 1} more tensors' if broken[1:] else ''})" if broken else ""
        raise UserError(
            f"step {progress.step} left weights or moments that are not finite{named}; they are not saved, and "
            f"{checkpoints.last_good()}. {_REMEDY}"
        )
    return thread.submit(checkpoints.save, saved, checkpoints.best) if main else thread.submit(lambda: None)


def _saved_by_all(checkpoints: Checkpoints) -> Saved | None:
    """Return the state from which all processes resume: a checkpoint that the first process chooses and verifies."""
    chosen: list[Saved | None] = []
    on_first(lambda: chosen.append(checkpoints.latest()))
    step = from_first(lambda: chosen[0].progress.step if chosen[0] else 0)

    def read() -> Saved | None:
        if chosen or not step:
            return chosen[0] if chosen else None
        if step not in checkpoints.steps():
            raise UserError(
                f"the first process resumes from the checkpoint of step {step}, but the output folder here lacks it: "
                "use an output folder that all machines share"
            )
        return checkpoints.read(step)

    return agreed(read)


# --- micro batches ----------------------------------------------------------------------------------------------------


class MicroBatch(NamedTuple):
    """A micro batch of a step, and the result of `Objective.prefetch` for it."""

    batch: Batch
    prefetched: Any
    last: bool
    """True for the last micro batch of its step."""
    counts: Float[Tensor, " terms+1"]
    """Number of labels of each term, then of trained tokens, in all of the step's micro batches of this process."""


class Feed:
    """This process's micro batches. Each is prepared in a thread while the previous micro batch trains, even if the two
    belong to different steps.

    A micro batch depends only on its step and its index in the step. If the thread fails, taking the next micro batch
    raises its error. Nothing is prepared in advance for a step in which the source writes.
    """

    def __init__(
        self,
        objective: Objective,
        source: BatchSource,
        section: TrainingSection,
        positions: Sequence[int],
        device: torch.device,
    ) -> None:
        """``positions`` are this process's positions in a step's batch."""
        self._objective, self._source, self._section = objective, source, section
        self._positions, self._device = positions, device
        self._per_step = len(positions) // section.micro_batch_size
        self._thread = ThreadPoolExecutor(1, "micro batches")
        self._next: tuple[tuple[int, int], Future[MicroBatch]] | None = None
        # A step, its batches, and its `MicroBatch.counts`; only the thread uses this.
        self._collated: tuple[int, list[Batch], Float[Tensor, " terms+1"]] | None = None

    def __enter__(self) -> "Feed":
        return self

    def __exit__(self, *exception: object) -> None:
        self._thread.shutdown(cancel_futures=True)

    def begin(self, step: int) -> None:
        """Prepare a run's first micro batch, so its errors are raised early; do nothing if the source writes first."""
        if step < self._section.steps and not self._source.writes_at(step):
            self._begin(step, 0).result()

    def step(self, step: int) -> tuple[Float[Tensor, " terms+1"], Iterator[MicroBatch]]:
        """Return the `MicroBatch.counts` and the micro batches of a step (counted from 0), on the device."""
        first = self._take(step, 0)
        rest = (self._take(step, index) for index in range(1, self._per_step))
        micro_batches = (send(micro_batch, self._device) for part in ([first], rest) for micro_batch in part)
        return send(first.counts, self._device), micro_batches

    def settle(self) -> None:
        """Wait until the thread is idle."""
        if self._next is not None:
            wait([self._next[1]])

    def _take(self, step: int, index: int) -> MicroBatch:
        begun = self._next is not None and self._next[0] == (step, index)
        future = self._next[1] if self._next is not None and begun else self._begin(step, index)
        with span("data"):
            micro_batch = future.result()
        self._next = None
        if index + 1 < self._per_step:
            self._begin(step, index + 1)
        elif step + 1 < self._section.steps and not self._source.writes_at(step + 1):
            self._begin(step + 1, 0)
        return micro_batch

    def _begin(self, step: int, index: int) -> Future[MicroBatch]:
        future = self._thread.submit(self._prepare, step, index)
        self._next = (step, index), future
        return future

    def _prepare(self, step: int, index: int) -> MicroBatch:
        """Prepare a micro batch. Its whole step is collated together, because the loss needs the counts of the step."""
        if self._collated is None or self._collated[0] != step:
            drawn, size = self._source.examples_at(step, self._positions), self._section.micro_batch_size
            # Sorted so that micro batches have little padding.
            drawn = sorted(drawn, key=lambda item: len(item.example.tokens))
            shares = [drawn[start : start + size] for start in range(0, len(drawn), size)]
            batches = [
                collate([item.example for item in share], [item.example_index for item in share]) for share in shares
            ]
            labels = torch.stack([self._objective.counts(batch, step) for batch in batches]).sum(0)
            counts = torch.cat((labels, torch.stack([batch.labelled(1).sum() for batch in batches]).sum()[None]))
            self._collated = step, batches, counts
        _, batches, counts = self._collated
        batch, last = batches[index], index + 1 == self._per_step
        return _pinned(MicroBatch(batch, self._objective.prefetch(batch, step), last, counts), self._device)


Tensors = TypeVar("Tensors")


def send(values: Tensors, device: torch.device) -> Tensors:
    """Copy the tensors among these values to a device, without waiting for a GPU."""
    return _for_each_tensor(lambda value: value.to(device, non_blocking=True), _pinned(values, device))


def _pinned(values: Tensors, device: torch.device) -> Tensors:
    """Pin the memory of the tensors among these values if the device is a GPU."""
    return _for_each_tensor(lambda value: value.pin_memory(), values) if device.type == "cuda" else values


def _for_each_tensor(change: Callable[[Any], Any], values: Tensors) -> Tensors:
    changed: Tensors = tree_map_only((Tensor, Batch), change, values)
    return changed
