"""Whole runs of DSpark and EAGLE-3 drafts: from a recipe to a folder that drafts, however it is interrupted."""

import copy
import io
import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from dspark_training import TEXTS as BLOCK_TEXTS
from dspark_training import TURNS, objective_for
from eagle3_training import eagle3_for
from rich.console import Console
from safetensors.torch import load_file
from test_taps import model_of
from tiny_dspark import states_at, tiny_dspark
from tiny_models import naive_greedy, tiny_model
from tiny_training import Recorder, interrupt, recipe_content, tiny_tokenizer, train_toy, write_corpus, write_target

from decoding.drafters.registry import DrafterLoader, parse_drafter
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import Costs, _Passes, measure_costs
from decoding.model.dspark import DSpark
from decoding.model.fingerprint import fingerprint
from trainer.data.batch import Example, collate
from trainer.drafts import job as job_module
from trainer.drafts.job import DEEPEST, check_pays, payoff
from trainer.processes import Process
from trainer.recipe.heads import FeaturesSection, StatesDtype
from trainer.recipe.reading import parse_recipe
from trainer.run.loop import Interrupted
from trainer.run.train import run_recipe
from trainer.target.features import FeatureStore, StoredTaps, ensure_features
from trainer.target.loading import OnlineTarget, Target
from trainer.target.store import estimate_bytes

DSPARK = {"block_size": 3, "markov_rank": 4, "anchors": 4, "layers": 1, "mask_token": "<user>", "tree_nodes": 5}
EAGLE3 = {"steps": 3, "anchors": 4, "taps": (0,)}
KINDS: dict[str, Any] = {"dspark": DSPARK, "eagle3": EAGLE3}
OBJECTIVES: list[Callable[..., Any]] = [objective_for, eagle3_for]
TEXTS = [
    Example(tuple(4 + (start + i) % 11 for i in range(6 + start % 5)), (True,) * (6 + start % 5), 0)
    for start in range(16)
]


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    return tmp_path


