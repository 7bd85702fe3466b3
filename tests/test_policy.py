"""Policies: fixed budgets, what has paid, and transformers' schedule."""

import random

import pytest
from simulated_machine import chains

from decoding.metrics import StepCount
from decoding.policies import PLAIN, AdaptivePolicy, Budget, FixedPolicy, HeuristicPolicy, Policy, named_policy

TREES = (Budget(2, 4), Budget(3, 8), Budget(4, 16))
NAMES = ("adaptive", "fixed", "heuristic")


def one(accepted: int, offered: int) -> list[StepCount]:
    return [StepCount(accepted + 1, accepted, offered, offered)]


def repeat(policy: Policy, budget: Budget, steps: list[StepCount], draft: float, verify: float, times: int) -> None:
    for _ in range(times):
        policy.observe(budget, steps, draft, verify, draft + verify)


def test_the_fixed_policy_takes_the_largest_budget_within_its_limits() -> None:
    assert FixedPolicy().choose(TREES, 1) == Budget(4, 16)
    assert FixedPolicy(depth=3).choose(TREES, 1) == Budget(3, 8)
    assert FixedPolicy(nodes=7).choose(TREES, 1) == Budget(2, 4)
    assert FixedPolicy(depth=1).choose(TREES, 1) == PLAIN
    assert FixedPolicy(depth=0).choose(chains(4), 1) == PLAIN


def test_the_heuristic_goes_two_deeper_when_all_was_accepted_and_one_less_else() -> None:
    policy = HeuristicPolicy(depth=5)
    depths = []
    for accepted, offered in [(5, 5), (6, 7), (0, 6), (5, 5)]:
        repeat(policy, Budget(offered, offered + 1), one(accepted, offered), 0.0, 0.0, 1)
        depths.append(policy.choose(chains(20), 1).depth)
    assert depths == [7, 6, 5, 7]


def test_in_a_batch_the_heuristic_moves_by_the_mean_of_its_rows() -> None:
    policy = HeuristicPolicy(depth=4)
    full, missed, nothing_offered = StepCount(5, 4, 4, 4), StepCount(2, 1, 4, 4), StepCount(1, 0, 0, 0)
    policy.observe(Budget(4, 5), [full, missed, nothing_offered], 0.0, 1.0, 1.0)
    policy.observe(Budget(4, 5), [full, missed], 0.0, 1.0, 1.0)
    assert policy.choose(chains(8), 1).depth == 5  # 4 + (2 - 1)/2 + (2 - 1)/2


@pytest.mark.parametrize(
    ("accepted", "draft", "node"),
    [(0.9, 0.1, 0.05), (0.3, 0.5, 0.2), (0.8, 0.3, 0.5), (0.6, 0.0, 0.4)],
    ids=["all pays", "nothing pays", "a short chain pays", "on the verge"],
)
@pytest.mark.parametrize("rows", [1, 8])
def test_the_adaptive_policy_loses_little_against_the_best_of_what_it_may_choose(
    accepted: float, draft: float, node: float, rows: int
) -> None:
    """A machine on which a step costs 1 + draft + node * depth, and each token is accepted after the one before."""
    policy, draw, budgets = AdaptivePolicy(), random.Random(0), chains(8)
    expected = {budget: sum(accepted**i for i in range(budget.depth + 1)) for budget in (PLAIN, *budgets)}
    cost = {budget: 1 + (draft + node * budget.depth) * (budget != PLAIN) for budget in expected}
    tokens = seconds = 0.0
    for _ in range(3000):
        budget = policy.choose(budgets, rows)
        steps = []
        for _ in range(rows):
            kept = next((i for i in range(budget.depth) if draw.random() > accepted), budget.depth)
            steps.append(StepCount(kept + 1, kept, budget.depth, budget.depth))
        policy.observe(budget, steps, 0.0, 0.0, spent := cost[budget] * draw.uniform(0.8, 1.2))
        tokens, seconds = tokens + sum(step.emitted for step in steps) / rows, seconds + spent
    offered = (PLAIN, budgets[7], budgets[3], budgets[1])
    best = max(expected[budget] / cost[budget] for budget in offered)
    assert 0.96 < tokens / seconds / best < 1.03


@pytest.mark.parametrize("name", NAMES)
def test_odd_steps_break_no_policy_and_without_budgets_it_decodes_plainly(name: str) -> None:
    odd: list[list[StepCount]] = [one(0, 0), [], [StepCount(2, 2, 2, 3)], one(1, 1)]
    policy = named_policy(name)
    assert policy.choose([], 1) == PLAIN
    for turn in range(12):
        budget = policy.choose(chains(4), 1)
        assert budget == PLAIN or budget in chains(4)
        policy.observe(budget, odd[turn % 4], 0.0, 0.0, 0.0)
