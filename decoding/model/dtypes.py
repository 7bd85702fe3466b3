"""Dtypes by the names that users give them, and the device that models are loaded on. Imports PyTorch alone."""

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype called ``bf16``, ``fp16`` or ``fp32``; ValueError for another name."""
    if name not in DTYPES:
        raise ValueError(f"dtype is {name!r}: give one of {', '.join(DTYPES)}")
    return DTYPES[name]


def default_device() -> torch.device:
    """Return the first GPU, or the CPU where there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
