"""The whole job from end to end (``make demo``): a target, its answers, heads and drafts trained on them, speed-ups.

Nothing is downloaded. HEADSTART_DEMO=short runs the same code on less data, for continuous integration.
"""

# ruff: noqa: E402  # how threads wait is set before torch is imported
import json
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from decoding.threads import spin_briefly

spin_briefly()  # before torch is imported

from decoding.errors import UserError
from decoding.model.fingerprint import stored_fingerprint
from trainer import quickstart
from trainer.commands.evaluate import run_evaluate
from trainer.commands.guarded import guarded
from trainer.commands.options import EvaluateOptions
from trainer.export.exporter import export
from trainer.recipe.reading import load_recipe
from trainer.run.train import ensure_built, run_recipe

ROOT = Path(__file__).parent.parent
OUTPUT = Path("runs/quickstart")
SHORT = os.environ.get("HEADSTART_DEMO") == "short"


def main() -> None:
    """Run seven stages and print how many seconds each took."""
    if SHORT:
        os.environ.setdefault("HEADSTART_QUICKSTART_STEPS", "10")
    console = Console(highlight=False)
    seconds: dict[str, float] = {}

    def stage(name: str, work: Callable[[], None]) -> None:
        console.rule(f"[bold]{name}")
        began = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - began

    stage("1. the target", build_target)
    stage("2. its answers", lambda: ensure_built(quickstart.ANSWERS))
    stage("3. heads", lambda: launch("medusa1"))
    stage("4. a distilled draft", lambda: launch("draft"))
    stage("5. a DSpark draft", lambda: launch("dspark"))
    stage("6. decoding and measuring", measure)
    stage("7. exporting", export_all)
    console.print(timing(seconds))


def build_target() -> None:
    ensure_built(quickstart.NAME)
    print(f"the target is in {quickstart.folder()}")


def discard_stale(recipe: str) -> None:
    """Remove a finished run with another target (a new Python, another cache) or recipe, which cannot be resumed."""
    provenance = Path(artefact(recipe)) / "provenance.json"
    if provenance.is_file():
        stored = json.loads(provenance.read_text())
        wanted = load_recipe(ROOT / "recipes" / "quickstart" / f"{recipe}.yaml").model_dump(mode="json")
        other = "on another target" * (stored["target"]["fingerprint"] != stored_fingerprint(quickstart.folder()))
        if any(stored["recipe"].get(section) != wanted.get(section) for section in ("data", "heads", "draft")):
            other = other or "by another recipe"
        if other:
            print(f"{provenance.parent.parent} was trained {other}: starting over")
            shutil.rmtree(provenance.parent.parent)


def launch(recipe: str) -> None:
    """Train a recipe as a user would, by ``accelerate launch``; if `SHORT`, only the heads are launched."""
    discard_stale(recipe)
    small = ["training.steps=4", "evaluation.prompts=2", "evaluation.tree_prompts=2"]
    changes = [*small, f"output={OUTPUT / 'short' / recipe}"] if SHORT else []
    if SHORT and recipe != "medusa1":  # a second launch would only repeat all imports
        run_recipe(load_recipe(ROOT / "recipes" / "quickstart" / f"{recipe}.yaml", changes))
        return
    command = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--quiet",
        "--config_file",
        "recipes/accelerate/cpu.yaml",
    ]
    command += ["scripts/train.py", f"recipes/quickstart/{recipe}.yaml", *changes]
    finished = subprocess.run(command, cwd=ROOT, check=False)
    if finished.returncode:
        raise UserError(f"training {recipe} failed with exit code {finished.returncode}; its message is above")


def artefact(recipe: str) -> str:
    return str(OUTPUT / ("short" if SHORT else "") / recipe / "final")


def measure() -> None:
    """Measure each trained drafter alone and combined with a lookup, and the lookup alone.

    Sampling comes first, because greedy texts of such a small target repeat themselves and a lookup copies them. A
    draft costs about half a pass of this target (least_gain).
    """
    trained = []
    for kind, name in (("dspark", "dspark"), ("heads", "medusa1"), ("draft", "draft")):
        trained += [f"{kind}:{artefact(name)}", f"hybrid:{artefact(name)},least_gain=0.5"]
    run_evaluate(
        EvaluateOptions(
            target=quickstart.NAME,
            drafter=[*trained, "lookup"],
            prompts=f"{quickstart.NAME}/heldout.jsonl",
            context=[128],
            limit=3 if SHORT else 10,
            max_new_tokens=24 if SHORT else 64,
            settings=["sampling", "greedy"],
            policy=["fixed"],
            output=OUTPUT,
            restart=True,
        )
    )


def export_all() -> None:
    """Export the heads for this project and the drafts for servers, each with its model card."""
    report = OUTPUT / "report.json"
    for recipe, form in (("medusa1", "headstart"), ("dspark", "dspark"), ("draft", "draft")):
        folder = OUTPUT / "export" / f"{recipe}-{form}"
        shutil.rmtree(folder, ignore_errors=True)
        summary = export(Path(artefact(recipe)), folder, form, report=report)
        print(summary)


def timing(seconds: dict[str, float]) -> Table:
    table = Table(title="Wall time", title_style="bold")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    for name, spent in seconds.items():
        table.add_row(name, f"{spent:.0f}")
    table.add_section()
    table.add_row("together", f"{sum(seconds.values()):.0f}")
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    table.caption = f"peak memory of the largest process: {peak / 2**20:.2f} GiB"
    return table


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(guarded(main, debug=os.environ.get("HEADSTART_DEBUG") == "1"))
