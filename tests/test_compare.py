"""Comparison of two evaluations by pairs: the ratio, the conclusion, and the errors."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from decoding.measure.compare import Comparison, compare, conclusion, read_evaluation
from decoding.metrics import Estimate
from trainer.cli import app

_ABOUT = {"label": "lossless", "drafter": None, "artefact": None, "temperature": 0.0}
METHODS = [{"setting": "greedy", "name": name, **_ABOUT} for name in ("plain", "draft")]


def evaluated(
    folder: Path,
    seconds: list[float],
    accepted: int = 1,
    commit: str = "c",
    digest: str = "d",
    turn: int = 0,
    plain: float = 1.0,
    **identity: Any,
) -> Path:
    """Write runs of ten tokens: for each prompt plain decoding takes ``plain`` seconds, and the draft takes the given
    seconds.
    """
    folder.mkdir()
    lines: list[dict[str, Any]] = [
        {
            "provenance": {
                "identity": {"target": "t", "tokenizer": "k", "prompts": "p", **identity},
                "methods": METHODS,
                "hardware": "h",
                "commit": commit,
            }
        }
    ]
    for wave, spent in enumerate(seconds):
        for name, own in (("plain", plain), ("draft", spent)):
            counts = [[1 + accepted, accepted, 1, 1, 9]] * 5 if name == "draft" else [[1, 0, 0, 0, 9]] * 10
            key = {"cell": [1, None], "wave": wave, "turn": turn, "setting": "greedy", "method": name, "round": 0}
            run = [[3] * 11, 10, 1.0, own, counts, 0.1, 0.1]
            lines.append({**key, "prompts": [f"q{wave}"], "digests": [digest], "runs": [run]})
    (folder / "runs-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def row(found: Comparison, method: str = "draft") -> Any:
    (held,) = [row for row in found.rows if row.method == method]
    return held


def test_a_method_that_is_faster_on_every_prompt_is_really_faster(tmp_path: Path) -> None:
    a = read_evaluation(evaluated(tmp_path / "a", [0.5] * 10))
    b = read_evaluation(evaluated(tmp_path / "b", [0.4, 0.45] * 5))
    found = compare(a, b)
    assert [each.method for each in found.rows] == ["plain", "draft"] and found.warnings == ()
    assert row(found).pairs == 10 and row(found).speed.value == pytest.approx(0.5 / 0.425)
    assert row(found).speed_conclusion.kind == "real" and row(found).tokens_per_pass.value == 1.0
    assert row(found, "plain").speed_conclusion.text == "no difference seen: at most 0.1% in either direction"


def test_two_methods_of_one_folder_are_paired_by_prompt(tmp_path: Path) -> None:
    a = read_evaluation(evaluated(tmp_path / "a", [0.5] * 10))
    (held,) = compare(a, a, "plain", "draft").rows
    assert (held.method, held.other) == ("plain", "draft")
    assert held.speed and held.speed_conclusion and held.speed.value == held.tokens_per_pass.value == 2.0
    assert held.speed_conclusion.text == "real: B is faster by 100.0% to 100.0%"
    assert held.tokens_per_pass_conclusion.text == "real: B keeps more by 100.0% to 100.0%"


@pytest.mark.parametrize(
    ("estimate", "kind", "text"),
    [
        (Estimate(1.05, 1.03, 1.08, 100), "real", "real: B is faster by 3.0% to 8.0%"),
        (Estimate(0.95, 0.92, 0.97, 100), "real", "real: B is slower by 3.0% to 8.0%"),
        (Estimate(1.0, 0.98, 1.015, 100), "none", "no difference seen: at most 2.0% in either direction"),
        # The error in logs is 0.0953 / 2.147 = 0.0444; it must fall to log(1.05) / 2.802: 20 x 6.49 = 129.9.
        (Estimate(1.05, 1.05 / 1.1, 1.05 * 1.1, 20), "open", "too few prompts to say: about 130 would be enough"),
        (Estimate(1.5, 1.4, 1.6, 4), "open", "too few prompts to say: about 8 would be enough"),
        (Estimate(float("nan"), 0.0, 0.0, 0), "unmeasured", "not measured"),
    ],
)
def test_the_verdict_follows_from_the_interval(estimate: Estimate, kind: str, text: str) -> None:
    found = conclusion(estimate)
    assert (found.kind, found.text) == (kind, text)
    if kind == "open":
        assert conclusion(estimate, prompts=10 * estimate.observations).needed >= 10 * estimate.observations


def test_times_of_other_commits_are_not_compared_and_acceptance_is(tmp_path: Path) -> None:
    a = read_evaluation(evaluated(tmp_path / "a", [0.5] * 9))
    b = read_evaluation(evaluated(tmp_path / "b", [0.4] * 9, commit="other"))
    found = compare(a, b)
    assert found.warnings == ("the commits differ: times are not compared, only tokens per target pass",)
    assert row(found).speed is None and row(found).tokens_per_pass.value == 1.0


def test_a_setting_that_differs_is_named_and_records_without_an_option_had_it_off(tmp_path: Path) -> None:
    a, b, c = (
        read_evaluation(evaluated(tmp_path / str(number), [0.5] * 9, **identity))
        for number, identity in enumerate(({}, {"batch_invariant": False}, {"batch_invariant": True}))
    )
    assert compare(a, b).warnings == ()
    assert compare(b, c).warnings == (
        "A and B differ in batch_invariant (False and True): every ratio includes this difference",
    )


def test_later_turns_with_other_prompts_are_left_out(tmp_path: Path) -> None:
    a = read_evaluation(evaluated(tmp_path / "a", [0.5] * 9, turn=1))
    b = read_evaluation(evaluated(tmp_path / "b", [0.4] * 9, digest="e", turn=1))
    with pytest.raises(ValueError, match="share no prompts"):
        compare(a, b)


def test_other_targets_prompts_methods_and_settings_are_refused_in_one_sentence(tmp_path: Path) -> None:
    a = read_evaluation(evaluated(tmp_path / "a", [0.5]))
    for name, changes, complaint in (
        ("b", {"target": "u"}, "were evaluated with different targets: use the same target for both"),
        ("c", {"digest": "e"}, "question q0 has different tokens in .* evaluate both on the same file"),
    ):
        with pytest.raises(ValueError, match=complaint):
            compare(a, read_evaluation(evaluated(tmp_path / name, [0.5], **changes)))
    with pytest.raises(ValueError, match="lacks the method 'heads': choose among plain, draft"):
        compare(a, a, "heads", "draft")
    with pytest.raises(ValueError, match="both folders are the same: name two methods"):
        compare(a, a)
    with pytest.raises(ValueError, match="contains no runs"):
        read_evaluation(tmp_path)


def test_the_command_prints_a_table_or_json(tmp_path: Path) -> None:
    folders = [str(evaluated(tmp_path / name, [0.5] * 9)) for name in "ab"]
    shown = CliRunner().invoke(app, ["compare", *folders], env={"COLUMNS": "250"}).output
    assert "no difference seen: at most 0.1% in either direction" in shown and "1.00× [1.00, 1.00]" in shown
    assert "batch" in shown and "concurrency" not in shown
    served = [str(evaluated(tmp_path / name, [0.5] * 9, concurrency=[1])) for name in "cd"]
    assert "concurrency" in CliRunner().invoke(app, ["compare", *served], env={"COLUMNS": "250"}).output
    printed = CliRunner().invoke(app, ["compare", *folders, "--method", "draft", "--json", "-"]).output
    assert [row["method"] for row in json.loads(printed)["rows"]] == ["draft"]
    refused = CliRunner().invoke(app, ["compare", folders[0]])
    assert refused.exit_code == 2


def test_a_file_of_other_origin_is_refused_in_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "runs-0.jsonl").write_text('{"step": 1}\n')
    with pytest.raises(ValueError, match="does not begin with a provenance"):
        read_evaluation(tmp_path)
