"""Checks of a local transformers folder that read its JSON files and headers before a model is built from it.

transformers builds all layers before it reads weights and compares sizes; it neither limits the number of layers nor
notices missing ones. peft allocates LoRA matrices of any rank. This module compares these numbers with the headers.
"""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import (  # type: ignore[attr-defined]  # not in its __all__
    CONFIG_MAPPING_NAMES,
)

from decoding.errors import UserError
from decoding.model.stored import StoredTensor, read_header, read_object, weights_header

_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
_REMEDY = "copy the folder again from its source"
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_ALL_LAYERS_RUN = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"),
    *("gpt2", "gpt_neox", "opt", "falcon", "olmo2", "granite"),
)
"""Model types that store exactly as many layers as their config says, and none for multi-token prediction."""


def check_model_folder(folder: Path) -> None:
    """Raise UserError, with file and value, if a folder's config and weights cannot belong to one model.

    Only headers are read. For adapters, a base model in a local folder is checked as well.
    """
    base = adapted_model(folder)
    if base is not None:
        _check_ranks(folder)
        if Path(base).is_dir():
            check_model_folder(Path(base))
    path = folder / _CONFIG
    if path.is_file():
        config, header = read_object(path, _REMEDY), weights_header(folder, _REMEDY)
        if header:
            text = config.get("text_config")
            for sizes in (config, text) if isinstance(text, dict) else (config,):
                _check_layers(path, sizes, header)
            for name, tensor in header.items() if "quantization_config" not in config else ():
                if name.endswith(".weight") and not tensor.dtype.startswith(("F", "BF")):
                    raise UserError(
                        f"the weights next to {path} store {name} as {tensor.dtype}, which is not a float: {_REMEDY}"
                    )


def quantisation(folder: Path) -> str | None:
    """Return the quantisation method of a folder's weights, such as ``fp8``; None for plain weights."""
    path = folder / _CONFIG
    given = read_object(path, _REMEDY).get("quantization_config") if path.is_file() else None
    if not isinstance(given, dict):
        return None
    bits = [f" {count}-bit" for count in (4, 8) if given.get(f"load_in_{count}bit")]
    return f"{given.get('quant_method')}{''.join(bits)}"


def adapted_model(folder: Path) -> str | None:
    """Return the name of the base model of a folder's adapters; None for a folder without adapters.

    Raises UserError if the name is missing, or if the chain of base models leads back to the adapters.
    """
    base, visited = _base_of(folder), {folder.resolve()}
    following = base
    while following is not None:
        at = Path(following).resolve()
        if at in visited:
            raise UserError(f"the adapters in {folder} lead back to themselves as their base model: {_REMEDY}")
        visited.add(at)
        following = _base_of(at)
    return base


def _base_of(folder: Path) -> str | None:
    path = folder / _ADAPTER_CONFIG
    if not path.is_file():
        return None
    name = read_object(path, _REMEDY).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise UserError(
            f"{path} has {reprlib.repr(name)} as base_model_name_or_path: use the folder or Hub id of its model"
        )
    return name


def _check_ranks(folder: Path) -> None:
    """Raise UserError for a LoRA rank above every stored size."""
    path, weights = folder / _ADAPTER_CONFIG, folder / "adapter_model.safetensors"
    if not weights.is_file():
        return
    config, header = read_object(path, _REMEDY), read_header(weights, _REMEDY)
    patterns, most = config.get("rank_pattern"), max((max(it.shape, default=0) for it in header.values()), default=0)
    for rank in (config.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())):
        if isinstance(rank, int | float) and rank > most:
            raise UserError(f"{path} has a rank of {rank}, but no tensor in {weights.name} has that size: {_REMEDY}")


def _check_layers(path: Path, config: Mapping[str, Any], header: Mapping[str, StoredTensor]) -> None:
    """Compare the number of layers with the tensors' names, or with their largest size if the class is unknown."""
    kind = config.get("model_type")
    # A user's own class may number its modules freely, and run one module in several layers.
    numbered = [int(part) for name in header if kind in CONFIG_MAPPING_NAMES and (part := _layer_of(name)) is not None]
    most = (
        max(numbered) + 1 if numbered else max((size for tensor in header.values() for size in tensor.shape), default=0)
    )
    least = most if numbered and kind in _ALL_LAYERS_RUN else 1
    for key in _LAYERS:
        if isinstance(layers := config.get(key), int) and not least <= layers <= most:
            raise UserError(f"{path} has {layers} as {key}, but the weights have {most} layers: {_REMEDY}")


def _layer_of(name: str) -> str | None:
    """Return the first number in a tensor's name.

    In the families of transformers it is the layer (model.layers.3., h.3.).
    """
    return next((part for part in name.split(".") if part.isascii() and part.isdigit() and len(part) < 10), None)
