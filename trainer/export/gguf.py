"""A draft, or any other causal LM, as one GGUF file for llama.cpp and the programs built on it.

llama.cpp reads a file of an architecture that it knows and ignores what it has no key for. So only settings that have a
key are written, and a model with any other that changes the logits is rejected.
"""

import io
from collections.abc import Iterable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import (
    MODEL_ARCH,
    MODEL_ARCH_NAMES,
    GGMLQuantizationType,
    GGUFReader,
    GGUFWriter,
    LlamaFileType,
    get_tensor_name_map,
    quants,
)
from gguf.constants import GGML_QUANT_SIZES, GGUFValueType
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from decoding.drafters import Drafter, DraftModelDrafter
from decoding.model.architecture import shortest_window
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids, load_draft, load_model, load_tokenizer
from decoding.model.stored import check_finite
from decoding.model.vocabulary import read_output_tokens, trimmed_vocabulary, with_filled_vocabulary
from trainer.export.companions import chain_length
from trainer.export.draft import describe_model, probe_logits
from trainer.export.gguf_vocabulary import vocabulary_of
from trainer.export.readback import Readers
from trainer.export.task import Artefact, ExportTask

FILE_NAME = "model.gguf"
ARCHITECTURES = {
    "llama": MODEL_ARCH.LLAMA,
    "mistral": MODEL_ARCH.LLAMA,
    "qwen2": MODEL_ARCH.QWEN2,
    "qwen3": MODEL_ARCH.QWEN3,
}
"""Model type -> llama.cpp's architecture, for models whose every tensor it holds under one name of its own."""
TYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_TYPE_OF = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""Stored dtype -> type of the file, if none is given; f32 for any other dtype."""
_TORCH = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_VALUES = {
    bool: GGUFValueType.BOOL,
    int: GGUFValueType.UINT32,
    float: GGUFValueType.FLOAT32,
    str: GGUFValueType.STRING,
}
"""llama.cpp reads whole numbers as unsigned."""
_YARN_UNWRITTEN = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate")
"""Settings of yarn for which llama.cpp's defaults, transformers' own, are kept."""
_UNREAD = ("attention_bias", "mlp_bias", "head_dim", "rope_parameters")
"""Settings that llama.cpp takes from the tensors and from keys that transformers' reader of GGUF does not know."""
_OTHER_PROGRAM = "serve it with a program that reads transformers folders, such as vLLM"
_AGAIN = "export again, and check the disk if it happens twice"


def write(task: ExportTask) -> tuple[Artefact, tuple[str, ...]]:
    """Write a model's GGUF file, read it back and compare.

    A trimmed draft gets a full lm_head, by which it drafts the same tokens. ValueError for a model or a tokenizer that
    llama.cpp would read as another.
    """
    name, remarks = str(task.source), []
    model = load_model(name, "auto", torch.device("cpu"), task.trust_remote_code)
    check_finite(dict(model.named_parameters()), name, "give an earlier checkpoint, or train the model again")
    if (tokens := read_output_tokens(model, name)) is not None:
        model = with_filled_vocabulary(trimmed_vocabulary(model, tokens))
        remarks.append(
            f"the draft is trimmed to {len(tokens):,} of {model.config.vocab_size:,} tokens, which llama.cpp does not "
            "know of: its lm_head is written whole, drafts the same tokens, and costs more"
        )
    tokenizer = load_tokenizer(name, task.trust_remote_code)
    vocabulary, told = vocabulary_of(tokenizer, model.config.vocab_size, eos_token_ids(model, tokenizer))
    metadata = {**metadata_of(model), **vocabulary}
    type, path = task.type or _TYPE_OF.get(model.dtype, "f32"), task.folder / FILE_NAME
    write_file(path, metadata, tensors_of(model), type)
    count, rounded, error = compare_file(path, metadata, tensors_of(model))
    before, after = probe_logits(model), probe_logits(_read(path, model.config, model.dtype))
    change = float((before.float() - after.float()).abs().max())
    if change and not rounded:
        raise ValueError(f"{path.name} reads back with other logits than were written (by {change:.3g}): export again")
    compared = f"{path.name}: {len(metadata)} keys, {count - rounded} of {count} tensors"
    if rounded:
        compared += (
            f" are equal, to the bit; the others are the weights rounded to {type}: a weight changes by at most "
            f"{error:.3g}, a logit of a probe by {change:.3g}"
        )
    else:
        compared += " and the logits of a probe, as transformers reads the file, are equal, to the bit"
    artefact = replace(describe_model(model, task.format, type), rounded=rounded > 0)
    return artefact, (compared, *remarks, *told)