def trained(
    workshop: Path,
    output: str = "run",
    kind: str = "dspark",
    draft: dict[str, Any] | None = None,
    features: dict[str, Any] | None = None,
    said: io.StringIO | None = None,
    evaluation: dict[str, Any] | None = None,
    **training: Any,
) -> Path:
    content = recipe_content(workshop, "draft", **training)
    content["output"], content["features"] = str(workshop / output), features
    content["draft"] |= {kind: KINDS[kind], **(draft or {})}
    content["evaluation"] |= evaluation or {}
    AcceleratorState._reset_state(True)
    try:
        return run_recipe(parse_recipe(content), Console(file=said or io.StringIO(), width=1000))
    finally:
        AcceleratorState._reset_state(True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_is_trained_to_a_folder_that_drafts_and_changes_no_text(workshop: Path, kind: str) -> None:
    """And evaluated by its own drafter."""
    said = io.StringIO()
    final = trained(workshop, kind=kind, said=said)
    assert {"dspark": "(dspark, tree of 5)", "eagle3": "(eagle3, 4 tokens)"}[kind] in said.getvalue()
    lines = [json.loads(line) for line in (workshop / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"loss/token_1", "loss/token_3", "acceptance/token_3"} <= lines[0].keys()
    assert ("loss/confidence" in lines[0]) == (kind == "dspark")
    assert sum("heldout/tokens_per_pass" in line for line in lines) == 1
    target = CausalLM(tiny_model("llama"))
    spec = parse_drafter(str(final))
    drafter = DrafterLoader(target, tiny_tokenizer()).load(spec)
    found = Engine(target, drafter).decode([4, 5, 6], DecodingConfig(max_new_tokens=12))
    assert found.tokens == naive_greedy(tiny_model("llama"), (4, 5, 6), 12)
    assert any(step.offered for step in found.steps) and spec.options["of"] == kind
    assert {"recipe", "target", "steps"} <= json.loads((final / "provenance.json").read_text()).keys()


def test_what_the_first_lines_promise_is_what_the_run_does(workshop: Path) -> None:
    """A tree is fitted only if there are evaluations, and a target's scaling is not taken over in silence."""
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for prompts, rope in ((2, None), (0, scaled)):
        write_target(workshop / "target", **({"rope_parameters": rope} if rope else {}))
        said = io.StringIO()
        final = trained(workshop, f"run-{prompts}", said=said, evaluation={"prompts": prompts})
        tree = json.loads((final / "config.json").read_text())["headstart"]["tree"]
        assert bool(tree) == bool(prompts) == ("the finished draft uses a tree of 5 here" in said.getvalue())
        told = "the draft's rotary embeddings are not scaled like the target's (llama3)"
        assert (told in said.getvalue()) == (rope is not None)


@pytest.mark.parametrize("made", OBJECTIVES)
def test_one_step_of_eight_rows_is_eight_steps_of_one(tmp_path: Path, made: Any) -> None:
    losses = []
    for size in (8, 1):
        recorder, objective = Recorder(), made(tiny_model("llama"))
        settings = {"steps": 3, "checkpoint_every": 100, "micro_batch_size": size}
        train_toy(tmp_path / str(size), objective, recorder, TEXTS, **settings)
        losses.append([recorder.losses[step] for step in (1, 2, 3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("made", OBJECTIVES)
def test_a_run_that_goes_on_is_to_the_bit_one_that_never_stopped(tmp_path: Path, made: Any) -> None:
    whole, first, second = Recorder(), Recorder(), Recorder()
    objectives = [made(tiny_model("llama")) for _ in range(3)]
    train_toy(tmp_path / "whole", objectives[0], whole, TEXTS)
    first.actions[2] = interrupt
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", objectives[1], first, TEXTS)
    train_toy(tmp_path / "parts", objectives[2], second, TEXTS)
    assert first.losses | second.losses == whole.losses and second.losses.keys() == {3, 4, 5, 6}
    found, wanted = (objectives[index].module.state_dict() for index in (2, 0))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_draft_goes_on_in_a_second_stage_on_what_the_loop_writes(workshop: Path, kind: str) -> None:
    first = trained(workshop, kind=kind)
    policy = {"loop": 1, "loop_trains": "all", "max_new_tokens": 6}
    second = trained(workshop, "second", kind, draft={"init": {"from_model": str(first)}, "policy": policy})
    stored, found = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert found.keys() == stored.keys() and not any(torch.equal(found[name], stored[name]) for name in found)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (first, second)]
    if kind == "dspark":
        assert all(config.pop("headstart")["tree"] for config in configs), "fitted anew"
    assert configs[0] == configs[1]


# --- states of the target on disk: a draft learns from them what it learns from the target itself ---------------------


__all__ = ["workshop"]  # a fixture
EXAMPLES = [BLOCK_TEXTS[0], TURNS, BLOCK_TEXTS[1]]
BATCH = collate(BLOCK_TEXTS, (0, 2))  # padded otherwise than when it was written


def target_of(family: str = "llama") -> CausalLM:
    return CausalLM(copy.deepcopy(model_of(family)))


def stored(
    target: CausalLM,
    folder: Path,
    states: StatesDtype = "target",
    taps: tuple[int, ...] = (0, 1),
    said: Any = None,
    examples: Any = EXAMPLES,
) -> FeatureStore:
    whole = Target("tiny", target.dtype, fingerprint(target.model), tiny_tokenizer(), target)
    section = FeaturesSection(folder=str(folder), states=states)
    return ensure_features(
        whole, examples, section, Process(console=Console(file=said or io.StringIO(), width=200)), taps
    )


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon", "gemma3", "granite"])
@pytest.mark.parametrize("made", OBJECTIVES)
def test_a_draft_learns_from_the_disk_what_it_learns_from_its_target(
    made: Any, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its taps are 0 and 1; the state behind layer 2 is stored for the target's own distribution.

    The running target takes rows of other lengths one by one.
    """
    monkeypatch.setattr("trainer.target.loading._ENOUGH", 1)
    target, found = target_of(family), []
    store = stored(target, tmp_path)
    assert store.identity.layers == "0, 1, 2" and not (tmp_path / "weights.safetensors").exists()
    for states in (OnlineTarget(target), StoredTaps(target, store)):
        objective = made(target.model, taps=(0, 1), states=states)
        ahead = objective.ahead(BATCH, 0)
        assert (ahead.stored is None) == (not found)
        sums = objective.module(*objective.inputs(BATCH, 0, ahead))
        sums.total.backward()
        found.append([sums.losses, *(parameter.grad for parameter in objective.module.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_states_in_int8_have_a_scale_for_each_token_and_layer(tmp_path: Path) -> None:
    target = target_of()
    read = stored(target, tmp_path, "int8").hidden(BATCH)
    for row, example in enumerate(BLOCK_TEXTS):
        wanted = states_at(target, example.tokens.tolist(), (0, 1, 2)).unflatten(-1, (3, -1))
        for token, layer in ((token, layer) for token in range(len(example.tokens)) for layer in range(3)):
            exact = wanted[token, layer].tolist()
            scale = max(map(abs, exact)) / 127
            for number, value in zip(read[row, token, layer].tolist(), exact, strict=True):
                assert math.isclose(number / scale, round(number / scale), abs_tol=1e-3)
                assert abs(number - value) <= scale * 0.501


def test_three_taps_of_320_numbers_take_less_than_1000_bytes_a_token_in_int8(tmp_path: Path) -> None:
    said, target = io.StringIO(), target_of()
    identity = stored(target, tmp_path, "int8", said=said).identity
    assert "features: 26 tokens in" in said.getvalue() and ": 60 bytes a token" in said.getvalue()
    assert estimate_bytes(EXAMPLES, identity) == 26 * 3 * (16 + 4)
    wide = replace(identity, hidden_size=320)
    assert (wide.row_bytes, replace(wide, states="bf16").row_bytes) == (972, 1920)


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ({"taps": (1,)}, "layers 0, 1, 2 and not 1, 2"),
        ({"states": "bf16"}, "states target and not bf16"),
        ({"target": CausalLM(tiny_model("llama", seed=1, num_hidden_layers=4))}, "other target"),
    ],
)
def test_states_of_another_kind_are_refused(what: dict[str, Any], problem: str, tmp_path: Path) -> None:
    stored(target_of(), tmp_path)
    with pytest.raises(ValueError, match=rf"features made with {problem}: give features.folder another folder"):
        stored(**{"target": target_of(), "folder": tmp_path, **what})


def test_a_target_whose_last_layer_reads_more_than_the_states_before_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the last layer adds what the first one has computed."""
    target, seen = target_of(), list[torch.Tensor]()
    first, last = target.model.model.layers[0].self_attn, target.model.model.layers[3]
    first.register_forward_hook(lambda module, args, output: seen.append(output[0]))
    last.register_forward_hook(lambda module, args, output: output + 10 * seen.pop())
    store = stored(target, tmp_path)
    seen.extend([torch.zeros(())] * 9)
    with pytest.raises(ValueError, match=r"\(llama\) reads more than the stored states.*set features=null"):
        StoredTaps(target, store)


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_from_the_disk_is_the_run_from_the_target(workshop: Path, kind: str) -> None:
    losses = []
    for name, features in (("online", None), ("stored", {"folder": str(workshop / "features")})):
        trained(workshop, name, kind, features=features)
        lines = (workshop / name / "metrics.jsonl").read_text().splitlines()
        losses.append([row["loss"] for row in map(json.loads, lines) if "loss" in row])
    assert len(losses[0]) == 4 and losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_a_run_from_the_disk_that_goes_on_is_to_the_bit_one_that_never_stopped(tmp_path: Path) -> None:
    target, examples = target_of(), [EXAMPLES[index % 3] for index in range(16)]
    recorders = [Recorder() for _ in range(3)]
    states = StoredTaps(target, stored(target, tmp_path / "states", "int8", examples=examples))
    objectives = [objective_for(target.model, taps=(0, 1), states=states) for _ in range(3)]
    train_toy(tmp_path / "whole", objectives[0], recorders[0], examples)
    recorders[1].actions[2] = interrupt
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", objectives[1], recorders[1], examples)
    train_toy(tmp_path / "parts", objectives[2], recorders[2], examples)
    assert recorders[1].losses | recorders[2].losses == recorders[0].losses and len(recorders[2].losses) == 4
    found, wanted = (objectives[index].module.state_dict() for index in (2, 0))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize(
    ("draft", "features", "problem"),
    [
        ({}, {}, "features are for a DSpark or EAGLE-3 draft.*: set features=null"),
        ({"dspark": {}, "policy": {"target": 1}}, {}, "draft.policy generates new ones: set features=null"),
        ({"dspark": {}}, {"keep_target": False}, "features.keep_target=false works for heads only"),
    ],
)
def test_recipes_that_features_do_not_fit_are_refused(draft: Any, features: Any, problem: str) -> None:
    content = recipe_content(Path(), "draft") | {"draft": draft, "features": {"folder": "features", **features}}
    with pytest.raises(ValueError, match=problem):
        parse_recipe(content)


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
