"""When a run's figures go to wandb, and when wandb may call anybody."""

# ruff: noqa: F811  # a fixture comes by the name that it is imported under
from pathlib import Path

import pytest
from test_tracking import (
    KEY,
    nobody_logged_in,  # noqa: F401  # fixtures
)

from trainer.run import tracking


def test_wandbs_own_login_is_found_without_asking_anybody(nobody_logged_in: Path) -> None:
    pytest.importorskip("wandb", reason="the tracker is an optional extra")
    assert not tracking._is_logged_in()
    netrc = nobody_logged_in / ".netrc"
    netrc.write_text(f"machine api.wandb.ai\n  login user\n  password {KEY}\n")
    netrc.chmod(0o600)
    assert tracking._is_logged_in()
