"""Export of a draft, or any causal LM, as one GGUF file for llama.cpp and programs built on it. llama.cpp ignores
settings for which GGUF has no key. So this module writes only settings with a key, and rejects a model if any other
setting changes its logits.
"""

import io
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import redirect_stderr
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFReader, GGUFWriter, LlamaFileType, quants
from gguf.constants import GGML_QUANT_SIZES, GGUFValueType
from gguf.gguf_reader import ReaderTensor
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from decoding.drafters import Drafter, DraftModelDrafter, DSparkDrafter, Eagle3Drafter
from decoding.errors import UserError
from decoding.files.folder import UNREADABLE, read_output_tokens, reason
from decoding.files.hub import local_folder
from decoding.files.stored import check_finite
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import read_dspark_config
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.eagle3_config import read_eagle3_config
from decoding.model.eagle3_draft import Eagle3Draft
from decoding.model.loading import (
    eos_token_ids,
    load_draft,
    load_dspark,
    load_eagle3,
    load_model,
    load_tokenizer,
    model_without_weights,
)
from decoding.model.vocabulary import trimmed_vocabulary, with_filled_vocabulary
from trainer.export.companions import chain_length
from trainer.export.folder_formats import (
    describe_model,
    describe_state_draft,
    probe_logits,
    served_config,
    stored_draft,
)
from trainer.export.gguf_names import draft_metadata, draft_names, draft_tensors, metadata_of, row_order, tensors_of
from trainer.export.gguf_vocabulary import vocabulary_of
from trainer.export.readback import Readers
from trainer.export.task import DSPARK, EAGLE3, Artefact, ExportTask, kind_held_in

_Draft = TypeVar("_Draft", DSparkDraft, Eagle3Draft)
FILE_NAME = "model.gguf"
TYPES = {
    "f32": (GGMLQuantizationType.F32, LlamaFileType.ALL_F32),
    "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
    "bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
    "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0),
}
_TYPE_OF = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""Maps stored dtypes to the default type of the file, which is f32 for any other dtype."""
_TORCH = {
    GGMLQuantizationType.F32: torch.float32,
    GGMLQuantizationType.F16: torch.float16,
    GGMLQuantizationType.BF16: torch.bfloat16,
}
_VALUES = {bool: GGUFValueType.BOOL, int: GGUFValueType.UINT32, float: GGUFValueType.FLOAT32, str: GGUFValueType.STRING}
"""llama.cpp reads integers as unsigned numbers."""
_UNREAD = ("attention_bias", "mlp_bias", "head_dim", "rope_parameters")
"""Settings that transformers' GGUF reader misses, because llama.cpp takes them from the tensors or from other keys."""
_AGAIN = "export again, and check the disk if it happens twice"


def write(task: ExportTask) -> tuple[Artefact, tuple[str, ...]]:
    """Write a model's GGUF file, read it back and compare it.

    A trimmed draft gets a full lm_head that drafts the same tokens. A draft that reads its target's states gets the
    tokenizer of this target. Raises UserError for a model or a tokenizer that llama.cpp would interpret differently.
    """
    if kind_held_in(task.source) in (DSPARK, EAGLE3):
        return _write_state_draft(task)
    name, remarks = str(task.source), []
    model = load_model(name, "auto", torch.device("cpu"), task.trust_remote_code)
    check_finite(dict(model.named_parameters()), name, "use an earlier checkpoint, or train the model again")
    if (tokens := read_output_tokens(model, name)) is not None:
        model = with_filled_vocabulary(trimmed_vocabulary(model, tokens))
        remarks.append(
            f"the draft is trimmed to {len(tokens):,} of {model.config.vocab_size:,} tokens; llama.cpp cannot trim, so "
            "the file has a full lm_head, which drafts the same tokens at a higher cost"
        )
    tokenizer = load_tokenizer(name, task.trust_remote_code)
    vocabulary, told = vocabulary_of(tokenizer, model.config.vocab_size, eos_token_ids(model, tokenizer))
    metadata = {**metadata_of(model), **vocabulary}
    type, path = task.type or _TYPE_OF.get(model.dtype, "f32"), task.folder / FILE_NAME
    compared, rounded = _written(path, metadata, lambda: tensors_of(model), type)
    before, after = probe_logits(model), probe_logits(_read(path, model.config, model.dtype))
    change = float((before.float() - after.float()).abs().max())
    if change and not rounded:
        raise UserError(f"the logits of {path.name} and of the written model differ by {change:.3g}: export again")
    if rounded:
        compared += f" and a logit of a probe by at most {change:.3g}"
    else:
        compared += ", and so are the logits of a probe when transformers reads the file"
    artefact = replace(describe_model(model, task.format, type), rounded=rounded > 0)
    return artefact, (compared, *remarks, *told)


