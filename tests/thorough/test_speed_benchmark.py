"""The benchmarks of speed and of policies, from end to end at sizes that mean nothing."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

CHAIN = "draft model, 4 tokens"


@pytest.fixture(scope="module")
def scripts() -> Iterator[Callable[[str], ModuleType]]:
    """The scripts as modules, with their own folder in the path as where they are run."""
    path = list(sys.path)
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
    yield importlib.import_module
    sys.path[:] = path


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options: a target, its draft, prompts, fp32 and few tokens."""
    folder = tmp_path_factory.mktemp("models")
    target, draft, prompts = (folder / name for name in ("target", "draft", "prompts.jsonl"))
    for model, layers in ((target, 2), (draft, 1)):
        tiny_model("llama", vocab=128, num_hidden_layers=layers).save_pretrained(model)
        byte_tokenizer().save_pretrained(model)
    prompts.write_text('{"prompt": "abcabcabc"}\n{"prompt": "one two one two"}\n')
    found = ["--target", target, "--draft", draft, "--prompts", prompts, "--widen", "0", "--dtype", "fp32"]
    return [*map(str, found), "--max-new-tokens", "8"]


def test_a_short_run_measures_every_drafter_and_batches(
    scripts: Callable[[str], ModuleType], words: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "report.json"
    scripts("speed").main([*words, "--output", str(output), "--rounds", "1", "--batch-size", "2"])
    part = json.loads(output.read_text())["targets"]["target"]
    assert {"plain", CHAIN, "draft tree", "prompt lookup"} < {row["method"] for row in part["drafters"]["rows"]}
    assert {row["batch_size"] for row in part["batches"]["rows"]} == {2}


def test_a_short_run_compares_the_policies_in_every_cell(
    scripts: Callable[[str], ModuleType], words: list[str], tmp_path: Path
) -> None:
    output = tmp_path / "report.json"
    scripts("policies").main([*words, "--output", str(output), "--turns", "1", "--batch-sizes", "1", "2"])
    report = json.loads(output.read_text())
    assert len(report["rows"]) == 2 * 2 * 4  # temperatures, batch sizes, drafters
    assert all(row["default_over_better"] > 0 and row["choices"] for row in report["rows"])
    assert report["worst"]["default_over_plain"] == min(row["default_over_plain"] for row in report["rows"])
