"""The held-out evaluations of a run, and the decisions made by them."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.evaluate import measure_acceptance
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids
from decoding.rules.sampling import SamplingConfig
from trainer.data.dataset import Dataset, heldout_prompts
from trainer.job import Job
from trainer.learning.objective import Objective
from trainer.recipe.common import EvaluationSection
from trainer.run.best import CRITERION, Best
from trainer.run.checkpoint import Checkpoints, Progress
from trainer.run.log import Evaluation, Log
from trainer.target.loading import StoredTarget, Target


class Evaluator:
    """The real decoding loop on the same prompts, with the same seeds, every time."""

    def __init__(
        self, target: CausalLM, tokenizer: PreTrainedTokenizerBase, heldout: Dataset, section: EvaluationSection
    ) -> None:
        self.target = target
        self._section = section
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
        drafter = objective.drafter()
        assert drafter is not None
        found = measure_acceptance(self.target, drafter, self.prompts, self.config)
        figures = {
            CRITERION: found.tokens_per_pass.value,
            **{f"acceptance_{position}": share.value for position, share in enumerate(found.conditional, start=1)},
        }
        return Evaluation(figures, drafter.max_nodes, found.texts)

    def greedy_texts(self, dataset: Dataset) -> list[tuple[Sequence[int], int]]:
        """Return the target's own answers to prompts of another set, as (tokens, prompt length)."""
        config = replace(self.config, sampling=SamplingConfig())
        prompts = self._prompts_of(dataset)
        return [((*prompt, *Engine(self.target).decode(prompt, config).tokens), len(prompt)) for prompt in prompts]


def evaluator_of(job: Job) -> Evaluator | None:
    """Return the evaluator of a run under way; None if no target is loaded or the recipe asks for no prompts."""
    return _evaluator(job, job.target)


def evaluator_at_end(job: Job, device: torch.device) -> Evaluator | None:
    """Return the evaluator of finished weights, for which a target that was let go is loaded again on ``device``."""
    return _evaluator(job, job.target_again(device)) if job.recipe.evaluation.prompts else None


def _evaluator(job: Job, target: StoredTarget | None) -> Evaluator | None:
    if not isinstance(target, Target) or not job.recipe.evaluation.prompts:
        return None
    return Evaluator(target.model, job.tokenizer, job.heldout, job.recipe.evaluation)


class Watch:
    """The evaluations during a run, which choose the weights to finish and end the run's patience.

    Main process only, where parameters are whole.
    """

    def __init__(self, job: Job, log: Log, checkpoints: Checkpoints) -> None:
        self._objective, self._log, self._section = job.objective, log, job.recipe.evaluation
        self._evaluator = evaluator_of(job)
        self._evaluated_at: int | None = None
        self._best: Best | None = None
        if self._section.decides:
            assert self._evaluator is not None, "a recipe whose evaluations decide keeps a target for them"
            settings = (self._section.max_new_tokens, self._section.temperature)
            comparable = [job.identity, self._evaluator.prompts, *settings]
            self._best = Best(Path(job.recipe.output) / "best", self._section, comparable, checkpoints.steps)

    def check(self) -> None:
        """Raise ValueError where the best weights on the disk are damaged."""
        if self._best is not None:
            self._best.check()

    def evaluate(self, progress: Progress) -> bool:
        """Evaluate the present weights if a target is loaded; True when patience has run out."""
        if self._evaluator is None:
            return False
        evaluation = self._evaluator.evaluate(self._objective)
        self._log.evaluation(progress, evaluation)
        self._evaluated_at = progress.step
        if self._best is None:
            return False
        figure = evaluation.figures[CRITERION]
        if math.isnan(figure):
            raise ValueError(
                "every held-out answer ended with its first token, so that nothing says how good the draft is: give "
                "data.heldout prompts to be answered, or set evaluation.keep=last and evaluation.patience=null"
            )
        self._best.offer(progress, figure, self._objective.module)
        return self._best.is_enough(progress.step)

    def begun(self, progress: Progress) -> None:
        """Say if a run goes on without the evaluations that it made before."""
        if self._best is not None and self._best.latest() is None and progress.step > self._section.every:
            self._log.note(
                f"no evaluation up to step {progress.step} is in {self._best.folder}: the best weights are chosen "
                "among those still to come"
            )

    def choose_weights(self, progress: Progress) -> Progress:
        """Load the weights to finish into the module at the end of training; returns their progress."""
        if self._best is None or self._section.keep == "last":
            return progress
        if self._evaluated_at != progress.step:
            self.evaluate(progress)
        best = self._best.latest()
        if best is None or best.progress == progress:
            return progress
        self._best.restore(self._objective.module)
        return best.progress
