"""The best weights by held-out figures: the same wherever a run is killed."""

from pathlib import Path
from typing import Any

import pytest
from tiny_training import Recorder, ToyObjective, train_toy

from trainer.files import folders
from trainer.run.checkpoint import Checkpoints, Progress
from trainer.run.heldout import Best


class Killed(Exception):  # not an error
    """In place of a SIGKILL: nothing is saved."""


class Watched(Recorder):
    """A run that is best at steps 2, 6 and 8, and that dies where it is told to."""

    def __init__(self, folder: Path, objective: ToyObjective, dies_at: tuple[str, int] | None = None) -> None:
        super().__init__()
        self.checkpoints = Checkpoints(folder / "checkpoints", 2, {"seed": 0})
        self.best = Best(folder / "best", "toy", self.checkpoints.steps)
        self.module, self.dies_at = objective.module, dies_at

    def _die(self, place: str, step: int) -> None:
        if self.dies_at == (place, step):
            raise Killed

    def _evaluate(self, progress: Progress) -> None:
        super()._evaluate(progress)
        self._die("checkpoint", progress.step)
        figure = {2: 0.3, 4: 0.1, 6: 0.5, 8: 0.6}.get(progress.step, 0.2)
        self.best.offer(progress, figure, self.module)
        self._die("evaluation", progress.step)

    def _on_step(self, progress: Progress, figures: dict[str, float]) -> None:
        super()._on_step(progress, figures)
        self._die("step", progress.step)


def watched_run(folder: Path, dies_at: tuple[str, int] | None = None) -> tuple[Progress, Watched]:
    objective = ToyObjective(dropout=0.3)
    watched = Watched(folder, objective, dies_at)
    settings = {"steps": 12, "learning_rate": 3e-2, "checkpoint_every": 3, "evaluate_every": 2}
    return train_toy(folder / "checkpoints", objective, watched, **settings), watched


def outcome(progress: Progress, watched: Watched) -> tuple[Progress, Any, list[float]]:
    """Where it ended, what was best, and the weights that are finished."""
    latest = watched.best.latest()
    assert latest is not None
    watched.best.restore(watched.module, latest.progress.step)
    return progress, latest, [parameter.sum().item() for parameter in watched.module.parameters()]


def test_a_run_killed_anywhere_ends_at_the_same_step_with_the_same_best_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After every step, after every evaluation, and between the two where there is a checkpoint."""
    monkeypatch.setattr(folders, "flush_to_disk", lambda path: None)  # slow, and for worse than a kill
    straight = outcome(*watched_run(tmp_path / "straight"))
    assert straight[1].progress.step == 8
    places = [("step", step) for step in range(1, 13)] + [("evaluation", step) for step in range(2, 11, 2)]
    places += [("checkpoint", 6)]
    for number, place in enumerate(places):
        folder = tmp_path / str(number)
        with pytest.raises(Killed):
            watched_run(folder, place)
        assert outcome(*watched_run(folder)) == straight, place
        assert outcome(*watched_run(folder)) == straight, f"{place}, and started once more"
