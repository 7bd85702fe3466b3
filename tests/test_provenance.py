"""What is written beside the weights: enough to know where they come from, and nothing secret."""

import hashlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from rich.console import Console
from tiny_models import tiny_model
from tiny_training import recipe_content, write_corpus, write_target
from torch import nn

from decoding.heads import MedusaHeads
from decoding.loading import load_heads, load_model
from decoding.target import CausalLM
from trainer.provenance import FILE_NAME, fingerprint
from trainer.read_recipe import parse_recipe
from trainer.train import run_recipe

MARKER = "s3cret-m4rker-that-must-not-leak"


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a target and a corpus; accelerate is told to use the CPU and forgets its state."""
    write_target(tmp_path / "target", seed=3)
    write_corpus(tmp_path)
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    AcceleratorState._reset_state(True)
    yield tmp_path
    AcceleratorState._reset_state(True)


def run(folder: Path, kind: str, **changes: Any) -> tuple[Path, str]:
    """Train a tiny recipe in this process; returns its final folder and what it said."""
    said = io.StringIO()
    recipe = parse_recipe({**recipe_content(folder, kind), **changes})
    return run_recipe(recipe, Console(file=said, width=200)), said.getvalue()


def test_a_fingerprint_changes_with_any_weight_of_a_small_model() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = fingerprint(model)
    assert len(before) == 16 and fingerprint(model) == before
    for parameter in model.parameters():
        for index in range(parameter.numel()):
            with torch.no_grad():
                parameter.view(-1)[index] += 1e-3
                changed = fingerprint(model)
                parameter.view(-1)[index] -= 1e-3
            assert changed != before


def test_a_fingerprint_knows_names_shapes_and_dtype() -> None:
    model = nn.Linear(4, 2, bias=False)
    other_shape = nn.Linear(2, 4, bias=False)
    with torch.no_grad():
        other_shape.weight.copy_(model.weight.view(4, 2))
    prints = {fingerprint(model), fingerprint(other_shape), fingerprint(nn.Sequential(model))}
    halves = nn.Linear(2, 2, bias=False)
    with torch.no_grad():
        halves.weight.fill_(0.5)
    prints |= {fingerprint(halves), fingerprint(halves.bfloat16())}
    assert len(prints) == 5


def test_a_fingerprint_depends_neither_on_the_order_of_parameters_nor_on_their_layout() -> None:
    one, other = nn.Module(), nn.Module()
    a, b = nn.Linear(2, 3), nn.Linear(3, 2)
    one.add_module("a", a)
    one.add_module("b", b)
    other.add_module("b", b)
    other.add_module("a", a)
    assert list(one.state_dict()) != list(other.state_dict()) and fingerprint(one) == fingerprint(other)
    before = fingerprint(a)
    a.weight.data = a.weight.data.T.contiguous().T  # the same values, in another order in memory
    assert not a.weight.is_contiguous() and fingerprint(a) == before


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_fingerprint_does_not_depend_on_the_device() -> None:
    model = tiny_model("llama")
    assert fingerprint(model) == fingerprint(model.to("cuda"))


def test_a_fingerprint_of_large_matrices_reads_a_sample_of_each() -> None:
    """9,000 values: every third is read, so the first counts and the second does not."""
    model = nn.Linear(90, 100, bias=False)
    before = fingerprint(model)
    with torch.no_grad():
        model.weight.view(-1)[1] += 1
        assert fingerprint(model) == before
        model.weight.view(-1)[0] += 1
    assert fingerprint(model) != before


def test_a_finished_run_says_what_it_was_made_from(run_folder: Path) -> None:
    final, _ = run(run_folder, "medusa")
    written = json.loads((final / FILE_NAME).read_text())
    assert {"commit", "versions", "hardware", "recipe", "data", "target", "steps", "tokens"} <= written.keys()
    assert written["recipe"]["training"]["batch_size"] == 8 and written["recipe"]["heads"]["decay"] == 0.8
    assert written["versions"].keys() >= {"python", "torch", "transformers", "accelerate"}
    train_file = run_folder / "train.jsonl"
    assert written["data"][str(train_file)] == {
        "sha256": hashlib.sha256(train_file.read_bytes()).hexdigest(),
        "rows": 24,
    }
    target = load_model(str(run_folder / "target"), torch.float32)
    assert written["target"] == {"name": str(run_folder / "target"), "fingerprint": fingerprint(target)}
    assert written["num_processes"] == 1
    # 4 steps of 8 texts of 20 tokens, of which head 0 predicts all but the first two.
    assert (written["steps"], written["tokens"]) == (4, 4 * 8 * 18)


@pytest.mark.parametrize("kind", ["medusa", "draft"])
def test_no_secret_of_the_environment_is_written_anywhere(
    run_folder: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    for name in ("WANDB_API_KEY", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OPENAI_API_KEY"):
        monkeypatch.setenv(name, MARKER)
    _, said = run(run_folder, kind)
    files = [path for path in run_folder.rglob("*") if path.is_file()]
    assert {path.name for path in files} >= {FILE_NAME, "metrics.jsonl", "state.json", "weights.safetensors"}
    assert not [path for path in files if MARKER.encode() in path.read_bytes()]
    assert MARKER not in said


def test_a_run_announces_itself_logs_every_step_and_ends_with_a_tree_and_its_acceptance(run_folder: Path) -> None:
    final, said = run(run_folder, "medusa")
    assert (
        "tiny medusa: medusa for " in said
        and "24 rows (24 text), 24 sequences, 480 of 480 tokens trained; 4 steps of 8" in said
    )
    assert f"finished: {final}" in said
    lines = [json.loads(line) for line in (run_folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4]
    assert lines[-1]["heldout/tokens_per_pass"] >= 1 and "loss" in lines[0]
    heads = load_heads(final, CausalLM(load_model(str(run_folder / "target"), torch.float32)))
    assert isinstance(heads, MedusaHeads) and 1 <= len(heads.config.tree) <= 16


def test_the_same_recipe_twice_makes_the_same_weights(run_folder: Path) -> None:
    """A pretraining run starts from chance, which is the seed's, not the clock's."""
    content = recipe_content(run_folder, "pretrain")
    del content["target"], content["dtype"]
    model = {"tokenizer": str(run_folder / "target"), "hidden_size": 16, "intermediate_size": 16}
    model |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    states = []
    for name in ("one", "two"):
        torch.rand(len(states) + 1)  # another state of chance
        recipe = parse_recipe({**content, "model": model, "output": str(run_folder / name)})
        final = run_recipe(recipe, Console(file=io.StringIO()))
        states.append((final / "model.safetensors").read_bytes())
        AcceleratorState._reset_state(True)
    assert states[0] == states[1]


def test_a_sequence_longer_than_the_targets_context_is_refused_before_training(run_folder: Path) -> None:
    content = recipe_content(run_folder, "medusa")
    content["data"]["max_length"] = 97
    with pytest.raises(ValueError, match=r"data\.max_length is 97 but the target's context holds 96 tokens"):
        run_recipe(parse_recipe(content), Console(file=io.StringIO()))
    assert not (run_folder / "run").exists()
