"""Fingerprints: short hashes that are equal for equal models, heads, tokenizers or sets of prompts.

`stored_fingerprint` is the digest of files on disk or on the Hub. This digest depends neither on the dtype in which a
model is loaded nor on how its weights are split into files. `fingerprint` is the digest of a module in memory.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel, PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.files.folder import OUTPUT_TOKENS_KEY, OUTPUT_TOKENS_NAME, adapted_model, is_heads_folder, reason
from decoding.files.hub import local_folder
from decoding.files.stored import CONFIG_NAME, cache_root, read_header, weight_files

TOKENIZER_PROBE = "def speculate(prompt):\n    return 'Zoë said: 3 + 4 = 7'  "
"""Text that different tokenizers split differently: spaces at the start and end of lines, digits, an accent."""

_DIGITS = 16
_LARGE = 10**9
"""The smallest size in bytes of a folder whose fingerprint is kept on disk."""
_SAYS_NOTHING = ("_name_or_path", "transformers_version", "architectures", "dtype", "auto_map", "use_cache")
"""Config keys that record a model's origin or how the model runs. These keys do not change the model's outputs."""
_ADAPTERS_SAY_NOTHING = ("base_model_name_or_path", "revision", "peft_version", "inference_mode", "auto_mapping")
_ADAPTER_CONFIG, _ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def fingerprint(module: nn.Module) -> str:
    """Return a short hash of a model in memory: its config, and every tensor's name, shape, dtype and values.

    This takes about a second per GB, which is the speed of SHA-256 on one core.
    """
    hashed = hashlib.sha256()
    if isinstance(module, PreTrainedModel):
        hashed.update(_json_bytes(_behaviour(module.config.to_dict())))
    for name, tensor in sorted(module.state_dict().items()):
        hashed.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        hashed.update(_bytes_of(tensor))
    return hashed.hexdigest()[:_DIGITS]


def stored_fingerprint(name: str | Path, trust_remote_code: bool = False) -> str:
    """Return a short hash of the files of a model, heads or LoRA adapters, in a folder or under a Hub id.

    The hash covers the config and every tensor's name, shape, stored dtype and bytes. It also covers the base model of
    adapters, and the tree of heads, because the figures of heads depend on the tree. Files are read in pieces at about
    a second per GB, and only once unless they change; files of adapters, and folders of less than a GB, are read once
    per process. A change that leaves all sizes and times of files as they are is not noticed.

    Raises UserError if the model does not exist or one of its files cannot be read.
    """
    folder = local_folder(name)
    paths = sorted({*folder.iterdir(), *folder.rglob("*.safetensors")})  # an index may name weights in subfolders
    states = [(str(path.relative_to(folder)), path.stat()) for path in paths if path.is_file()]
    files = tuple((file, state.st_size, state.st_mtime_ns, state.st_ctime_ns) for file, state in states)
    return _stored_fingerprint(folder, trust_remote_code, files)


@lru_cache(maxsize=16)
def _stored_fingerprint(folder: Path, trust_remote_code: bool, files: tuple[tuple[str, int, int, int], ...]) -> str:
    """Compute `stored_fingerprint`; ``files`` (names, sizes, times of changes) serves only as a key of the cache.

    The fingerprint of a large folder is kept on disk, because each start of a run would hash the weights again.
    """
    computed_by = transformers.__version__, Path(__file__).read_bytes()
    key = values_fingerprint([str(folder.resolve()), trust_remote_code, files, computed_by])
    kept = cache_root() / "fingerprints" / key
    # The base model of adapters may change without a change in their folder.
    large = sum(size for _, size, *_ in files) >= _LARGE and adapted_model(folder) is None
    with suppress(OSError, ValueError):  # an entry that cannot be read is written again
        if large and re.fullmatch(f"[0-9a-f]{{{_DIGITS}}}", known := kept.read_text()):
            return known
    try:
        hashed = hashlib.sha256(_json_bytes(_described(folder, trust_remote_code)))
        for name, path in sorted(files_of_tensors(folder).items()):
            with safe_open(path, framework="pt", backend="pread") as file:  # one tensor in memory at a time
                part, tensor = file.get_slice(name), file.get_tensor(name)
            hashed.update(f"{name}{tuple(part.get_shape())}{part.get_dtype()}".encode())
            hashed.update(_bytes_of(tensor))
    except (OSError, KeyError, TypeError, AttributeError, ValueError, SafetensorError) as error:
        raise UserError(f"the files in {folder} cannot be read: {reason(error)}") from error
    if large:
        with suppress(OSError):  # a full disk costs only the time of the next start
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(hashed.hexdigest()[:_DIGITS])
    return hashed.hexdigest()[:_DIGITS]


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a short hash of a tokenizer: its vocabulary, its chat template, and the tokens of a probe text."""
    probe = tokenizer(TOKENIZER_PROBE)["input_ids"]
    return values_fingerprint([sorted(tokenizer.get_vocab().items()), tokenizer.chat_template, probe])


def prompts_fingerprint(prompts: Sequence[Sequence[int]]) -> str:
    """Return a short hash of prompts (token ids) in their order."""
    return values_fingerprint([list(prompt) for prompt in prompts])


def _described(folder: Path, trust_remote_code: bool) -> Any:
    """Return, as JSON values, everything that affects a model's outputs except the weights."""
    if is_heads_folder(folder):
        return json.loads((folder / "config.json").read_text())
    if (adapters := folder / _ADAPTER_CONFIG).is_file():
        config = json.loads(adapters.read_text())
        own = {key: _sorted(value) for key, value in config.items() if key not in _ADAPTERS_SAY_NOTHING}
        return {"adapters": own, "base": stored_fingerprint(str(adapted_model(folder)), trust_remote_code)}
    config = json.loads((folder / CONFIG_NAME).read_text())
    # In speculators' layout, a draft's model type is in a nested object.
    if "model_type" in config or trust_remote_code:
        config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code).to_dict()
    behaviour = _behaviour(config)
    if OUTPUT_TOKENS_KEY in config and (listed := folder / OUTPUT_TOKENS_NAME).is_file():
        behaviour[OUTPUT_TOKENS_KEY] = json.loads(listed.read_text())
    return behaviour


def _behaviour(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part of a config that changes a model's outputs, including nested configs."""
    return {
        key: _behaviour(value) if isinstance(value, dict) else value
        for key, value in config.items()
        if key not in _SAYS_NOTHING
    }


def _sorted(value: Any) -> Any:
    """Sort a list, because peft writes sets of module names in varying order."""
    return sorted(value, key=str) if isinstance(value, list) else value


def files_of_tensors(folder: Path) -> dict[str, Path]:
    """Return the file of every tensor stored in a folder that transformers would load.

    Raises UserError for a folder without weights, and for a truncated file.
    """
    remedy = "fetch or write it again"
    adapters = folder / _ADAPTER_WEIGHTS
    files = [adapters] if adapters.is_file() else weight_files(folder, remedy)
    if not files:
        raise UserError(f"{folder} lacks .safetensors files: convert its weights (pickled weights are not loaded)")
    return {name: path for path in files for name in read_header(path, remedy)}


def _bytes_of(tensor: Tensor) -> Any:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()


def values_fingerprint(value: Any) -> str:
    """Return a short hash of JSON values."""
    return hashlib.sha256(_json_bytes(value)).hexdigest()[:_DIGITS]


def _json_bytes(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode()
