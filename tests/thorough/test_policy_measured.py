"""The measured policy on a simulated machine: good and useless drafters, change, rows, and the price of trials."""

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
from simulated_machine import TREES, Machine, always, chains, mean_rate, one, simulate

from decoding.drafters import PromptLookupDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.metrics import StepCount
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import Costs
from decoding.policies import PLAIN, Budget, FixedPolicy, HeuristicPolicy, MeasuredPolicy, Policy, Rehearsal
from decoding.policies.acceptance import Acceptance
from decoding.policies.survey import Survey

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


@pytest.mark.parametrize(("slope", "best"), [(0.005, Budget(4, 16)), (0.15, Budget(2, 4))])
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


@pytest.mark.parametrize(("draft", "extra"), USELESS)
def test_a_useless_drafter_costs_at_most_a_twentieth_even_of_a_short_text(draft: float, extra: float) -> None:
    machine = Machine(draft, lambda rows, nodes: 1.0 if nodes == 1 else 1 + extra)
    for seed in range(8):
        run = simulate(MeasuredPolicy(), machine, always(0.0), 128, chains(8), seed=seed)
        assert run.seconds <= 1.05 * run.tokens


def test_over_a_long_text_a_useless_drafter_costs_a_fiftieth() -> None:
    for draft in (0.1, 1.0):
        run = simulate(MeasuredPolicy(), Machine(draft), always(0.0), 3000, chains(8))
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


def test_trials_of_a_useless_drafter_lose_a_hundredth_of_the_tokens() -> None:
    """A step of draft and pass costs 2 plain ones and brings 1 token: a token is lost, and saved up in 100 steps."""
    run = simulate(MeasuredPolicy(), Machine(1.0, noise=0.0, hiccups=0.0), always(0.0), 3000, chains(8))
    trials = [step for step, budget in enumerate(run.choices) if budget != PLAIN]
    assert len(trials) >= 20 and min(later - earlier for earlier, later in pairwise(trials)) >= 95
    assert run.seconds <= 1.011 * run.tokens


@pytest.mark.parametrize(("acceptance_rate", "draft"), [(0.0, 0.02), (0.0, 0.3), (0.5, 0.1), (0.8, 0.02)])
def test_what_trials_lose_is_small_whatever_the_drafter(acceptance_rate: float, draft: float) -> None:
    """Against the same machine with the best depth throughout; misjudgements are in it too."""
    machine, done = Machine(draft, noise=0.0, hiccups=0.0), []
    for seed in range(4):
        policy = MeasuredPolicy()
        simulate(policy, machine, always(acceptance_rate), 500, chains(8), seed=seed)
        done.append(simulate(policy, machine, always(acceptance_rate), 2000, chains(8), seed=seed + 100))
    assert mean_rate(done) > 0.965 * machine.best_rate(acceptance_rate, 8)


# What changes.


def test_a_drafter_that_becomes_good_is_found_again() -> None:
    for seed in range(4):
        policy, machine = MeasuredPolicy(), Machine()
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
            done.append(simulate(policy, machine, always(after), 1000, chains(8), seed=seed + 100))
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


def test_costs_are_measured_once_for_one_row_and_once_for_the_most_rows() -> None:
    policy, rehearsed = MeasuredPolicy(), []
    for rows in (8, 8, 3, 1, 16, 8):
        rehearsed.append(simulate(policy, Machine(), always(0.8), 50, chains(8), rows=rows).rehearsed > 0)
    assert rehearsed == [True, False, False, False, True, False]


def test_a_measurement_ends_after_two_seconds_however_slow_the_target_is() -> None:
    clock, steps = SimpleNamespace(now=0.0), Counter[int]()
    policy = MeasuredPolicy(clock=lambda: clock.now)

    def rehearse(survey, rows):  # type: ignore[no-untyped-def]  # a Rehearsal
        while True:
            budget = survey.choose(chains(8), rows)
            clock.now += 0.4
            steps[rows] += 1
            survey.observe(budget, rows, one(0, budget.depth), 0.1 * budget.depth, 0.3, 0.4)
            yield

    policy.begin(chains(8), 4, rehearse)
    assert steps == {1: 3, 4: 3} and clock.now == pytest.approx(2.4)  # a second for each, to the end of its last step
    assert policy.choose(chains(8), 2) in [PLAIN, *chains(8)]


