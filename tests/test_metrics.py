"""Acceptance figures from raw counts, checked by hand."""

import math

import pytest

from decoding.metrics import (
    StepCount,
    acceptance,
    expected_tokens,
    predicted_speedup,
    ratio_of_rates,
    ratio_of_sums,
    share,
)

TEXT = [StepCount(4, 3, 3, 3), StepCount(1, 0, 3, 3), StepCount(2, 1, 3, 3), StepCount(3, 2, 2, 2)]


def test_tokens_per_pass_count_the_targets_own_token() -> None:
    assert acceptance([TEXT]).tokens_per_pass.value == pytest.approx(10 / 4)


def test_conditional_acceptance_counts_only_drafts_that_came_that_far() -> None:
    values = [(each.value, each.observations) for each in acceptance([TEXT]).conditional]
    assert values == [(3 / 4, 4), (2 / 3, 3), (1 / 1, 1)]  # position 3 was offered in three steps and reached in one


def test_unconditional_acceptance_counts_all_drafts_that_were_that_deep() -> None:
    values = [(each.value, each.observations) for each in acceptance([TEXT]).unconditional]
    assert values == [(3 / 4, 4), (2 / 4, 4), (1 / 3, 3)]


def test_accepted_per_drafted_and_the_histogram_of_lengths() -> None:
    figures = acceptance([TEXT])
    assert figures.accepted_per_drafted.value == pytest.approx(6 / 11)
    assert figures.length_histogram == {0: 1, 1: 1, 2: 1, 3: 1}


def test_the_acceptance_length_is_one_and_the_shares_of_all_passes_that_reached_each_position() -> None:
    figures = acceptance([TEXT])
    assert [(each.value, each.observations) for each in figures.reached] == [(3 / 4, 4), (2 / 4, 4), (1 / 4, 4)]
    assert figures.acceptance_length == pytest.approx(1 + 6 / 4) == figures.tokens_per_pass.value
    assert figures.ended_in_draft == 0


def test_a_pass_whose_text_ended_in_the_draft_is_counted_and_emits_no_token_of_the_targets() -> None:
    figures = acceptance([[StepCount(3, 2, 4, 4), StepCount(2, 2, 2, 4)]])
    assert figures.ended_in_draft == 1 and figures.acceptance_length == 3.0
    assert figures.tokens_per_pass.value == 3.0 - 1 / 2


def test_no_steps_give_no_figure_rather_than_an_error() -> None:
    figures = acceptance([])
    assert figures.passes == 0 and math.isnan(figures.tokens_per_pass.value) and figures.conditional == ()


def test_the_steps_of_a_text_are_alike_so_more_of_them_do_not_narrow_a_shares_interval() -> None:
    """Wilson's interval for 100 of 200 is 0.43 to 0.57, and it would be narrower for ten times as many."""
    of_20, of_200 = (share([(0, steps), (steps, steps)] * 5) for steps in (20, 200))
    assert of_20[:3] == of_200[:3] and (of_20.observations, of_200.observations) == (200, 2000)
    assert of_20.value == 0.5 and of_20.low < 0.2 and of_20.high > 0.8


def test_drafted_tree_nodes_are_no_trials_of_their_own() -> None:
    """At most one of sixteen siblings in a tree is accepted, so 160 nodes contain no more information than their ten
    texts.
    """
    chains = acceptance([[StepCount(1 + kept, kept, 1, 1)] for kept in (0, 1) * 5]).accepted_per_drafted
    trees = acceptance([[StepCount(1 + kept, kept, 1, 16)] for kept in (0, 1) * 5]).accepted_per_drafted
    assert trees.observations == 160 == 16 * chains.observations
    assert trees[:3] == pytest.approx([figure / 16 for figure in chains[:3]])


def test_a_share_of_none_or_all_gets_wilsons_interval_with_a_trial_for_each_text() -> None:
    wide = 1.959964**2 / (9 + 1.959964**2)
    assert share([(0, 5)] * 9)[:3] == pytest.approx((0.0, 0.0, wide))
    assert share([(5, 5)] * 9 + [(0, 0)])[:3] == pytest.approx((1.0, 1 - wide, 1.0))


def test_a_share_of_fewer_than_eight_texts_has_no_interval() -> None:
    estimate = share([(1, 100)] * 7)
    assert (estimate.value, estimate.observations) == (0.01, 700) and math.isnan(estimate.low + estimate.high)


def test_a_bootstrap_interval_holds_the_ratio_and_is_the_same_every_time() -> None:
    pairs = [(float(i), 2.0) for i in range(1, 20)]
    estimate = ratio_of_sums(pairs)
    assert estimate.value == pytest.approx(5.0)
    assert estimate.low < estimate.value < estimate.high
    assert estimate == ratio_of_sums(pairs)


@pytest.mark.parametrize(("rate", "cost", "depth", "speedup"), [(0.6, 0.2, 2, 1.40), (0.8, 0.05, 8, 3.09)])
def test_predicted_speedups_are_those_of_the_closed_form(rate: float, cost: float, depth: int, speedup: float) -> None:
    predicted = predicted_speedup(expected_tokens(rate, depth), cost * depth, 1.0)
    assert predicted == pytest.approx(speedup, abs=0.005)


def test_a_ratio_of_rates_is_that_of_all_tokens_over_all_seconds() -> None:
    texts = [(10.0, 1.0, 10.0, 2.0), (10.0, 1.0, 10.0, 2.0), (1000.0, 1000.0, 1000.0, 1000.0)]
    estimate = ratio_of_rates(texts)
    assert estimate.value == pytest.approx(1004 / 1002) and estimate == ratio_of_rates(texts)
    assert estimate.low == pytest.approx(1.0) and estimate.high == pytest.approx(2.0)


def test_a_ratio_of_rates_draws_a_text_with_both_its_sides() -> None:
    """Every text is twice as fast, so every resample is.

    If the two sides were resampled separately, the sizes of texts would matter.
    """
    estimate = ratio_of_rates([(float(i), 1.0 * i, 2.0 * i, 4.0 * i) for i in range(1, 20)])
    assert estimate[:3] == pytest.approx((2.0, 2.0, 2.0)) and estimate.observations == 19


def test_texts_without_tokens_leave_the_others_their_ratio_and_alone_have_none() -> None:
    estimate = ratio_of_rates([(0.0, 0.0, 0.0, 0.0), (4.0, 1.0, 4.0, 2.0)])
    assert estimate == (2.0, 2.0, 2.0, 2)
    assert all(math.isnan(figure) for figure in ratio_of_rates([(0.0, 0.0, 0.0, 0.0)])[:3])
    assert math.isnan(ratio_of_rates([]).value)


def test_equal_methods_have_a_ratio_of_exactly_one_whatever_their_figures_are() -> None:
    """1/49 x 49 is 0.9999999999999999.

    With such a value the interval would exclude 1, and the verdict would be a real difference.
    """
    for tokens in range(1, 50, 3):
        for passes in range(1, 50, 3):
            assert ratio_of_rates([(tokens, passes, tokens, passes)] * 2)[:3] == (1.0, 1.0, 1.0)
