"""Finds dtypes by the names that users write, rounds weights to int8, and chooses the default device."""

from typing import TypeVar

import torch
from torch import nn

from decoding.errors import UserError

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
Model = TypeVar("Model", bound=nn.Module)


def parse_dtype(name: str | torch.dtype) -> torch.dtype:
    """Return the floating dtype with this name in `DTYPES` or torch; ``fast`` means `fast_dtype`.

    Raises UserError for other names.
    """
    if isinstance(name, torch.dtype) and name.is_floating_point:
        return name
    names = DTYPES | {str(dtype).removeprefix("torch."): dtype for dtype in DTYPES.values()}
    known = names.get(fast_dtype() if name == "fast" else str(name))
    if known is None:
        raise UserError(f"dtype is {str(name)!r}: use one of fast, {', '.join(DTYPES)}")
    return known


def parse_device(name: str | torch.device) -> torch.device:
    """Return the device; raise UserError if it cannot be used here."""
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).partition("\n")[0]
        raise UserError(
            f"device is {str(name)!r}, which cannot be used: {reason}", "use cpu, cuda or cuda:N"
        ) from error
    return device


def fast_dtype() -> str:
    """Return ``bf16`` if the default device supports it natively, and otherwise ``fp32``.

    A processor without AVX512-BF16, AMX or Arm's BF16 was measured to be 50 times slower in bf16 than in fp32.
    """
    if torch.cuda.is_available():
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp32"
    has = torch.cpu.get_capabilities()
    return "bf16" if any(has.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else "fp32"


def default_device() -> torch.device:
    """Return the current GPU of this process, or the CPU if there is none.

    The returned device includes the GPU's number, because transformers reads weights in other threads, and the current
    GPU of those threads is the first one.
    """
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def quantised(model: Model) -> Model:
    """Round the weights of a model's linear layers to int8 in place, with one scale per row.

    Each call of a layer converts its weights to the model's dtype, so the model is smaller but slower. Raises UserError
    if torchao is not installed.
    """
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise UserError("int8 weights need torchao: pip install 'headstart[quantise]'") from error
    quantize_(model, Int8WeightOnlyConfig(), lambda module, name: isinstance(module, nn.Linear))
    return model