def rehearsal(prefill: float, step: float, clock: SimpleNamespace, asked: bool = True) -> Rehearsal:
    """Texts whose prefill and whose steps take so long; with ``asked`` False no text has room for a draft."""

    def rehearse(survey: Policy, rows: int) -> Iterator[None]:
        clock.now += prefill
        yield
        while True:
            budget = survey.choose(chains(8), rows) if asked else PLAIN
            clock.now += step
            survey.observe(budget, rows, one(0, budget.depth), 0.0, step, step)
            yield

    return rehearse


def test_a_slow_prefill_and_slow_steps_leave_the_survey_two_sizes() -> None:
    clock = SimpleNamespace(now=0.0)
    policy = MeasuredPolicy(clock=lambda: clock.now)
    policy.begin(chains(8), 1, rehearsal(30.0, 5.0, clock))
    assert policy._costs[1].target_pass == {1: 5.0, 9: 5.0} and clock.now == 40.0


def test_texts_without_room_for_a_draft_measure_nothing_for_two_seconds() -> None:
    clock = SimpleNamespace(now=0.0)
    policy = MeasuredPolicy(clock=lambda: clock.now)
    policy.begin(chains(8), 1, rehearsal(0.5, 0.5, clock, asked=False))
    assert policy._costs == {} and clock.now == pytest.approx(3.0)
    assert policy.choose(chains(8), 1) == Budget(8, 9)


def test_a_survey_takes_sizes_that_look_cheaper_than_smaller_ones_for_noise() -> None:
    survey = Survey(chains(2), Acceptance())
    for budget, seconds in [(PLAIN, 3.0), (Budget(1, 2), 2.0), (Budget(2, 3), 4.0), (PLAIN, 60.0)]:
        survey.observe(budget, 1, one(0, budget.depth), 0.0, seconds, seconds)
    assert survey.costs().target_pass == {1: 2.5, 2: 2.5, 3: 4.0}


def test_known_costs_need_no_measurement_and_spare_attempts_that_cannot_pay() -> None:
    def cliff(rows: int, nodes: int) -> float:
        return 1.0 if nodes < 4 else 6.0

    machine = Machine(0.05, cliff, noise=0.0, hiccups=0.0)
    costs = Costs({1: 2.0, 2: 2.0, 3: 2.0, 4: 12.0, 8: 12.0}, {8: 0.8})
    run = simulate(MeasuredPolicy({1: costs}), machine, always(0.8), 100, chains(8))
    assert run.rehearsed == 0
    assert not [budget for budget in run.choices if budget.nodes >= 4][1:]  # the largest is what it starts from


def test_costs_of_rows_between_those_measured_are_interpolated() -> None:
    policy = MeasuredPolicy({1: Costs({1: 1.0, 2: 1.0}), 5: Costs({1: 1.0, 2: 3.0})})
    assert [policy._step(rows, Budget(1, 2)) for rows in (1, 2, 3, 5, 9)] == [1.0, 1.5, 2.0, 3.0, 3.0]


def test_a_machine_that_slows_down_as_a_whole_changes_little() -> None:
    slow, done = Machine(0.3, lambda rows, nodes: 3.0), []
    for seed in range(6):
        policy = MeasuredPolicy()
        simulate(policy, Machine(), always(0.8), 400, chains(8), seed=seed)
        done.append(simulate(policy, slow, always(0.8), 400, chains(8), seed=seed + 100))
    assert mean_rate(done) > 0.94 * slow.best_rate(0.8, 8)


def test_a_cost_that_was_measured_wrong_is_corrected_by_what_is_seen() -> None:
    """Plain decoding was said to cost four fifths of a draft, which gains a fifth then; it costs half, and is best."""
    wrong = Costs({1: 0.8, 9: 1.0}, {8: 0.0})
    machine = Machine(0.0, lambda rows, nodes: 1.0 if nodes == 1 else 2.0)
    run = simulate(MeasuredPolicy({1: wrong}), machine, always(0.35), 3000, chains(8))
    assert Counter(run.choices[-400:])[PLAIN] > 350


