"""The benchmark on long texts, from end to end at sizes that mean nothing, and the page's table of it."""

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tiny_models import full_forward, tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding.model.windowed import with_window

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module", autouse=True)
def scripts_in_the_path() -> Iterator[None]:
    path = list(sys.path)
    sys.path += [str(ROOT / "benchmarks"), str(ROOT / "scripts")]
    yield
    sys.path[:] = path


def long_texts() -> ModuleType:
    return importlib.import_module("long_texts")


def test_every_method_takes_its_turn_at_every_context_and_the_table_has_all_rows(tmp_path: Path) -> None:
    models = {"target": tiny_model("llama", vocab=128), "draft": tiny_model("llama", vocab=128, num_hidden_layers=1)}
    models["windowed"] = with_window(tiny_model("llama", vocab=128, num_hidden_layers=1, seed=1), 6)
    words = []
    for name, model in models.items():
        model.save_pretrained(tmp_path / name)
        byte_tokenizer().save_pretrained(tmp_path / name)
        words += [f"--{name}", str(tmp_path / name)]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"text": "abcde " * 40}) + "\n" for _ in range(3)))
    words += ["--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "long.json")]
    words += ["--context", "20", "150", "--window", "8", "--limit", "2", "--max-new-tokens", "6", "--rounds", "2"]
    long_texts().main([*words, "--dtype", "fp32"])
    report = json.loads((tmp_path / "long.json").read_text())
    methods = ["plain", "draft, whole text", "draft, cut to 8 when decoding", "draft, trained with window 6"]
    assert [(row["context"], row["method"]) for row in report["rows"]] == [(c, m) for c in (20, 150) for m in methods]
    assert {row["tokens_per_pass"]["observations"] for row in report["rows"] if row["context"] == 20} == {2}, "texts"
    assert [row["stretched"] for row in report["rows"][3:5]] == [1.0, 156 / 96]
    assert str(tmp_path) not in json.dumps(report), "a report names no folder of a machine"
    table = importlib.import_module("long_texts_table").long_texts_table(report).splitlines()
    assert table[0] == f"| context | {' | '.join(methods)} |"
    assert [line.split(" | ")[0] for line in table[2:4]] == ["| 20", "| 150, stretched"]
    assert table[2].count("ms") == 4 and table[2].count("×") == 3


def test_a_model_is_stretched_from_its_first_context_on() -> None:
    model, text = tiny_model("llama", max_position_embeddings=96), list(range(12))
    stretched = long_texts().stretched
    once, twice = stretched(model, 384), stretched(stretched(model, 192), 384)
    assert twice.config.rope_parameters == once.config.rope_parameters
    assert (once.config.rope_parameters["factor"], twice.config.max_position_embeddings) == (4.0, 384)
    assert torch.equal(full_forward(once, text), full_forward(twice, text))
    assert stretched(model, 96) is model


def test_embeddings_that_are_scaled_otherwise_are_not_stretched() -> None:
    rope: dict[str, Any] = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ValueError, match="96 positions with linear embeddings is not stretched to 97: give shorter"):
        long_texts().stretched(tiny_model("llama", rope_parameters=rope), 97)
