"""Evaluates a recipe's draft in every process of a launch; each process records its results and the prompts it decoded.

Usage: launched_evaluation.py FOLDER; writes FOLDER/found-RANK.json.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from tiny_training import recipe_content

import trainer.run.heldout
from decoding.measure.measurement import count_steps
from trainer.processes import ALONE
from trainer.recipe.reading import parse_recipe
from trainer.run.heldout import Evaluator
from trainer.run.job import Job, assemble
from trainer.target.loading import Target

decoded: list[Sequence[int]] = []
"""Prompts that this process decoded."""


def noting_count_steps(target: Any, drafter: Any, prompts: Sequence[Sequence[int]], *others: Any) -> Any:
    """Do the work of an evaluation, and record its prompts."""
    decoded.extend(prompts)
    return count_steps(target, drafter, prompts, *others)


def evaluator_of(job: Job, accelerator: Accelerator | None, **section: Any) -> Evaluator:
    assert isinstance(job.target, Target)
    settings = job.recipe.evaluation.model_copy(update={"prompts": 7, "max_new_tokens": 12, **section})
    return Evaluator(job.target.model, job.tokenizer, job.heldout, settings, accelerator)


def found(folder: Path, accelerator: Accelerator | None) -> dict[str, Any]:
    """Return the evaluations for every dtype, temperature and batch size, and the texts on which trees are fitted."""
    results: dict[str, Any] = {}
    for dtype in ("fp32", "bf16"):
        recipe = parse_recipe(recipe_content(folder, "draft") | {"dtype": dtype})
        job = assemble(recipe, torch.device("cpu"), ALONE)
        for batch_size in (1, 3) if dtype == "fp32" else (3,):
            for temperature in (0.0, 1.0):
                evaluator = evaluator_of(job, accelerator, batch_size=batch_size, temperature=temperature)
                results[f"{dtype}, {batch_size} at a time, T={temperature:g}"] = evaluator.evaluate(job.objective)
        results[f"{dtype}, texts"] = evaluator.greedy_texts(job.dataset)
    return json.loads(json.dumps(results))  # type: ignore[no-any-return]


def refusal(folder: Path, accelerator: Accelerator) -> str:
    """Return the error of each process if only the last process has a prompt that cannot be decoded."""
    job = assemble(parse_recipe(recipe_content(folder, "draft")), torch.device("cpu"), ALONE)
    evaluator = evaluator_of(job, accelerator, batch_size=1)
    if accelerator.is_last_process:
        evaluator.prompts[accelerator.process_index] = ()
    try:
        evaluator.evaluate(job.objective)
    except ValueError as error:
        return str(error)
    return "nothing"


if __name__ == "__main__":
    folder, accelerator = Path(sys.argv[1]), Accelerator()
    trainer.run.heldout.count_steps = noting_count_steps  # type: ignore[attr-defined]
    content = {"found": found(folder, accelerator), "decoded": len(decoded), "refusal": refusal(folder, accelerator)}
    (folder / f"found-{accelerator.process_index}.json").write_text(json.dumps(content))
    accelerator.end_training()
