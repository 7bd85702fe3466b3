"""Short digests that are equal if two models, heads, tokenizers or sets of prompts are the same.

`stored_fingerprint` covers files on disk or on the Hub: it depends neither on the dtype in which a model is loaded, nor
on the way its weights are split into files. `fingerprint` covers a module in memory.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # base class of all errors of a download
from torch import nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.hub import cached_file

from decoding.model.loading import TOKENIZER_PROBE, first_line, is_heads_folder
from decoding.model.parallel import CONFIG_NAME as PARALLEL_CONFIG
from decoding.model.parallel import WEIGHTS_NAME as PARALLEL_WEIGHTS
from decoding.model.stored import INDEX_NAME, WEIGHTS_NAME
from decoding.model.vocabulary import OUTPUT_TOKENS_KEY, OUTPUT_TOKENS_NAME

_DIGITS = 16
_SAYS_NOTHING = (
    "_name_or_path",
    "transformers_version",
    "architectures",
    "dtype",
    "auto_map",
    "use_cache",
    "pard_token",
)
"""Keys of a config that tell a model's origin and the way it runs, but do not change its outputs."""
_ADAPTERS_SAY_NOTHING = ("base_model_name_or_path", "revision", "peft_version", "inference_mode", "auto_mapping")
_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_CHUNK = 1 << 24


