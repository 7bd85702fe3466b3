"""`headstart plan-training`: a table of the parameters, memory, disk and hours of a run."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from rich.table import Table

from trainer.recipe.recipe import AnyRecipe
from trainer.run.embedded import ensure_answered
from trainer.run.forecast import forecast, points_of, read_evaluated, too_few, verdict
from trainer.run.kinds import kind_of
from trainer.run.log import METRICS
from trainer.run.planning import Launch, Plan, plan_training
from trainer.run.train import ensure_built
from trainer.terminal.console import standard_output, title


def print_plan(recipe: AnyRecipe, launch: Launch, steps: int) -> None:
    """Print the plan of a recipe; the embedded target and its answers are made first if they are not there."""
    ensure_built(kind_of(recipe).target)
    ensure_answered(recipe.data.train)
    standard_output().print(table_of(plan_training(recipe, launch, steps), recipe, launch))


def table_of(plan: Plan, recipe: AnyRecipe, launch: Launch) -> Table:
    """Return the plan as a table."""
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
    if more := _more_training(Path(recipe.output) / METRICS):
        add("more training, forecast by the run so far", more)
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


def _more_training(metrics: Path) -> dict[str, str]:
    """Return the forecast of two doublings of the trained tokens of a run that was begun; empty without evaluations."""
    points = points_of(read_evaluated(metrics))
    if not points:
        return {}
    found = forecast(points, doublings=2)
    if found is None:
        return {"no forecast": too_few(points)}
    return {
        f"{times * found.trained_tokens:,} tokens, {times} times as many": verdict(found, gain)
        for times, gain in zip((2, 4), found.gains, strict=True)
    }
