"""Dtypes by the names that users give them, int8 weights, and the device that models are loaded on."""

from typing import TypeVar

import torch
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Model = TypeVar("Model", bound=nn.Module)


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype called ``bf16``, ``fp16``, ``fp32`` or ``fast``; ValueError for another name."""
    if name != "fast" and name not in DTYPES:
        raise ValueError(f"dtype is {name!r}: give one of fast, {', '.join(DTYPES)}")
    return DTYPES[fast_dtype() if name == "fast" else name]


def fast_dtype() -> str:
    """Return ``bf16`` where the default device multiplies it, else ``fp32``.

    A processor without AVX512-BF16, AMX or Arm's BF16 was measured at 50 times the time of fp32.
    """
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    has = torch.cpu.get_capabilities()
    return "bf16" if any(has.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else "fp32"


def default_device() -> torch.device:
    """Return the first GPU, or the CPU if there is none."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def quantised(model: Model) -> Model:
    """Round the weights of a transformers model's linear layers to int8, row by row; in place.

    The weights are widened to the model's dtype at every call: the model is smaller, but slower. ValueError without
    torchao.
    """
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ValueError("int8 weights need torchao: pip install 'headstart[quantise]'") from error
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: isinstance(module, nn.Linear))
    return model
