"""`headstart evaluate`: errors before it decodes, what it keeps between runs, and how it describes the questions."""

import json
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer
from typer.testing import CliRunner

from decoding.measure.measurement import Measurement
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.policies import NO_DRAFT, AdaptivePolicy
from trainer.cli import app

CHAT = "{% for m in messages %}{{ m.content }}{% endfor %}:"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tiny target with a chat template, and four questions from two tasks, one of them with two turns."""
    folder = tmp_path_factory.mktemp("desk")
    tiny_model(vocab=128, max_position_embeddings=256).save_pretrained(folder / "target")
    byte_tokenizer(CHAT).save_pretrained(folder / "target")
    rows = [
        {"question_id": f"q{n}", "category": "ab"[n % 2], "turns": ["x" * n, "y"][: 1 + n % 2]} for n in range(1, 5)
    ]
    (folder / "questions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def evaluate(desk: Path, output: Path, *more: str, prompts: str = "questions.jsonl") -> tuple[int, str]:
    words = ["--target", str(desk / "target"), "--prompts", str(desk / prompts), "--output", str(output)]
    words += ["--max-new-tokens", "4", "--dtype", "fp32", "--settings", "greedy", "--drafter", "lookup", *more]
    done = CliRunner().invoke(app, ["evaluate", *words])
    return done.exit_code, " ".join(done.output.split())


REFUSED = {
    "--batch-size 1,8": "--batch-size 8 needs that many questions of one task, but the largest task has 2: raise",
    "--context 64,253": "--context 253 plus 4 new tokens exceeds the 256 tokens that target and drafters support",
    "--context 64": "--context 64 needs more text than",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_be_measured_is_refused_before_anything_runs(
    desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str
) -> None:
    monkeypatch.setattr(Measurement, "run", lambda measurement: pytest.fail("it decodes"))
    code, said = evaluate(desk, tmp_path / "out", *words.split())
    assert code == 2 and f"error: {REFUSED[words]}" in said
    assert not (tmp_path / "out").exists()


def test_a_finished_evaluation_decodes_nothing_again_and_another_one_needs_restart(
    desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, said = evaluate(desk, tmp_path, "--limit", "3")
    assert code == 0 and "3 of 4 questions, spread evenly over 2 tasks (--limit)" in said
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    assert report["prompts"] == 5 and report["questions"] == 3 and report["asked"]["turns"] == "all"
    assert [row["task"] for row in report["tasks"]] == ["b"] * 4 + ["a"] * 4
    assert report["samples"][0]["task"] in "ab"
    with monkeypatch.context() as patched:
        patched.setattr(Measurement, "_decode", lambda measurement, unit: pytest.fail("it decodes"))
        assert evaluate(desk, tmp_path, "--limit", "3")[0] == 0
        assert json.loads((tmp_path / "report.json").read_text())["rows"] == report["rows"]
        code, said = evaluate(desk, tmp_path, "--limit", "4")
    assert code == 2 and "contains runs with limit 3, not 4: use another --output, or --restart to" in said
    assert evaluate(desk, tmp_path, "--limit", "4", "--restart")[0] == 0
    assert json.loads((tmp_path / "report.json").read_text())["questions"] == 4


def test_each_drafter_is_measured_with_drafts_of_fixed_size_and_as_generate_drafts(
    desk: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(AdaptivePolicy, "_best", lambda *asked, **explores: NO_DRAFT)  # as if no draft pays
    MedusaHeads.for_target(tiny_model(vocab=128), MedusaConfig(16, 128)).save_pretrained(tmp_path / "heads")
    code, said = evaluate(desk, tmp_path, "--limit", "2", "--drafter", f"heads:{tmp_path / 'heads'}")
    report: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    rows = {row["policy"]: row for row in report["rows"] if row["artefact"] == "heads"}
    label = rows["fixed"]["method"]
    assert code == 0 and rows["adaptive"]["method"] == f"{label}, adaptive" and f"{label}, adaptive" in said
    assert rows["adaptive"]["drafter"] == rows["fixed"]["drafter"] == label
    assert rows["adaptive"]["conditional_acceptance"] == [] and len(rows["fixed"]["conditional_acceptance"]) > 0
    code, said = evaluate(desk, tmp_path, "--policy", "eager")
    assert code == 2 and "no policy is called 'eager': choose one of fixed, adaptive" in said


def test_drafters_are_named_by_their_runs_and_none_is_lost(desk: Path, tmp_path: Path) -> None:
    words = []
    for place, run in enumerate(["alpha", "beta", "beta (2)", "beta", None, None]):
        folder = tmp_path / str(place) / "final (1)"
        MedusaHeads.for_target(tiny_model(vocab=128), MedusaConfig(16, 128)).save_pretrained(folder)
        if run is not None:
            (folder / "provenance.json").write_text(json.dumps({"recipe": {"name": run}}))
        words += ["--drafter", f"heads:{folder}"]
    assert evaluate(desk, tmp_path / "out", "--limit", "1", "--policy", "fixed", *words)[0] == 0
    report: dict[str, Any] = json.loads((tmp_path / "out" / "report.json").read_text())
    label, *_ = (row["method"].partition(" (")[0] for row in report["rows"] if row["artefact"] == "heads")
    runs = ["alpha", "beta", "beta (2)", "beta (3)", "final (1)", "final (1) (2)"]
    heads = [row["method"] for row in report["rows"] if row["artefact"] == "heads"]
    assert heads == [f"{label} (heads:{run})" for run in runs]
    assert list(report["drafters"].values()) == ["lookup", *(f"heads:{run}" for run in runs)]
    assert len({report["fingerprints"][f"heads:{run}"] for run in runs}) == 1


def test_runs_and_report_name_no_local_path(desk: Path, tmp_path: Path) -> None:
    evaluate(desk, tmp_path, "--limit", "1")
    for file in ("runs-0.jsonl", "report.json"):
        assert str(desk) not in (tmp_path / file).read_text()


def test_questions_that_do_not_fit_are_left_out_and_counted(desk: Path, tmp_path: Path) -> None:
    (desk / "long.jsonl").write_text(json.dumps({"prompt": "a" * 400}) + "\n" + json.dumps({"prompt": "b"}) + "\n")
    code, said = evaluate(desk, tmp_path, prompts="long.jsonl")
    assert code == 0 and "1 prompts (1 were left out because they are too long)" in said
    assert json.loads((tmp_path / "report.json").read_text())["prompts_left_out"] == 1
    code, said = evaluate(desk, tmp_path / "none", "--limit", "1", prompts="long.jsonl")
    assert code == 2 and "every prompt plus 4 new tokens exceeds the 256 tokens that target and drafters " in said
