"""The held-out evaluations of a run, and the decisions made by them."""

import hashlib
import json
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.evaluate import count_steps
from decoding.metrics import StepCount, acceptance
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids
from decoding.model.stored import check_finite
from decoding.rules.sampling import SamplingConfig
from trainer.data.dataset import Dataset, heldout_prompts
from trainer.files.folders import check_seal, write_folder
from trainer.job import Job
from trainer.learning.objective import Objective
from trainer.processes import agreed, from_first, on_first
from trainer.recipe.common import EvaluationSection
from trainer.run.checkpoint import Checkpoints, Progress, bound
from trainer.run.log import Evaluation, Log
from trainer.run.state import gather_weights, load_weights
from trainer.target.loading import StoredTarget, Target

Row = tuple[int, ...]
CRITERION = "tokens_per_pass"
_EVALUATION, _WEIGHTS = "evaluation.json", "weights.safetensors"


class Evaluator:
    """The real decoding loop on the same prompts, with the same seeds and in the same batches, every time.

    The batches are dealt over the processes of the accelerator (None: one process), all of which must call each method
    together and get the same from it: every prompt has a seed of its own, and in bf16, where a near-tie may fall
    otherwise beside other texts, the same texts beside it at any number of processes.
    """

    def __init__(
        self,
        target: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        heldout: Dataset,
        section: EvaluationSection,
        accelerator: Accelerator | None = None,
    ) -> None:
        self.target = target
        self._section, self._accelerator = section, accelerator
        self.prompts = self._prompts_of(heldout)
        sampling = SamplingConfig(section.temperature)
        ends = eos_token_ids(target.model, tokenizer)
        self.config = DecodingConfig(section.max_new_tokens, sampling, eos_token_ids=ends)

    def _prompts_of(self, dataset: Dataset) -> list[tuple[int, ...]]:
        section = self._section
        longest = (self.target.max_positions or 1 << 30) - section.max_new_tokens
        return heldout_prompts(dataset.firsts, section.prompts, section.prompt_tokens, longest)

    def evaluate(self, objective: Objective) -> Evaluation:
        """Measure the present weights: tokens per target pass, and conditional acceptance by position (from 1)."""
        drafter, target = objective.drafter(), self.target.at_its_fastest()
        assert drafter is not None

        def count(batch: Sequence[int]) -> Iterator[Row]:
            prompts, seeds = [self.prompts[index] for index in batch], [self.config.seed + index for index in batch]
            counted = count_steps(target, drafter, prompts, self.config, len(batch), seeds)
            for index, steps in zip(batch, counted, strict=True):
                yield from ((index, *step) for step in steps)

        texts: list[list[StepCount]] = [[] for _ in self.prompts]
        for index, *step in self._dealt(self.prompts, count, 1 + len(StepCount._fields)):
            texts[index].append(StepCount(*step))
        found = acceptance(texts)
        figures = {
            CRITERION: found.tokens_per_pass.value,
            **{f"acceptance_{position}": share.value for position, share in enumerate(found.conditional, start=1)},
        }
        return Evaluation(figures, drafter.label)

    def greedy_texts(self, dataset: Dataset) -> list[tuple[Sequence[int], int]]:
        """Return the target's own answers to prompts of another set, as (tokens, prompt length)."""
        config = replace(self.config, sampling=SamplingConfig())
        prompts, target = self._prompts_of(dataset), self.target.at_its_fastest()

        def decode(batch: Sequence[int]) -> Iterator[Row]:
            texts = Engine(target).decode([prompts[index] for index in batch], config, batch_size=len(batch))
            for index, text in zip(batch, texts, strict=True):
                yield from ((index, token) for token in text.tokens)

        texts = [list(prompt) for prompt in prompts]
        for index, token in self._dealt(prompts, decode, 2):
            texts[index].append(token)
        return [(tuple(text), len(prompt)) for text, prompt in zip(texts, prompts, strict=True)]

    def _dealt(
        self, prompts: Sequence[object], work: Callable[[Sequence[int]], Iterable[Row]], width: int
    ) -> list[Row]:
        """Do the work of each batch of the prompts' indices on one process; return all rows on every process.

        Batches have about equal sizes, which no number of processes changes. A row is ``width`` integers, the first of
        them at least 0; the rows of one batch keep their order. An error of one process becomes an error on all.
        """
        accelerator, parts = self._accelerator, -(-len(prompts) // self._section.batch_size)
        batches = [range(part, len(prompts), parts) for part in range(parts)]
        rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)
        rows = agreed(lambda: [row for batch in batches[rank::world] for row in work(batch)])
        if accelerator is None or world == 1:
            return rows
        table = torch.tensor(rows, dtype=torch.long, device=accelerator.device).reshape(-1, width)
        everyone: Tensor = accelerator.gather(accelerator.pad_across_processes(table, dim=0, pad_index=-1))
        return [tuple(row) for row in everyone.tolist() if row[0] >= 0]


