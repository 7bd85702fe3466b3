"""Whether a draft could pay, by costs that are given; and that costs are measured in the target's own passes."""

import io
import itertools
from pathlib import Path
from typing import Any

import pytest
from accelerate.state import AcceleratorState
from rich.console import Console
from tiny_dspark import tiny_dspark
from tiny_models import tiny_model
from tiny_training import recipe_content, write_corpus, write_target

from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import Costs, _Passes, measure_costs
from decoding.model.dspark import DSpark
from trainer.drafts import job as job_module
from trainer.drafts.job import DEEPEST, check_pays, payoff
from trainer.recipe.reading import parse_recipe
from trainer.run.train import run_recipe

SIZES = range(1, DEEPEST + 2)


def flat(draft_step: float) -> Costs:
    """A target's pass costs the same over any number of tokens."""
    return Costs(dict.fromkeys(SIZES, 1.0), {1: draft_step})


@pytest.mark.parametrize(
    ("costs", "least", "most"),
    [
        # One token: (1 + a) / (c + 1) > 1 for a > c. At acceptance 1 all 16 are drafted: 17 / (16 c + 1).
        (flat(0.2), 0.21, 17 / 4.2),
        (flat(0.505), 0.51, 17 / 9.08),
        # Two tokens cost 1.3 passes, and more cost 4: one token pays if 1 + a > 0.2 + 1.3, and no longer draft does.
        (Costs({1: 1.0, 2: 1.3, **dict.fromkeys(range(3, DEEPEST + 2), 4.0)}, {1: 0.2}), 0.51, 17 / 7.2),
        # Six tokens of a DSpark draft for 0.2 of a pass: Σ a^i up to a^6 is 1.2 at a = 0.167, and 7 at a = 1.
        (Costs(dict.fromkeys(range(1, 8), 1.0), {1: 0.2, 6: 0.2}), 0.17, 7 / 1.2),
    ],
)
def test_a_draft_pays_from_an_acceptance_on_by_its_steps_and_the_targets_passes(
    costs: Costs, least: float, most: float
) -> None:
    assert payoff(costs) == (least, pytest.approx(most))


def test_the_forward_of_a_dspark_draft_is_that_of_its_block(tiny_llama: CausalLM) -> None:
    found = measure_costs(tiny_llama, range(1, 5), DSpark(tiny_dspark(tiny_llama, 3), tiny_llama))
    assert found.draft.keys() == {1, 3} and found.draft_to(1) == found.draft_to(2) == found.draft_to(3) > 0


@pytest.mark.parametrize(
    ("costs", "said"),
    [
        (flat(1.0), "takes 1.00 of a target pass here, .* 1.00 times the speed"),
        (flat(1.4), "takes 1.40 of a target pass here, .* 0.83 times the speed"),
        (Costs({size: float(size) for size in SIZES}, {1: 0.05}), "takes 0.05"),  # n tokens cost n passes
    ],
)
def test_a_draft_that_cannot_pay_is_refused_with_its_figures_and_the_remedy(costs: Costs, said: str) -> None:
    assert payoff(costs).least_acceptance is None
    with pytest.raises(ValueError, match=rf"this draft is too slow to pay: .*{said}.*check_costs=false"):
        check_pays(costs)


def test_costs_are_counted_in_passes_of_the_target_over_one_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """What looks cheaper over more tokens is noise: the pass over 3 is taken to cost as much as that over 2."""
    target, draft = CausalLM(tiny_model()), CausalLM(tiny_model(num_hidden_layers=1))

    seconds = {target: {**{size: 2.0 + size for size in SIZES}, 1: 2.0, 2: 4.5, 3: 4.0}, draft: {1: 0.5}}
    monkeypatch.setattr(_Passes, "seconds", lambda passes, size: seconds[passes.model][size])
    found = measure_costs(target, SIZES, draft)
    assert found.draft_step == 0.25 and list(found.target_pass) == list(SIZES)
    assert [found.pass_over(size) / found.pass_over(1) for size in (1, 2, 3, 4, 17)] == [1.0, 2.25, 2.25, 3.0, 9.5]


