"""Policies on a simulated machine: a virtual clock, seeded acceptance, timing with noise and twentyfold hiccups."""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import pytest

from decoding.metrics import StepCount, expected_tokens
from decoding.policies import (
    PLAIN,
    Budget,
    FixedPolicy,
    Guarded,
    HeuristicPolicy,
    MeasuredPolicy,
    Policy,
    named_policy,
)
from decoding.policies.measured import _Acceptance

TREES = (Budget(2, 4), Budget(3, 8), Budget(4, 16))
POLICIES: dict[str, Callable[[], Policy]] = {
    "measured": MeasuredPolicy,
    "guarded fixed": lambda: Guarded(FixedPolicy()),
    "guarded heuristic": lambda: Guarded(HeuristicPolicy()),
}
Rate = Callable[[int, Budget], float]


def chains(depth: int) -> list[Budget]:
    return [Budget(length, length + 1) for length in range(1, depth + 1)]


def always(rate: float) -> Rate:
    """Every position is accepted with the same chance."""
    return lambda position, budget: rate


def one(accepted: int, offered: int) -> list[StepCount]:
    return [StepCount(accepted + 1, accepted, offered, offered)]


@dataclass
class Machine:
    """True seconds in plain steps: ``draft`` by drafted token, ``verify`` by rows and nodes. Timing is noisier."""

    draft: float = 0.1
    verify: Callable[[int, int], float] = lambda rows, nodes: 1.0
    noise: float = 0.05
    hiccups: float = 0.02

    def best_rate(self, acceptance_rate: float, deepest: int, rows: int = 1) -> float:
        """Tokens per second and row of the best fixed depth, plain decoding included."""
        depths = range(deepest + 1)
        return max(
            expected_tokens(acceptance_rate, depth) / (self.draft * depth + self.verify(rows, depth + 1))
            for depth in depths
        )


@dataclass
class Run:
    """What came of a simulated text; ``seconds`` are true ones, without noise."""

    tokens: float = 0.0
    seconds: float = 0.0
    choices: list[Budget] = field(default_factory=list)

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


def simulate(
    policy: Policy,
    machine: Machine,
    accepts: Rate,
    tokens: int,
    budgets: Sequence[Budget],
    rows: int = 1,
    found: float = 1.0,
    seed: int = 0,
) -> Run:
    """Decode so many tokens in each row; the drafter finds something to draft with the chance ``found``."""
    chance, run = random.Random(seed), Run()

    def timed(seconds: float) -> float:
        hiccup = 20 if chance.random() < machine.hiccups else 1
        return seconds * chance.lognormvariate(0, machine.noise) * hiccup

    while run.tokens < tokens:
        budget = policy.choose(budgets, rows)
        assert budget == PLAIN or budget in budgets
        steps = []
        for _ in range(rows):
            offered = budget.depth if chance.random() < found else 0
            accepted = 0
            while accepted < offered and chance.random() < accepts(accepted + 1, budget):
                accepted += 1
            steps.append(StepCount(accepted + 1, accepted, offered, budget.nodes - 1 if offered else 0))
        draft = machine.draft * max(step.offered for step in steps)
        verify = machine.verify(rows, 1 + max(step.drafted for step in steps))
        run.seconds += draft + verify
        run.tokens += sum(step.emitted for step in steps) / rows
        run.choices.append(budget)
        seconds = timed(draft), timed(verify)
        policy.observe(budget, rows, steps, *seconds, sum(seconds))
    return run


def mean_rate(runs: Iterable[Run]) -> float:
    """Tokens per second of all runs together."""
    done = list(runs)
    return sum(run.tokens for run in done) / sum(run.seconds for run in done)


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
    assert Guarded(HeuristicPolicy()).name == "guarded heuristic"
    with pytest.raises(ValueError, match="'bold': choose one of fixed, heuristic, measured"):
        named_policy("bold")


# A drafter that is worth its time.


@pytest.mark.parametrize(
    ("acceptance_rate", "draft", "slope"),
    # The first four: where FACTS' best depths are 2, 4, 8 and 10. The others: where a larger block costs more.
    [(0.6, 0.2, 0.0), (0.7, 0.1, 0.0), (0.8, 0.05, 0.0), (0.9, 0.1, 0.0), (0.8, 0.1, 0.1), (0.8, 0.1, 0.3)],
)
def test_the_measured_policy_comes_near_the_best_fixed_depth(
    acceptance_rate: float, draft: float, slope: float
) -> None:
    machine, accepts = Machine(draft, lambda rows, nodes: 1 + slope * (nodes - 1)), always(acceptance_rate)
    rate = mean_rate(simulate(MeasuredPolicy(), machine, accepts, 1024, chains(12), seed=seed) for seed in range(8))
    assert rate > 0.94 * machine.best_rate(acceptance_rate, 12)


