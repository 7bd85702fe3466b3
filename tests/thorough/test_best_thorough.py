"""The best weights by held-out figures: which they are, and that they are the same wherever a run is killed."""

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
from torch import Tensor

from trainer.files import folders
from trainer.learning.objective import Objective
from trainer.recipe.common import EvaluationSection
from trainer.recipe.reading import parse_recipe
from trainer.run import heldout, loop
from trainer.run.heldout import Evaluator, Watch
from trainer.run.log import Evaluation
from trainer.run.train import run_recipe


def workshop(folder: Path, kind: str, **evaluation: Any) -> dict[str, Any]:
    """Write a recipe of ten steps that evaluates at every second step and writes a checkpoint at every step."""
    folder.mkdir(exist_ok=True)
    counting_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    write_corpus(folder)
    content = recipe_content(folder, kind, steps=10)
    content["evaluation"] |= {"every": 2, "keep": "best", **evaluation}
    return {**content, "checkpoint": {"every": 1, "keep": 100}}


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[int, float]]]:
    """Make evaluations return these figures one after the other; return the tree nodes and temperature of each
    evaluation. There are eight prompts with ten passes each. Half of the prompts have ``apart`` tokens more, and the
    other half have ``apart`` tokens fewer; the halves change places at each evaluation.
    """
    asked: list[tuple[int, float]] = []

    def script(figures: list[float], apart: int = 0) -> list[tuple[int, float]]:
        left = iter(figures)

        def found(self: Evaluator, objective: Objective) -> Evaluation:
            drafter = objective.drafter()
            assert drafter is not None
            asked.append((drafter.max_nodes, self.config.sampling.temperature))
            figure, shift = next(left), apart * (-1) ** len(asked)
            texts = tuple((round(10 * figure) + sign * shift, 10) for sign in (1, -1) * 4)
            return Evaluation({"tokens_per_pass": figure}, drafter.label, texts)

        monkeypatch.setattr(Evaluator, "evaluate", found)
        return asked

    return script


def run(content: dict[str, Any]) -> str:
    """Run the recipe; return what it printed."""
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
"""Figures of steps 2, 4, 6, 8 and 10, and of the finished weights."""


def test_the_heads_of_the_best_step_are_finished_with_a_tree_of_their_own(
    tmp_path: Path, scripted: Callable[..., list[tuple[int, float]]]
) -> None:
    """All steps, including the last, are compared with chains; the tree is fitted afterwards."""
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
    assert "final, with the best weights (step 4)" in said and ": the best weights, of step 4, held out, T=0.7" in said
    assert "step 10, held out, T=0.7 (medusa, chain of 3): " in said
    assert re.search(rf"of step 4, held out, T=0\.7 \(medusa, \w+ of {nodes[5] - 1}\): ", said)
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert (lines[-1]["step"], lines[-1]["heldout/step"], lines[-1]["heldout/tokens_per_pass"]) == (10, 4, 3.5)


@pytest.mark.parametrize(("apart", "kept"), [(0, 4), (5, 10)])
def test_the_last_weights_are_kept_unless_others_are_better_beyond_their_interval(
    apart: int, kept: int, tmp_path: Path, scripted: Callable[..., list[tuple[int, float]]]
) -> None:
    """The figures are 3.0 and 2.9 tokens per pass: equal on every prompt, or with prompts that differ by a third either
    way.
    """
    content = workshop(tmp_path, "medusa")
    scripted([*SCRIPT[:1], 3.0, 2.0, 2.0, 2.9, 2.9], apart)
    said = run(content)
    provenance, heads = finished(content)
    weights = checkpointed(content, kept)
    assert provenance["steps"] == kept
    assert all(torch.equal(tensor, weights[f"heads.{name}"]) for name, tensor in heads.items())
    noted = "step 4 had the best evaluation, 3.000 tokens per target pass; the last"
    assert (noted in said) == ("with the best weights" not in said) == (kept == 10)


def test_evaluations_the_choice_of_weights_and_the_tree_have_prompts_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def counted(examples: Any, count: int, *lengths: int) -> list[tuple[int, ...]]:
        asked.append(count)
        return found(examples, min(count, 2), *lengths)

    found = heldout.heldout_prompts
    monkeypatch.setattr(heldout, "heldout_prompts", counted)
    sizes = {"prompts": 3, "best_prompts": 9, "tree_prompts": 5}
    for keep, evaluated in (("last", 3), ("best", 9)):
        run(workshop(tmp_path / keep, "medusa", keep=keep, every=10, **sizes))
        assert asked == [evaluated, evaluated, 5], "evaluations during training, at its end, and the tree"
        asked.clear()
    assert (EvaluationSection().prompts, EvaluationSection(keep="best").evaluated) == (8, 64)


# --- killed -----------------------------------------------------------------------------------------------------------


class Killed(Exception):  # not an error
    """Simulates a SIGKILL, after which nothing is saved."""


@pytest.fixture
def figures_of_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make evaluations return digits of the sum of the weights: figures that differ by step and can be repeated."""

    def found(self: Evaluator, objective: Objective) -> Evaluation:
        weights = sum(parameter.double().sum().item() for parameter in objective.module.parameters())
        figure = weights * 1e4 % 1
        return Evaluation({"tokens_per_pass": figure}, "scripted", ((round(1e6 * figure), 1_000_000),) * 8)

    monkeypatch.setattr(Evaluator, "evaluate", found)
    monkeypatch.setattr(folders, "flush_to_disk", lambda path: None)  # slow, and not needed for kills


def begin(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    return {**workshop(folder, "medusa"), "checkpoint": {"every": 3, "keep": 2}}


def killed(content: dict[str, Any], owner: Any, name: str, step: int) -> None:
    """Do a run that dies when this function is called with the progress of this step."""
    whole = getattr(owner, name)

    def dying(*args: Any) -> Any:
        if any(getattr(arg, "step", None) == step for arg in args):
            raise Killed
        return whole(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, dying)
        with pytest.raises(Killed):
            run(content)


@pytest.mark.usefixtures("figures_of_the_weights")
def test_a_run_killed_anywhere_finishes_the_same_best_weights(tmp_path: Path) -> None:
    """The kills come before a step, before an evaluation, and before the evaluated weights are judged."""
    straight = begin(tmp_path / "straight")
    run(straight)
    provenance, _ = finished(straight)
    assert 2 <= provenance["steps"] < 10, "the last step would be finished without a choice"
    places = [(loop, "_step", step) for step in (4, 5, 7, 9)]
    places += [(Watch, name, step) for name in ("evaluate", "_judge") for step in (6, 8, 10)]
    for number, place in enumerate(places):
        content = begin(tmp_path / str(number))
        killed(content, *place)
        for _ in range(2):  # started once more
            run(content)
            again, _ = finished(content)
            assert again["steps"] == provenance["steps"], place
            weights = [Path(c["output"]) / "final" / "model.safetensors" for c in (straight, content)]
            assert weights[0].read_bytes() == weights[1].read_bytes(), place
