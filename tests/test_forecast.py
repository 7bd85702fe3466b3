"""The forecast of more training: a known law is found again, its interval holds the truth, and noise says so."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.run.forecast import Evaluated, Point, forecast, points_of, read_evaluated, sentence

TOKENS = [50_000 * step for step in range(1, 7)]


def law(tokens: float) -> float:
    """Three tokens per pass in the end; a doubling takes 1 / sqrt(2) of what is left."""
    return 3 - 400 / tokens**0.5


def curve(tokens: list[int], error: float = 0.01) -> list[Point]:
    return [Point(each, law(each), error) for each in tokens]


def test_a_known_law_is_found_again() -> None:
    found = forecast(curve([10_000, 40_000, 90_000, 160_000]), doublings=2)
    assert found is not None
    # At 160,000 tokens 1 is left of the way to 3: 1 / sqrt(2) of it after one doubling, a half after two.
    assert found.trained_tokens == 160_000 and found.tokens_per_pass == pytest.approx(2)
    assert [gain.value for gain in found.gains] == pytest.approx([1 - 0.5**0.5, 0.5])
    assert all(gain.low < gain.value < gain.high and gain.observations == 4 for gain in found.gains)


def test_points_may_come_in_any_order_and_units_of_tokens_do_not_matter() -> None:
    points = curve(TOKENS)
    found, shuffled = forecast(points), forecast(points[::-1])
    scaled = forecast([point._replace(trained_tokens=1000 * point.trained_tokens) for point in points])
    assert found is not None and shuffled == found
    assert scaled is not None and scaled.gains[0] == pytest.approx(found.gains[0])


def test_the_interval_holds_the_truth_in_at_least_90_of_100_simulations() -> None:
    generator, truth, held = torch.Generator().manual_seed(0), law(2 * TOKENS[-1]) - law(TOKENS[-1]), 0
    for noise in torch.randn(100, len(TOKENS), generator=generator).mul(0.03).tolist():
        found = forecast([Point(n, law(n) + each, 0.03) for n, each in zip(TOKENS, noise, strict=True)])
        assert found is not None
        held += found.gains[0].low <= truth <= found.gains[0].high
    assert held >= 90


def test_a_larger_error_of_the_points_widens_the_interval() -> None:
    exact, rough = forecast(curve(TOKENS, 0.001)), forecast(curve(TOKENS, 0.05))
    assert exact is not None and rough is not None
    (near,), (far,) = exact.gains, rough.gains
    assert near.high - near.low < 0.1 * (far.high - far.low) and near.value == far.value


def test_points_off_the_law_widen_the_interval_whatever_error_they_claim() -> None:
    off = [
        point._replace(tokens_per_pass=point.tokens_per_pass + 0.1 * (-1) ** i) for i, point in enumerate(curve(TOKENS))
    ]
    found = forecast([point._replace(error=0.0) for point in off])
    assert found is not None and found.gains[0].high - found.gains[0].low > 0.1


# --- the sentence ---------------------------------------------------------------------------------------------------


def test_a_rising_curve_says_what_twice_the_tokens_bring() -> None:
    said = sentence(curve([10_000, 40_000, 90_000, 160_000], 0.001))
    assert said.startswith("with 320,000 trained tokens, twice as many: +0.29 [+0.2") and said.endswith(" on 2.00")


def test_a_flat_curve_says_that_there_is_no_gain() -> None:
    said = sentence([Point(tokens, 2 + 0.01 * (-1) ** i, 0.01) for i, tokens in enumerate(TOKENS)])
    assert said.endswith("tokens per pass on 2.00: no gain that the evaluations tell from noise")


def test_a_falling_curve_forecasts_a_loss() -> None:
    falling = [Point(tokens, 4 - law(tokens), 0.001) for tokens in TOKENS]
    assert "twice as many: -0." in sentence(falling) and "noise" not in sentence(falling)


def test_a_noisy_curve_says_that_nothing_can_be_told() -> None:
    assert "the evaluations are too noisy to tell (evaluation.prompts)" in sentence(curve(TOKENS, 0.5))


def test_three_points_are_too_few() -> None:
    assert forecast(curve(TOKENS[:3])) is None
    assert sentence(curve(TOKENS[:3])).startswith("comparable evaluations: 3, fewer than the 4 needed to forecast")


# --- points ---------------------------------------------------------------------------------------------------------


def test_a_point_is_all_tokens_over_all_passes() -> None:
    (point,) = points_of([Evaluated(1000, 5, [(30, 10), (10, 10)])])
    assert (point.trained_tokens, point.tokens_per_pass) == (1000, 2.0)


def test_an_error_that_all_points_share_is_left_out() -> None:
    """Prompts as easy and hard in every evaluation move all points alike; of others each point has its own error."""
    same = [(90, 30), (30, 30), (60, 30), (75, 30)]
    alike = points_of([Evaluated(tokens, 5, same) for tokens in TOKENS])
    assert all(point.error == pytest.approx(0, abs=1e-12) for point in alike)
    turned = points_of([Evaluated(tokens, 5, same[i % 4 :] + same[: i % 4]) for i, tokens in enumerate(TOKENS)])
    assert all(point.error > 0.1 for point in turned)


def test_evaluations_of_another_tree_or_of_other_prompts_are_left_out() -> None:
    texts = [(20, 10), (30, 10)]
    chains = [Evaluated(tokens, 5, texts) for tokens in TOKENS[:4]]
    others = [Evaluated(TOKENS[4], 16, texts), Evaluated(TOKENS[5], 5, texts[:1]), Evaluated(0, 5, texts)]
    assert [point.trained_tokens for point in points_of([*chains, *others])] == TOKENS[:4]
    assert points_of([]) == []


def test_texts_that_all_ended_with_the_prefill_make_no_point() -> None:
    assert points_of([Evaluated(1000, 5, [(0, 0), (0, 0)])]) == []


def line(tokens: int, nodes: int = 5, **more: Any) -> str:
    texts = {"heldout/nodes": nodes, "heldout/texts": [[20, 10], [30, 10]]}
    return json.dumps({"step": tokens // 100, "tokens": tokens, "heldout/tokens_per_pass": 2.5, **texts, **more})


def test_evaluations_are_read_from_the_lines_of_a_run(tmp_path: Path) -> None:
    assert read_evaluated(tmp_path / "metrics.jsonl") == []
    lines = [
        line(200),
        json.dumps({"step": 3, "tokens": 300, "loss": 1.0}),
        line(100),
        line(100),  # again, by a run that was started once more after its end
        line(200, nodes=16),
        line(200, **{"heldout/step": 1}),  # of earlier weights
        json.dumps({"step": 4, "tokens": 400, "heldout/tokens_per_pass": 2.5, "heldout/nodes": 5, "heldout/texts": []}),
    ]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = read_evaluated(tmp_path / "metrics.jsonl")
    assert [(each.trained_tokens, each.nodes) for each in found] == [(100, 5), (200, 5), (200, 16)]
    assert found[0].texts == [(20, 10), (30, 10)]


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text(f"{line(100)}\n{line(200)[:-9]}")
    assert [each.trained_tokens for each in read_evaluated(tmp_path / "metrics.jsonl")] == [100]
    (tmp_path / "metrics.jsonl").write_text("")
    assert read_evaluated(tmp_path / "metrics.jsonl") == []