def test_a_good_drafter_is_used_well_from_the_first_text_on() -> None:
    machine = Machine()
    rate = mean_rate(simulate(MeasuredPolicy(), machine, always(0.8), 256, chains(8), seed=seed) for seed in range(30))
    assert rate > 0.93 * machine.best_rate(0.8, 8)


def test_acceptance_that_falls_with_the_position_ends_the_draft_early() -> None:
    def accepts(position: int, budget: Budget) -> float:
        return [0.9, 0.8, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1][position - 1]

    run = simulate(MeasuredPolicy(), Machine(), accepts, 1500, chains(8))
    assert Counter(run.choices).most_common(1)[0][0] == Budget(2, 3)  # 2.62/1.2; one deeper 2.69/1.3, one less 1.9/1.1


@pytest.mark.parametrize(("slope", "best"), [(0.005, Budget(4, 16)), (0.12, Budget(2, 4))])
def test_the_size_of_a_tree_follows_the_cost_of_its_nodes(slope: float, best: Budget) -> None:
    by_nodes = {4: 0.55, 8: 0.65, 16: 0.8}
    machine = Machine(0.02, lambda rows, nodes: 1 + slope * (nodes - 1))
    run = simulate(MeasuredPolicy(), machine, lambda position, budget: by_nodes[budget.nodes], 1500, TREES)
    assert Counter(run.choices).most_common(1)[0][0] == best


def test_batches_whose_blocks_cost_more_draft_less() -> None:
    machine = Machine(0.05, lambda rows, nodes: max(1.0, 0.4 + 0.02 * rows * nodes))
    policy, usual = MeasuredPolicy(), {}
    for rows in (1, 8, 32):
        choices = simulate(policy, machine, always(0.7), 400, chains(8), rows=rows).choices
        usual[rows] = sum(budget.depth for budget in choices) / len(choices)
    # A fixed 6, 3 and 1 would be best; one policy served all three, and remembers the first when it comes back.
    assert usual[1] > 3.5 > usual[8] > 1.8 > usual[32]
    again = simulate(policy, machine, always(0.7), 100, chains(8)).choices
    assert sum(budget.depth for budget in again) / len(again) > 3.5


def test_a_first_block_that_costs_much_does_not_hide_deeper_ones_that_cost_no_more() -> None:
    machine = Machine(0.05, lambda rows, nodes: 1.0 if nodes == 1 else 1.9)  # depth 1: 1.8/1.95; depth 7: 4.16/2.25
    rate = mean_rate(simulate(MeasuredPolicy(), machine, always(0.8), 512, chains(8), seed=seed) for seed in range(10))
    assert rate > 1.5


@pytest.mark.parametrize(("found", "acceptance_rate"), [(0.3, 0.8), (0.7, 0.8), (0.3, 0.3)])
def test_a_lookup_that_often_finds_nothing_is_judged_by_when_it_does(found: float, acceptance_rate: float) -> None:
    machine = Machine(0.0, lambda rows, nodes: 1 + 0.05 * (nodes - 1))  # what a depth is worth, is simulated too
    accepts, fixed = always(acceptance_rate), (FixedPolicy(0), FixedPolicy(2), FixedPolicy(8))
    rates = [simulate(policy, machine, accepts, 4000, chains(8), found=found).rate for policy in fixed]
    rate = mean_rate(
        simulate(MeasuredPolicy(), machine, accepts, 512, chains(8), found=found, seed=seed) for seed in range(8)
    )
    assert rate > 0.93 * max(rates)


# A drafter that is not.

USELESS = [(0.02, 0.0), (0.05, 0.0), (0.1, 0.0), (0.3, 0.1), (1.0, 0.0), (0.0, 0.5), (1.0, 0.5)]


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize(("draft", "extra"), USELESS)
def test_a_useless_drafter_costs_at_most_a_twentieth_even_of_a_short_text(
    name: str, draft: float, extra: float
) -> None:
    machine = Machine(draft, lambda rows, nodes: 1.0 if nodes == 1 else 1 + extra)
    for seed in range(8):
        run = simulate(POLICIES[name](), machine, always(0.0), 128, chains(8), seed=seed)
        assert run.seconds <= 1.05 * run.tokens