def readers(task: ExportTask, target: CausalLM) -> Readers:
    """Return readers of the trained draft and the exported file. Both draft in the target's dtype."""
    chain = chain_length(task.source)

    def trained() -> Drafter:
        return DraftModelDrafter(load_draft(str(task.source), target, None, task.trust_remote_code), chain)

    def exported() -> Drafter:
        read = _read(task.folder / FILE_NAME, AutoConfig.from_pretrained(task.source), target.dtype)
        read.to(target.device)  # type: ignore[arg-type]  # transformers' stubs
        return DraftModelDrafter(CausalLM(read), chain)

    return [(trained, exported)]


def _read(path: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Read a model from its file by transformers' own reader; only `_UNREAD` comes from the trained ``config``."""
    with redirect_stderr(io.StringIO()):  # its bars
        read = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        for key in _UNREAD:
            if hasattr(config, key):
                setattr(read, key, getattr(config, key))
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, config=read, dtype=dtype
        )
    model.eval()
    return model


# --- the model by llama.cpp's names -----------------------------------------------------------------------------------


def metadata_of(model: PreTrainedModel) -> dict[str, Any]:
    """Return GGUF's keys for the model's sizes and rotary embeddings; ValueError for what llama.cpp would misread."""
    config = model.config
    if config.model_type not in ARCHITECTURES:
        raise ValueError(
            f"a model of type {config.model_type} cannot be written as GGUF here, only {', '.join(ARCHITECTURES)}: "
            "convert it with llama.cpp's convert_hf_to_gguf.py"
        )
    if config.hidden_act != "silu":
        raise ValueError(f"hidden_act is {config.hidden_act}, and llama.cpp computes silu: {_OTHER_PROGRAM}")
    if (window := shortest_window(config)) is not None:
        raise ValueError(
            f"the model attends to a window of {window} tokens, which llama.cpp would not: set sliding_window to null, "
            f"and max_position_embeddings to at most {window}, in its config.json"
        )
    if getattr(config, "quantization_config", None) is not None:
        raise ValueError("the model is quantised: give its folder before that, and choose --type q8_0")
    prefix = MODEL_ARCH_NAMES[ARCHITECTURES[config.model_type]]
    sizes = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": _head_size(config),
        "attention.value_length": _head_size(config),
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "vocab_size": config.vocab_size,
        "rope.dimension_count": _head_size(config),
        **_rope(config),
    }
    return {"general.architecture": prefix, **{f"{prefix}.{key}": value for key, value in sizes.items()}}


