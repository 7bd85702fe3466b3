"""Policies that never look at a clock, and what every policy must bear."""

from collections.abc import Callable

import pytest
from simulated_machine import TREES, Machine, always, chains, one, simulate

from decoding.metrics import StepCount
from decoding.policies import PLAIN, Budget, FixedPolicy, HeuristicPolicy, Policy, named_policy

NAMES = ("fixed", "heuristic", "measured")


def repeat(policy: Policy, budget: Budget, steps: list[StepCount], draft: float, verify: float, times: int) -> None:
    for _ in range(times):
        policy.observe(budget, len(steps), steps, draft, verify, draft + verify)


# The policies that never look at a clock.


def test_the_fixed_policy_takes_the_largest_budget_within_its_limits() -> None:
    assert FixedPolicy().choose(TREES, 1) == Budget(4, 16)
    assert FixedPolicy(depth=3).choose(TREES, 1) == Budget(3, 8)
    assert FixedPolicy(nodes=7).choose(TREES, 1) == Budget(2, 4)
    assert FixedPolicy(depth=1).choose(TREES, 1) == PLAIN
    assert FixedPolicy(depth=0).choose(chains(4), 8) == PLAIN


@pytest.mark.parametrize(("depth", "nodes"), [(-1, None), (None, 0)])
def test_a_limit_below_plain_decoding_is_refused(depth: int | None, nodes: int | None) -> None:
    with pytest.raises(ValueError, match="give a depth from 0 and nodes from 1"):
        FixedPolicy(depth, nodes)


def test_the_heuristic_goes_two_deeper_when_all_was_accepted_and_one_less_else() -> None:
    policy = HeuristicPolicy(depth=5)
    depths = []
    for accepted, offered in [(5, 5), (6, 7), (0, 6), (5, 5)]:
        repeat(policy, Budget(offered, offered + 1), one(accepted, offered), 0.0, 0.0, 1)
        depths.append(policy.choose(chains(20), 1).depth)
    assert depths == [7, 6, 5, 7]


def test_the_heuristic_stays_within_one_and_the_deepest_budget() -> None:
    policy = HeuristicPolicy(depth=2)
    repeat(policy, Budget(2, 3), one(0, 2), 0.0, 0.0, 5)
    assert policy.choose(chains(4), 1).depth == 1
    repeat(policy, Budget(1, 2), one(1, 1), 0.0, 0.0, 50)
    assert policy.choose(chains(4), 1).depth == 4
    repeat(policy, Budget(4, 5), one(3, 4), 0.0, 0.0, 1)
    assert policy.choose(chains(4), 1).depth == 3  # it did not climb to 101 in between


def test_in_a_batch_the_heuristic_moves_by_the_mean_of_its_rows() -> None:
    policy = HeuristicPolicy(depth=4)
    full, missed, nothing_offered = StepCount(5, 4, 4, 4), StepCount(2, 1, 4, 4), StepCount(1, 0, 0, 0)
    policy.observe(Budget(4, 5), 3, [full, missed, nothing_offered], 0.0, 1.0, 1.0)
    policy.observe(Budget(4, 5), 2, [full, missed], 0.0, 1.0, 1.0)
    assert policy.choose(chains(8), 3).depth == 5  # 4 + (2 - 1)/2 + (2 - 1)/2


def test_a_schedule_that_starts_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="give at least 1"):
        HeuristicPolicy(depth=0)


@pytest.mark.parametrize("make", [FixedPolicy, HeuristicPolicy])
def test_fixed_and_heuristic_choices_do_not_depend_on_the_clock(make: Callable[[], Policy]) -> None:
    calm, wild = Machine(hiccups=0.0, noise=0.0), Machine(hiccups=1.0, draft=7.0, noise=0.0)
    alternating = [always(index % 3 / 2) for index in range(6)]
    for accepts in alternating:
        runs = [simulate(make(), machine, accepts, 40, chains(6)) for machine in (calm, wild)]
        assert runs[0].choices == runs[1].choices


def test_policies_have_names() -> None:
    assert [named_policy(name).name for name in ("fixed", "heuristic", "measured")] == [
        "fixed",
        "heuristic",
        "measured",
    ]
    with pytest.raises(ValueError, match="'bold': choose one of fixed, heuristic, measured"):
        named_policy("bold")


# What must not break it.


@pytest.mark.parametrize("name", NAMES)
def test_without_budgets_every_policy_decodes_plainly(name: str) -> None:
    policy = named_policy(name)
    for _ in range(5):
        assert policy.choose([], 1) == PLAIN
        repeat(policy, PLAIN, one(0, 0), 0.0, 1.0, 1)


@pytest.mark.parametrize("name", NAMES)
def test_steps_of_no_time_no_offer_or_no_rows_break_nothing(name: str) -> None:
    odd: list[list[StepCount]] = [one(0, 0), [], [StepCount(2, 2, 2, 3)], one(1, 1)]

    def step(policy: Policy, turn: int) -> None:
        budget = policy.choose(chains(4), 2)
        assert budget == PLAIN or budget in chains(4)
        policy.observe(budget, 2, odd[turn % 4] if budget.depth else one(0, 0), 0.0, 0.0, 0.0)

    policy = named_policy(name)
    for rehearsed in (0, 1, 60):  # never, for a step, to its end
        policy.begin(chains(4), 2, lambda other, rows, steps=rehearsed: (step(other, turn) for turn in range(steps)))
        for turn in range(60):
            step(policy, turn)
