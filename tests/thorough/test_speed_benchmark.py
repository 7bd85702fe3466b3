"""The benchmark against transformers, from end to end at sizes that mean nothing."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

CHAIN = "draft model, 4 tokens"


@pytest.fixture(scope="module")
def speed() -> Iterator[ModuleType]:
    """The script as a module, with its own folder in the path as where it is run."""
    path = list(sys.path)
    sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
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
