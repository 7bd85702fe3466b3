"""GGUF files as models: each is converted once into a folder that is read like any other model's.

The folder is in the cache and is named after the file and its digest. It holds the dequantised weights in fp32, which
does not round them, and the config, tokenizer, chat template and end tokens that the file describes. transformers reads
the file; this module adds settings that transformers' reader ignores, and rejects what it would misread.
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
from typing import TYPE_CHECKING, Any

import torch
from filelock import FileLock

from decoding.errors import UserError
from decoding.model.stored import cache_root, read_object

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedTokenizerBase

SOURCE_NAME = "gguf.json"
"""File in a converted folder with the original file's name, digest and type."""
UNQUANTISED = ("F32", "F16", "BF16")
_LOGGER = logging.getLogger(__name__)
_LINK = "model.gguf"
_FORMAT = 1  # number in the folders' names: raise it when files are converted differently
_ERRORS = (OSError, ValueError, RuntimeError, TypeError, LookupError, ArithmeticError, AttributeError, ImportError)
_AGAIN = "fetch it again"
_OTHER = "give the folder or Hub id of the original model"
_DIGITS_APART = ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b")
"""llama.cpp's pre-tokenizers that split off each digit and then split as GPT-2 does (llama-vocab.cpp)."""
_WHOLE_WORDS = (
    *("llama3", "llama-v3", "llama-bpe", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2", "jina-v5-nano"),
    "tekken",
)
"""llama.cpp's pre-tokenizers whose words are not merged if they are tokens (llama-vocab.cpp, ignore_merges)."""
_AS_GPT2 = (None, "default", "gpt-2", "phi-2", "jina-en")
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def is_gguf(name: str | Path) -> bool:
    """Return True if a name is that of a GGUF file; a folder may have such a name too."""
    return str(name).lower().endswith(".gguf") and not Path(name).is_dir()


def source_of(folder: Path) -> dict[str, Any] | None:
    """Return name (``file``), ``sha256`` and ``type`` of the GGUF file that a folder was converted from, or None."""
    path = folder / SOURCE_NAME
    return read_object(path, "remove its folder") if path.is_file() else None


def converted(file: Path) -> Path:
    """Return the folder of a GGUF file's model; the first call converts the file, the others find the folder.

    Raises UserError for a file that is missing, not GGUF, cut short, or of a kind that cannot be read exactly.
    """
    try:
        state = file.stat()
        with file.open("rb") as opened:
            if opened.read(4) != b"GGUF":
                raise UserError(f"{file} is not a GGUF file: give a GGUF file or a folder with a model")
        digest = _digest(file.resolve(), state.st_size, state.st_mtime_ns)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror}): give a GGUF file") from error
    folder = cache_root() / "gguf" / f"{file.stem}-{digest[:16]}-{_FORMAT}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            partial = folder.with_name(f"{folder.name}.partial")
            shutil.rmtree(partial, ignore_errors=True)  # a killed process may have left it
            if not folder.is_dir():  # another process may have converted the file meanwhile
                partial.mkdir()
                _convert(file, digest, partial)
                partial.rename(folder)
    except OSError as error:
        remedy = "make room there, or set HEADSTART_CACHE to another folder"
        raise UserError(f"the weights of {file} cannot be written to {folder} ({error}): {remedy}") from error
    return folder