@pytest.mark.parametrize("name", POLICIES)
def test_over_a_long_text_a_useless_drafter_costs_a_fiftieth(name: str) -> None:
    for draft in (0.1, 1.0):
        run = simulate(POLICIES[name](), Machine(draft), always(0.0), 3000, chains(8))
        assert run.seconds <= 1.02 * run.tokens


def test_a_useless_tree_drafter_and_a_useless_batch_cost_as_little() -> None:
    steep = Machine(0.1, lambda rows, nodes: 1 + 0.3 * (nodes - 1))
    for rows, budgets in ((1, list(TREES)), (8, chains(8))):
        run = simulate(MeasuredPolicy(), steep, always(0.0), 128, budgets, rows=rows)
        assert run.seconds <= 1.05 * run.tokens


def test_the_simulation_would_catch_a_policy_that_has_no_guard() -> None:
    for policy in (FixedPolicy(), HeuristicPolicy()):
        run = simulate(policy, Machine(0.1), always(0.0), 128, chains(8))
        assert run.seconds > 1.08 * run.tokens


def test_plain_decoding_is_timed_first_then_the_smallest_budget() -> None:
    run = simulate(MeasuredPolicy(), Machine(), always(1.0), 60, chains(8))
    assert run.choices[:4] == [PLAIN, PLAIN, Budget(1, 2), Budget(1, 2)]
    sizes = [budget.nodes for budget in run.choices]
    assert all(size <= 2 * max(sizes[:step]) for step, size in enumerate(sizes) if step > 0)


def test_attempts_that_fail_become_rarer() -> None:
    run = simulate(MeasuredPolicy(), Machine(1.0, noise=0.0, hiccups=0.0), always(0.0), 1500, chains(8))
    attempts = [step for step, budget in enumerate(run.choices) if budget != PLAIN]
    pauses = [later - earlier for earlier, later in pairwise(attempts)]
    assert pauses[:2] == [1, 51]  # two trials, of which the second is known to have lost one plain step: 1/0.02 to wait
    assert pauses[2:4] == [101, 201] and set(pauses[4:]) == {201}


# What changes.


@pytest.mark.parametrize("name", POLICIES)
def test_a_drafter_that_becomes_good_is_found_again(name: str) -> None:
    for seed in range(4):
        policy, machine = POLICIES[name](), Machine()
        simulate(policy, machine, always(0.0), 600, chains(8), seed=seed)
        simulate(policy, machine, always(0.8), 300, chains(8), seed=seed + 100)
        run = simulate(policy, machine, always(0.8), 300, chains(8), seed=seed + 200)
        assert run.rate > 0.85 * machine.best_rate(0.8, 8)


def test_a_drafter_that_becomes_useless_is_given_up() -> None:
    for seed in range(4):
        policy, machine = MeasuredPolicy(), Machine()
        simulate(policy, machine, always(0.8), 600, chains(8), seed=seed)
        run = simulate(policy, machine, always(0.0), 300, chains(8), seed=seed + 100)
        assert run.seconds < 1.15 * run.tokens
        assert run.choices[-150:].count(PLAIN) > 110


def test_the_depth_follows_a_text_that_becomes_easier_or_harder() -> None:
    machine = Machine()
    for before, after in ((0.4, 0.9), (0.9, 0.4)):
        done = []
        for seed in range(6):
            policy = MeasuredPolicy()
            simulate(policy, machine, always(before), 400, chains(8), seed=seed)
            done.append(simulate(policy, machine, always(after), 400, chains(8), seed=seed + 100))
        assert mean_rate(done) > 0.9 * machine.best_rate(after, 8)


