"""The whole work from end to end (``make demo``): prompts and answers by a target, training of heads and of a draft,
and measured speed-ups.

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

import torch

from decoding.errors import UserError
from decoding.files import quickstart
from decoding.files.fingerprint import stored_fingerprint
from decoding.files.hub import local_folder
from decoding.model.dspark_config import read_dspark_config
from trainer.commands.chat import run_generate
from trainer.commands.evaluate import run_evaluate
from trainer.commands.options import EvaluateOptions, GenerateOptions, RegenerateOptions
from trainer.commands.regenerate import run_regenerate
from trainer.commands.usage import guarded
from trainer.export.exporter import NO_PROMPTS, export
from trainer.recipe.reading import load_recipe
from trainer.run.train import run_recipe

ROOT = Path(__file__).parent.parent
OUTPUT = Path("runs/quickstart")
RECIPES = Path("recipes/quickstart")
SHORT = os.environ.get("HEADSTART_DEMO") == "short"


def main() -> None:
    """Run the stages and print how many seconds each took, and what to do next."""
    console = Console(highlight=False)
    seconds: dict[str, float] = {}

    def stage(name: str, work: Callable[[], None]) -> None:
        console.rule(f"[bold]{name}")
        began = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - began

    stage("1. the target", read_target)
    stage("2. prompts and answers that the target writes", write)
    stage("3. heads", lambda: launch("medusa1"))
    stage("4. a DSpark draft", lambda: launch("dspark"))
    stage("5. decoding and measuring", measure)
    stage("6. one answer, and who wrote which token", show)
    stage("7. exporting", export_all)
    console.print(timing(seconds))
    console.rule("[bold]next")
    console.print(next_commands(), soft_wrap=True)


def read_target() -> None:
    folder = local_folder(quickstart.NAME)
    print(f"the target is {quickstart.MODEL}, converted from {quickstart.FILE} into {folder}")


def write() -> None:
    """Have the target write a few rows of training data.

    The recipes train on many such rows (see recipes/quickstart/README.md). Writing these rows takes an hour.
    """
    rows, wanted = OUTPUT / "self-written" / "rows.jsonl", 2 if SHORT else 4
    shutil.rmtree(rows.parent, ignore_errors=True)
    rows.parent.mkdir(parents=True)
    run_regenerate(
        RegenerateOptions(
            target=quickstart.NAME,
            prompts=f"self:{wanted}",
            output=rows,
            batch_size=wanted,
            temperature=1.0,
            max_new_tokens=12 if SHORT else 48,
        )
    )
    for line in rows.read_text(encoding="utf-8").splitlines()[:2]:
        print(*(f"{message['role']}: {message['content']}" for message in json.loads(line)["messages"]), sep="\n")
    shipped = (RECIPES / "answers.jsonl").read_text(encoding="utf-8")
    print(f"{RECIPES / 'answers.jsonl'} has {shipped.count(chr(10))} such rows, on which heads and draft are trained")


def discard_stale(recipe: str) -> None:
    """Remove a finished run of another target or recipe, because such a run cannot be resumed."""
    provenance = Path(artefact(recipe)) / "provenance.json"
    if provenance.is_file():
        stored = json.loads(provenance.read_text())
        wanted = load_recipe(RECIPES / f"{recipe}.yaml").model_dump(mode="json")
        other = "on another target" * (stored["target"]["fingerprint"] != stored_fingerprint(quickstart.NAME))
        if any(stored["recipe"].get(section) != wanted.get(section) for section in ("data", "heads", "draft")):
            other = other or "by another recipe"
        if other:
            print(f"{provenance.parent.parent} was trained {other}: starting over")
            shutil.rmtree(provenance.parent.parent)


def launch(recipe: str) -> None:
    """Train a recipe as a user would, by ``accelerate launch``; if `SHORT`, only the heads are launched."""
    discard_stale(recipe)
    small = ["training.steps=2", "training.batch_size=4", "training.micro_batch_size=4"]
    small += ["evaluation.prompts=2", "evaluation.tree_prompts=2", "evaluation.max_new_tokens=16"]
    changes = [*small, f"output={OUTPUT / 'short' / recipe}"] if SHORT else []
    if SHORT and recipe != "medusa1":  # a second launch would only repeat all imports
        run_recipe(load_recipe(RECIPES / f"{recipe}.yaml", changes))
        return
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet"]
    command += ["--config_file", "recipes/accelerate/cpu.yaml"]
    command += ["--num_cpu_threads_per_process", str(torch.get_num_threads())]  # accelerate's default is one thread
    command += ["scripts/train.py", str(RECIPES / f"{recipe}.yaml"), *changes]
    finished = subprocess.run(command, cwd=ROOT, check=False)
    if finished.returncode:
        raise UserError(f"training {recipe} failed with exit code {finished.returncode}; the error message is above")


def artefact(recipe: str) -> str:
    return str(OUTPUT / ("short" if SHORT else "") / recipe / "final")


def measure() -> None:
    """Measure each trained drafter and prompt lookup on questions that were not used in training."""
    run_evaluate(
        EvaluateOptions(
            target=quickstart.NAME,
            drafter=[f"heads:{artefact('medusa1')}", f"dspark:{artefact('dspark')}", "lookup"],
            prompts=str(RECIPES / "questions.jsonl"),
            limit=2 if SHORT else 20,
            max_new_tokens=12 if SHORT else 32,
            settings=["sampling"],
            policy=["fixed"],
            output=OUTPUT,
            restart=True,
        )
    )


def show() -> None:
    """Stream an answer; accepted drafted tokens are green."""
    run_generate(
        GenerateOptions(
            target=quickstart.NAME,
            drafter=f"heads:{artefact('medusa1')}",
            prompt="Explain in a few sentences why the sky is blue.",
            max_new_tokens=16 if SHORT else 64,
            temperature=1.0,
            seed=0,
        ),
        Console(highlight=False, force_terminal=True),
    )


def export_all() -> None:
    """Export the heads for this project and the draft for llama.cpp, each with its model card.

    Decoding with the trained and the exported weights takes long, so one prompt is compared for the draft and no prompt
    for the heads.
    """
    prompt = OUTPUT / "prompt.jsonl"
    prompt.write_text((RECIPES / "questions.jsonl").read_text(encoding="utf-8").partition("\n")[0])
    for recipe, form, asked in (("medusa1", "heads", NO_PROMPTS), ("dspark", "gguf", prompt)):
        folder = OUTPUT / "export" / f"{recipe}-{form}"
        shutil.rmtree(folder, ignore_errors=True)
        print(export(Path(artefact(recipe)), folder, form, report=OUTPUT / "report.json", prompts=asked))


def next_commands() -> str:
    """Return the commands for a chat, for the web demo and for serving the draft with llama.cpp."""
    draft = OUTPUT / "export" / "dspark-gguf" / "model.gguf"
    at_once = read_dspark_config(Path(artefact("dspark"))).block_size
    return "\n".join(
        (
            f".venv/bin/headstart chat --target {quickstart.NAME} --drafter heads:{artefact('medusa1')}",
            f".venv/bin/headstart demo --drafter heads:{artefact('medusa1')} --drafter lookup",
            f"llama-server -m {quickstart.embedded_file()} -md {draft} --spec-type draft-dspark "
            f"--spec-draft-n-max {at_once}",
        )
    )


def timing(seconds: dict[str, float]) -> Table:
    table = Table(title="Wall time", title_style="bold")
    table.add_column("stage")
    table.add_column("seconds", justify="right")
    for name, spent in seconds.items():
        table.add_row(name, f"{spent:.0f}")
    table.add_section()
    table.add_row("all stages", f"{sum(seconds.values()):.0f}")
    peak = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    table.caption = f"peak memory of the largest process: {peak / 2**20:.2f} GiB"
    return table


if __name__ == "__main__":
    os.chdir(ROOT)
    sys.exit(guarded(main, debug=os.environ.get("HEADSTART_DEBUG") == "1"))