@lru_cache(maxsize=16)
def _digest(file: Path, size: int, changed: int) -> str:
    """Return a file's SHA-256; ``size`` and ``changed`` are a key of the cache."""
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _convert(file: Path, digest: str, folder: Path) -> None:
    """Read a file by transformers, in the empty ``folder`` so that no neighbouring file is read, and write it there."""
    if find_spec("gguf") is None:
        raise UserError(f"reading {file} needs the package gguf: pip install 'headstart[gguf]'")
    from gguf import GGUFReader, LlamaFileType
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils.logging import disable_progress_bar

    try:
        reader = GGUFReader(file)
        keys = {key: field.contents() for key, field in reader.fields.items()}
    except _ERRORS as error:
        raise UserError(f"{file} is damaged or was not fetched completely ({_line(error)}): {_AGAIN}") from error
    if (parts := keys.get("split.count", 1)) > 1:
        raise UserError(f"{file} is one of {parts} parts: join them with llama-gguf-split --merge")
    _LOGGER.warning("converting %s once, into %s", file, folder.parent)
    disable_progress_bar()
    (folder / _LINK).symlink_to(file.resolve())
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    try:
        config = AutoConfig.from_pretrained(str(folder), gguf_file=_LINK)
        _complete(config, keys, tensors)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), gguf_file=_LINK)
        _split_as_llama_cpp(tokenizer, keys.get("tokenizer.ggml.pre"), file)
        with redirect_stderr(io.StringIO()):  # hides progress bars
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                str(folder),
                gguf_file=_LINK,
                config=config,
                dtype=torch.float32,
                quantization_config=GgufConfig(dequantize=True),
                output_loading_info=True,
            )
    except UserError as error:
        raise UserError(f"{file} {error.message}", error.remedy or _OTHER) from error
    except _ERRORS as error:
        raise UserError(f"transformers cannot read {file} ({_line(error)}): {_OTHER}") from error
    model, missing = loaded[0], loaded[1]["missing_keys"]
    read = sum(tensor.numel() for tensor in {it.data_ptr(): it for it in model.state_dict().values()}.values())
    held = sum(int(tensor.n_elements) for name, tensor in tensors.items() if _is_read(name, config))
    if missing or read != held:
        found = f"{file} stores {held:,} weights, but transformers reads {read:,} for a {config.model_type}"
        raise UserError(f"{found}, {len(missing)} tensors missing: {_OTHER}")
    ends = {keys.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")} - {None}
    model.generation_config.eos_token_id = sorted(ends) or None
    (folder / _LINK).unlink()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    known = {int(type): type.name.partition("_")[2] for type in LlamaFileType}
    largest = max(reader.tensors, key=lambda tensor: int(tensor.n_bytes)).tensor_type.name
    type = known.get(keys.get("general.file_type", -1)) or largest
    (folder / SOURCE_NAME).write_text(json.dumps({"file": file.name, "sha256": digest, "type": type}) + "\n")


def _is_read(name: str, config: "PreTrainedConfig") -> bool:
    """Return True unless a tensor only scales frequencies, or is in a layer that predicts several tokens."""
    block, _, rest = name.removeprefix("blk.").partition(".")
    return "rope_" not in name and not (rest and block.isdigit() and int(block) >= config.num_hidden_layers)


def _line(error: BaseException) -> str:
    return (" ".join(str(error).split()) or type(error).__name__)[:300]


def _complete(config: "PreTrainedConfig", keys: Mapping[str, Any], tensors: Mapping[str, Any]) -> None:
    """Set what transformers' reader ignores: sizes of heads, biases, and scaled rotary embeddings.

    Raises UserError, without the file's name, if the embeddings are scaled in a way that cannot be read exactly.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    of_model = {key.partition(".")[2]: value for key, value in keys.items()}
    found = {"head_dim": of_model.get("attention.key_length")}
    found |= {"attention_bias": "blk.0.attn_q.bias" in tensors, "mlp_bias": "blk.0.ffn_up.bias" in tensors}
    for key, value in found.items():
        if value is not None and hasattr(config, key):
            setattr(config, key, value)
    scaling = {key: value for key, value in of_model.items() if key.startswith("rope.scal")}
    kind = scaling.pop("rope.scaling.type", "none")
    factors = [torch.tensor(tensor.data) for name, tensor in tensors.items() if "rope_" in name]
    if kind == "none" and not scaling and not factors:
        return
    rope: Any = config.rope_parameters
    factor = float(factors[0].max()) if factors else scaling.pop("rope.scaling.factor", 1.0)
    original = scaling.pop("rope.scaling.original_context_length", None)
    scaling.pop("rope.scaling.finetuned", None)
    if len(factors) == 1 and "rope_freqs.weight" in tensors and kind == "none" and "rope_theta" in rope:
        config.rope_parameters = {**rope, **_LLAMA3_ROPE, "rope_type": "llama3", "factor": factor}
        plain, scaled = (ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0], factors[0])
        size = 2 * len(plain)
        unscaled = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
        if torch.allclose(unscaled / scaled, plain, rtol=1e-4, atol=0.0):
            return
    elif kind in ("linear", "yarn") and not factors and not scaling and "rope_theta" in rope:
        config.rope_parameters = {**rope, "rope_type": kind, "factor": factor}
        if kind == "yarn":
            config.rope_parameters["original_max_position_embeddings"] = original
        return
    raise UserError("scales its rotary embeddings in a way that transformers' reader would ignore", _OTHER)


def _split_as_llama_cpp(tokenizer: "PreTrainedTokenizerBase", pre: str | None, file: Path) -> None:
    """Give a tokenizer the pre-tokenizer that a file names, where transformers' reader does not."""
    from tokenizers import pre_tokenizers

    backend: Any = tokenizer.backend_tokenizer
    if pre in _DIGITS_APART:
        digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    elif pre in _WHOLE_WORDS:
        backend.model.ignore_merges = True
    elif pre not in _AS_GPT2 and isinstance(backend.pre_tokenizer, pre_tokenizers.ByteLevel):
        _LOGGER.warning("%s may split some texts differently here: the pre-tokenizer %s is unknown", file, pre)
