"""Policies: fixed budgets, and transformers' schedule."""

import pytest
from simulated_machine import chains

from decoding.metrics import StepCount
from decoding.policies import PLAIN, Budget, FixedPolicy, HeuristicPolicy, Policy, named_policy

TREES = (Budget(2, 4), Budget(3, 8), Budget(4, 16))
NAMES = ("fixed", "heuristic")


def one(accepted: int, offered: int) -> list[StepCount]:
    return [StepCount(accepted + 1, accepted, offered, offered)]


def repeat(policy: Policy, budget: Budget, steps: list[StepCount], draft: float, verify: float, times: int) -> None:
    for _ in range(times):
        policy.observe(budget, steps, draft, verify, draft + verify)


def test_the_fixed_policy_takes_the_largest_budget_within_its_limits() -> None:
    assert FixedPolicy().choose(TREES) == Budget(4, 16)
    assert FixedPolicy(depth=3).choose(TREES) == Budget(3, 8)
    assert FixedPolicy(nodes=7).choose(TREES) == Budget(2, 4)
    assert FixedPolicy(depth=1).choose(TREES) == PLAIN
    assert FixedPolicy(depth=0).choose(chains(4)) == PLAIN


def test_the_heuristic_goes_two_deeper_when_all_was_accepted_and_one_less_else() -> None:
    policy = HeuristicPolicy(depth=5)
    depths = []
    for accepted, offered in [(5, 5), (6, 7), (0, 6), (5, 5)]:
        repeat(policy, Budget(offered, offered + 1), one(accepted, offered), 0.0, 0.0, 1)
        depths.append(policy.choose(chains(20)).depth)
    assert depths == [7, 6, 5, 7]


def test_in_a_batch_the_heuristic_moves_by_the_mean_of_its_rows() -> None:
    policy = HeuristicPolicy(depth=4)
    full, missed, nothing_offered = StepCount(5, 4, 4, 4), StepCount(2, 1, 4, 4), StepCount(1, 0, 0, 0)
    policy.observe(Budget(4, 5), [full, missed, nothing_offered], 0.0, 1.0, 1.0)
    policy.observe(Budget(4, 5), [full, missed], 0.0, 1.0, 1.0)
    assert policy.choose(chains(8)).depth == 5  # 4 + (2 - 1)/2 + (2 - 1)/2


@pytest.mark.parametrize("name", NAMES)
def test_odd_steps_break_no_policy_and_without_budgets_it_decodes_plainly(name: str) -> None:
    odd: list[list[StepCount]] = [one(0, 0), [], [StepCount(2, 2, 2, 3)], one(1, 1)]
    policy = named_policy(name)
    assert policy.choose([]) == PLAIN
    for turn in range(12):
        budget = policy.choose(chains(4))
        assert budget == PLAIN or budget in chains(4)
        policy.observe(budget, odd[turn % 4], 0.0, 0.0, 0.0)
