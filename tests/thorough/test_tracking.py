"""When the figures of a run go to wandb, and when wandb may use the network."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from test_provenance import killed_after, rows, train, workshop

from decoding.errors import UserError
from trainer.run import log
from trainer.run.log import trackers_of

__all__ = ["workshop"]  # a fixture
KEY = "0123456789" * 4


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Replace the environment of the process, so that no change outlives a test."""
    given: dict[str, str] = {}
    monkeypatch.setattr(log, "os", SimpleNamespace(environ=given))
    return given


def installed(monkeypatch: pytest.MonkeyPatch, there: bool = True, logged_in: bool = False) -> None:
    monkeypatch.setattr(log, "installed_trackers", lambda: ["wandb", "mlflow"] if there else [])
    monkeypatch.setattr(log, "_is_logged_in", lambda: logged_in)


def test_a_key_in_the_environment_asks_for_wandb_unless_the_recipe_says_none(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch)
    environment["WANDB_API_KEY"] = KEY
    assert trackers_of(None) == ["wandb"] and trackers_of([]) == []
    assert "WANDB_MODE" not in environment


def test_a_recipe_that_asks_without_a_key_runs_offline_in_silence(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    installed(monkeypatch)
    assert trackers_of(["trackio", "mlflow", "wandb"]) == ["mlflow", "wandb"], "one that is not installed is left out"
    assert environment == {"WANDB_MODE": "offline", "WANDB_SILENT": "true"}


def test_wandbs_own_login_is_found_without_asking_anybody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the tracker is an optional extra")
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_SILENT", "NETRC"):
        monkeypatch.setenv(name, "")  # so that it is restored
        monkeypatch.delenv(name)
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    assert not log._is_logged_in()
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    netrc.chmod(0o600)
    assert log._is_logged_in()


class _MlflowError(Exception):
    pass


@pytest.mark.parametrize("fails", ["log", "finish"])
def test_a_tracker_that_fails_costs_no_step(workshop: Path, fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = Mock(tracker=SimpleNamespace(info=SimpleNamespace(run_id="7")))
    tracker.name = "mlflow"
    getattr(tracker, fails).side_effect = _MlflowError(f"no {fails}\nand more lines")

    def init_trackers(accelerator: Any, *given: Any) -> None:
        accelerator.trackers.append(tracker)

    monkeypatch.setattr("accelerate.Accelerator.init_trackers", init_trackers)
    said = train(workshop)
    warning = f"warning: mlflow failed (no {fails}), so it gets no more figures until the next start; metrics.jsonl has"
    assert said.count(warning) == 1 and "finished: " in said and tracker.finish.call_count == (fails == "finish")
    assert [step for step, kind in rows(workshop / "run" / "metrics.jsonl") if kind == "loss"] == [1, 2, 3, 4, 5, 6]


def test_a_tracker_that_cannot_start_is_the_users_error(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("accelerate.Accelerator.init_trackers", Mock(side_effect=_MlflowError("no server")))
    with pytest.raises(
        UserError, match=r"a tracker cannot start \(no server\): check its settings, or set tracking=none"
    ):
        train(workshop)


def test_a_resumed_run_continues_its_run_in_wandb_and_a_refused_one_opens_none(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="the tracker is an optional extra")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")

    def opened() -> list[str]:
        return [path.name.rpartition("-")[2] for path in (workshop / "run" / "wandb").glob("offline-run-*")]

    killed_after(3, workshop, tracking="wandb")
    (first,) = opened()
    with pytest.raises(UserError, match=r"another training\.seed"):
        train(workshop, tracking="wandb", seed=1)
    assert opened() == [first]
    train(workshop, tracking="wandb")
    assert json.loads((workshop / "run" / "trackers.json").read_text()) == {"wandb": first}
    assert set(opened()) == {first} and len(opened()) in (1, 2)  # the name of a folder contains the second


def test_every_tracker_is_told_the_run_that_it_continues(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr("accelerate.Accelerator.init_trackers", lambda accelerator, *given: told.append(given))
    killed_after(3, workshop)
    (workshop / "run" / "trackers.json").write_text('{"wandb": "a1", "trackio": "b", "mlflow": "c3"}')
    train(workshop)
    (_, began, fresh), (_, resumed, named) = told
    assert began["training.steps"] == 6 and resumed is None
    assert fresh["wandb"]["id"] is fresh["mlflow"]["run_id"] is None and fresh["trackio"]["resume"] == "never"
    assert (named["wandb"]["id"], named["wandb"]["resume"], named["mlflow"]["run_id"]) == ("a1", "allow", "c3")
    assert named["trackio"] == {"name": "b", "resume": "allow"} and named["tensorboard"] == {"purge_step": 3}