def evaluator_of(job: Job, accelerator: Accelerator) -> Evaluator | None:
    """Return the evaluator of a run under way; None if no target is loaded or the recipe asks for no prompts."""
    return _evaluator(job, job.target, accelerator)


def evaluator_at_end(job: Job, device: torch.device, accelerator: Accelerator | None = None) -> Evaluator | None:
    """Return the evaluator of finished weights, for which a target that was let go is loaded again on ``device``."""
    return _evaluator(job, job.target_again(device), accelerator) if job.recipe.evaluation.prompts else None


def _evaluator(job: Job, target: StoredTarget | None, accelerator: Accelerator | None) -> Evaluator | None:
    if not isinstance(target, Target) or not job.recipe.evaluation.prompts:
        return None
    return Evaluator(target.model, job.tokenizer, job.heldout, job.recipe.evaluation, accelerator)


class Watch:
    """The evaluations during a run, which choose the weights to finish if the recipe asks for the best.

    Every process takes part where parameters are whole; the main process alone writes, says and decides.
    """

    def __init__(self, job: Job, log: Log, checkpoints: Checkpoints, accelerator: Accelerator) -> None:
        self._objective, self._log, self._section = job.objective, log, job.recipe.evaluation
        self._accelerator = accelerator
        self._evaluator = evaluator_of(job, accelerator)
        self._evaluated_at: int | None = None
        self._best: Best | None = None
        if self._section.keep == "best":
            assert self._evaluator is not None, "a recipe whose evaluations choose keeps a target for them"
            settings = (self._section.max_new_tokens, self._section.temperature)
            comparable = [bound(job.identity), self._evaluator.prompts, *settings]
            self._best = Best(Path(job.recipe.output) / "best", comparable, checkpoints.steps)

    def check(self) -> None:
        """Raise ValueError where the best weights on the disk are damaged. Main process only."""
        if self._best is not None:
            self._best.check()

    def evaluate(self, progress: Progress) -> None:
        """Evaluate the present weights if a target is loaded. Every process must call this."""
        if self._evaluator is not None:
            evaluation = self._evaluator.evaluate(self._objective)
            self._evaluated_at = progress.step
            on_first(lambda: self._judge(progress, evaluation))

    def _judge(self, progress: Progress, evaluation: Evaluation) -> None:
        self._log.evaluation(progress, evaluation)
        if self._best is None:
            return
        figure = evaluation.figures[CRITERION]
        if math.isnan(figure):
            raise ValueError(
                "every held-out answer ended with its first token, so that nothing says how good the draft is: give "
                "data.heldout prompts to be answered, or set evaluation.keep=last"
            )
        self._best.offer(progress, figure, self._objective.module)

    def begun(self, progress: Progress) -> None:
        """Say if a run goes on without the evaluations that it made before."""
        if self._best is not None and self._best.latest() is None and progress.step > self._section.every:
            self._log.note(
                f"no evaluation up to step {progress.step} is in {self._best.folder}: the best weights are chosen "
                "among those still to come"
            )

    def choose_weights(self, progress: Progress) -> Progress:
        """Load the weights to finish into the module at the end of training; returns their progress.

        Every process must call this: the main process chooses, all read the same folder.
        """
        best = self._best
        if best is None:
            return progress
        if self._evaluated_at != progress.step:
            self.evaluate(progress)

        latest = from_first(best.latest)
        chosen = latest.progress if latest else progress
        if chosen != progress:
            agreed(lambda: best.restore(self._objective.module, chosen.step))
        return chosen


