"""Whole runs of parallel drafts: from a recipe to a folder that drafts, however a step is divided or interrupted."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from parallel_training import objective_for
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

PARALLEL = {"tokens": 3, "markov_rank": 4, "anchors": 4}
TEXTS = [
    Example(tuple(4 + (start + i) % 12 for i in range(6 + start % 5)), (True,) * (6 + start % 5), 0)
    for start in range(16)
]


@pytest.fixture
def workshop(tmp_path: Path) -> Path:
    write_target(tmp_path / "target")
    write_corpus(tmp_path)
    return tmp_path


def trained(workshop: Path, output: str = "run", draft: dict[str, Any] | None = None, **training: Any) -> Path:
    content = recipe_content(workshop, "draft", **training)
    content["output"] = str(workshop / output)
    content["draft"] |= {"parallel": PARALLEL, "num_draft_tokens": 6, **(draft or {})}
    AcceleratorState._reset_state(True)
    try:
        return run_recipe(parse_recipe(content), Console(file=io.StringIO()))
    finally:
        AcceleratorState._reset_state(True)


def figures_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_recipe_is_trained_to_a_folder_that_drafts_and_changes_no_text(workshop: Path) -> None:
    """Evaluated on the way by its own drafter: three positions, though the recipe asks for drafts of six."""
    final = trained(workshop)
    lines = figures_of(workshop / "run")
    assert {"loss/logits", "loss/masked", "acceptance/logits", "acceptance/masked"} <= lines[0].keys()
    (evaluated,) = [line for line in lines if "heldout/tokens_per_pass" in line]
    assert "heldout/acceptance_4" not in evaluated
    target, tokenizer = CausalLM(tiny_model("llama")), tiny_tokenizer()
    drafter = DrafterLoader(target, tokenizer).load(parse_drafter(str(final)))
    found = Engine(target, drafter).decode([4, 5, 6], DecodingConfig(max_new_tokens=12))
    assert found.tokens == naive_greedy(tiny_model("llama"), (4, 5, 6), 12)
    assert any(step.offered for step in found.steps)


def test_one_step_of_eight_rows_is_eight_steps_of_one(tmp_path: Path) -> None:
    losses = []
    for micro_batch_size in (8, 1):
        recorder = Recorder()
        train_toy(
            tmp_path / str(micro_batch_size),
            objective_for(tiny_model("llama")),
            recorder,
            TEXTS,
            steps=3,
            checkpoint_every=100,
            micro_batch_size=micro_batch_size,
        )
        losses.append([recorder.losses[step] for step in (1, 2, 3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_run_that_goes_on_trains_at_the_same_anchors_as_one_that_never_stopped(tmp_path: Path) -> None:
    whole, first, second = Recorder(), Recorder(), Recorder()
    train_toy(tmp_path / "whole", objective_for(tiny_model("llama")), whole, TEXTS)
    first.actions[2] = interrupt
    with pytest.raises(Interrupted):
        train_toy(tmp_path / "parts", objective_for(tiny_model("llama")), first, TEXTS)
    train_toy(tmp_path / "parts", objective_for(tiny_model("llama")), second, TEXTS)
    assert first.losses | second.losses == whole.losses and second.losses.keys() == {3, 4, 5, 6}


def test_a_finished_draft_goes_on_in_a_second_stage(workshop: Path) -> None:
    first = trained(workshop)
    second = trained(
        workshop, "second", draft={"init": {"from_model": str(first)}, "policy": {"loop": 1, "max_new_tokens": 6}}
    )
    stored = load_file(first / "parallel.safetensors")
    found = load_file(second / "parallel.safetensors")
    assert found.keys() == stored.keys() and not any(torch.equal(found[name], stored[name]) for name in found)
    configs = [json.loads((folder / "parallel.json").read_text()) for folder in (first, second)]
    assert all(config.pop("tree") for config in configs) and configs[0] == configs[1]  # the tree is fitted anew


def test_a_cache_on_disk_teaches_a_draft_that_does_not_read_the_target(workshop: Path) -> None:
    teacher = {"folder": str(workshop / "teacher"), "top_k": 6, "tail": 4}
    final = trained(workshop, draft={"teacher": teacher, "parallel": {**PARALLEL, "reads_target": False}})
    assert "reader.weight" not in load_file(final / "parallel.safetensors")
    losses = [line["loss/masked"] for line in figures_of(workshop / "run") if "loss/masked" in line]
    assert len(losses) == 4 and all(loss > 0 for loss in losses)
