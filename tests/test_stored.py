"""Weights in shards are the same model for any number of files, and tensors with NaN or infinity are named."""

import json
from pathlib import Path

import pytest
import torch
from test_export import CONFIG, bits, random_heads

from decoding.files.fingerprint import stored_fingerprint
from decoding.files.folder import is_heads_folder
from decoding.files.stored import non_finite, weight_files
from decoding.model.heads import MedusaHeads

SHARDS = ["model-00001-of-00003.safetensors", "model-00002-of-00003.safetensors", "model-00003-of-00003.safetensors"]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """Write heads with 4 blocks of 64 + 8 numbers and 2 lm_heads of 96, in 2 bytes each: 960 bytes, in shards of at
    most 400.
    """
    random_heads(dtype=torch.bfloat16).save_pretrained(tmp_path / "sharded", shard_bytes=400)
    return tmp_path / "sharded"


def test_shards_are_named_as_transformers_names_them_and_hold_every_tensor_once(sharded: Path) -> None:
    assert sorted(path.name for path in sharded.iterdir()) == ["config.json", *SHARDS, "model.safetensors.index.json"]
    index = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == dict(CONFIG.shapes()).keys() and set(index["weight_map"].values()) == {*SHARDS}
    assert index["metadata"]["total_size"] == 960
    assert all(path.stat().st_size < 400 + 1000 for path in weight_files(sharded, ""))


def test_sharded_heads_are_the_same_heads(sharded: Path, tmp_path: Path) -> None:
    whole = random_heads(dtype=torch.bfloat16)
    whole.save_pretrained(tmp_path / "whole")
    read = MedusaHeads.from_pretrained(sharded)
    assert is_heads_folder(sharded) and read.config == whole.config
    assert {n: bits(t) for n, t in read.state_dict().items()} == {n: bits(t) for n, t in whole.state_dict().items()}
    assert stored_fingerprint(sharded) == stored_fingerprint(tmp_path / "whole")
    read.save_pretrained(sharded)  # as one file, which leaves no shard
    assert sorted(path.name for path in sharded.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_tensors_that_are_not_finite_are_named_in_any_dtype_and_the_largest_numbers_are_not(dtype: torch.dtype) -> None:
    largest = torch.tensor([torch.finfo(dtype).max, torch.finfo(dtype).min], dtype=torch.float64).to(dtype)
    whole = {"largest": largest, "int": torch.tensor([2**62]), "none": torch.empty(0)}
    assert non_finite({**whole, "broken": torch.tensor([1.0, float("nan")]).to(dtype)}) == ["broken"]
    assert non_finite({"a": torch.tensor([0.0, float("-inf")])}) == ["a"]
