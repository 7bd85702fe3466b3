"""The best weights by held-out figures are the same wherever a run is killed."""

from pathlib import Path
from typing import Any

import pytest
from test_checkpoint import finished, run, workshop

from trainer.files import folders
from trainer.learning.objective import Objective
from trainer.run import loop
from trainer.run.heldout import Evaluator, Watch
from trainer.run.log import Evaluation


class Killed(Exception):  # not an error
    """Simulates a SIGKILL, after which nothing is saved."""


@pytest.fixture(autouse=True)
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


def test_a_run_killed_anywhere_finishes_the_same_best_weights(tmp_path: Path) -> None:
    """The kills come before a step, before an evaluation, and before its weights are judged."""
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
