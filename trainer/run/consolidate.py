"""An artefact of a checkpoint: of a run that was stopped before its end, or of an earlier step.

A checkpoint holds whole tensors by name, whichever launcher sharded them (see `state`), so one process without a
launcher makes the artefact, as the run itself would have if that step had been its last.
"""

import json
from pathlib import Path

import torch
from rich.console import Console

from trainer.processes import Process
from trainer.recipe.reading import parse_recipe
from trainer.run.checkpoint import read_apart
from trainer.run.finish import choose_tree, finish
from trainer.run.heldout import evaluator_at_end
from trainer.run.kinds import kind_of
from trainer.run.resuming import compare
from trainer.run.state import load_weights
from trainer.terminal.console import standard_error

_STORED = ("features.top_k", "draft.teacher")
"""Keys of a job's identity on what was stored ahead, which finished weights no longer need."""


def consolidate(checkpoint: Path, destination: Path, console: Console | None = None) -> str:
    """Write the artefact of a checkpoint with its provenance; return a sentence on the step that it is of.

    The recipe's target and data are read again. ValueError for a checkpoint that is damaged or holds no recipe, and for
    a target or data that have changed since.
    """
    apart = read_apart(checkpoint)
    recipe = parse_recipe(apart.recipe, f"{checkpoint.name}/state.json")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    job = kind_of(kind_of(recipe).without_store()).assemble(device, Process(console=console or standard_error()))
    now = json.loads(json.dumps(dict(job.identity)))
    changed = [str(each) for each in compare(apart.identity, now).refused if not each.name.startswith(_STORED)]
    if changed:
        raise ValueError(
            f"{checkpoint} was made with another {', '.join(changed)} than its recipe names now: put back what it was "
            "trained on"
        )
    load_weights(job.objective.module, apart.weights)
    choose_tree(job, evaluator_at_end(job, device))
    origin = {**apart.launch, "checkpoint": checkpoint.name}
    finish(job, recipe, destination, apart.progress, apart.stretches, origin)
    done, steps = apart.progress.step, recipe.training.steps
    return f"made of the checkpoint {checkpoint}: the weights after step {done} of {steps}, not the run's finished ones"
