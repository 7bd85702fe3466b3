"""Answers from a target in this process: what is requested and written, and what remains after a kill."""

# ruff: noqa: F811  # a fixture comes by the name that it is imported under
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from test_regenerate import finished, models, options, regenerate  # noqa: F401  # fixtures

from trainer.commands.options import RegenerateOptions


@pytest.mark.parametrize("speculator", ["heads", "draft"])
def test_a_speculating_target_writes_the_very_same_greedy_file(models: Path, tmp_path: Path, speculator: str) -> None:
    files = []
    for name, chosen in {"plain": {}, "speculating": {"drafter": str(models / speculator)}}.items():
        (tmp_path / name).mkdir()
        regenerate(options(tmp_path / name, models / "random", "abcde", max_new_tokens=12, dtype="fp32", **chosen))
        files.append((tmp_path / name / "answers.jsonl").read_bytes())
    assert files[0] == files[1] and len(files[0].splitlines()) > 2


@pytest.mark.parametrize("kept", [0.0, 0.01, 0.5, 0.9])
def test_a_run_that_was_killed_is_gone_on_with_to_the_same_bytes(
    finished: tuple[RegenerateOptions, dict[str, bytes]], tmp_path: Path, kept: float
) -> None:
    chosen, files = finished
    whole = files["answers.jsonl"]
    left = whole[: int(kept * len(whole))]  # mostly up to the middle of a line
    assert whole.count(b"\n") >= 12 and files["answers.jsonl.failed.jsonl"]
    (tmp_path / "answers.jsonl").write_bytes(left)
    (tmp_path / "answers.jsonl.meta.json").write_bytes(files["answers.jsonl.meta.json"])
    summary = regenerate(replace(chosen, output=tmp_path / "answers.jsonl"))
    for name in ("answers.jsonl", "answers.jsonl.failed.jsonl"):
        assert (tmp_path / name).read_bytes() == files[name]
    assert summary.before == left.count(b"\n")


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"temperature": 0.5}, "temperature 0.0, not 0.5"),
        ({"top_p": 0.5}, "top_p 1.0, not 0.5"),
        ({"max_new_tokens": 31}, "max_new_tokens 30, not 31"),
        ({"seed": 1}, "seed 0, not 1"),
        ({"prompt_field": "prompt"}, "prompt_field None, not 'prompt'"),
        ({"target": "random"}, "target_fingerprint"),
        ({"dtype": "bf16"}, "dtype 'float32', not 'bfloat16'"),
        ({"rows": ["a", "c"]}, "prompts_sha256"),
    ],
    ids=lambda value: str(value),
)
def test_other_settings_than_it_was_begun_with_are_refused(
    models: Path, tmp_path: Path, change: dict[str, Any], complaint: str
) -> None:
    regenerate(options(tmp_path, models / "plain", ["a", "b"], dtype="fp32"))
    before = (tmp_path / "answers.jsonl").read_bytes()
    target = models / change.pop("target", "plain")
    with pytest.raises(ValueError, match=f"was started with {complaint}.*or another output"):
        regenerate(options(tmp_path, target, change.pop("rows", ["a", "b"]), **{"dtype": "fp32", **change}))
    assert (tmp_path / "answers.jsonl").read_bytes() == before
