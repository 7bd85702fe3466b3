"""GGUF files as models: each file is converted once into a folder, which is read like any model's folder.

The folder is in the cache and is named after the file and its checksum. The folder holds the dequantised weights in
fp32, so that they are not rounded. It also holds the config, tokenizer, chat template and end tokens that the file
describes. transformers reads the file; this module adds settings that transformers' reader ignores, and rejects files
that the reader would misread.
"""

import hashlib
import io
import json
import logging
import shutil
from collections.abc import Mapping
from contextlib import redirect_stderr
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock
from safetensors import SafetensorError

from decoding.errors import UserError
from decoding.files.stored import cache_root, read_object

_LOGGER = logging.getLogger(__name__)
_SOURCE, _LINK = "gguf.json", "model.gguf"
_FORMAT = 1  # part of the folders' names; increase it when the conversion changes
_ERRORS = (OSError, ValueError, RuntimeError, TypeError, LookupError, ArithmeticError, AttributeError, ImportError)
_OTHER = "use the folder or Hub id of the original model"
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""llama.cpp's pre-tokenizers that split off each digit and then split as GPT-2 does (llama-vocab.cpp)."""
_WHOLE_WORDS = ("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "tekken")
"""llama.cpp's pre-tokenizers that do not merge within words that are tokens (llama-vocab.cpp, ignore_merges)."""
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def is_gguf(name: str | Path) -> bool:
    """Return True if ``name`` ends like the name of a GGUF file, and there is no folder of this name."""
    return str(name).lower().endswith(".gguf") and not Path(name).is_dir()


def source_of(folder: Path) -> dict[str, Any] | None:
    """Return the name (``file``), ``sha256`` and ``quantisation`` of the GGUF file that a folder was converted from.

    The quantisation is the type of the largest tensor, such as ``Q4_1``, or None for floats. Returns None for any other
    folder.
    """
    return read_object(folder / _SOURCE, "remove its folder") if (folder / _SOURCE).is_file() else None


def converted(file: Path) -> Path:
    """Return the folder of a GGUF file's model. The first call converts the file; later calls find the folder.

    Raises UserError for a file that is missing, not GGUF, cut short, or of a kind that cannot be read exactly.
    """
    if not file.is_file():
        raise UserError(f"there is no file {file}: use a GGUF file, or ORG/NAME:FILE.gguf for a file on the Hub")
    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise UserError(f"{file} is not a GGUF file: use a GGUF file, or a folder with a model")
    state = file.stat()
    checksum = _checksum(file.resolve(), state.st_size, state.st_mtime_ns)
    folder = cache_root() / "gguf" / f"{file.stem}-{checksum[:16]}-{_FORMAT}"
    partial = folder.with_name(f"{folder.name}.partial")
    if folder.is_dir():  # the folder is complete, even if nothing can be written here
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not folder.is_dir():
                shutil.rmtree(partial, ignore_errors=True)  # a killed process may have left this folder behind
                partial.mkdir()
                try:
                    _convert(file, partial, {"file": file.name, "sha256": checksum})
                    partial.rename(folder)
                finally:
                    shutil.rmtree(partial, ignore_errors=True)  # removed even after an error: it may fill the disk
    except (OSError, SafetensorError) as error:
        remedy = "make room there, or set HEADSTART_CACHE to another folder"
        raise UserError(f"the weights of {file} cannot be written to {folder} ({error}): {remedy}") from error
    return folder


@lru_cache(maxsize=16)
def _checksum(file: Path, size: int, changed: int) -> str:
    """Return a file's SHA-256; ``size`` and ``changed`` serve only as parts of the cache's key."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _convert(file: Path, folder: Path, source: Mapping[str, str]) -> None:
    """Read a file with transformers and write the model to ``folder``, which must not contain other files."""
    if find_spec("gguf") is None:
        raise UserError(f"reading {file} needs the package gguf: pip install 'headstart[gguf]'")
    from gguf import GGUFReader
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    try:
        reader = GGUFReader(file)
        keys = {key: field.contents() for key, field in reader.fields.items()}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        largest = max(reader.tensors, key=lambda tensor: int(tensor.n_bytes)).tensor_type.name
    except _ERRORS as error:
        raise UserError(f"{file} is damaged or was not fetched completely ({_line(error)}): fetch it again") from error
    if keys.get("split.count", 1) > 1:
        raise UserError(f"{file} is one of {keys['split.count']} parts: join the parts with llama-gguf-split --merge")
    _LOGGER.warning("converting %s once, into %s", file, folder.parent)
    (folder / _LINK).symlink_to(file.resolve())
    named: dict[str, Any] = {"pretrained_model_name_or_path": str(folder), "gguf_file": _LINK}
    plain: dict[str, Any] = {"dtype": torch.float32, "quantization_config": GgufConfig(dequantize=True)}
    loaded: Any
    try:
        config = AutoConfig.from_pretrained(**named)
        _complete(config, keys, tensors)
        tokenizer = AutoTokenizer.from_pretrained(**named)
        with redirect_stderr(io.StringIO()):  # hides progress bars
            loaded = AutoModelForCausalLM.from_pretrained(**named, **plain, config=config, output_loading_info=True)
    except _ERRORS as error:
        raise UserError(f"transformers cannot read {file} ({_line(error)}): {_OTHER}") from error
    model, missing = loaded[0], len(loaded[1]["missing_keys"])
    read = sum(tensor.numel() for tensor in {it.data_ptr(): it for it in model.state_dict().values()}.values())
    held = sum(int(tensor.n_elements) for name, tensor in tensors.items() if "rope_" not in name)
    if missing or read != held:
        mismatch = f"{held:,} weights, but transformers reads {read:,}, and {missing} tensors are missing"
        raise UserError(f"{file} stores {mismatch}: {_OTHER}")
    ends = {keys.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")} - {None}
    model.generation_config.eos_token_id = sorted(ends) or None
    _split_as_llama_cpp(tokenizer.backend_tokenizer, keys.get("tokenizer.ggml.pre"), file)
    (folder / _LINK).unlink()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    stored = read_object(folder / "tokenizer.json", _OTHER)  # the tokenizer class adds tokens that the model lacks
    stored["added_tokens"] = [it for it in stored["added_tokens"] if it["id"] < len(keys["tokenizer.ggml.tokens"])]
    (folder / "tokenizer.json").write_text(json.dumps(stored))
    quantisation = None if largest in ("F32", "F16", "BF16") else largest
    (folder / _SOURCE).write_text(json.dumps({**source, "quantisation": quantisation}) + "\n")


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def _complete(config: Any, keys: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Set what transformers' reader ignores: the size of attention heads, biases, and the scaled rotary embeddings of
    Llama 3.

    Raises UserError, without the file's name, if rotary embeddings are scaled in another way.
    """
    of_model = {key.partition(".")[2]: value for key, value in keys.items()}
    ignored = {"head_dim": of_model.get("attention.key_length")}
    ignored |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    for key, value in ignored.items():
        if value is not None and hasattr(config, key):
            setattr(config, key, value)
    scaled = [key for key, value in of_model.items() if key.startswith("rope.scal") and value != "none"]
    scaled += [name for name in tensors if "rope_" in name]
    if scaled == ["rope_freqs.weight"]:
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        factors, rope = torch.tensor(tensors["rope_freqs.weight"].data), config.rope_parameters
        config.rope_parameters = {**rope, **_LLAMA3, "rope_type": "llama3", "factor": float(factors.max())}
        plain = rope["rope_theta"] ** -(torch.arange(len(factors)) / len(factors))
        if torch.allclose(plain / factors, ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0], atol=0.0):
            return
    if scaled:
        raise UserError("the reader would ignore that rotary embeddings are scaled")


def _split_as_llama_cpp(backend: Any, pre: str | None, file: Path) -> None:
    """Set the pre-tokenizer that the file names, if transformers' reader does not set it."""
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence

    if pre in _DIGITS_APART:
        backend.pre_tokenizer = Sequence([Digits(individual_digits=True), ByteLevel(add_prefix_space=False)])
    elif pre in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    elif pre not in (None, "default", "gpt-2", "phi-2", "jina-en") and isinstance(backend.pre_tokenizer, ByteLevel):
        _LOGGER.warning(
            "%s may split some texts differently here than in llama.cpp: the pre-tokenizer %s is unknown", file, pre
        )
