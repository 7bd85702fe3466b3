"""The benchmark against transformers, from end to end at sizes that mean nothing, and its goals by hand."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

CHAIN = "draft model, 4 tokens"


@pytest.fixture(scope="module")
def speed() -> Iterator[ModuleType]:
    """The script as a module, with its own folder in the path as where it is run."""
    path = list(sys.path)
    sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
    yield importlib.import_module("speed")
    sys.path[:] = path


def test_a_short_run_measures_every_drafter_and_batches(speed: ModuleType, tmp_path: Path) -> None:
    target, draft, prompts, output = (tmp_path / name for name in ("target", "draft", "prompts.jsonl", "report.json"))
    for folder, layers in ((target, 2), (draft, 1)):
        tiny_model("llama", vocab=128, num_hidden_layers=layers).save_pretrained(folder)
        byte_tokenizer().save_pretrained(folder)
    prompts.write_text('{"prompt": "abcabcabc"}\n{"prompt": "one two one two"}\n')
    words = ["--target", target, "--draft", draft, "--prompts", prompts, "--output", output, "--widen", "0"]
    speed.main([*map(str, words), *["--dtype", "fp32", "--rounds", "1", "--max-new-tokens", "8", "--batch-size", "2"]])
    part = json.loads(output.read_text())["targets"]["target"]
    assert {"plain", CHAIN, "draft tree", "prompt lookup"} < {row["method"] for row in part["drafters"]["rows"]}
    assert {row["batch_size"] for row in part["batches"]["rows"]} == {2}


def test_a_goal_is_met_by_the_median_of_paired_runs(speed: ModuleType) -> None:
    def row(method: str, gain: float, **more: Any) -> dict[str, Any]:
        return {"setting": "greedy", "method": method, "speedup": {"median": gain}, **more}

    compared = {"plain": 1.0, "transformers generate": 0.8, "transformers assisted, 4 tokens": 1.25, CHAIN: 1.5}
    batch = row(CHAIN, 1.3, drafter=CHAIN, batch_size=8, speedup_over_transformers={"median": 1.45})
    part = {"drafters": {"rows": [row(*each) for each in compared.items()]}, "batches": {"rows": [batch]}}
    found = {goal["goal"]: goal for goal in speed.goals({"targets": {"small": part}})}
    assert found["small: plain over transformers generate"]["measured"] == 1 / 0.8
    assert found["small: draft over assisted generation, same draft and depth"]["met"]  # 1.5 / 1.25 = 1.2
    assert not found["small: the fastest way to draft over plain, greedy"]["met"]
    assert found["small: the fastest way to draft over plain, T=1"]["measured"] is None
    assert found["small: batch 8, draft model, 4 tokens over transformers"]["measured"] == 1.45
