"""Features as users create them: written by two processes, and used for training."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tiny_models import counting_model
from tiny_training import counting_text, recipe_content, tiny_tokenizer, write_rows
from whole_runs import DIRECT, TWO_PROCESSES, run

ROWS, LENGTH = 500, 24
SHARDS = 12  # 42 rows of 24 tokens in a shard of 1,024


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a target that counts, its tokenizer, and many texts like those it writes."""
    folder = tmp_path_factory.mktemp("workshop")
    counting_model().save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    write_rows(folder / "train.jsonl", [{"text": counting_text(row, LENGTH)} for row in range(ROWS)])
    write_rows(folder / "heldout.jsonl", [{"text": "a b c d e f g h"}, {"text": "b c d e f g h i"}])
    return folder


def write_recipe(workshop: Path, path: Path, features: dict[str, Any] | None, **training: Any) -> str:
    content = recipe_content(workshop, "medusa", **{"batch_size": 16, **training})
    content |= {"output": str(path.with_suffix("")), "heads": {"num_heads": 2, "markov_rank": 3}}
    if features is not None:
        content["features"] = {"shard_tokens": 1024, **features}
    path.write_text(yaml.safe_dump(content))
    return str(path)


def test_two_processes_write_features_and_train_from_them_as_one_does_from_the_target(
    workshop: Path, tmp_path: Path
) -> None:
    """The target is released meanwhile, and loaded again to choose the tree and to evaluate."""
    folder = tmp_path / "features"
    stored = {"folder": str(folder), "keep_target": False}
    two = write_recipe(workshop, tmp_path / "two.yaml", stored)
    run([*TWO_PROCESSES, two], tmp_path)
    assert len(list(folder.glob("shard-*.sha256"))) == SHARDS
    run([*DIRECT, write_recipe(workshop, tmp_path / "one.yaml", None)], tmp_path)
    offline, online = (load_file(tmp_path / name / "final" / "model.safetensors") for name in ("two", "one"))
    assert offline.keys() == online.keys()
    for name, tensor in online.items():
        torch.testing.assert_close(offline[name], tensor, rtol=1e-4, atol=1e-4)
    assert any(tensor.abs().sum() > 0 for name, tensor in online.items() if "blocks" in name)  # something was learnt
