"""Train heads and drafts on the states of a tiny target, kill -9, resume, export and decode, on the GPU if there is
one. Usage: killed_and_resumed.py FOLDER. Every run is a fork of this process, which has imported everything once and
has not used the GPU. Needs torch, transformers, accelerate and pydantic, but neither datasets nor DeepSpeed nor a
tracker.
"""

import json
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # looks for a GPU without using it, so that forks can use it

import torch
from rich.console import Console
from tiny_models import counting_model
from tiny_training import await_file, recipe_content, tiny_tokenizer, write_corpus

from decoding.headstart_model import HeadstartModel
from trainer.export.exporter import export
from trainer.recipe.reading import parse_recipe
from trainer.run.checkpoint import Progress
from trainer.run.log import Log
from trainer.run.train import run_recipe

LAST, KILLED_AFTER = 6, 3
DSPARK = {"block_size": 3, "markov_rank": 4, "anchors": 4, "layers": 1, "mask_token": "<user>"}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "heads": ("medusa", {"heads": {"num_heads": 2}, "training": {"optimizer": "adamw"}}),
    "dspark": ("draft", {"draft": {"dspark": DSPARK}, "training": {"optimizer": "muon"}}),
    "eagle3": ("draft", {"draft": {"eagle3": {"steps": 3, "taps": [0]}}, "training": {"optimizer": "muon"}}),
}
"""The kind of recipe and the changes to it, by the format of the export."""


def status_of(life: Callable[[], None]) -> int:
    """Run the function in a separate process; return the exit code, or minus the signal that killed the process."""
    if (process := os.fork()) == 0:
        code = 1
        try:
            life()
            code = 0
        finally:
            if code:
                traceback.print_exc()
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def train(folder: Path, format: str, output: Path, killed: bool = False) -> None:
    kind, changes = KINDS[format]
    content = recipe_content(folder, kind, steps=LAST) | {"output": str(output), "checkpoint": {"every": 2}}
    for section, values in changes.items():
        content[section] = {**content.get(section, {}), **values}
    note_step = Log.step

    def step(self: Log, progress: Progress, *rest: Any) -> None:
        note_step(self, progress, *rest)
        if killed and progress.step == KILLED_AFTER:
            await_file(output / "checkpoints" / "step-00000002")
            os.kill(os.getpid(), signal.SIGKILL)

    Log.step = step  # type: ignore[method-assign, assignment]
    run_recipe(parse_recipe(content), Console(stderr=True))


def losses(output: Path, name: str = "metrics.jsonl") -> dict[int, float]:
    lines = map(json.loads, (output / name).read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def export_and_decode(folder: Path, format: str, output: Path) -> None:
    exported = folder / f"{format} exported"
    export(output, exported, format)
    target, prompt = str(folder / "target"), torch.tensor([[4, 5, 6]])
    options: dict[str, Any] = {"max_new_tokens": 16, "do_sample": False, "pad_token_id": 0}
    drafted, plain = (
        HeadstartModel.from_pretrained(target, drafter, dtype=torch.float32) for drafter in (str(exported), None)
    )
    assert drafted.drafter is not None
    texts: list[Any] = [model.generate(prompt.to(model.device), **options) for model in (drafted, plain)]
    assert torch.equal(*texts), texts


def check(folder: Path, format: str) -> None:
    whole, resumed = folder / f"{format} whole", folder / f"{format} resumed"
    assert status_of(lambda: train(folder, format, whole)) == 0
    assert status_of(lambda: train(folder, format, resumed, killed=True)) == -signal.SIGKILL
    assert not (resumed / "final").exists()
    assert status_of(lambda: train(folder, format, resumed)) == 0
    found, wanted = losses(resumed), losses(whole)
    assert losses(resumed, "metrics.superseded.jsonl").keys() == {KILLED_AFTER}, "it began again"
    assert found.keys() == wanted.keys() == set(range(1, LAST + 1))
    assert all(math.isclose(found[step], wanted[step], rel_tol=2e-5) for step in wanted), (found, wanted)
    assert status_of(lambda: export_and_decode(folder, format, resumed)) == 0
    print(f"{format}: trained, killed, resumed, exported and decoded", flush=True)


if __name__ == "__main__":
    workshop = Path(sys.argv[1])
    os.environ["HEADSTART_CACHE"] = str(workshop / "cache")
    counting_model().save_pretrained(workshop / "target")
    tiny_tokenizer().save_pretrained(workshop / "target")
    write_corpus(workshop)
    for each in KINDS:
        check(workshop, each)
