"""From a recipe to a finished folder: assemble, train, evaluate, write."""

import importlib.util
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from accelerate import Accelerator
from accelerate.state import AcceleratorState
from rich.console import Console
from transformers import PreTrainedTokenizerBase

from decoding.evaluate import acceptance_on
from decoding.generate import DecodingConfig, decode
from decoding.loading import eos_token_ids
from decoding.target import CausalLM
from trainer import quickstart
from trainer.assemble import Job, assemble, load_target
from trainer.checkpoint import Checkpoints, Progress
from trainer.data import Dataset, heldout_prompts
from trainer.distributed import build_accelerator, describe, whole_parameters
from trainer.folders import write_folder
from trainer.log import Log
from trainer.loop import Hooks, train
from trainer.objective import Objective, TreeObjective
from trainer.provenance import provenance, write_provenance
from trainer.recipe import AnyRecipe, DraftRecipe, EvaluationSection, MedusaRecipe

FINAL = "final"


class Evaluator:
    """The held-out evaluation: the real decoding loop, greedy, on the same prompts every time."""

    def __init__(
        self, target: CausalLM, tokenizer: PreTrainedTokenizerBase, heldout: Dataset, section: EvaluationSection
    ) -> None:
        self.target = target
        self._section = section
        self.prompts = self._prompts_of(heldout)
        self.config = DecodingConfig(section.max_new_tokens, eos_token_ids=eos_token_ids(target.model, tokenizer))

    def _prompts_of(self, dataset: Dataset) -> list[tuple[int, ...]]:
        section = self._section
        longest = (self.target.max_positions or 1 << 30) - section.max_new_tokens
        return heldout_prompts(dataset.firsts, section.prompts, section.prompt_tokens, longest)

    def figures(self, objective: Objective) -> dict[str, float]:
        drafter = objective.drafter()
        assert drafter is not None
        return acceptance_on(self.target, drafter, self.prompts, self.config)

    def greedy_texts(self, dataset: Dataset) -> list[tuple[Sequence[int], int]]:
        """The target's own answers to prompts of another set, as (tokens, prompt length)."""
        prompts = self._prompts_of(dataset)
        return [((*prompt, *decode(self.target, None, prompt, self.config).tokens), len(prompt)) for prompt in prompts]


def run_recipe(recipe: AnyRecipe, console: Console | None = None) -> Path:
    """Train a recipe to its end, resuming if it was stopped before; returns the folder of the finished artefact."""
    console = console or Console(stderr=True)
    accelerator = _accelerator(recipe)
    job = assemble(recipe, accelerator.device, console, accelerator.process_index, accelerator.num_processes)
    output = Path(recipe.output)
    if accelerator.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        _announce(console, job)
    log = Log(recipe, accelerator, console)
    evaluator = _evaluator(job)

    def evaluate(progress: Progress) -> None:
        if evaluator is not None:
            log.evaluation(progress, evaluator.figures(job.objective))

    with log:
        checkpoints = Checkpoints(output / "checkpoints", recipe.checkpoint.keep, job.identity())
        progress = train(
            job.objective,
            job.dataset.examples,
            recipe.training,
            accelerator,
            checkpoints,
            recipe.checkpoint.every,
            recipe.evaluation.every,
            Hooks(log.step, evaluate),
        )
        with whole_parameters(accelerator, job.objective.module):
            if accelerator.is_main_process:
                evaluator = evaluator or _evaluator(_with_target(job, accelerator))
                _finish(job, evaluator, output / FINAL, progress, accelerator)
                evaluate(progress)
                console.print(f"finished: {output / FINAL}", soft_wrap=True)
        accelerator.wait_for_everyone()
    accelerator.end_training()
    return output / FINAL


def _evaluator(job: Job) -> Evaluator | None:
    if job.target is None or job.target.model is None or not job.recipe.evaluation.prompts:
        return None
    return Evaluator(job.target.model, job.tokenizer, job.heldout, job.recipe.evaluation)


def _with_target(job: Job, accelerator: Accelerator) -> Job:
    """The target again, where features stood in for it and it is to be evaluated."""
    if job.target is None or not job.recipe.evaluation.prompts:
        return job
    return replace(job, target=load_target(job.recipe, accelerator.device))


def _finish(
    job: Job, evaluator: Evaluator | None, destination: Path, progress: Progress, accelerator: Accelerator
) -> None:
    """Choose the heads' tree; write the artefact with its provenance, whole or not at all."""
    objective = job.objective
    objective.module.eval()  # the target may be part of it
    if isinstance(objective, TreeObjective) and evaluator is not None:
        objective.choose_tree(evaluator.target, evaluator.greedy_texts(job.dataset))  # not on what is evaluated
    made_from = provenance(
        job.recipe,
        (job.dataset, job.heldout),
        job.target.fingerprint if job.target else None,
        progress.step,
        progress.tokens,
        describe(accelerator),
    )

    def write(folder: Path) -> None:
        objective.save(folder)
        write_provenance(folder, made_from)

    write_folder(destination, write)


def ensure_built(target: str | None) -> None:
    """Train the embedded default target if that is what is asked for and it is not there yet."""
    if target is None or target.partition("/")[0] != quickstart.NAME or quickstart.is_built():
        return
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ValueError("the quickstart target is not built yet: train once with one process, which builds it first")
    run_recipe(quickstart.recipe())
    AcceleratorState._reset_state(True)  # what comes next in this process may want another precision


def _accelerator(recipe: AnyRecipe) -> Accelerator:
    wandb = recipe.tracking == "wandb" and importlib.util.find_spec("wandb") is not None
    if wandb and "WANDB_API_KEY" not in os.environ:
        os.environ.setdefault("WANDB_MODE", "offline")
    return build_accelerator(recipe.training, log_with="wandb" if wandb else None, project_dir=recipe.output)


def _announce(console: Console, job: Job) -> None:
    recipe, module = job.recipe, job.objective.module
    trained = sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)
    if recipe.tracking == "wandb" and importlib.util.find_spec("wandb") is None:
        console.print("wandb is not installed: figures go to metrics.jsonl alone")
    aim = f" for {recipe.target}" if isinstance(recipe, MedusaRecipe | DraftRecipe) else ""
    console.print(
        f"{recipe.name}: {recipe.kind}{aim}; {trained / 1e6:.2f}M parameters trained; {job.dataset.describe()}; "
        f"{recipe.training.steps} steps of {recipe.training.batch_size} sequences",
        soft_wrap=True,
    )
