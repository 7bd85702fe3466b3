"""An export of large heads: they are in memory once, however often they are read, written and compared."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.export import export


def peak_while(work: Callable[[], object]) -> int:
    """Bytes by which this process grew at most while it worked."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak so far
    before = memory("VmRSS")
    work()
    return memory("VmHWM") - before


def memory(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("format", ["headstart", "vllm"])
def test_an_export_holds_its_heads_once(tmp_path: Path, format: str) -> None:
    """Three lm_heads of 40 MB: read, written in shards, read back and compared in the memory that the heads take."""
    config = MedusaConfig(hidden_size=512, vocab_size=20_000, num_heads=3, tree=((0,),))
    held = sum(4 * torch.Size(shape).numel() for _, shape in config.shapes())
    MedusaHeads(config).save_pretrained(tmp_path / "run")
    grown = peak_while(lambda: export(tmp_path / "run", tmp_path / "out", format, shard_bytes=60 << 20))
    assert len(list((tmp_path / "out").glob("model-*.safetensors"))) == 3
    assert 0.8 * held < grown < 1.5 * held, "the heads, and at most one tensor more"
