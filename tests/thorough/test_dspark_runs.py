"""Whole runs of DSpark and EAGLE-3 drafts: from a recipe to a folder that drafts, with any interruptions."""

import copy
import io
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
from tiny_dspark import states_at
from tiny_models import naive_greedy, tiny_model
from tiny_training import Recorder, interrupt, recipe_content, tiny_tokenizer, train_toy, write_corpus, write_target

from decoding.drafters.registry import DrafterLoader, parse_drafter
from decoding.files.fingerprint import fingerprint
from decoding.generate import DecodingConfig, Engine
from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Example, collate
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
    content["draft"] = {kind: KINDS[kind], **(draft or {})}
    content["evaluation"] |= evaluation or {}
    AcceleratorState._reset_state(True)
    try:
        return run_recipe(parse_recipe(content), Console(file=said or io.StringIO(), width=1000))
    finally:
        AcceleratorState._reset_state(True)


@pytest.mark.parametrize("kind", KINDS)
def test_a_recipe_is_trained_to_a_folder_that_drafts_and_changes_no_text(workshop: Path, kind: str) -> None:
    """The evaluation uses the drafter of the draft."""
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
    """A tree is fitted only if there are evaluations, and a message says if the target's scaling is not taken over."""
    scaled = {"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    for prompts, rope in ((2, None), (0, scaled)):
        write_target(workshop / "target", **({"rope_parameters": rope} if rope else {}))
        said = io.StringIO()
        final = trained(workshop, f"run-{prompts}", said=said, evaluation={"prompts": prompts})
        tree = json.loads((final / "config.json").read_text())["headstart"]["tree"]
        assert bool(tree) == bool(prompts) == ("the finished draft uses a tree of 5 nodes" in said.getvalue())
        told = "the draft's rotary embeddings are not scaled, because llama.cpp cannot scale them by llama3"
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
BATCH = collate(BLOCK_TEXTS, (0, 2))  # with different padding than when it was written


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
    """The taps are 0 and 1; the state after layer 2 is stored to compute the target's distribution.

    The running target reads rows of different lengths one by one.
    """
    monkeypatch.setattr("trainer.target.loading._ENOUGH", 1)
    target, found = target_of(family), []
    store = stored(target, tmp_path)
    assert store.origin.layers == "0, 1, 2" and not (tmp_path / "weights.safetensors").exists()
    for states in (OnlineTarget(target), StoredTaps(target, store)):
        objective = made(target.model, taps=(0, 1), states=states)
        prefetched = objective.prefetch(BATCH, 0)
        assert (prefetched.stored is None) == (not found)
        sums = objective.module(*objective.inputs(BATCH, 0, prefetched))
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
    origin = stored(target, tmp_path, "int8", said=said).origin
    assert "features: 26 tokens in" in said.getvalue() and ": 60 bytes per token" in said.getvalue()
    assert estimate_bytes(EXAMPLES, origin) == 26 * 3 * (16 + 4)
    wide = replace(origin, hidden_size=320)
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
    with pytest.raises(ValueError, match=rf"features made with {problem}: set features.folder to another folder"):
        stored(**{"target": target_of(), "folder": tmp_path, **what})


def test_a_target_whose_last_layer_reads_more_than_the_states_before_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Here the last layer adds the output of the first layer."""
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
    assert states.read(collate(examples[:1], (0,)))["hidden"].dtype == torch.int8, "only a GPU needs the target's dtype"
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
        ({"dspark": {}, "policy": {"target": 1}}, {}, "draft.policy generates new answers: set features=null"),
        ({"dspark": {}}, {"keep_target": False}, "features.keep_target=false works only for heads"),
    ],
)
def test_recipes_that_features_do_not_fit_are_refused(draft: Any, features: Any, problem: str) -> None:
    content = recipe_content(Path(), "draft") | {"draft": draft, "features": {"folder": "features", **features}}
    with pytest.raises(ValueError, match=problem):
        parse_recipe(content)
