"""Held-out evaluations of a run, and the choice of its best weights."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.files.stored import check_finite
from decoding.generate import DecodingConfig, Engine
from decoding.measure.compare import conclusion
from decoding.measure.measurement import count_steps
from decoding.metrics import StepCount, acceptance, ratio_of_rates
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids
from decoding.rules.sampling import SamplingConfig
from trainer.data.dataset import Dataset, heldout_prompts
from trainer.learning.objective import Objective
from trainer.processes import agreed, on_first
from trainer.recipe.common import EvaluationSection
from trainer.run.checkpoint import Best, Checkpoints, Progress
from trainer.run.job import Job
from trainer.run.log import Evaluation, Log
from trainer.run.state import gather_weights, load_weights
from trainer.target.loading import StoredTarget, Target

Row = tuple[int, ...]
CRITERION = "tokens_per_pass"


class Evaluator:
    """The real decoding loop, which decodes the same prompts with the same seeds in the same batches every time.

    Batches are distributed over the accelerator's processes; without an accelerator there is one process. All processes
    must call each method together, and all get the same result. The result does not depend on the number of processes:
    each prompt keeps its seed and its batch, because in bf16 the other texts in a batch can decide near-ties.
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
        self.prompts = self._prompts_of(heldout, section.evaluated)
        sampling = SamplingConfig(section.temperature)
        ends = eos_token_ids(target.model, tokenizer)
        self.config = DecodingConfig(section.max_new_tokens, sampling, eos_token_ids=ends)

    def _prompts_of(self, dataset: Dataset, count: int) -> list[tuple[int, ...]]:
        section = self._section
        longest = (self.target.max_positions or 1 << 30) - section.max_new_tokens
        return heldout_prompts(dataset.firsts, count, section.prompt_tokens, longest)

    def evaluate(self, objective: Objective) -> Evaluation:
        """Measure the current weights: tokens per target pass, and per-position acceptance (positions count from 1)."""
        drafter, target = objective.drafter(), self.target.at_its_fastest()

        def count(batch: Sequence[int]) -> Iterator[Row]:
            prompts, seeds = [self.prompts[index] for index in batch], [self.config.seed + index for index in batch]
            counted = count_steps(target, drafter, prompts, self.config, len(batch), seeds)
            for index, steps in zip(batch, counted, strict=True):
                yield from ((index, *step) for step in steps)

        texts: list[list[StepCount]] = [[] for _ in self.prompts]
        for index, *step in self._dealt(self.prompts, count, 1 + len(StepCount._fields)):
            texts[index].append(StepCount(*step))
        shares = acceptance(texts)
        figures = {
            CRITERION: shares.tokens_per_pass.value,
            **{f"acceptance_{position}": share.value for position, share in enumerate(shares.conditional, start=1)},
        }
        return Evaluation(figures, drafter.label, tuple((sum(s.emitted for s in text), len(text)) for text in texts))

    def greedy_texts(self, dataset: Dataset) -> list[tuple[Sequence[int], int]]:
        """Return the target's greedy answers to the prompts of ``dataset``, as (tokens, prompt length)."""
        config = replace(self.config, sampling=SamplingConfig())
        prompts, target = self._prompts_of(dataset, self._section.tree_prompts), self.target.at_its_fastest()

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
        """Run ``work`` on each batch of prompt indices, each batch on one process; return all rows on every process.

        A row has ``width`` integers, of which the first is at least 0. The rows of one batch keep their order. The
        number of processes does not change the batches. An error on one process becomes an error on all.
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
    """Return the evaluator during training; None if no target is loaded or evaluation.prompts is 0."""
    return _evaluator(job, job.target, accelerator)


def evaluator_at_end(job: Job, device: torch.device, accelerator: Accelerator | None = None) -> Evaluator | None:
    """Return the evaluator of finished weights; a released target is loaded again on ``device``."""
    return _evaluator(job, job.target_again(device), accelerator) if job.recipe.evaluation.prompts else None


def _evaluator(job: Job, target: StoredTarget, accelerator: Accelerator | None) -> Evaluator | None:
    if not isinstance(target, Target) or not job.recipe.evaluation.prompts:
        return None
    return Evaluator(target.model, job.tokenizer, job.heldout, job.recipe.evaluation, accelerator)


class Watch:
    """The evaluations during a run. If the recipe keeps the best weights, the evaluations choose the final weights.

    Every process takes part, with whole parameters, and gets the same result; only the main process writes.
    """

    def __init__(self, job: Job, log: Log, checkpoints: Checkpoints, accelerator: Accelerator) -> None:
        self._objective, self._log, self._section = job.objective, log, job.recipe.evaluation
        self._checkpoints = checkpoints
        self._evaluator = evaluator_of(job, accelerator)
        self._last: tuple[int, Evaluation] | None = None

    def evaluate(self, progress: Progress) -> None:
        """Evaluate the current weights if a target is loaded. Every process must call this."""
        if self._evaluator is None:
            return
        evaluation = self._evaluator.evaluate(self._objective)
        self._last = progress.step, evaluation
        on_first(lambda: self._log.evaluation(progress, evaluation))
        if self._section.keep == "best":
            agreed(lambda: self._judge(progress, evaluation))  # every process raises the same error

    def _judge(self, progress: Progress, evaluation: Evaluation) -> None:
        figure = evaluation.figures[CRITERION]
        if math.isnan(figure):
            raise UserError(
                "every held-out answer ended with its first token, so no draft token was compared: use data.heldout "
                "prompts with longer answers, or set evaluation.keep=last"
            )
        best = self._checkpoints.best
        if best is None or len(best.texts) != len(evaluation.texts) or figure > best.figure:
            weights = gather_weights(self._objective.module)
            check_finite(weights, f"step {progress.step}", "lower training.learning_rate and start again to resume")
            self._checkpoints.best = Best(progress, figure, weights, evaluation.texts)

    def choose_weights(self, progress: Progress) -> Progress:
        """At the end of training, load into the module the weights that the run keeps; return the progress at which the
        module had these weights.

        Every process must call this, with whole parameters. The figure of the best weights is divided by the figure of
        the last weights, paired by prompt. The best weights are kept only if the interval of this ratio excludes 1,
        because the best of several figures is a little higher even if all weights are equally good.
        """
        if self._section.keep == "last":
            return progress
        if self._last is None or self._last[0] != progress.step:
            self.evaluate(progress)
        best = self._checkpoints.best
        assert best is not None and self._last is not None, "a recipe with evaluation.keep=best keeps its target loaded"
        if best.progress == progress:
            return progress
        _, last = self._last
        pairs = [(*ours, *theirs) for ours, theirs in zip(best.texts, last.texts, strict=True)]
        difference = conclusion(ratio_of_rates(pairs))
        if difference.kind != "real":
            self._log.note(
                f"step {best.progress.step} had the best evaluation, {best.figure:.3f} tokens per target pass; the "
                f"last step has {last.figures[CRITERION]:.3f}. The difference may be chance ({difference.text}), so "
                "the last weights are kept"
            )
            return progress
        load_weights(self._objective.module, best.weights)
        return best.progress
