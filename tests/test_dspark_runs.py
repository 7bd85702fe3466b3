"""Whole runs of DSpark drafts: from a recipe to a folder that drafts, however a step is divided or interrupted."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from dspark_training import objective_for
from rich.console import Console
from safetensors.torch import load_file
from tiny_models import naive_greedy, tiny_model
from tiny_training import Recorder, interrupt, recipe_content, tiny_tokenizer, train_toy, write_corpus, write_target

from decoding.drafters.registry import DrafterLoader, parse_drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Example
from trainer.recipe.reading import parse_recipe
from trainer.run.loop import Interrupted
from trainer.run.train import run_recipe

DSPARK = {"block_size": 3, "markov_rank": 4, "anchors": 4, "layers": 1, "mask_token": "<user>", "tree_nodes": 5}
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
    draft: dict[str, Any] | None = None,
    features: dict[str, Any] | None = None,
    said: io.StringIO | None = None,
    evaluation: dict[str, Any] | None = None,
    **training: Any,
) -> Path:
    content = recipe_content(workshop, "draft", **training)
    content["output"], content["features"] = str(workshop / output), features
    content["draft"] |= {"dspark": DSPARK, **(draft or {})}
    content["evaluation"] |= evaluation or {}
    AcceleratorState._reset_state(True)
    try:
        return run_recipe(parse_recipe(content), Console(file=said or io.StringIO(), width=1000))
    finally:
        AcceleratorState._reset_state(True)


def test_a_recipe_is_trained_to_a_folder_that_drafts_and_changes_no_text(workshop: Path) -> None:
    """Evaluated on the way by its own drafter: three tokens, though the recipe asks for drafts of six."""
    final = trained(workshop)
    lines = [json.loads(line) for line in (workshop / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {"loss/token_1", "loss/token_3", "loss/confidence", "acceptance/token_3"} <= lines[0].keys()
    (evaluated,) = [line for line in lines if "heldout/tokens_per_pass" in line]
    assert "heldout/acceptance_4" not in evaluated
    target = CausalLM(tiny_model("llama"))
    drafter = DrafterLoader(target, tiny_tokenizer()).load(parse_drafter(str(final)))
    found = Engine(target, drafter).decode([4, 5, 6], DecodingConfig(max_new_tokens=12))
    assert found.tokens == naive_greedy(tiny_model("llama"), (4, 5, 6), 12)
    assert any(step.offered for step in found.steps)


def test_what_the_first_lines_promise_is_what_the_run_does(workshop: Path) -> None:
    """A tree is fitted only if there are evaluations, and a target's scaling is not taken over in silence."""
    scaled = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    for prompts, rope in ((2, None), (0, scaled)):
        write_target(workshop / "target", **({"rope_parameters": rope} if rope else {}))
        said = io.StringIO()
        final = trained(workshop, f"run-{prompts}", said=said, evaluation={"prompts": prompts})
        tree = json.loads((final / "config.json").read_text())["headstart"]["tree"]
        assert bool(tree) == bool(prompts) == ("the finished draft uses a tree of 5 here" in said.getvalue())
        assert ("the target scales its rotary embeddings (linear)" in said.getvalue()) == (rope is not None)


def test_one_step_of_eight_rows_is_eight_steps_of_one(tmp_path: Path) -> None:
    losses = []
    for size in (8, 1):
        recorder, objective = Recorder(), objective_for(tiny_model("llama"))
        settings = {"steps": 3, "checkpoint_every": 100, "micro_batch_size": size}
        train_toy(tmp_path / str(size), objective, recorder, TEXTS, **settings)
        losses.append([recorder.losses[step] for step in (1, 2, 3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_run_that_goes_on_is_to_the_bit_one_that_never_stopped(tmp_path: Path) -> None:
    whole, first, second = Recorder(), Recorder(), Recorder()
    objectives = [objective_for(tiny_model("llama")) for _ in range(3)]
    train_toy(tmp_path / "whole", objectives[0], whole, TEXTS)
    first.actions[2] = interrupt
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", objectives[1], first, TEXTS)
    train_toy(tmp_path / "parts", objectives[2], second, TEXTS)
    assert first.losses | second.losses == whole.losses and second.losses.keys() == {3, 4, 5, 6}
    found, wanted = (objectives[index].module.state_dict() for index in (2, 0))
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_finished_draft_goes_on_in_a_second_stage_on_what_the_loop_writes(workshop: Path) -> None:
    first = trained(workshop)
    policy = {"loop": 1, "loop_trains": "all", "max_new_tokens": 6}
    second = trained(workshop, "second", draft={"init": {"from_model": str(first)}, "policy": policy})
    stored, found = (load_file(folder / "model.safetensors") for folder in (first, second))
    assert found.keys() == stored.keys() and not any(torch.equal(found[name], stored[name]) for name in found)
    configs = [json.loads((folder / "config.json").read_text()) for folder in (first, second)]
    assert all(config.pop("headstart")["tree"] for config in configs) and configs[0] == configs[1]  # fitted anew