class BestEvaluation(NamedTuple):
    """Tokens per target pass on the held-out prompts, of the weights at a step."""

    progress: Progress
    figure: float


class Best:
    """The best weights so far by held-out acceptance, kept on disk. Main process only, but for `restore`.

    Every new best gets a folder best/step-N of its own: the trained weights, and the step with its figure. Each folder
    beats those of all earlier steps, so a run that resumes at any checkpoint finds its best in these folders; an
    evaluation that is repeated drops the folders from its own step on. A folder is removed when no checkpoint needs it
    any more. A folder that cannot be read stops the run and stays: the run would finish other weights than the best.
    """

    def __init__(self, folder: Path, identity: Any, checkpoint_steps: Callable[[], Sequence[int]]) -> None:
        """``identity``: all that makes figures comparable, as JSON values; folders of another one do not count.

        ``checkpoint_steps`` gives the steps of the checkpoints on the disk.
        """
        self.folder = folder
        self._identity = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
        self._checkpoint_steps = checkpoint_steps

    def check(self) -> None:
        """Read all folders of this run; ValueError where one is damaged."""
        for step in self._known():
            _check_whole(self._folder_of(step))

    def offer(self, progress: Progress, figure: float, module: nn.Module) -> bool:
        """Note an evaluation; True if it is a new best, which a tie is not. Parameters must be whole."""
        known = self._known()
        earlier = {step: found for step, found in known.items() if step < progress.step}
        best = earlier[max(earlier)] if earlier else None
        is_best = figure > (best.figure if best else float("-inf"))
        if is_best:
            self._write(BestEvaluation(progress, figure), module)
        resumable = [max((step for step in earlier if step <= c), default=0) for c in self._checkpoint_steps()]
        needed = {*map(self._folder_of, {*resumable, progress.step} if is_best else earlier)}
        for folder in {*self.folder.glob("step-*")} - needed:
            shutil.rmtree(folder, ignore_errors=True)
        return is_best

    def latest(self) -> BestEvaluation | None:
        """Return the best of all that were offered; None where no evaluation had a figure."""
        known = self._known()
        return known[max(known)] if known else None

    def restore(self, module: nn.Module, step: int) -> None:
        """Load the weights of a step that was the best into a module that is whole; any process may."""
        _check_whole(self._folder_of(step))
        load_weights(module, load_file(self._folder_of(step) / _WEIGHTS))

    def _folder_of(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def _write(self, evaluated: BestEvaluation, module: nn.Module) -> None:
        progress, figure = evaluated

        def write(folder: Path) -> None:
            weights = gather_weights(module)
            check_finite(weights, f"step {progress.step}", "lower training.learning_rate and start again to resume")
            save_file(weights, folder / _WEIGHTS)
            content = {"step": progress.step, "tokens": progress.tokens, CRITERION: figure, "identity": self._identity}
            (folder / _EVALUATION).write_text(json.dumps(content, indent=2) + "\n")

        write_folder(self._folder_of(progress.step), write, sealed=True)

    def _known(self) -> dict[int, BestEvaluation]:
        """Return the evaluations on the disk, by step, without those that another run left."""
        found = map(self._read, sorted(self.folder.glob("step-*")))
        return {each.progress.step: each for each in found if each is not None}

    def _read(self, folder: Path) -> BestEvaluation | None:
        """Return an evaluation; None if it is another run's. ValueError if it cannot be read."""
        try:
            content = json.loads((folder / _EVALUATION).read_text())
            evaluated = BestEvaluation(Progress(content["step"], content["tokens"]), content[CRITERION])
            return evaluated if content["identity"] == self._identity else None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise _damaged(folder, error) from error


def _check_whole(folder: Path) -> None:
    try:
        check_seal(folder)
    except (OSError, ValueError) as error:
        raise _damaged(folder, error) from error


def _damaged(folder: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{folder}, the best weights up to its step, cannot be read ({error}). Nothing was changed: start again if the "
        "disk failed for a moment, else remove the folder, and the run goes on as if that evaluation had found less"
    )
