"""From a recipe to a finished folder: target, data, objective, loop, evaluation, artefact."""

import importlib.util
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as ProgressBar
from transformers import PreTrainedTokenizerBase

from decoding.evaluate import acceptance_on
from decoding.generate import DecodingConfig, decode
from decoding.loading import eos_token_ids, load_model, load_tokenizer, parse_dtype
from decoding.target import CausalLM
from trainer import quickstart
from trainer.checkpoint import Checkpoints, Progress
from trainer.data import Dataset, heldout_prompts, load_dataset
from trainer.distill import DistillObjective
from trainer.folders import write_folder
from trainer.loop import Hooks, train
from trainer.medusa import MedusaObjective
from trainer.objective import Objective
from trainer.pretrain import PretrainObjective
from trainer.provenance import fingerprint, provenance, write_provenance
from trainer.quickstart import resolve
from trainer.recipe import AnyRecipe, DraftRecipe, EvaluationSection, MedusaRecipe, PretrainRecipe

FINAL = "final"


class _Evaluator:
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
    target, tokenizer = _target(recipe, accelerator)
    heldout = load_dataset(resolve(recipe.data.heldout), recipe.data, tokenizer)
    dataset = load_dataset(resolve(recipe.data.train), recipe.data, tokenizer)
    torch.manual_seed(recipe.training.seed)  # where the objective starts from chance
    objective = _objective(recipe, target, tokenizer)
    evaluator = _Evaluator(target, tokenizer, heldout, recipe.evaluation) if target else None
    output = Path(recipe.output)
    if accelerator.is_main_process:
        output.mkdir(parents=True, exist_ok=True)
        _announce(console, recipe, dataset, objective)
    log = _Log(recipe, accelerator, console)

    def evaluate(progress: Progress) -> None:
        if evaluator is not None:
            log.evaluation(progress, evaluator.figures(objective))

    with log:
        progress = train(
            objective,
            dataset.examples,
            recipe.training,
            accelerator,
            Checkpoints(output / "checkpoints", recipe.checkpoint.keep, _identity(recipe, target, dataset)),
            recipe.checkpoint.every,
            recipe.evaluation.every,
            Hooks(log.step, evaluate),
        )
        if accelerator.is_main_process:
            if isinstance(objective, MedusaObjective) and evaluator is not None:
                objective.choose_tree(evaluator.greedy_texts(dataset))  # not on what is evaluated
            model = target.model if target else None
            datasets = (dataset, heldout)
            made_from = provenance(recipe, datasets, model, progress.step, progress.tokens, accelerator.num_processes)
            _write_final(output / FINAL, objective, made_from)
            evaluate(progress)
            console.print(f"finished: {output / FINAL}", soft_wrap=True)
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return output / FINAL


def _write_final(destination: Path, objective: Objective, made_from: dict[str, Any]) -> None:
    """The finished artefact with its provenance, whole or not at all."""

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
    return Accelerator(
        mixed_precision=recipe.training.mixed_precision,
        log_with="wandb" if wandb else None,
        project_dir=recipe.output,
    )


def _target(recipe: AnyRecipe, accelerator: Accelerator) -> tuple[CausalLM | None, PreTrainedTokenizerBase]:
    if isinstance(recipe, PretrainRecipe):
        return None, load_tokenizer(recipe.model.tokenizer)
    name = resolve(recipe.target)
    model = load_model(name, parse_dtype(recipe.dtype), accelerator.device, recipe.trust_remote_code)
    target = CausalLM(model)
    if target.max_positions is not None and recipe.data.max_length > target.max_positions:
        raise ValueError(
            f"data.max_length is {recipe.data.max_length} but the target's context holds {target.max_positions} tokens"
        )
    return target, load_tokenizer(name, recipe.trust_remote_code)


def _objective(recipe: AnyRecipe, target: CausalLM | None, tokenizer: PreTrainedTokenizerBase) -> Objective:
    if isinstance(recipe, PretrainRecipe):
        return PretrainObjective(tokenizer, recipe.model)
    assert target is not None
    if isinstance(recipe, MedusaRecipe):
        return MedusaObjective(target, recipe.heads)
    evaluated = recipe.evaluation.prompt_tokens + recipe.evaluation.max_new_tokens
    longest = max(recipe.data.max_length, evaluated)
    return DistillObjective(target, tokenizer, recipe.draft, recipe.trust_remote_code, longest)