def test_a_plain_step_that_nobody_chose_is_not_charged_as_a_trial() -> None:
    policy = MeasuredPolicy({1: Costs({1: 1.0, 9: 1.0}, {8: 0.8})})
    for _ in range(40):
        budget = policy.choose(chains(8), 1)
        policy.observe(budget, 1, one(budget.depth, budget.depth), 0.1 * budget.depth, 1.0, 1 + 0.1 * budget.depth)
        saved = policy._saved
        policy.observe(PLAIN, 1, [StepCount(1, 0, 0, 0, 0)], 0.0, 1.0, 1.0)
        assert policy._saved == saved


# Texts that end.


def test_a_position_that_a_text_had_no_room_for_is_no_miss() -> None:
    acceptance = Acceptance()
    acceptance.observe(Budget(2, 3), [StepCount(2, 1, 1, 1, room=1)])
    # The first position: 1 of 1, on a prior of 1.5 observations that is itself 1 of 1 on 1.5 at even odds. Of the
    # second nothing is known but the first's prior.
    prior = (1 + 1.5 * 0.5) / (1 + 1.5)
    first = (1 + 1.5 * prior) / (1 + 1.5)
    assert acceptance.expected_tokens([Budget(2, 3)]) == [pytest.approx(1 + first + first * prior)]


def test_short_texts_do_not_make_a_good_drafter_look_bad() -> None:
    policy, budgets = MeasuredPolicy(), chains(4)
    for _ in range(20):  # texts of a plain step's worth of room behind one full draft
        for room in (9, 4, 1):
            budget = policy.choose(budgets, 1)
            depth = min(budget.depth, room)
            seconds = 0.1 * depth, 1.0
            policy.observe(budget, 1, [StepCount(depth + 1, depth, depth, depth, room)], *seconds, sum(seconds))
    assert policy.choose(budgets, 1) == Budget(4, 5)


def test_a_drafter_that_never_finds_anything_and_takes_no_time_costs_nothing() -> None:
    run = simulate(MeasuredPolicy(), Machine(0.1), always(0.9), 200, chains(8), found=0.0)
    assert run.seconds == run.tokens


# In the loop.


def test_a_rehearsal_decodes_the_first_prompts_and_none_where_nothing_could_be_drafted(tiny_llama: CausalLM) -> None:
    rehearsed: list[int] = []

    class Counting(FixedPolicy):
        def begin(self, budgets: Sequence[Budget], rows: int, rehearse: Rehearsal, /) -> None:
            rehearsed.append(len({place for place, _ in rehearse(FixedPolicy(), 1)}))

    for count, tokens in ((2, 3), (300, 3), (2, 2)):
        Engine(tiny_llama, PromptLookupDrafter(8), Counting()).decode(
            [[3, 1]] * count, DecodingConfig(tokens), batch_size=2
        )
    assert rehearsed == [100, 100]


@pytest.mark.parametrize("rows", [1, 3])
def test_the_loop_rehearses_for_the_policy_and_says_what_plain_greedy_says(tiny_llama: CausalLM, rows: int) -> None:
    prompts, config = [[3, 1, 4, 1, 5], [7], [6, 6], [9, 8, 7, 6]], DecodingConfig(16)
    policy = MeasuredPolicy(clock=lambda: 0.0)  # by which a rehearsal takes no time, so that it is seen to its end
    texts = Engine(tiny_llama, PromptLookupDrafter(8), policy).decode(prompts, config, batch_size=rows)
    plain = Engine(tiny_llama).decode(prompts, config, batch_size=rows)
    assert [text.tokens for text in texts] == [text.tokens for text in plain]
    assert sorted(policy._costs) == sorted({1, rows})
    assert all(seconds > 0 for costs in policy._costs.values() for seconds in costs.target_pass.values())