def _write_state_draft(task: ExportTask) -> tuple[Artefact, tuple[str, ...]]:
    """Write the file of a draft that reads its target's states.

    Raises UserError if the target cannot be read or does not fit the draft.
    """
    if task.target is None:
        raise UserError(f"{task.source} does not name its target, but a GGUF file needs the tokenizer: use --target")
    draft, trusted = stored_draft(task.source), task.trust_remote_code
    try:
        model = model_without_weights(local_folder(task.target, weights=False), torch.float32, trusted)
        target, tokenizer = CausalLM(model), load_tokenizer(task.target, trusted)
    except UNREADABLE as error:
        raise UserError(
            f"the file needs the tokenizer of the target {task.target}, which cannot be read ({reason(error)}): "
            "name the target with --target"
        ) from error
    if isinstance(draft, Eagle3Draft):
        draft.config = draft.config.for_target(target)
    else:
        draft.config.check_fits(target)
    if draft.config.target_layer_ids[-1] == target.num_layers - 1:
        raise UserError("the draft reads the target's last layer, which llama.cpp cannot read: serve it with vLLM")
    vocabulary, told = vocabulary_of(tokenizer, target.vocab_size, eos_token_ids(target.model, tokenizer))
    metadata, tensors = {**draft_metadata(draft.config), **vocabulary}, draft_tensors(draft)
    type = task.type or _TYPE_OF.get(draft.fc.weight.dtype, "f32")
    compared, rounded = _written(task.folder / FILE_NAME, metadata, lambda: iter(tensors.items()), type)
    return replace(describe_state_draft(draft, task.format, type), rounded=rounded > 0), (compared, *told)


def _written(
    path: Path, metadata: Mapping[str, Any], tensors: Callable[[], Iterator[tuple[str, Tensor]]], type: str
) -> tuple[str, int]:
    """Write a file and read it back; return a sentence and the number of rounded tensors."""
    write_file(path, metadata, tensors(), type)
    count, rounded, error = compare_file(path, metadata, tensors())
    compared = f"{path.name}: {len(metadata)} keys and {count - rounded} of {count} tensors are bit-equal"
    if rounded:
        compared += f"; the others are rounded to {type}, which changes a weight by at most {error:.3g}"
    return compared, rounded


def readers(task: ExportTask, target: CausalLM) -> Readers:
    """Return readers of the trained draft and of the exported file; both draft chains and run in the target's dtype."""
    path, chain = task.folder / FILE_NAME, chain_length(task.source)
    if kind_held_in(task.source) == DSPARK:
        config = replace(served_config(read_dspark_config(task.source)), tree=())
        return [
            (
                lambda: DSparkDrafter(load_dspark(task.source, target), config.block_size),
                lambda: DSparkDrafter(_read_into(path, DSparkDraft(config)).to(target.device, target.dtype)),
            )
        ]
    if kind_held_in(task.source) == EAGLE3:
        named = read_eagle3_config(task.source).for_target(target)
        return [
            (
                lambda: Eagle3Drafter(load_eagle3(task.source, target), chain),
                lambda: Eagle3Drafter(_read_into(path, Eagle3Draft(named)).to(target.device, target.dtype), chain),
            )
        ]

    def trained() -> Drafter:
        return DraftModelDrafter(load_draft(str(task.source), target, None, task.trust_remote_code), chain)

    def exported() -> Drafter:
        read = _read(path, AutoConfig.from_pretrained(task.source), target.dtype)
        read.to(target.device)  # type: ignore[arg-type]  # transformers' stubs
        return DraftModelDrafter(CausalLM(read), chain)

    return [(trained, exported)]


