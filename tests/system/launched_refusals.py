"""Under torchrun, let one of two processes fail at each place where the other would wait for it.

Usage: launched_refusals.py FOLDER PLACE ...; writes FOLDER/PLACE-RANK.json, the error with which each process ended.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from rich.console import Console
from whole_runs import write_recipe, write_workshop

from trainer.commands.evaluate import run_evaluate
from trainer.commands.options import EvaluateOptions
from trainer.files.folders import write_folder
from trainer.recipe.reading import load_recipe
from trainer.run.train import run_recipe

RANK = int(os.environ.get("RANK", "0"))
QUIET = Console(quiet=True)


class Place(NamedTuple):
    """The work during which the process of a rank fails, by means of a function that raises an error."""

    rank: int
    function: str
    work: Callable[[Path], object]
    error: type[Exception] = ValueError
    slow: bool = False
    """True if writing a checkpoint takes longer than the next steps."""


def train(*overrides: str) -> Callable[[Path], object]:
    return lambda folder: run_recipe(load_recipe(folder / "medusa.yaml", overrides), QUIET)


def features(folder: Path) -> object:
    return train(f"features.folder={folder}/features")(folder)


def evaluate(folder: Path) -> object:
    options = EvaluateOptions(
        target=str(folder / "target"),
        prompts=str(folder / "prompts.jsonl"),
        output=folder / "evaluated",
        drafter=["lookup"],
        max_new_tokens=4,
        dtype="fp32",
    )
    return run_evaluate(options, QUIET)


PLACES = {
    "target": Place(1, "trainer.target.loading.load_model", train()),
    "rows": Place(1, "trainer.data.dataset.load_dataset", train()),
    "batches": Place(1, "trainer.run.loop.collate", train()),
    "evaluation": Place(
        0,
        "trainer.run.heldout.count_steps",
        train("training.steps=9", "evaluation.every=6", "checkpoint.every=5"),
        slow=True,
    ),
    "metrics": Place(0, "trainer.run.log.Log.step", train("training.steps=3"), OSError),
    "tree": Place(1, "trainer.heads.medusa1.fit_tree", train("training.steps=1")),
    "lock": Place(0, "trainer.target.store.hold", features),
    "shards": Place(1, "trainer.target.store.write_sealed", features, OSError),
    "models": Place(1, "trainer.commands.evaluate.load_models", evaluate),
    "decoding": Place(0, "trainer.commands.evaluate.Measurement.run", evaluate),
}


def write_slowly(*args: Any, **named: Any) -> None:
    time.sleep(2)
    write_folder(*args, **named)


def prepare(folder: Path) -> None:
    """Write a target, texts and recipes, including recipes with features in several shards."""
    write_workshop(folder)
    (folder / "prompts.jsonl").write_text('{"prompt": "a b c"}\n{"prompt": "b c d"}\n')
    write_recipe(folder, "medusa", folder / "medusa", micro_batch_size=2)


def refuse(folder: Path, name: str) -> dict[str, Any]:
    place = PLACES[name]
    planted = patch(place.function, side_effect=place.error("planted")) if place.rank == RANK else nullcontext()
    slow = patch("trainer.run.checkpoint.write_folder", write_slowly) if place.slow else nullcontext()
    with planted, slow:
        try:
            place.work(folder / name)
        except (ValueError, OSError, RuntimeError) as error:
            kept = sorted(path.name for path in (folder / name).glob("medusa/checkpoints/step-*"))
            return {"type": type(error).__name__, "message": str(error), "kept": kept}
    return {}


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for name in sys.argv[2:]:
        found = refuse(folder, name)
        (folder / f"{name}-{RANK}.json").write_text(json.dumps(found))