class Stored(NamedTuple):
    """A tensor in a safetensors file: ``begin`` and ``end`` are the offsets of its bytes in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    path: Path
    begin: int
    end: int


def fingerprint(module: nn.Module) -> str:
    """Return a short digest of a model in memory: of its config, and of every tensor's name, shape, dtype and values.

    Takes about a second per GB: SHA-256 on one core.
    """
    digest = hashlib.sha256()
    if isinstance(module, PreTrainedModel):
        digest.update(_json_bytes(_behaviour(module.config.to_dict())))
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()[:_DIGITS]


def stored_fingerprint(name: str | Path, trust_remote_code: bool = False) -> str:
    """Return a short digest of the files of a model, heads or LoRA adapters, in a folder or under a Hub id.

    It covers the config and every tensor's name, shape, stored dtype and bytes; for heads also their tree, which
    changes their measured figures; for adapters also the base model. Reads the files in pieces, about a second per GB,
    and only once per process while they do not change.

    ValueError if there is no such model, or a file of it cannot be read.
    """
    name = str(name)
    folder = Path(name)
    files = sorted(path for path in folder.iterdir() if path.is_file()) if folder.is_dir() else []
    states = [(path.name, path.stat()) for path in files]
    return _stored_fingerprint(
        name, trust_remote_code, tuple((file, state.st_size, state.st_mtime_ns) for file, state in states)
    )


@lru_cache(maxsize=16)
def _stored_fingerprint(name: str, trust_remote_code: bool, files: tuple[tuple[str, int, int], ...]) -> str:
    """Compute `stored_fingerprint`; ``files`` (names, sizes and times of a folder's files) is a key of the cache."""
    try:
        digest = hashlib.sha256(_json_bytes(_described(name, trust_remote_code)))
        for tensor in sorted(tensors_of(name)):
            digest.update(f"{tensor.name}{tensor.shape}{tensor.dtype}".encode())
            _update_from_file(digest, tensor)
    except (OSError, KeyError, TypeError, AttributeError, json.JSONDecodeError, UnicodeDecodeError, HTTPError) as error:
        raise ValueError(f"what is stored under {name!r} cannot be read: {first_line(error)}") from error
    return digest.hexdigest()[:_DIGITS]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short digest of a tokenizer: of its vocabulary, its chat template, and the tokens of a probe text."""
    probe = tokenizer(TOKENIZER_PROBE)["input_ids"]
    return values_fingerprint([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, probe])


def prompts_fingerprint(prompts: Sequence[Sequence[int]]) -> str:
    """Return a short digest of prompts, given as token ids, and of their order."""
    return values_fingerprint([list(prompt) for prompt in prompts])


def _described(name: str, trust_remote_code: bool) -> Any:
    """Return everything besides the weights that decides a model's outputs, as JSON values."""
    if is_heads_folder(name):
        return json.loads((Path(name) / "config.json").read_text())
    if (adapters := _file_of(name, _ADAPTER_CONFIG)) is not None:
        config = json.loads(adapters.read_text())
        own = {key: _sorted(value) for key, value in config.items() if key not in _ADAPTERS_SAY_NOTHING}
        return {"adapters": own, "base": stored_fingerprint(config["base_model_name_or_path"], trust_remote_code)}
    config = AutoConfig.from_pretrained(name, trust_remote_code=trust_remote_code).to_dict()
    behaviour = _behaviour(config)
    if (parts := _file_of(name, PARALLEL_CONFIG)) is not None:
        behaviour[PARALLEL_CONFIG] = json.loads(parts.read_text())
    if OUTPUT_TOKENS_KEY in config and (listed := _file_of(name, OUTPUT_TOKENS_NAME)) is not None:
        behaviour[OUTPUT_TOKENS_KEY] = json.loads(listed.read_text())
    return behaviour


def _behaviour(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config, nested configs included, that changes a model's outputs."""
    return {
        key: _behaviour(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _SAYS_NOTHING
    }


def _sorted(value: Any) -> Any:
    """Sort a list: peft writes sets of module names, whose order differs from one writing to the next."""
    return sorted(value, key=str) if isinstance(value, list) else value


def tensors_of(name: str) -> Iterator[Stored]:
    """Yield every tensor stored under a name: those that transformers would load, and a parallel draft's parts.

    ValueError for a name without weights; OSError for one that is neither here nor to be had.
    """
    if (parts := _file_of(name, PARALLEL_WEIGHTS)) is not None:
        yield from _tensors_in(parts)
    for single in (_ADAPTER_WEIGHTS, WEIGHTS_NAME):
        if (path := _file_of(name, single)) is not None:
            yield from _tensors_in(path)
            return
    index = _file_of(name, INDEX_NAME)
    if index is None:
        raise ValueError(f"{name} holds no weights: no {WEIGHTS_NAME} is there (pickled weights are not loaded)")
    for shard in sorted(set(json.loads(index.read_text())["weight_map"].values())):
        path = _file_of(name, shard)
        if path is None:
            raise ValueError(f"{name} lacks {shard}, which its {INDEX_NAME} names: fetch it again")
        yield from _tensors_in(path)


def _file_of(name: str, file: str) -> Path | None:
    """Return the path of a file of a folder or Hub id (downloaded if need be); None if there is no such file."""
    if Path(name).is_dir():
        path = Path(name) / file
        return path if path.is_file() else None
    found = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
    return Path(str(found)) if found is not None else None


def _tensors_in(path: Path) -> Iterator[Stored]:
    """Yield the tensors of a safetensors file: eight bytes of length, a JSON header, then all bytes."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size - 8:
            raise ValueError(f"{path} is no whole safetensors file: fetch or write it again")
        header = json.loads(file.read(length))
    for name, tensor in header.items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in tensor["data_offsets"])
            yield Stored(name, tensor["dtype"], tuple(tensor["shape"]), path, begin, end)


def _update_from_file(digest: Any, tensor: Stored) -> None:
    with tensor.path.open("rb") as file:
        file.seek(tensor.begin)
        left = tensor.end - tensor.begin
        while left:
            piece = file.read(min(left, _CHUNK))
            if not piece:
                raise ValueError(f"{tensor.path} ends before its tensor {tensor.name!r}: fetch or write it again")
            digest.update(piece)
            left -= len(piece)


def values_fingerprint(value: Any) -> str:
    """Return a short digest of JSON values."""
    return hashlib.sha256(_json_bytes(value)).hexdigest()[:_DIGITS]


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
