"""The best weights by held-out figures, the same however often a run is killed."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from safetensors.torch import load_file
from tiny_models import counting_model
from tiny_training import recipe_content, tiny_tokenizer, write_corpus
from torch import Tensor, nn

from trainer.learning.objective import Objective
from trainer.recipe.reading import parse_recipe
from trainer.run.checkpoint import Progress
from trainer.run.heldout import Best, Evaluator
from trainer.run.log import Evaluation
from trainer.run.train import run_recipe


def best_in(folder: Path, checkpoints: list[int] | None = None) -> Best:
    return Best(folder, "a run", lambda: checkpoints or [])


def module_of(value: float) -> nn.Module:
    """One weight and a buffer, both of this value."""
    module = nn.Linear(1, 1, bias=False)
    module.register_buffer("seen", torch.tensor(value))
    nn.init.constant_(module.weight, value)
    return module


def offer(best: Best, step: int, figure: float) -> bool:
    """An evaluation whose weights are all of the step's number."""
    return best.offer(Progress(step, 10 * step), figure, module_of(step))


def restored(best: Best) -> float:
    module = module_of(-1.0)
    latest = best.latest()
    assert latest is not None
    best.restore(module, latest.progress.step)
    assert module.seen == module.weight.item()
    return module.weight.item()


def steps_kept(folder: Path) -> list[int]:
    return [int(path.name.removeprefix("step-")) for path in sorted(folder.glob("step-*"))]


def test_the_weights_of_the_highest_figure_are_kept_and_come_back(tmp_path: Path) -> None:
    best = best_in(tmp_path)
    assert [offer(best, step, figure) for step, figure in ((2, 1.5), (4, 2.5), (6, 2.0))] == [True, True, False]
    latest = best.latest()
    assert latest is not None and (latest.progress, latest.figure) == (Progress(4, 40), 2.5)
    assert restored(best) == 4
    written = json.loads((tmp_path / "step-00000004" / "evaluation.json").read_text())
    assert (written["step"], written["tokens_per_pass"]) == (4, 2.5)


@pytest.mark.parametrize("damage", ["evaluation.json", "weights.safetensors"])
def test_a_best_that_is_not_whole_stops_the_run_and_stays(tmp_path: Path, damage: str) -> None:
    """Without it the run would finish other weights than the best, and nobody would know."""
    offer(best_in(tmp_path), 2, 9.0)
    (tmp_path / "step-00000002" / damage).unlink()
    with pytest.raises(ValueError, match=r"step-00000002, the best weights up to its step, cannot be read \(.*remove"):
        best_in(tmp_path).check()
    assert steps_kept(tmp_path) == [2]


def workshop(folder: Path, kind: str, **evaluation: Any) -> dict[str, Any]:
    """A recipe of ten steps that evaluates at every second, with a checkpoint of every step."""
    counting_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    write_corpus(folder)
    content = recipe_content(folder, kind, steps=10)
    content["evaluation"] |= {"every": 2, "keep": "best", **evaluation}
    return {**content, "checkpoint": {"every": 1, "keep": 100}}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[float]], list[tuple[int, float]]]:
    """Makes evaluations find these figures one after the other; returns each one's tree nodes and temperature."""
    asked: list[tuple[int, float]] = []

    def script(figures: list[float]) -> list[tuple[int, float]]:
        left = iter(figures)

        def found(self: Evaluator, objective: Objective) -> Evaluation:
            drafter = objective.drafter()
            assert drafter is not None
            asked.append((drafter.max_nodes, self.config.sampling.temperature))
            return Evaluation({"tokens_per_pass": next(left)}, drafter.label)

        monkeypatch.setattr(Evaluator, "evaluate", found)
        return asked

    return script


def run(content: dict[str, Any]) -> str:
    """What the run said."""
    AcceleratorState._reset_state(True)
    console = Console(width=200, record=True, file=(Path(content["output"]).parent / "said.txt").open("a"))
    try:
        run_recipe(parse_recipe(content), console)
    finally:
        AcceleratorState._reset_state(True)
    return console.export_text()


def finished(content: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    final = Path(content["output"]) / "final"
    return json.loads((final / "provenance.json").read_text()), load_file(final / "model.safetensors")


def checkpointed(content: dict[str, Any], step: int) -> dict[str, Tensor]:
    return load_file(Path(content["output"]) / "checkpoints" / f"step-{step:08d}" / "weights.safetensors")


SCRIPT = [1.5, 3.0, 2.0, 2.5, 2.9, 3.5]
"""Of steps 2, 4, 6, 8 and 10, and of what is finished."""


def test_the_heads_of_the_best_step_are_finished_with_a_tree_of_their_own(
    tmp_path: Path, scripted: Callable[..., list[tuple[int, float]]]
) -> None:
    """Steps are compared by chains, the last one's too; the tree comes after."""
    content = workshop(tmp_path, "medusa", temperature=0.7)
    content["heads"] = {"num_heads": 3, "tree_nodes": 9}
    asked = scripted(SCRIPT)
    said = run(content)
    nodes, temperatures = zip(*asked, strict=True)
    assert nodes[:5] == (4,) * 5 and nodes[5] != 4 and set(temperatures) == {0.7}
    provenance, heads = finished(content)
    best, last = checkpointed(content, 4), checkpointed(content, 10)
    assert all(torch.equal(tensor, best[f"heads.{name}"]) for name, tensor in heads.items())
    assert not all(torch.equal(tensor, last[f"heads.{name}"]) for name, tensor in heads.items())
    assert provenance["steps"] == 4 and provenance["tokens"] > 0
    assert (
        "final, the weights of step 4, which were the best" in said
        and ": the best weights, of step 4, held out, T=0.7" in said
    )
    assert "step 10, held out, T=0.7 (medusa, chain of 3): " in said
    assert re.search(rf"of step 4, held out, T=0\.7 \(medusa, \w+ of {nodes[5] - 1}\): ", said)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (lines[-1]["step"], lines[-1]["heldout/step"], lines[-1]["heldout/tokens_per_pass"]) == (10, 4, 3.5)
