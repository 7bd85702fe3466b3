"""`headstart train --dry-run` measures a few real steps, and leaves only an untrained artefact."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_launching import no_state_of_accelerate  # noqa: F401  # a fixture
from tiny_training import recipe_content, write_corpus, write_target
from typer.testing import CliRunner

from trainer.cli import app

ITS_OWN_TEXTS = {"loop": 1, "loop_trains": "all", "max_new_tokens": 8, "every": 2}
DSPARK, EAGLE3 = {"block_size": 3, "mask_token": "<user>"}, {"steps": 3, "taps": [0]}
CASES: dict[str, dict[str, Any]] = {
    "medusa": {"features": {"folder": "features"}},
    "draft": {"draft": {"policy": {"loop": 1, "max_new_tokens": 8, "every": 2}}},
    "dspark": {"kind": "draft", "draft": {"policy": ITS_OWN_TEXTS, "dspark": DSPARK}},
    "eagle3": {"kind": "draft", "draft": {"policy": ITS_OWN_TEXTS, "eagle3": EAGLE3}},
}


@pytest.mark.parametrize("kind", CASES)
def test_a_dry_run_says_what_a_run_takes_and_leaves_an_untrained_artefact(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    content = {**recipe_content(tmp_path, "medusa" if kind == "medusa" else "draft", steps=12), **CASES[kind]}
    (tmp_path / "recipe.yaml").write_text(json.dumps(content))
    result = CliRunner().invoke(app, ["train", "recipe.yaml", "--dry-run"])
    assert result.exit_code == 0, result.output
    parts = ["12 x 8 = 96, which is 4.00 times all rows", "tokens trained", "peak of one process", "free now", "s x 12"]
    parts += [" h ", "writing features"] if kind == "medusa" else [" h ", "writing texts"]
    assert not [part for part in parts if part not in result.output], result.output
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["dry-run"]
    assert {"config.json", "provenance.json"} <= {path.name for path in (tmp_path / "run" / "dry-run").iterdir()}
    assert not (tmp_path / "features").exists()


def test_a_dry_run_whose_loss_is_not_finite_says_so(tmp_path: Path) -> None:
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(recipe_content(tmp_path, "medusa", steps=12, learning_rate=1e37)))
    result = CliRunner().invoke(app, ["train", str(recipe), "--dry-run"])
    assert "there is no earlier checkpoint" in result.output
