"""What a local folder contains, read from its JSON files and headers before a model is built from it.

transformers builds all layers before it reads weights and compares sizes; it neither limits the number of layers nor
notices missing layers. peft allocates LoRA matrices of any rank. This module compares the number of layers and the rank
with the headers of the weight files.
"""

import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: base class of its clients' errors
    HTTPError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from transformers import PreTrainedModel
from transformers.models.auto.configuration_auto import (  # type: ignore[attr-defined]  # not in its __all__
    CONFIG_MAPPING_NAMES,
)

from decoding.errors import UserError, check_once, first_line, lines_of
from decoding.files.hub import local_folder
from decoding.files.stored import CONFIG_NAME, StoredTensor, read_header, read_object, weights_header

UNREADABLE = (
    *(OSError, ValueError, RuntimeError, TypeError, LookupError, ArithmeticError, AttributeError, AssertionError),
    *(ImportError, SafetensorError, HTTPError, StrictDataclassError),
)
"""Errors that transformers and its libraries raise when they cannot build a model or a config."""
OUTPUT_TOKENS_KEY = "headstart_output_tokens"
"""Key in a draft's config.json. Its value names a file in the same folder, which lists the tokens of the trimmed
lm_head."""
OUTPUT_TOKENS_NAME = "output_tokens.json"
HEADS_FORMAT = "headstart-medusa"

_CONFIG, _ADAPTER_CONFIG = "config.json", "adapter_config.json"
_REMEDY = "copy the folder again from its source"
_LAYERS = ("num_hidden_layers", "n_layer", "num_layers")
_ALL_LAYERS_RUN = (
    *("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "phi3"),
    *("gpt2", "gpt_neox", "opt", "falcon", "olmo2", "granite"),
)
"""Model types that store exactly as many layers as their config says, and no layers for multi-token prediction."""


def check_model_folder(folder: Path) -> None:
    """Raise UserError, with file and value, if a folder's config and weights cannot belong to one model.

    Only headers are read. For adapters, a base model in a local folder is also checked.
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
            raise UserError(f"the base models of the adapters in {folder} lead back to these adapters: {_REMEDY}")
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
            f"{path} has {reprlib.repr(name)} as base_model_name_or_path: use the folder or Hub id of the base model"
        )
    return name


def _check_ranks(folder: Path) -> None:
    """Raise UserError for a LoRA rank that is larger than every dimension of every stored tensor."""
    path, weights = folder / _ADAPTER_CONFIG, folder / "adapter_model.safetensors"
    if not weights.is_file():
        return
    config, header = read_object(path, _REMEDY), read_header(weights, _REMEDY)
    patterns, most = config.get("rank_pattern"), max((max(it.shape, default=0) for it in header.values()), default=0)
    for rank in (config.get("r"), *(patterns.values() if isinstance(patterns, dict) else ())):
        if isinstance(rank, int | float) and rank > most:
            raise UserError(f"{path} has a rank of {rank}, but no tensor in {weights.name} has that size: {_REMEDY}")


def _check_layers(path: Path, config: Mapping[str, Any], header: Mapping[str, StoredTensor]) -> None:
    """Raise UserError if the config's number of layers does not fit the layer numbers in the tensors' names.

    If the model's class is unknown, the number of layers must not exceed the largest dimension of the tensors.
    """
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

    In the families of transformers this number is the layer (model.layers.3., h.3.).
    """
    return next((part for part in name.split(".") if part.isascii() and part.isdigit() and len(part) < 10), None)


def is_heads_folder(folder: str | Path) -> bool:
    """Return True if a folder contains heads in this project's format."""
    config = Path(folder) / CONFIG_NAME
    return config.is_file() and read_object(config, "use heads or a model").get("format") == HEADS_FORMAT


def is_untrusted(error: BaseException) -> bool:
    """Return True if transformers refused to run a model's own code."""
    return "trust_remote_code" in str(error)


def reason(error: BaseException) -> str:
    """Return the line of an error that states the reason: the first line, or, for a rejected config, the last line."""
    if "ignore_mismatched_sizes" in str(error):  # an option that users cannot set here
        return "the sizes in config.json differ from the weights"
    if is_untrusted(error):
        return (
            "the folder contains its own code: read the code, then add --trust-remote-code, or trust_remote_code=true "
            "in a recipe"
        )
    if not isinstance(error, StrictDataclassError):
        return first_line(error)
    return lines_of(error)[-1].removeprefix("ValueError: ").removeprefix("TypeError: ")


# --- the tokens of a trimmed draft ----------------------------------------------------------------------------------


def write_output_tokens(folder: str | Path, token_ids: Iterable[int]) -> None:
    """Mark a draft's folder as trimmed to ``token_ids``.

    `loading.load_draft` reads the mark; transformers ignores it.
    """
    config_path = Path(folder) / "config.json"
    if not config_path.is_file():
        raise UserError(f"{folder} does not contain a model: config.json is missing")
    config = json.loads(config_path.read_text())
    tokens = sorted(token_ids)
    check_trimmed(tokens, config.get("vocab_size", max(tokens, default=0) + 1))
    (Path(folder) / OUTPUT_TOKENS_NAME).write_text(json.dumps(tokens) + "\n")
    config_path.write_text(json.dumps({**config, OUTPUT_TOKENS_KEY: OUTPUT_TOKENS_NAME}, indent=2) + "\n")


def read_output_tokens(model: PreTrainedModel, name: str) -> tuple[int, ...] | None:
    """Return the tokens that a trimmed draft from this folder or Hub id can write; None if it is not trimmed."""
    file_name = getattr(model.config, OUTPUT_TOKENS_KEY, None)
    if file_name is None:
        return None
    if file_name != OUTPUT_TOKENS_NAME:
        raise UserError(
            f"config.json of {name} names {file_name!r} as the file of tokens: rename the file to {OUTPUT_TOKENS_NAME}"
        )
    try:
        tokens = json.loads((local_folder(name, weights=False) / file_name).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file_name} of {name} cannot be read: {error}") from error
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise UserError(f"{file_name} of {name} is not a list of token ids: write it with write_output_tokens")
    check_trimmed(tokens, model.config.get_text_config(decoder=True).vocab_size)
    return tuple(tokens)


def check_trimmed(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise UserError if there are no tokens, if a token occurs twice, or if the draft does not know a token."""
    if not tokens:
        raise UserError("the trimmed vocabulary is empty: use at least one token")
    check_once("token", tokens)
    if outside := [token for token in tokens if not 0 <= token < vocab_size]:
        raise UserError(f"token {outside[0]} is unknown to the draft, which has tokens 0 to {vocab_size - 1}: omit it")
