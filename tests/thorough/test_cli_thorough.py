"""The command line: what it prints, its exit codes, its one-line errors."""

# ruff: noqa: F811  # a fixture comes by the name that it is imported under
import json
from pathlib import Path

import pytest
from test_cli import (
    models,  # noqa: F401  # fixtures
    run,
)

from decoding.model.fingerprint import stored_fingerprint


def test_evaluate_writes_the_report_and_prints_the_table(
    models: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "220")
    code, output = run(
        "evaluate", "--target", str(models / "target"), "--drafter", f"draft:{models}/draft", "--drafter",
        f"heads:{models}/heads", "--drafter", f"draft-tree:{models}/draft,depth=2,width=2,nodes=5", "--drafter",
        "lookup", "--prompts", str(models / "prompts.jsonl"), "--limit", "2", "--max-new-tokens", "6",
        "--dtype", "fp32", "--output", str(tmp_path), "--settings", "greedy,sampling", "--policies", "fixed,heuristic",
        "--title", "Two prompts",
    )  # fmt: skip
    assert code == 0
    report = json.loads((tmp_path / "report.json").read_text())
    names = {row["method"] for row in report["rows"]}
    assert names >= {"plain", "prompt lookup", "medusa, tree of 9", "draft model, 4 tokens", "draft model, tree of 4"}
    assert "prompt lookup, heuristic" in names and report["title"] == "Two prompts"
    assert {row["setting"] for row in report["rows"]} == {"greedy", "T=1"}
    assert (tmp_path / "report.html").stat().st_size > 10_000
    assert "transformers generate" in output and "lossless, 2/2 same" in output
    by = {row["method"]: row["artefact"] for row in report["rows"]}
    assert by["plain"] is by["prompt lookup"] is by["transformers generate"] is None
    assert by["medusa, tree of 9"] == "heads" and by["transformers assisted, 4 tokens"] == "draft"
    assert by["draft model, 4 tokens"] == by["draft model, tree of 4"] == "draft"


def test_drafters_that_are_called_alike_are_told_apart_by_their_specs(models: Path, tmp_path: Path) -> None:
    (tmp_path / "draft").symlink_to(models / "draft")
    asked = [f"draft:{folder}/draft" for folder in (models, tmp_path)] + ["lookup:ngram=2", "lookup"]
    words = [word for spec in asked for word in ("--drafter", spec)]
    code, _ = run(
        "evaluate", "--target", str(models / "target"), *words, "--prompts", str(models / "prompts.jsonl"), "--limit",
        "1", "--max-new-tokens", "4", "--dtype", "fp32", "--output", str(tmp_path), "--settings", "greedy",
    )  # fmt: skip
    assert code == 0
    report = json.loads((tmp_path / "report.json").read_text())
    chain = "draft model, 4 tokens"
    assert report["drafters"] == {
        f"{chain} (draft:draft)": "draft:draft",
        f"{chain} (draft:draft (2))": "draft:draft (2)",
        "prompt lookup (lookup:ngram=2)": "lookup:ngram=2",
        "prompt lookup (lookup)": "lookup",
    }
    weights = stored_fingerprint(models / "draft")
    assert report["fingerprints"]["draft:draft"] == report["fingerprints"]["draft:draft (2)"] == weights
    rows = {row["method"]: row["drafter"] for row in report["rows"]}
    assert rows["transformers assisted, 4 tokens"] == f"{chain} (draft:draft)" and rows["plain"] is None
    assert all(rows[name] == name for name in report["drafters"])
