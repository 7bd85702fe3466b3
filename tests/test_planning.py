"""The plan of speculation: trees, costs of steps, acceptance, the choice, the file, and the depths for servers."""

import itertools
import re
from collections.abc import Sequence

import pytest
from simulated_machine import Machine, chains, simulate

from decoding.drafters.spec import DrafterSpec
from decoding.measure.planning.forms import RankCounts
from decoding.measure.planning.prospects import DEEPEST, PUBLISHED, Published, equal_rates, outlook
from decoding.measure.planning.step_costs import (
    BLOCK,
    Candidate,
    Prediction,
    StepCosts,
    StepSeconds,
    StepSurvey,
    best,
    depth_by_batch_size,
)
from decoding.metrics import StepCount, expected_tokens, tokens_per_pass
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import _Passes, measure_costs, pass_over
from decoding.policies import NO_DRAFT, Budget
from decoding.rules.tree import TokenTree, TreeShape

SPEC = DrafterSpec("draft", "folder", {})


# --- the cost curve ---------------------------------------------------------------------------------------------------


def test_what_looks_cheaper_over_more_tokens_is_noise(tiny_llama: CausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = {1: 2.0, 2: 4.5, 3: 4.0, 4: 6.0}
    monkeypatch.setattr(_Passes, "seconds", lambda passes, size: seconds[size])
    assert measure_costs(tiny_llama, (1, 2, 3, 4)) == {1: 2.0, 2: 4.5, 3: 4.5, 4: 6.0}


def test_the_cost_curve_has_a_time_for_every_size_even_in_a_short_context(tiny_llama: CausalLM) -> None:
    assert tiny_llama.max_positions == 96  # shorter than the usual prefix of 128 tokens
    curve = measure_costs(tiny_llama, (1, 4), repeats=1)
    assert list(curve) == [1, 4] and all(seconds > 0 for seconds in curve.values())


def test_costs_are_linear_between_what_was_measured_and_go_on_as_they_ended() -> None:
    curve = {2: 4.0, 6: 6.0, 4: 4.0}
    assert [pass_over(curve, tokens) for tokens in (1, 2, 3, 5, 6, 8)] == [4.0, 4.0, 4.0, 5.0, 6.0, 8.0]
    assert pass_over({1: 2.0, 3: 1.0}, 9) == 1.0, "a curve that ends falling goes on level"


# --- hiccups ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("drafting", [10, 20, 30])
def test_steps_that_draft_and_steps_that_find_nothing_both_count(drafting: int) -> None:
    """A lookup drafts only in some steps.

    Here a step with ten drafted tokens costs five, and a step without a draft costs one.
    """
    survey, budget = StepSurvey([Budget(10, 11)], 1, samples=24), Budget(10, 11)
    steps = [(0, 1.0)] * (41 - drafting) + [(10, 5.0)] * drafting  # the first step is not counted
    for drafted, seconds in [*steps, (0, 20.0), (10, 100.0)]:  # and a hiccup of each kind
        survey.observe(budget, [StepCount(1, 0, drafted, drafted)], 0.0, 0.0, seconds)
    assert survey.seconds()[budget].total == pytest.approx((40 - drafting + 5 * drafting) / 40)


# --- the whole prediction on a machine whose truth is known ----------------------------------------------------------


def surveyed(machine: Machine, depth: int, rows: int, seed: int = 0) -> StepCosts:
    """Return the costs that a survey of chains finds on the machine; only its passes are measured without noise."""
    survey = StepSurvey(chains(depth), rows, samples=20)
    simulate(survey, machine, 0.7, 600 * BLOCK, chains(depth), rows=rows, seed=seed)
    assert survey.is_done()
    return StepCosts(survey.seconds(), {size: machine.verify(rows, size) for size in (1, 2, 4, 8, 16)})


def chain_candidates(rate: float, depth: int) -> list[Candidate]:
    return [Candidate(SPEC, budget, expected_tokens(rate, budget.depth)) for budget in chains(depth)]


@pytest.mark.parametrize("rows", [1, 8])
@pytest.mark.parametrize(("rate", "draft", "slope"), [(0.6, 0.2, 0.0), (0.8, 0.05, 0.02), (0.9, 0.1, 0.1)])
def test_the_predicted_speedup_is_the_machine_s_within_a_few_percent(
    rate: float, draft: float, slope: float, rows: int
) -> None:
    """The times have 5% noise, and hiccups take twenty times as long. The check covers depths that were measured and
    depths that were not.
    """
    machine = Machine(draft, lambda rows, nodes: 1 + slope * rows * (nodes - 1) / 4)
    costs = surveyed(machine, 10, rows)
    for candidate in chain_candidates(rate, 10):
        depth = candidate.budget.depth
        true = candidate.tokens_per_pass / (draft * depth + machine.verify(rows, depth + 1)) * machine.verify(rows, 1)
        assert best([candidate], costs).speedup == pytest.approx(true, rel=0.05)
    chosen = best(chain_candidates(rate, 10), costs)
    budget = chosen.candidate.budget
    rate_of_chosen = chosen.candidate.tokens_per_pass / (draft * budget.depth + machine.verify(rows, budget.nodes))
    true_rates = [expected_tokens(rate, d) / (draft * d + machine.verify(rows, d + 1)) for d in range(11)]
    assert rate_of_chosen > 0.97 * max(true_rates)


def test_steps_cut_short_by_a_text_s_end_and_steps_of_fewer_rows_are_not_measured() -> None:
    survey = StepSurvey([Budget(3, 4)], rows=2, samples=1)
    whole, cut = StepCount(2, 1, 3, 3, room=3), StepCount(2, 1, 2, 2, room=2)
    for steps in ([whole, whole], [whole, whole], [whole, cut], [whole]):  # the first step of a budget is not counted
        survey.observe(Budget(3, 4), steps, 1.0, 2.0, 4.0)
    survey.observe(NO_DRAFT, [whole, whole], 0.0, 2.0, 2.5)
    assert survey.seconds() == {Budget(3, 4): StepSeconds(1.0, 2.0, 1.0)}


# --- acceptance ------------------------------------------------------------------------------------------------------


def test_tokens_per_pass_of_a_shorter_chain_come_from_the_passes_of_a_longer_one() -> None:
    steps = [StepCount(emitted, emitted - 1, 4, 4) for emitted in (1, 3, 5)]
    steps.append(StepCount(2, 2, 2, 2))  # its text ended with the second drafted token
    assert tokens_per_pass(steps) == 11 / 4
    assert [tokens_per_pass(steps, depth) for depth in (1, 2, 4)] == [7 / 4, 10 / 4 - 1 / 4, 11 / 4]


def tree_of(*parents: int) -> TokenTree:
    return TokenTree.of_list(list(range(len(parents) + 1)), TreeShape((-1, *parents)))


def test_accepted_children_give_shares_by_depth_and_rank() -> None:
    tree = tree_of(0, 0, 1, 1, 2)  # children 1 and 2 of the root; 3 and 4 of node 1; 5 of node 2
    counts = RankCounts()
    for _ in range(100):
        for accepted in ((1, 3), (1, 3), (1,), (2, 5), ()):
            counts.add(tree, accepted)
    shares = counts.shares()
    assert [len(depth) for depth in shares] == [2, 2]
    assert shares[0] == pytest.approx([3 / 5, 1 / 5], abs=0.01)
    assert shares[1] == pytest.approx([3 / 4, 0.0], abs=0.01)  # of 4 reached nodes; node 2 has only one child


# --- the choice ------------------------------------------------------------------------------------------------------


def costs_of(draft: float, verify: Sequence[float], overhead: float = 0.0, plain_overhead: float = 0.0) -> StepCosts:
    """Return the costs of chains if each token costs ``draft`` and passes over 1, 2, … tokens take ``verify``."""
    found = {NO_DRAFT: StepSeconds(0.0, verify[0], plain_overhead)}
    for depth in range(1, len(verify)):
        found[Budget(depth, depth + 1)] = StepSeconds(draft * depth, verify[depth], overhead)
    return StepCosts(found, dict(enumerate(verify, start=1)))


def test_the_speedup_counts_the_overhead_of_both_loops() -> None:
    costs = costs_of(0.5, [1.0, 1.0, 1.0], overhead=0.5, plain_overhead=1.0)
    found = Prediction(Candidate(SPEC, Budget(2, 3), tokens_per_pass=2.5), costs.step(Budget(2, 3)), costs.plain)
    assert found.plain == 2.0 and found.cost == pytest.approx((1.0 + 1.0 + 0.5) / 2.0)
    assert found.speedup == pytest.approx(2.5 / 1.25)


@pytest.mark.parametrize(
    ("rate", "cost", "depth", "speedup"), [(0.6, 0.2, 2, 1.40), (0.7, 0.1, 4, 1.98), (0.8, 0.05, 8, 3.09)]
)
def test_the_best_chain_is_that_of_the_formula(rate: float, cost: float, depth: int, speedup: float) -> None:
    found = best(chain_candidates(rate, 10), costs_of(cost, [1.0] * 11))
    assert found.candidate.budget.depth == depth and found.speedup == pytest.approx(speedup, abs=0.005)


def test_depths_by_batch_size_cover_all_sizes_and_end_with_plain_decoding_where_nothing_pays() -> None:
    chains_of = {depth: expected_tokens(0.6, depth) for depth in (1, 2, 3, 4)}
    costs = {rows: costs_of(0.05, [1 + max(0, rows * nodes - 8) / 16 for nodes in range(1, 6)]) for rows in (1, 4, 16)}
    ranges = depth_by_batch_size(chains_of, costs)
    assert ranges[0][0] == 1 and ranges[-1][1] == 16
    assert all(before[1] + 1 == after[0] for before, after in itertools.pairwise(ranges))
    depths = [depth for _, _, depth in ranges]
    assert depths == sorted(depths, reverse=True) and depths[0] == 4 and depths[-1] == 0
    assert depth_by_batch_size({depth: chains_of[depth] for depth in (1, 2)}, {1: costs[1]}) == [(1, 1, 2)]


# --- before any training ---------------------------------------------------------------------------------------------


def test_the_acceptance_that_pays_is_that_of_the_formula_and_gains_exactly_nothing() -> None:
    """A chain of k costs 1 + k/10, so one token breaks even at 1 + a = 1.1, and two tokens break even at 1 + a + a² =
    1.2.
    """
    costs = costs_of(0.1, [1.0] * (DEEPEST + 1))
    (heads,) = outlook({"heads": costs})["drafts"]
    assert heads["cost"] == pytest.approx([1 + depth / 10 for depth in range(1, DEEPEST + 1)])
    assert heads["break_even"][:2] == pytest.approx([0.1, (1.8**0.5 - 1) / 2])
    for depth, rate in enumerate(heads["break_even"], start=1):
        budget = Budget(depth, depth + 1)
        chain = Candidate(SPEC, budget, expected_tokens(rate, depth))
        assert Prediction(chain, costs.step(budget), costs.plain).speedup == pytest.approx(1.0)


def test_a_chain_that_costs_more_than_all_its_tokens_never_pays() -> None:
    slow = costs_of(0.9, [1.0, 1.5, *[2.0] * (DEEPEST - 1)])  # steps cost 2.4 for 2 tokens, 3.8 for 3, …
    (draft,) = outlook({"draft": slow})["drafts"]
    assert draft["break_even"] == [None] * DEEPEST


def test_published_acceptance_gains_what_the_best_length_of_its_chain_does() -> None:
    costs = costs_of(0.2, [1.0] * (DEEPEST + 1))
    alike = Published("draft", "alike", (0.6,) * DEEPEST, "")
    falling = Published("draft", "falling", (0.6, 0.5, 0.1), "")
    found = outlook({"draft": costs}, (alike, falling, Published("heads", "not measured", (0.9,), "")))["published"]
    assert [each["name"] for each in found] == ["alike", "falling"]
    assert (found[0]["depth"], found[0]["speedup"]) == (2, pytest.approx(1.96 / 1.4))
    assert (found[1]["depth"], found[1]["tokens_per_pass"]) == (2, pytest.approx(1 + 0.6 + 0.3))


def test_the_published_rates_bring_the_tokens_that_their_sources_print() -> None:
    assert expected_tokens(equal_rates(3.11, 7)[0], 7) == pytest.approx(3.11)
    assert {each.draft for each in PUBLISHED} == {"heads", "dspark", "draft"}
    assert all(re.search(r"\b20\d\d\b", each.source) and 0 < len(each.rates) <= DEEPEST for each in PUBLISHED)
