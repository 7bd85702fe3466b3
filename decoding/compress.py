"""Smaller drafts: int8 weights, and an lm_head that writes frequent tokens only. Neither changes what the target says.

A draft of fewer tokens is q = 0 for the others, which a lossless rule allows for (FR-Spec, 2502.14856).
"""

import copy
import json
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils.hub import cached_file

from decoding.target import CausalLM

OUTPUT_TOKENS_KEY = "headstart_output_tokens"
"""In a draft's config.json: the name of the file beside it that lists the tokens its lm_head is cut to."""
OUTPUT_TOKENS_NAME = "output_tokens.json"


def quantised(model: PreTrainedModel) -> PreTrainedModel:
    """The model with the weights of its linear layers rounded to int8, row by row; in place.

    Products are still made in the model's dtype, for which the weights are widened again at every call: without
    `torch.compile` (``static="compile"`` of `CausalLM`) the model is smaller, but slower. Needs torchao.
    """
    try:
        from torchao.quantization import Int8WeightOnlyConfig, quantize_
    except ImportError as error:
        raise ValueError("int8 weights need torchao: pip install 'headstart[quantise]'") from error
    quantize_(model, Int8WeightOnlyConfig())
    return model


def most_frequent_tokens(texts: Iterable[Sequence[int]], count: int, always: Sequence[int] = ()) -> tuple[int, ...]:
    """The ``count`` commonest tokens of texts of token ids, ``always`` among them, in increasing order.

    Fewer where the texts have no more. Of tokens equally common the lower id wins. Put what ends a text, and whatever
    else must not be missing, into ``always``.
    """
    if count < max(1, len(set(always))):
        raise ValueError(f"count is {count}: give at least 1, and room for the {len(set(always))} tokens in always")
    seen = Counter(token for text in texts for token in text)
    chosen = dict.fromkeys(always)
    for token in sorted(seen, key=lambda token: (-seen[token], token)):
        if len(chosen) == count:
            break
        chosen.setdefault(token)
    if not chosen:
        raise ValueError("the texts are empty: give some to count tokens in")
    return tuple(sorted(chosen))


def trimmed_vocabulary(model: PreTrainedModel, token_ids: Iterable[int]) -> CausalLM:
    """A draft that writes these tokens alone: the model with the other rows of its lm_head cut off.

    It still reads every token. The model given stays as it is, and shares its other weights with the draft.
    """
    tokens = sorted(token_ids)
    lm_head = model.get_output_embeddings()
    if not isinstance(lm_head, nn.Linear):
        raise ValueError(f"the lm_head is a {type(lm_head).__name__}: trim a draft before it is quantised")
    _check_tokens(tokens, lm_head.out_features)
    index = torch.tensor(tokens, device=lm_head.weight.device)
    cut = nn.Linear(lm_head.in_features, len(tokens), bias=lm_head.bias is not None, device="meta")
    cut.weight = nn.Parameter(lm_head.weight.detach()[index], requires_grad=False)
    if lm_head.bias is not None:
        cut.bias = nn.Parameter(lm_head.bias.detach()[index], requires_grad=False)
    shared: dict[int, object] = {id(parameter): parameter for parameter in model.parameters()}
    trimmed = copy.deepcopy(model, shared | {id(lm_head): cut})
    trimmed.config.tie_word_embeddings = False
    trimmed.config.get_text_config(decoder=True).tie_word_embeddings = False
    return CausalLM(trimmed, output_tokens=index)


def write_output_tokens(folder: str | Path, token_ids: Iterable[int]) -> None:
    """Let a draft's folder, which stays a plain transformers folder, be read by `loading.load_draft` as trimmed."""
    config_path = Path(folder) / "config.json"
    if not config_path.is_file():
        raise ValueError(f"{folder} holds no model: config.json is missing")
    config = json.loads(config_path.read_text())
    tokens = sorted(token_ids)
    _check_tokens(tokens, config.get("vocab_size", max(tokens, default=0) + 1))
    (Path(folder) / OUTPUT_TOKENS_NAME).write_text(json.dumps(tokens) + "\n")
    config_path.write_text(json.dumps({**config, OUTPUT_TOKENS_KEY: OUTPUT_TOKENS_NAME}, indent=2) + "\n")


def read_output_tokens(model: PreTrainedModel, name: str) -> tuple[int, ...] | None:
    """The tokens that a draft from this folder or hub id is to be trimmed to; None where it is not."""
    file_name = getattr(model.config, OUTPUT_TOKENS_KEY, None)
    if file_name is None:
        return None
    if file_name != OUTPUT_TOKENS_NAME:
        raise ValueError(f"{name} is to be trimmed by {file_name!r}: only {OUTPUT_TOKENS_NAME} beside it is read")
    try:
        tokens = json.loads(Path(str(cached_file(name, file_name))).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{name} is to be trimmed by its {file_name}, which cannot be read: {error}") from error
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise ValueError(f"{file_name} of {name} is no list of token ids: write it with write_output_tokens")
    _check_tokens(tokens, model.config.get_text_config(decoder=True).vocab_size)
    return tuple(tokens)


def _check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    if not tokens:
        raise ValueError("no tokens are given to trim the vocabulary to: give at least one")
    if len(set(tokens)) < len(tokens):
        token = Counter(tokens).most_common(1)[0][0]
        raise ValueError(f"token {token} is given twice: give each token of the trimmed vocabulary once")
    if outside := [token for token in tokens if not 0 <= token < vocab_size]:
        raise ValueError(f"token {outside[0]} is to be kept but the draft knows 0 to {vocab_size - 1}")
