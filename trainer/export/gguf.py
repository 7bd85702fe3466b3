"""A draft, or any other causal LM, as one GGUF file for llama.cpp and the programs built on it."""

import io
from collections.abc import Iterator
from contextlib import redirect_stderr
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from decoding.drafters import Drafter, DraftModelDrafter
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids, load_draft, load_model, load_tokenizer
from decoding.model.stored import check_finite, weights_header
from decoding.model.vocabulary import read_output_tokens, trimmed_vocabulary, with_filled_vocabulary
from trainer.export.artefact import Artefact, Task, Written
from trainer.export.draft import probe_logits
from trainer.export.gguf_vocabulary import vocabulary_of
from trainer.export.source import chain_length

FILE_NAME = "model.gguf"
_TYPE_OF = {torch.bfloat16: "bf16", torch.float16: "f16"}
"""Stored dtype -> type of the file, if none is asked for; f32 for any other dtype."""
_EXACT = {"F32": ("f32",), "F16": ("f16", "f32"), "BF16": ("bf16", "f32")}
"""Type of stored weights, by its safetensors name -> types of the file that have a number for each of them."""
_UNREAD = ("attention_bias", "mlp_bias", "head_dim", "rope_parameters")
"""Settings that llama.cpp takes from the tensors and from keys that transformers' reader of GGUF does not know."""


def write(task: Task) -> Written:
    """Write a model's GGUF file, read it back and compare.

    A trimmed draft gets a full lm_head, by which it drafts the same tokens. ValueError for a model or a tokenizer that
    llama.cpp would read as another.
    """
    try:
        from trainer.export.gguf_file import compare_file, write_file
        from trainer.export.gguf_model import metadata_of, tensors_of
    except ImportError as error:
        raise ValueError("format gguf needs the package gguf: pip install 'headstart[gguf]'") from error
    model, remarks = _load(task)
    tokenizer = load_tokenizer(str(task.source), task.trust_remote_code)
    vocabulary = vocabulary_of(tokenizer, model.config.vocab_size, eos_token_ids(model, tokenizer))
    metadata = {**metadata_of(model), **vocabulary.metadata}
    type, path = task.type or _TYPE_OF.get(model.dtype, "f32"), task.folder / FILE_NAME
    write_file(path, metadata, tensors_of(model), type)
    compared = compare_file(path, metadata, tensors_of(model))
    change = _change_of_logits(model, path)
    if change and not compared.rounded:
        raise ValueError(f"{path.name} reads back with other logits than were written (by {change:.3g}): export again")
    told = f"{path.name}: {len(metadata)} keys, {compared.tensors - compared.rounded} of {compared.tensors} tensors"
    if compared.rounded:
        told += (
            f" are equal, to the bit; the others are the weights rounded to {type}: a weight changes by at most "
            f"{compared.largest_error:.3g}, a logit of a probe by {change:.3g}"
        )
    else:
        told += " and the logits of a probe, as transformers reads the file, are equal, to the bit"
    return Written(_described(task.format, model, type), (told, *remarks, *vocabulary.remarks))


def drafters(task: Task, target: CausalLM) -> Iterator[Drafter]:
    """Yield the trained draft and the exported file: see `trainer.export.reread`. Both draft in the target's dtype."""
    chain = chain_length(task.source)
    trained = load_draft(str(task.source), target, None, task.trust_remote_code)
    config = trained.model.config
    yield DraftModelDrafter(trained, chain)
    del trained
    exported = _read(task.folder / FILE_NAME, config, target.dtype)
    exported.to(target.device)  # type: ignore[arg-type]  # transformers' stubs
    yield DraftModelDrafter(CausalLM(exported), chain)


def rounds(task: Task) -> bool:
    """Return True if the file's type has no number for some of the stored weights."""
    stored = {tensor.dtype for tensor in weights_header(task.source, "train the model again").values()}
    return task.type is not None and any(task.type not in _EXACT.get(dtype, ()) for dtype in stored)


def _described(format: str, model: PreTrainedModel, type: str) -> Artefact:
    return Artefact(
        format=format,
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        dtype=type,
        hidden_size=model.config.hidden_size,
        vocab_size=model.config.vocab_size,
        layers=model.config.num_hidden_layers,
    )


def _load(task: Task) -> tuple[PreTrainedModel, tuple[str, ...]]:
    """Load the model in its stored dtype, on the CPU, and remarks on it."""
    name = str(task.source)
    model = load_model(name, "auto", torch.device("cpu"), task.trust_remote_code)
    check_finite(dict(model.named_parameters()), name, "give an earlier checkpoint, or train the model again")
    tokens = read_output_tokens(model, name)
    if tokens is None:
        return model, ()
    remark = (
        f"the draft is trimmed to {len(tokens):,} of {model.config.vocab_size:,} tokens, which llama.cpp does not know "
        "of: its lm_head is written whole, drafts the same tokens, and costs more"
    )
    return with_filled_vocabulary(trimmed_vocabulary(model, tokens)), (remark,)


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


def _change_of_logits(model: PreTrainedModel, path: Path) -> float:
    """Return the largest difference between the logits of a model and of its file, on a probe; 0 if none differs."""
    before, after = probe_logits(model), probe_logits(_read(path, model.config, model.dtype))
    difference: Tensor = (before.float() - after.float()).abs().max()
    return float(difference)