def _identity(recipe: AnyRecipe, target: CausalLM | None, dataset: Dataset) -> dict[str, Any]:
    """What must be the same for a checkpoint to be resumed: all that changes the result of a step.

    But for the learning rate and the precision, which are what to change when the loss is no longer finite.
    """
    content = recipe.model_dump(mode="json")
    for free in ("name", "output", "evaluation", "checkpoint", "tracking"):
        content.pop(free)
    for free in ("micro_batch_size", "learning_rate", "mixed_precision"):
        content["training"].pop(free)
    content["target weights"] = fingerprint(target.model) if target else None
    content["training data"] = dataset.sha256
    return content


def _announce(console: Console, recipe: AnyRecipe, dataset: Dataset, objective: Objective) -> None:
    trained = sum(parameter.numel() for parameter in objective.module.parameters() if parameter.requires_grad)
    tokens = sum(sum(example.trained) for example in dataset.examples)
    if recipe.tracking == "wandb" and importlib.util.find_spec("wandb") is None:
        console.print("wandb is not installed: figures go to metrics.jsonl alone")
    cut = f", {dataset.truncated} cut at data.max_length" if dataset.truncated else ""
    aim = f" for {recipe.target}" if isinstance(recipe, MedusaRecipe | DraftRecipe) else ""
    console.print(
        f"{recipe.name}: {recipe.kind}{aim}; {trained / 1e6:.2f}M parameters trained; "
        f"{dataset.rows:,} rows, {len(dataset.examples):,} sequences, {tokens:,} trained tokens{cut}; "
        f"{recipe.training.steps} steps of {recipe.training.batch_size} sequences"
    )


class _Log:
    """metrics.jsonl, the tracker, and a progress bar (lines, where there is no terminal). Main process only."""

    def __init__(self, recipe: AnyRecipe, accelerator: Accelerator, console: Console) -> None:
        self._recipe = recipe
        self._accelerator = accelerator
        self._console = console
        self._active = accelerator.is_main_process
        self._file = Path(recipe.output) / "metrics.jsonl"
        self._bar = ProgressBar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
            console=console,
            disable=not (self._active and console.is_terminal),
        )
        self._task = self._bar.add_task(recipe.name, total=recipe.training.steps, note="")
        self._last_line = time.monotonic()
        self._last_step: tuple[float, int] | None = None

    def __enter__(self) -> "_Log":
        wandb = {"name": self._recipe.name, "dir": self._recipe.output}
        self._accelerator.init_trackers("headstart", self._recipe.model_dump(mode="json"), {"wandb": wandb})
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def step(self, progress: Progress, figures: dict[str, float]) -> None:
        """Note a step's figures and its speed."""
        now = time.perf_counter()
        if self._last_step is not None:
            before, tokens = self._last_step
            figures = {**figures, "tokens_per_second": (progress.tokens - tokens) / (now - before)}
        self._last_step = (now, progress.tokens)
        self._write(progress, figures)
        note = f"loss {figures['loss']:.3f}"
        self._bar.update(self._task, completed=progress.step, note=note)
        if self._active and not self._console.is_terminal and time.monotonic() - self._last_line > 15:
            self._last_line = time.monotonic()
            speed = f", {figures['tokens_per_second']:,.0f} tokens/s" if "tokens_per_second" in figures else ""
            self._console.print(
                f"{self._recipe.name}: step {progress.step}/{self._recipe.training.steps}, {note}{speed}"
            )

    def evaluation(self, progress: Progress, figures: dict[str, float]) -> None:
        """Note the held-out figures, and say them."""
        self._write(progress, {f"heldout/{name}": value for name, value in figures.items()})
        self._console.print(
            f"{self._recipe.name}: step {progress.step}, held out, greedy: "
            + ", ".join(f"{name.replace('_', ' ')} {value:.3f}" for name, value in figures.items())
        )
        self._last_step = None  # the clock of the next step would include the evaluation

    def _write(self, progress: Progress, figures: dict[str, float]) -> None:
        self._accelerator.log(figures, step=progress.step)
        if self._active:
            with self._file.open("a") as lines:
                lines.write(json.dumps({"step": progress.step, "tokens": progress.tokens, **figures}) + "\n")
