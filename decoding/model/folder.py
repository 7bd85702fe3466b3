"""Check of a local transformers folder before a model is built from it: its JSON files, its index, its sizes.

The headers of the weights reveal errors here that transformers would report only after making the layers, and wrong
sizes that it would accept silently.
"""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers.models.auto.configuration_auto import (  # type: ignore[attr-defined]  # not in its __all__
    CONFIG_MAPPING_NAMES,
)

from decoding.model.stored import StoredTensor, check_whole, read_header, read_object, weights_header

_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
_ADAPTER = "adapter_model.safetensors"
_REMEDY = "copy the folder again from where it came"

_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_WIDTHS = ("hidden_size", "n_embd", "vocab_size")
"""Config keys of sizes that are a dimension of some tensor in every family, the embeddings."""
_INNER = ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size")
_INNER_FAMILIES = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"),
    *("gpt2", "gpt_neox", "opt", "falcon", "olmo2", "granite"),
)
"""Model types in which a feed-forward tensor has the `_INNER` size; in a mixture of experts none need have it."""
_COUNTS = ("num_attention_heads", "n_head", "num_key_value_heads", "num_kv_heads", "head_dim")
_POSITIONS = ("max_position_embeddings", "n_positions")
_SHARES = ("partial_rotary_factor", "rotary_pct")


def check_model_folder(folder: Path, above: tuple[Path, ...] = ()) -> None:
    """Refuse a folder whose config and weights cannot belong to one model; ValueError names the file and the value.

    Reads the headers only. Sizes and families not known here are left to transformers. ``above``: the folders of the
    adapters whose base model this folder is, to find circles.
    """
    if folder.resolve() in above:
        raise ValueError(f"{folder} holds adapters of a model that is made of these adapters: {_REMEDY}")
    if (folder / _ADAPTER_CONFIG).is_file():
        _check_adapters(folder, above)
    if (folder / _CONFIG).is_file():
        config = read_object(folder / _CONFIG, _REMEDY)
        text = config.get("text_config")
        for sizes in (config, text) if isinstance(text, dict) else (config,):
            _check_counts(folder / _CONFIG, sizes)
        header = weights_header(folder, _REMEDY)
        if header:
            for sizes in (config, text) if isinstance(text, dict) else (config,):
                _check_sizes(folder / _CONFIG, sizes, header)


def adapted_model(folder: Path) -> str | None:
    """Return the name of the model that a folder's adapters belong to; None for a folder without adapters."""
    path = folder / _ADAPTER_CONFIG
    if not path.is_file():
        return None
    name = read_object(path, _REMEDY).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ValueError(
            f"{path} has {reprlib.repr(name)} as base_model_name_or_path: give the folder or hub id of its model"
        )
    return name


def _check_adapters(folder: Path, above: tuple[Path, ...]) -> None:
    """Check the rank of LoRA matrices, which peft allocates before it reads their weights."""
    path = folder / _ADAPTER_CONFIG
    base, config = adapted_model(folder), read_object(path, _REMEDY)
    if not (folder / _ADAPTER).is_file():
        return
    header = read_header(folder / _ADAPTER, _REMEDY)
    patterns = config.get("rank_pattern") or {}
    if config.get("peft_type") == "LORA" and isinstance(patterns, dict):
        for key, rank in {"r": config.get("r", 8), **patterns}.items():
            _check_rank(path, key, rank, header, needed=key != "r" or not patterns)
    if base is not None and Path(base).is_dir():
        check_model_folder(Path(base), (*above, folder.resolve()))


def _check_rank(path: Path, key: str, rank: object, header: Mapping[str, StoredTensor], needed: bool) -> None:
    """Refuse a rank that no stored matrix has.

    A rank that patterns may override everywhere (``needed`` is False) is refused only above the largest stored size.
    """
    _check_count(path, key, rank)
    assert isinstance(rank, int)
    dims = {size for tensor in header.values() for size in tensor.shape}
    if rank not in dims and (needed or rank > max(dims, default=0)):
        raise ValueError(f"{path} has a rank of {rank} as {key}, which no tensor in {_ADAPTER} has: {_REMEDY}")


def _check_counts(path: Path, config: Mapping[str, Any]) -> None:
    """Refuse sizes that are not whole numbers from 1; null and lists, valid in some families, pass."""
    for key in (*_LAYERS, *_WIDTHS, *_INNER, *_COUNTS, *_POSITIONS):
        if config.get(key) is not None and not isinstance(config[key], list):
            _check_count(path, key, config[key])
    parts = (config, config.get("rope_parameters"), config.get("rope_scaling"))
    for part in [part for part in parts if isinstance(part, dict)]:
        for key in _SHARES:
            share = part.get(key)
            if share is not None and not (isinstance(share, int | float) and 0 <= share <= 1):
                raise ValueError(f"{path} has {reprlib.repr(share)} as {key}, which is a share from 0 to 1: {_REMEDY}")


def _check_count(path: Path, key: str, value: object) -> None:
    try:
        check_whole(key, value)
    except ValueError as error:
        raise ValueError(f"{path} cannot be right: {error}") from error


def _check_sizes(path: Path, config: Mapping[str, Any], header: Mapping[str, StoredTensor]) -> None:
    """Compare a config's sizes with the stored tensors; weights must be floats unless the config quantises them."""
    dims = {size for tensor in header.values() for size in tensor.shape}
    # A class of the user's own may number its modules as it likes, and run one of them in several layers.
    known = config.get("model_type") in CONFIG_MAPPING_NAMES
    numbered = [int(part) for name in header if known and (part := _layer_of(name)) is not None]
    most = max(numbered) + 1 if numbered else max(dims, default=0)
    for key in _LAYERS:
        layers = config.get(key)
        fewer = config.get("model_type") in _INNER_FAMILIES and numbered
        if isinstance(layers, int) and (layers > most or (fewer and layers < most)):
            raise ValueError(f"{path} has {layers} as {key}, but the weights beside it have {most} layers: {_REMEDY}")
    plain = "quantization_config" not in config
    has_inner = config.get("model_type") in _INNER_FAMILIES and plain
    for key in (*_WIDTHS, *(_INNER if has_inner else ())):
        if isinstance(size := config.get(key), int) and size not in dims:
            raise ValueError(f"{path} has {size} as {key}, which no tensor in the weights beside it has: {_REMEDY}")
    for name, tensor in header.items() if plain else ():
        if name.endswith(".weight") and not tensor.dtype.startswith(("F", "BF")):
            raise ValueError(f"the weights beside {path} hold {name} in {tensor.dtype}, which is no float: {_REMEDY}")


def _layer_of(name: str) -> str | None:
    """Return the first number in a tensor's name: its layer, in transformers' own families (model.layers.3., h.3.)."""
    return next((part for part in name.split(".") if part.isascii() and part.isdigit() and len(part) < 10), None)
