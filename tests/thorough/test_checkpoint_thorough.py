"""Checkpoints: whole or not there, tied to their recipe, and bit-equal when they come back."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from test_checkpoint import FILES, checkpoints, load, save_steps, trained_model, truncate

from trainer.run.checkpoint import Progress


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize(
    "damage", [truncate, Path.unlink, lambda path: path.write_bytes(b"")], ids=["cut", "gone", "0"]
)
def test_a_damaged_newest_checkpoint_is_passed_over(
    tmp_path: Path, file: str, damage: Callable[[Path], object]
) -> None:
    model = save_steps(tmp_path, 2, 4)
    damage(tmp_path / "step-00000004" / file)
    other, optimizers = trained_model(seed=1)
    assert load(checkpoints(tmp_path), other, optimizers) == Progress(2, 200)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize(
    "state",
    [
        "[]",
        "null",
        '"step"',
        '{"step": 4, "tokens": 400, "identity": null}',
        '{"step": "4", "tokens": 400, "identity": {}, "stretches": []}',
        '{"step": 4, "identity": {}}',
    ],
)
def test_a_state_that_is_json_but_not_a_checkpoints_is_passed_over_as_damaged(tmp_path: Path, state: str) -> None:
    save_steps(tmp_path, 2, 4)
    (tmp_path / "step-00000004" / "state.json").write_text(state)
    assert load(checkpoints(tmp_path), *trained_model()) == Progress(2, 200)