def _read(path: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Read a model from its file with transformers' reader; the settings in `_UNREAD` are taken from the trained
    ``config``.
    """
    with redirect_stderr(io.StringIO()):  # hides progress bars
        read = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
        for key in _UNREAD:
            if hasattr(config, key):
                setattr(read, key, getattr(config, key))
        model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, config=read, dtype=dtype
        )
    model.eval()
    return model


def _read_into(path: Path, draft: _Draft) -> _Draft:
    """Load all weights of a file into a draft that reads its target's states."""
    stored = {tensor.name: tensor for tensor in GGUFReader(path).tensors}
    for name, theirs in draft_names(draft).items():
        values = draft.get_parameter(name).data
        values[row_order(draft, name)] = _values(stored[theirs]).reshape(values.shape).to(values)
    if "d2t" in stored:
        draft.d2t.copy_(_values(stored["d2t"]) - torch.arange(len(draft.d2t)))
    return draft.requires_grad_(False).eval()


# --- the file ---------------------------------------------------------------------------------------------------------


def write_file(path: Path, metadata: Mapping[str, Any], tensors: Iterable[tuple[str, Tensor]], type: str) -> None:
    """Write a file. Vectors are stored in f32 (llama.cpp requires this), integers in i64, and matrices in ``type``.

    A matrix is stored in f16 if its rows do not divide into q8_0 blocks.
    """
    writer = GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if isinstance(value, list) and value:  # GGUF cannot store an empty list
            numbers = GGUFValueType.INT32 if isinstance(value[0], int) and not isinstance(value[0], bool) else None
            writer.add_key_value(key, value, GGUFValueType.ARRAY, sub_type=numbers)
        elif not isinstance(value, list) and key != "general.architecture":
            writer.add_key_value(key, value, _VALUES[value.__class__])
    writer.add_file_type(TYPES[type][1])
    writer.add_quantization_version(2)
    chosen = []
    for name, tensor in tensors:
        kind = GGMLQuantizationType.F32 if tensor.ndim == 1 else TYPES[type][0]
        kind = kind if tensor.is_floating_point() else GGMLQuantizationType.I64
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
    """Read a file and compare all of it with what was written; raise `UserError` for a difference.

    Returns the number of tensors, the number of tensors with rounded weights, and the largest change of a weight. Float
    types must contain the rounded weights bit for bit. q8_0 stores 32 weights as integers from -127 to 127 times one
    f16 scale, so the error of a weight may reach half a step plus the rounding error of the scale.
    """
    reader = GGUFReader(path)
    for key, value in metadata.items():
        field = reader.get_field(key)
        if field is None or not _same(field.contents(), value):
            raise UserError(f"the key {key} in {path.name} differs from what was written: {_AGAIN}")
    stored = {tensor.name: tensor for tensor in reader.tensors}
    written, rounded, largest = set(), 0, 0.0
    for name, tensor in tensors:
        written.add(name)
        values, held = tensor.float(), stored.get(name)
        if held is None:
            raise UserError(f"the tensor {name} is missing from {path.name}: {_AGAIN}")
        read = _values(held).reshape(values.shape)
        if not _is_rounded(read, values, held.tensor_type):
            raise UserError(f"the tensor {name} in {path.name} differs from what was written: {_AGAIN}")
        rounded += not torch.equal(read.float(), values)
        largest = max(largest, float((read - values).abs().max()))
    if more := sorted(stored.keys() - written):
        raise UserError(f"{path.name} has a tensor {more[0]} that was not written: {_AGAIN}")
    return len(written), rounded, largest


def _values(tensor: ReaderTensor) -> Tensor:
    """Return the values of a stored tensor, flat or by rows.

    Integers (int64) are returned as stored, and all other values in fp32.
    """
    if tensor.tensor_type == GGMLQuantizationType.I64:
        return torch.from_numpy(tensor.data.copy())
    return torch.from_numpy(quants.dequantize(tensor.data, tensor.tensor_type).copy())


def _is_rounded(read: Tensor, values: Tensor, kind: GGMLQuantizationType) -> bool:
    """Return True if ``read`` equals ``values`` rounded to the file's type."""
    if kind == GGMLQuantizationType.I64:
        return torch.equal(read.float(), values)
    if kind != GGMLQuantizationType.Q8_0:
        return torch.equal(read, values.to(_TORCH[kind]).float())
    peaks = values.reshape(-1, 32).abs().amax(1, keepdim=True)
    allowed = peaks * (0.5 / 127 + 2.0**-11) + 2.0**-17  # a tiny scale is off by up to 2^-25, counted 127 times
    return bool(((read - values).reshape(-1, 32).abs() <= allowed).all())


def _same(read: Any, written: Any) -> bool:
    """Return True if the values are equal; floats are compared in 32 bits, as stored."""
    if isinstance(written, float) or (isinstance(written, list) and written and isinstance(written[0], float)):
        return np.array_equal(np.array(read, np.float32), np.array(written, np.float32))
    return bool(read == written)


def _packed(tensor: Tensor, kind: GGMLQuantizationType) -> np.ndarray[Any, Any]:
    """Return a tensor's bytes in the file's type."""
    if kind == GGMLQuantizationType.I64:
        return tensor.contiguous().numpy().view(np.uint8)
    if kind == GGMLQuantizationType.Q8_0:
        return quants.quantize(tensor.float().contiguous().numpy(), kind)
    rounded = tensor.to(_TORCH[kind])
    if not bool(torch.isfinite(rounded).all()):
        raise UserError(f"a weight of {float(tensor.abs().max()):.3g} is outside f16's range: use type bf16 or f32")
    return rounded.contiguous().view(torch.uint8).numpy()
