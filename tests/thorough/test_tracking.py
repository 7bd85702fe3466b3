"""When a run's figures go to wandb, and when wandb may call anybody."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from trainer.run import log
from trainer.run.log import trackers_of

KEY = "0123456789" * 4


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What stands for the process's own, so that nothing of it outlives a test."""
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
        monkeypatch.setenv(name, "")  # so that it is put back
        monkeypatch.delenv(name)
    for name in ("HOME", "WANDB_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path))
    assert not log._is_logged_in()
    netrc = tmp_path / ".netrc"
    netrc.write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    netrc.chmod(0o600)
    assert log._is_logged_in()
