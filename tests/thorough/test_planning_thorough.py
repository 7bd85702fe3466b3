"""Plans of every family of drafters on tiny models: acceptance that is the loop's own, greedy and sampled."""

from collections.abc import Callable
from dataclasses import replace

import pytest
from test_cli import models  # noqa: F401  # a fixture
from tiny_dspark import tiny_dspark
from tiny_models import tiny_model

from decoding.drafters import Drafter
from decoding.drafters.registry import LoadedWeights, named_drafter
from decoding.drafters.spec import DrafterSpec
from decoding.measure.planning.forms import Family, family_of, first_tree
from decoding.measure.planning.planner import Planner
from decoding.measure.planning.survey import PlanConfig
from decoding.metrics import tokens_per_pass
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads

PROMPTS = [(4, 5, 6), (7, 8), (9, 10, 11), (12, 4, 5, 6)]
QUICK = PlanConfig(batch_sizes=(1, 2), max_new_tokens=16, most_nodes=8, seconds=0.05, sizes=(1, 2, 4, 8))


@pytest.fixture
def load(tiny_llama: CausalLM, tiny_draft: CausalLM) -> Callable[[DrafterSpec], Drafter]:
    """Drafters by the name of their weights; the draft "same" is the target itself."""
    weights: dict[str, LoadedWeights] = {
        "heads": MedusaHeads.for_target(tiny_llama.model, MedusaConfig(16, 16, num_heads=3, tree=((0,),))),
        "same": CausalLM(tiny_model("llama")),
        "other": tiny_draft,
        "short": CausalLM(tiny_model("llama", max_position_embeddings=19)),
        "dspark": tiny_dspark(tiny_llama),
    }
    return lambda spec: named_drafter(spec.name, None if spec.path is None else weights[spec.path], **spec.options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("name", ["heads", "dspark"])
def test_the_counted_children_of_a_tree_are_those_that_the_loop_accepted(
    tiny_llama: CausalLM, load: Callable[[DrafterSpec], Drafter], name: str, temperature: float
) -> None:
    spec = DrafterSpec(name, name, {"tree": first_tree(3, 4, 9)})
    planner = Planner(tiny_llama, load, [spec], PROMPTS, replace(QUICK, temperature=temperature, max_new_tokens=24))
    steps, children = planner.decode(Family(spec, "tree", load(spec)), PROMPTS)
    counted = [step for step in steps if step.room >= 3]
    assert children.trials[0, 0] == len(counted) > 0
    assert sum(children.hits.values()) == sum(step.accepted for step in counted)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_draft_equal_to_the_target_is_accepted_whole_at_every_depth(
    tiny_llama: CausalLM, load: Callable[[DrafterSpec], Drafter], temperature: float
) -> None:
    config = replace(QUICK, temperature=temperature, max_new_tokens=31)  # the prefill's token, and ten passes of three
    planner = Planner(tiny_llama, load, [DrafterSpec("draft", "same", {"tokens": 2})], PROMPTS, config)
    measured = planner.measure(planner.families[0])
    assert [candidate.tokens for candidate in measured.chains] == [2.0, 3.0]


def test_prompts_that_a_draft_cannot_hold_are_left_out_and_none_at_all_is_refused(
    tiny_llama: CausalLM, load: Callable[[DrafterSpec], Drafter]
) -> None:
    spec = DrafterSpec("draft", "short", {})
    assert Planner(tiny_llama, load, [spec], PROMPTS, QUICK).prompts == [(4, 5, 6), (7, 8), (9, 10, 11)]
    with pytest.raises(ValueError, match="no prompt and 16 new tokens fit into the 19 tokens that target and drafters"):
        Planner(tiny_llama, load, [spec], PROMPTS[3:], QUICK)


def test_families_are_as_free_as_their_spec_leaves_them(load: Callable[[DrafterSpec], Drafter]) -> None:
    def kind(name: str, path: str | None = None, **options: object) -> tuple[str, int]:
        family = family_of(DrafterSpec(name, path, options), load, most_nodes=8, most_depth=5)
        return family.kind, family.depth

    assert kind("heads", "heads") == ("tree", 3)
    assert kind("heads", "heads", tree=((0,), (1,))) == ("fixed", 1)
    assert kind("dspark", "dspark") == ("tree", 4)  # all its tokens, where a typical tree is 3 deep
    assert kind("dspark", "dspark", tokens=2) == ("chain", 2)
    assert kind("draft", "other") == ("chain", 5)
    assert kind("draft", "other", tokens=3) == ("chain", 3)
    assert kind("lookup") == ("chain", 10)
    assert kind("lookup", branches=2) == ("fixed", 10)
    assert kind("draft-tree", "other")[0] == "fixed"
    assert kind("hybrid", "heads", of="heads")[0] == "fixed"


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_plan_of_every_family_expects_of_its_choice_what_the_loop_decodes(
    tiny_llama: CausalLM, load: Callable[[DrafterSpec], Drafter], temperature: float
) -> None:
    specs = [
        DrafterSpec("heads", "heads", {}),
        DrafterSpec("dspark", "dspark", {}),
        DrafterSpec("draft", "same", {}),
        DrafterSpec("lookup", None, {"tokens": 3}),
        DrafterSpec("hybrid", "heads", {"of": "heads"}),
        DrafterSpec("draft-tree", "other", {"depth": 2, "nodes": 6}),
    ]
    specs = specs if temperature == 0 else specs[:2]  # those that draw trees
    config = replace(QUICK, temperature=temperature, batch_sizes=(2,))
    planner = Planner(tiny_llama, load, specs, PROMPTS, config)
    plan = planner.run()
    assert [len(cell["choices"]) for cell in plan["cells"]] == [len(specs)]
    for cell in plan["cells"]:
        for spec, choice in zip(specs, cell["choices"], strict=True):
            form, family = choice["best"], family_of(spec, load, 8, config.deepest)
            drafted = load(family.of_tree(tuple(map(tuple, form["tree"])))) if form["tree"] else family.drafter
            steps, _ = planner.decode(Family(spec, "fixed", drafted), PROMPTS)
            cut = form["depth"] if family.kind == "chain" else None
            assert form["tokens_per_pass"] == pytest.approx(tokens_per_pass(steps, cut))
