"""A GGUF file: written one tensor at a time, and read back by the library's own reader."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, quants
from gguf.constants import GGML_QUANT_SIZES, GGUFValueType
from torch import Tensor

TYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_TORCH = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_AGAIN = "export again, and check the disk if it happens twice"


class Comparison(NamedTuple):
    """A file compared with the trained weights."""

    tensors: int
    rounded: int
    """Tensors with weights that the file's type has no number for."""
    largest_error: float
    """Greatest difference of a weight."""


def write_file(path: Path, metadata: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], type: str) -> None:
    """Write a file. Vectors are stored in f32, as llama.cpp wants them; matrices in ``type``."""
    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if key != "general.architecture":
            _add(writer, key, value)
    writer.add_file_type(TYPES[type][1])
    writer.add_quantization_version(2)
    chosen = [(name, tensor, stored_type(tensor, type)) for name, tensor in tensors]
    for name, tensor, kind in chosen:
        block, size = GGML_QUANT_SIZES[kind]
        shape = (*tensor.shape[:-1], tensor.shape[-1] // block * size)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=kind)
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for _, tensor, kind in chosen:
            writer.write_tensor_data(_packed(tensor, kind))
    finally:
        writer.close()


def stored_type(tensor: Tensor, type: str) -> GGMLQuantizationType:
    """Return the type of a tensor in a file of ``type``; rows that q8_0 cannot cut into blocks are stored in f16."""
    if tensor.ndim == 1:
        return GGMLQuantizationType.F32
    kind = TYPES[type][0]
    return GGMLQuantizationType.F16 if tensor.shape[-1] % GGML_QUANT_SIZES[kind][0] else kind


def compare_file(path: Path, metadata: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]) -> Comparison:
    """Read a file and compare all of it with what was written; `ValueError` for a difference.

    Floats must be the rounded weights to the bit. q8_0 holds 32 weights as whole numbers from -127 to 127 times one
    number in f16: an error beyond half a step, and what rounding that number adds, is a difference.
    """
    reader = GGUFReader(path)
    for key, value in metadata.items():
        field = reader.get_field(key)
        if field is None or not _same(field.contents(), value):
            raise ValueError(f"{path.name} reads back with another {key} than was written: {_AGAIN}")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    written, rounded, largest = set(), 0, 0.0
    for name, tensor in tensors:
        written.add(name)
        values = tensor.float()
        found = stored.get(name)
        if found is None:
            raise ValueError(f"{path.name} reads back without {name}: {_AGAIN}")
        read = torch.from_numpy(quants.dequantize(found.data, found.tensor_type).copy()).reshape(values.shape)
        if not _is_rounded(read, values, found.tensor_type):
            raise ValueError(f"{path.name} reads back with another {name} than was written: {_AGAIN}")
        rounded += not torch.equal(read, values)
        largest = max(largest, float((read - values).abs().max()))
    if more := sorted(stored.keys() - written):
        raise ValueError(f"{path.name} reads back with a tensor {more[0]} that was not written: {_AGAIN}")
    return Comparison(len(written), rounded, largest)


def _is_rounded(read: Tensor, values: Tensor, kind: GGMLQuantizationType) -> bool:
    """Return True if ``read`` is what ``values`` round to in a type of the file."""
    if kind != GGMLQuantizationType.Q8_0:
        return torch.equal(read, values.to(_TORCH[kind]).float())
    peaks = values.reshape(-1, 32).abs().amax(1, keepdim=True)
    allowed = peaks * (0.5 / 127 + 2.0**-11) + 2.0**-17  # f16 holds no steps below 2^-24, of which 127 add up
    return bool(((read - values).reshape(-1, 32).abs() <= allowed).all())


def _add(writer: GGUFWriter, key: str, value: Any) -> None:
    """Add a key with the type that llama.cpp reads it as: whole numbers are unsigned, lists take their items' type."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    elif value:  # a file holds no empty list
        kind = GGUFValueType.INT32 if isinstance(value[0], int) else None
        writer.add_key_value(key, list(value), GGUFValueType.ARRAY, sub_type=kind)


def _same(read: Any, written: Any) -> bool:
    """Return True for equal values; floats are stored in 32 bits."""
    if isinstance(written, float):
        return bool(np.float32(read) == np.float32(written))
    if isinstance(written, list) and written and isinstance(written[0], float):
        return np.array_equal(np.array(read, np.float32), np.array(written, np.float32))
    return bool(read == written)


def _packed(tensor: Tensor, kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Return a tensor's bytes in a type of the file."""
    if kind == GGMLQuantizationType.Q8_0:
        return quants.quantize(tensor.float().contiguous().numpy(), kind)
    rounded = tensor.to(_TORCH[kind])
    if not bool(torch.isfinite(rounded).all()):
        raise ValueError(f"a weight is {float(tensor.abs().max()):.3g}, beyond the range of f16: give type bf16 or f32")
    return rounded.contiguous().view(torch.uint8).numpy()
