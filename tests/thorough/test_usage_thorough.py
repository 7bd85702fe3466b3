"""Options in lists, folders typed wrong, and prompts that do not fit."""

# ruff: noqa: F811  # a fixture comes by the name that it is imported under
import json
from pathlib import Path

import pytest
from test_usage import (
    CLI,
    evaluated,
    models,  # noqa: F401  # fixtures
)

from trainer.cli import app
from trainer.terminal import progress


def test_settings_and_policies_given_several_times_are_all_measured(models: Path, tmp_path: Path) -> None:
    arguments = [
        "--drafter",
        "lookup",
        "--settings",
        "greedy",
        "--settings",
        "sampling",
        "--policies",
        "fixed",
        "--policies",
        "heuristic",
    ]
    result = CLI.invoke(app, evaluated(models, tmp_path, *arguments, "--limit", "1"))
    assert result.exit_code == 0, result.output
    rows = json.loads((tmp_path / "report.json").read_text())["rows"]
    assert {row["setting"] for row in rows} == {"greedy", "T=1"}
    assert {"prompt lookup", "prompt lookup, heuristic"} <= {row["method"] for row in rows}


def test_without_a_terminal_evaluating_says_how_far_it_is(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    result = CLI.invoke(app, evaluated(models, tmp_path, "--limit", "1", "--settings", "greedy", "--drafter", "lookup"))
    lines = [line for line in result.output.splitlines() if line.startswith("evaluating: ")]
    assert lines[0].startswith("evaluating: 1/3, about ") and lines[-1] == "evaluating: 3/3"  # 3 methods


def test_prompts_that_do_not_fit_are_left_out_and_counted_if_asked(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    arguments = ["--drafter", f"draft:{models}/draft", "--skip-long", "--settings", "greedy"]
    result = CLI.invoke(app, evaluated(models, tmp_path, *arguments))
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["prompts"], report["prompts_left_out"]) == (1, 2)
    for text in (result.output, (tmp_path / "report.html").read_text()):
        assert "1 prompts (2 too long, left out), up to 6 new tokens" in " ".join(text.split())


def test_where_every_prompt_fits_nothing_is_left_out(models: Path, tmp_path: Path) -> None:
    result = CLI.invoke(app, evaluated(models, tmp_path, "--limit", "1", "--skip-long", "--settings", "greedy"))
    report = json.loads((tmp_path / "report.json").read_text())
    assert result.exit_code == 0 and report["prompts_left_out"] == 0 and "too long" not in result.output
