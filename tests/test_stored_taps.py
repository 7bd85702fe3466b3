"""States of a target on disk for a DSpark draft: it learns from them what it learns from the target itself."""

import copy
import io
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from dspark_training import TEXTS, TURNS, objective_for
from rich.console import Console
from test_dspark_runs import trained, workshop
from test_taps import model_of
from tiny_dspark import states_at
from tiny_models import tiny_model
from tiny_training import Recorder, interrupt, recipe_content, tiny_tokenizer, train_toy

from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import fingerprint
from trainer.data.batch import collate
from trainer.drafts.dspark import DSparkObjective
from trainer.processes import Process
from trainer.recipe.heads import FeaturesSection, StatesDtype
from trainer.recipe.reading import parse_recipe
from trainer.run.loop import Interrupted
from trainer.target.features import FeatureStore, StoredTaps, ensure_features
from trainer.target.hidden import OnlineTarget
from trainer.target.loading import Target
from trainer.target.store import estimate_bytes

__all__ = ["workshop"]  # a fixture
EXAMPLES = [TEXTS[0], TURNS, TEXTS[1]]
BATCH = collate(TEXTS, (0, 2))  # padded otherwise than when it was written


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
def test_a_draft_learns_from_the_disk_what_it_learns_from_its_target(family: str, tmp_path: Path) -> None:
    """Its taps are 0 and 1; the state behind layer 2 is stored for the target's own distribution."""
    target, found = target_of(family), []
    store = stored(target, tmp_path)
    assert store.identity.layers == "0, 1, 2" and not (tmp_path / "weights.safetensors").exists()
    for states in (OnlineTarget(target), StoredTaps(target, store)):
        objective: DSparkObjective = objective_for(target.model, taps=(0, 1), states=states)
        ahead = objective.ahead(BATCH, 0)
        assert (ahead.stored is None) == (not found)
        sums = objective.module(*objective.inputs(BATCH, 0, ahead))
        sums.losses.sum().backward()
        found.append([sums.losses, *(parameter.grad for parameter in objective.module.parameters())])
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() <= 1e-4 * theirs.abs().max()


def test_states_in_int8_have_a_scale_for_each_token_and_layer(tmp_path: Path) -> None:
    target = target_of()
    read = stored(target, tmp_path, "int8").hidden(BATCH)
    for row, example in enumerate(TEXTS):
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


def test_a_run_from_the_disk_is_the_run_from_the_target(workshop: Path) -> None:
    losses = []
    for name, features in (("online", None), ("stored", {"folder": str(workshop / "features")})):
        trained(workshop, name, features=features)
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
        ({}, {}, "features are for a DSpark draft.*: set features=null"),
        ({"dspark": {}, "policy": {"target": 1}}, {}, "draft.policy generates new ones: set features=null"),
        ({"dspark": {}}, {"keep_target": False}, "features.keep_target=false works for heads only"),
    ],
)
def test_recipes_that_features_do_not_fit_are_refused(draft: Any, features: Any, problem: str) -> None:
    content = recipe_content(Path(), "draft") | {"draft": draft, "features": {"folder": "features", **features}}
    with pytest.raises(ValueError, match=problem):
        parse_recipe(content)