def tensors_of(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of each tensor of the file, in the stored dtype, as llama.cpp lays it out.

    A tied lm_head is left out: llama.cpp then takes the embeddings.
    """
    config = model.config
    architecture = ARCHITECTURES[config.model_type]
    names = get_tensor_name_map(architecture, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        stem, _, suffix = name.rpartition(".")
        theirs = names.get_name(stem)
        if theirs is None or suffix not in ("weight", "bias"):
            raise ValueError(f"llama.cpp's {config.model_type} has no place for the tensor {name}: {_OTHER_PROGRAM}")
        values = tensor.detach().cpu()
        if architecture == MODEL_ARCH.LLAMA and ".q_proj." in name:
            values = _interleaved(values, config.num_attention_heads)
        if architecture == MODEL_ARCH.LLAMA and ".k_proj." in name:
            values = _interleaved(values, config.num_key_value_heads)
        yield f"{theirs}.{suffix}", values
    if config.rope_parameters.get("rope_type") == "llama3":  # the numbers by which llama.cpp divides the frequencies
        size = _head_size(config)
        unscaled: Tensor = 1.0 / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
        yield "rope_freqs.weight", unscaled / ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))[0]


def _head_size(config: PreTrainedConfig) -> int:
    size: int = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return size


def _rope(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the keys of the rotary embeddings."""
    rope = config.rope_parameters
    kind = rope.get("rope_type", "default")
    if rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise ValueError(f"the model turns {rope['partial_rotary_factor']} of each head only: {_OTHER_PROGRAM}")
    base = {"rope.freq_base": float(rope["rope_theta"])}
    if kind == "default" or (kind == "llama3" and ARCHITECTURES[config.model_type] == MODEL_ARCH.LLAMA):
        return base
    scaled = {**base, "rope.scaling.type": kind, "rope.scaling.factor": float(rope.get("factor", 1.0))}
    if kind == "linear":
        return scaled
    if kind == "yarn" and not any(rope.get(key) is not None for key in _YARN_UNWRITTEN):
        return {**scaled, "rope.scaling.original_context_length": rope["original_max_position_embeddings"]}
    raise ValueError(
        f"the model's rotary embeddings are scaled by {kind} ({rope}), which a GGUF file of a {config.model_type} "
        f"written here cannot say: {_OTHER_PROGRAM}"
    )


def _interleaved(rows: Tensor, heads: int) -> Tensor:
    """Reorder the rows of q or k: transformers turns row i with i + half a head, llama.cpp's llama with i + 1."""
    halves = rows.reshape(heads, 2, rows.shape[0] // heads // 2, *rows.shape[1:])
    return halves.transpose(1, 2).reshape(rows.shape)


# --- the file ---------------------------------------------------------------------------------------------------------


def write_file(path: Path, metadata: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], type: str) -> None:
    """Write a file. Vectors are stored in f32, as llama.cpp wants them; matrices in ``type``.

    Rows that q8_0 cannot cut into blocks are stored in f16.
    """
    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if isinstance(value, list) and value:  # a file holds no empty list
            numbers = GGUFValueType.INT32 if isinstance(value[0], int) else None
            writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=numbers)
        elif not isinstance(value, list) and key != "general.architecture":
            writer.add_key_value(key, value, _VALUES[value.__class__])
    writer.add_file_type(TYPES[type][1])
    writer.add_quantization_version(2)
    chosen = []
    for name, tensor in tensors:
        kind = GGMLQuantizationType.F32 if tensor.ndim == 1 else TYPES[type][0]
        if tensor.shape[-1] % GGML_QUANT_SIZES[kind][0]:
            kind = GGMLQuantizationType.F16
        block, size = GGML_QUANT_SIZES[kind]
        shape = (*tensor.shape[:-1], tensor.shape[-1] // block * size)
        writer.add_tensor_info(name, shape, np.dtype(np.uint8), int(np.prod(shape)), raw_dtype=kind)
        chosen.append((tensor, kind))
    try:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for tensor, kind in chosen:
            writer.write_tensor_data(_packed(tensor, kind))
    finally:
        writer.close()


def compare_file(
    path: Path, metadata: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]]
) -> tuple[int, int, float]:
    """Read a file and compare all of it with what was written; `ValueError` for a difference.

    Returns the tensors, those of them with weights that the file's type has no number for, and the greatest difference
    of a weight. Floats must be the rounded weights to the bit. q8_0 holds 32 weights as whole numbers from -127 to 127
    times one number in f16: an error beyond half a step, and what rounding that number adds, is a difference.
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
        values, found = tensor.float(), stored.get(name)
        if found is None:
            raise ValueError(f"{path.name} reads back without {name}: {_AGAIN}")
        read = torch.from_numpy(quants.dequantize(found.data, found.tensor_type).copy()).reshape(values.shape)
        if not _is_rounded(read, values, found.tensor_type):
            raise ValueError(f"{path.name} reads back with another {name} than was written: {_AGAIN}")
        rounded += not torch.equal(read, values)
        largest = max(largest, float((read - values).abs().max()))
    if more := sorted(stored.keys() - written):
        raise ValueError(f"{path.name} reads back with a tensor {more[0]} that was not written: {_AGAIN}")
    return len(written), rounded, largest


def _is_rounded(read: Tensor, values: Tensor, kind: GGMLQuantizationType) -> bool:
    """Return True if ``read`` is what ``values`` round to in a type of the file."""
    if kind != GGMLQuantizationType.Q8_0:
        return torch.equal(read, values.to(_TORCH[kind]).float())
    peaks = values.reshape(-1, 32).abs().amax(1, keepdim=True)
    allowed = peaks * (0.5 / 127 + 2.0**-11) + 2.0**-17  # f16 holds no steps below 2^-24, of which 127 add up
    return bool(((read - values).reshape(-1, 32).abs() <= allowed).all())


def _same(read: Any, written: Any) -> bool:
    """Return True for equal values; floats are stored in 32 bits."""
    if isinstance(written, float) or (isinstance(written, list) and written and isinstance(written[0], float)):
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
