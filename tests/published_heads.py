"""Medusa heads as others publish them, with names and shapes written out here, and their logits by a plain formula."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tiny_models import tiny_model
from torch import Tensor
from torch.nn import functional as F

HIDDEN, VOCAB, HEADS, LAYERS = 16, 16, 3, 2
"""Sizes of the tiny Llama, and of heads for it."""


def random_tensors(dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Heads under the names of FasterDecoding's files, every tensor random."""
    generator = torch.Generator().manual_seed(0)
    shapes: dict[str, tuple[int, ...]] = {}
    for head in range(HEADS):
        for layer in range(LAYERS):
            shapes |= {f"{head}.{layer}.linear.weight": (HIDDEN, HIDDEN), f"{head}.{layer}.linear.bias": (HIDDEN,)}
        shapes[f"{head}.{LAYERS}.weight"] = (VOCAB, HIDDEN)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def expected_logits(tensors: Mapping[str, Tensor], hidden: Tensor, lm_head: Tensor | None = None) -> Tensor:
    """The logits of all heads, (heads, batch, vocab), by the formula of FasterDecoding's code."""
    logits = []
    for head in range(HEADS):
        x = hidden
        for layer in range(LAYERS):
            bias = tensors.get(f"{head}.{layer}.linear.bias")
            x = x + F.silu(F.linear(x, tensors[f"{head}.{layer}.linear.weight"], bias))
        logits.append(F.linear(x, tensors[f"{head}.{LAYERS}.weight"] if lm_head is None else lm_head))
    return torch.stack(logits)


def publish(folder: Path, tensors: Mapping[str, Any], name: str = "medusa_lm_head.safetensors", **config: Any) -> Path:
    """Write published heads: the tensors, pickled if the name ends in .pt, and a config beside them."""
    folder.mkdir(exist_ok=True)
    if name.endswith(".pt"):
        torch.save(dict(tensors), folder / name)
    else:
        save_file(dict(tensors), folder / name)
    claims = {"base_model_name_or_path": "ORG/TARGET", "medusa_num_heads": HEADS, "medusa_num_layers": LAYERS}
    (folder / "config.json").write_text(json.dumps({**claims, **config}))
    return folder


def vllm_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same heads under vLLM's names."""
    renamed = {}
    for name, tensor in tensors.items():
        head, layer, *rest = name.split(".")
        renamed[f"lm_heads.{head}.weight" if rest == ["weight"] else f"blocks.{head}.layers.{layer}.{rest[-1]}"] = (
            tensor
        )
    return renamed


def saved_target(folder: Path, **changes: Any) -> Path:
    """The tiny Llama on disk."""
    tiny_model("llama", **changes).save_pretrained(folder)
    return folder