def test_a_machine_that_gets_slower_meanwhile_slows_target_and_draft_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their passes take turns: a draft of half a target's pass costs half of one, whatever the machine does."""
    target, draft = CausalLM(tiny_model()), CausalLM(tiny_model(num_hidden_layers=1))
    turns = itertools.count()

    def clock(passes: _Passes, size: int) -> float:
        slowness = 1 + next(turns) // (1 + len(SIZES))
        return slowness * (1.0 if passes.model is target else 0.5)

    monkeypatch.setattr(_Passes, "seconds", clock)
    assert measure_costs(target, SIZES, draft).draft_step == 0.5


def test_the_cost_curve_has_a_time_for_every_size_even_in_a_short_context(tiny_llama: CausalLM) -> None:
    assert tiny_llama.max_positions == 96  # shorter than the usual prefix of 128 tokens
    curve = measure_costs(tiny_llama, (1, 4), repeats=1).target_pass
    assert list(curve) == [1, 4] and all(seconds > 0 for seconds in curve.values())


def test_costs_are_linear_between_what_was_measured_and_go_on_as_they_ended() -> None:
    costs = Costs({2: 4.0, 6: 6.0, 4: 4.0}, {2: 1.0})
    assert [costs.pass_over(tokens) for tokens in (1, 2, 3, 5, 6, 8)] == [4.0, 4.0, 4.0, 5.0, 6.0, 8.0]
    assert [costs.draft_to(depth) for depth in (0, 1, 2, 4)] == [0.0, 0.5, 1.0, 2.0]
    assert costs.step(2, 5) == 6.0 and costs.draft_step == 0.125
    assert Costs({1: 2.0, 3: 1.0}).pass_over(9) == 1.0, "a curve that ends falling goes on level"


def flat_run(folder: Path, monkeypatch: pytest.MonkeyPatch, draft_step: float, **draft: Any) -> str:
    """What a small training run says where a draft's step costs so much."""
    content = recipe_content(folder, "draft", steps=1)
    content["draft"] = draft
    said = io.StringIO()
    monkeypatch.setattr(job_module, "best_costs", lambda target, draft: flat(draft_step))
    AcceleratorState._reset_state(True)
    try:
        run_recipe(parse_recipe(content), Console(width=200, file=said))
    finally:
        AcceleratorState._reset_state(True)
    return said.getvalue()


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    return tmp_path


def test_a_draft_that_cannot_pay_is_refused_before_anything_is_written(
    workshop: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="this draft is too slow to pay"):
        flat_run(workshop, monkeypatch, 1.1)
    assert not (workshop / "run").exists()
    assert "costs here" not in flat_run(workshop, monkeypatch, 1.1, check_costs=False)
    assert (workshop / "run" / "final").is_dir()


def test_costs_are_looked_at_once_and_a_run_under_way_goes_on(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run is not refused because the machine is busy with something else now."""
    assert "it pays off above a per-position acceptance of 0.21, at most 4.0x" in flat_run(workshop, monkeypatch, 0.2)
    assert "costs here" not in flat_run(workshop, monkeypatch, 1.1)


def test_a_measurement_that_a_busy_machine_spoilt_is_made_again(
    tiny_llama: CausalLM, tiny_draft: CausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([flat(1.5), flat(0.2), flat(9.0), flat(0.3)])
    monkeypatch.setattr(job_module, "measure_costs", lambda *args, **options: next(found))
    assert job_module.best_costs(tiny_llama, tiny_draft).draft_step == 0.2
    assert next(found).draft_step == 9.0  # the second will do
    useless = iter([flat(1.5), flat(1.2), flat(1.4)])
    monkeypatch.setattr(job_module, "measure_costs", lambda *args, **options: next(useless))
    assert job_module.best_costs(tiny_llama, tiny_draft).draft_step == 1.2