@pytest.mark.parametrize("phase", ["draft", "verify", "overhead"])
def test_a_single_hiccup_changes_no_choice(phase: str) -> None:
    settled = MeasuredPolicy()
    calm = Machine(noise=0.0, hiccups=0.0)
    run = simulate(settled, calm, always(0.8), 400, chains(8))
    usual = run.choices[-1]
    draft = 0.1 * usual.depth
    late = {name: 20.0 * (name == phase) for name in ("draft", "verify", "overhead")}
    seconds = draft + late["draft"], 1 + late["verify"], draft + 1 + sum(late.values())
    settled.observe(usual, 1, one(usual.depth // 2, usual.depth), *seconds)
    assert settled.choose(chains(8), 1) != PLAIN
    assert abs(settled.choose(chains(8), 1).depth - usual.depth) <= 1


def test_many_hiccups_do_not_lose_a_good_drafter() -> None:
    machine = Machine(hiccups=0.1)
    rate = mean_rate(simulate(MeasuredPolicy(), machine, always(0.8), 512, chains(8), seed=seed) for seed in range(20))
    assert rate > 0.93 * machine.best_rate(0.8, 8)


# Rows and sizes not seen yet.


def test_rows_not_seen_yet_borrow_from_their_neighbours_but_not_from_afar() -> None:
    policy = MeasuredPolicy()
    simulate(policy, Machine(), always(0.8), 200, chains(8), rows=8)
    assert policy.choose(chains(8), 7).depth > 2
    assert policy.choose(chains(8), 3) == PLAIN  # more than a factor of two away: plain decoding is timed anew


def test_a_known_cost_curve_spares_attempts_that_cannot_pay() -> None:
    def cliff(rows: int, nodes: int) -> float:
        return 1.0 if nodes < 4 else 6.0

    machine, curve = Machine(0.05, cliff, noise=0.0, hiccups=0.0), {1: 2.0, 2: 2.0, 3: 2.0, 4: 12.0, 8: 12.0}
    dear = {}
    for name, policy in (("without", MeasuredPolicy()), ("with", MeasuredPolicy(curve))):
        run = simulate(policy, machine, always(0.8), 100, chains(8))
        dear[name] = sum(budget.nodes >= 4 for budget in run.choices)
    assert dear["with"] == 0 < dear["without"]


# Texts that end.


def test_a_position_that_a_text_had_no_room_for_is_no_miss() -> None:
    acceptance = _Acceptance()
    acceptance.observe(Budget(2, 3), [StepCount(2, 1, 1, 1, room=1)])
    # The first position: 1 of 1 on a prior of 1.5 observations at 0.5. Of the second nothing is known but the first.
    first = (1 + 1.5 * 0.5) / (1 + 1.5)
    assert acceptance.expected_tokens(Budget(2, 3)) == pytest.approx(1 + first + first**2)
    assert acceptance.fill == 1, "it drafted all that it had room for"
    acceptance.observe(Budget(2, 3), [StepCount(2, 1, 1, 1, room=2)])
    assert acceptance.fill < 1, "this time it stopped by itself"


def test_short_texts_do_not_make_a_good_drafter_look_bad() -> None:
    policy, budgets = MeasuredPolicy(), chains(4)
    for _ in range(20):  # texts of a plain step's worth of room behind one full draft
        for room in (9, 4, 1):
            budget = policy.choose(budgets, 1)
            depth = min(budget.depth, room)
            seconds = 0.1 * depth, 1.0
            policy.observe(budget, 1, [StepCount(depth + 1, depth, depth, depth, room)], *seconds, sum(seconds))
    assert policy.choose(budgets, 1) == Budget(4, 5)


# What must not break it.


@pytest.mark.parametrize("name", [*POLICIES, "fixed", "heuristic"])
def test_without_budgets_every_policy_decodes_plainly(name: str) -> None:
    policy = POLICIES[name]() if name in POLICIES else named_policy(name)
    for _ in range(5):
        assert policy.choose([], 1) == PLAIN
        repeat(policy, PLAIN, one(0, 0), 0.0, 1.0, 1)


@pytest.mark.parametrize("name", [*POLICIES, "fixed", "heuristic"])
def test_steps_of_no_time_no_offer_or_no_rows_break_nothing(name: str) -> None:
    policy = POLICIES[name]() if name in POLICIES else named_policy(name)
    odd: list[list[StepCount]] = [one(0, 0), [], [StepCount(2, 2, 2, 3)], one(1, 1)]
    for turn in range(60):
        budget = policy.choose(chains(4), 2)
        assert budget == PLAIN or budget in chains(4)
        policy.observe(budget, 2, odd[turn % 4] if budget.depth else one(0, 0), 0.0, 0.0, 0.0)


def test_a_drafter_that_never_finds_anything_and_takes_no_time_costs_nothing() -> None:
    run = simulate(MeasuredPolicy(), Machine(0.1), always(0.9), 200, chains(8), found=0.0)
    assert run.seconds == run.tokens


def test_a_guarded_policy_makes_its_own_choice_where_that_pays() -> None:
    run = simulate(Guarded(FixedPolicy(3)), Machine(), always(0.8), 500, chains(8))
    late = Counter(run.choices[40:])
    assert late[Budget(3, 4)] > 0.9 * sum(late.values())
