"""Drafts with a trimmed vocabulary: an lm_head for frequent tokens only (FR-Spec, 2502.14856).

Such a draft has q = 0 for every other token. Lossless rules allow this, so the target's output is unchanged.
"""

import copy
import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.errors import UserError, check_once
from decoding.model.causal_lm import CausalLM
from decoding.model.hub import local_folder
from decoding.model.stored import StoredTensor

OUTPUT_TOKENS_KEY = "headstart_output_tokens"
"""Key in a draft's config.json. Its value names the file, in the same folder, with the tokens of the trimmed
lm_head."""
OUTPUT_TOKENS_NAME = "output_tokens.json"


def most_frequent_tokens(
    texts: Iterable[Sequence[int]], count: int, vocab_size: int, always: Collection[int] = ()
) -> tuple[int, ...]:
    """Return the ``count`` most frequent of ``vocab_size`` tokens in texts of token ids, in increasing order.

    Among equally frequent tokens the lowest ids come first. If the texts contain fewer different tokens, the lowest ids
    fill the rest: the usual tokenizers number tokens by their frequency in the tokenizer's own data. The tokens
    ``always`` are chosen before all others; they should contain the EOS tokens.
    """
    if count < max(1, len(set(always))):
        raise UserError(f"count is {count}: use at least 1, and at least the {len(set(always))} tokens in always")
    seen, first = Counter(token for text in texts for token in text), set(always)
    ranked = sorted(range(vocab_size), key=lambda token: (token not in first, -seen[token], token))
    return tuple(sorted(ranked[:count]))


def trimmed_vocabulary(model: PreTrainedModel, token_ids: Iterable[int]) -> CausalLM:
    """Make a draft that writes only ``token_ids``: a copy of the model without the other rows of its lm_head.

    The draft still reads every token. ``model`` is unchanged and shares all other weights with the draft.
    """
    tokens = sorted(token_ids)
    lm_head = model.get_output_embeddings()
    if not isinstance(lm_head, nn.Linear):
        raise UserError(f"the lm_head is a {type(lm_head).__name__}: trim a draft before quantising it")
    _check_tokens(tokens, lm_head.out_features)
    index = torch.tensor(tokens, device=lm_head.weight.device)
    weight, bias = lm_head.weight.detach()[index], None if lm_head.bias is None else lm_head.bias.detach()[index]
    return CausalLM(_with_lm_head(model, weight, bias), output_tokens=index)


def with_filled_vocabulary(draft: CausalLM) -> PreTrainedModel:
    """Return a trimmed draft with a full lm_head, for programs that do not support trimming.

    The lm_head row of a token that the draft cannot write is the mean of the draft's rows. So the logit of such a token
    is the mean of the draft's logits and never the largest, and greedy decoding writes the same tokens. All other
    weights are shared. The model of a draft that is not trimmed is returned unchanged.
    """
    model: PreTrainedModel = draft.model
    if (output_tokens := draft.output_tokens) is None:
        return model
    lm_head = model.get_output_embeddings()
    assert isinstance(lm_head, nn.Linear), "trimmed_vocabulary made it"

    def filled(rows: Tensor) -> Tensor:
        mean = rows.float().mean(0, keepdim=True).to(rows.dtype)
        return mean.repeat(draft.vocab_size, *[1] * (rows.ndim - 1)).index_copy(0, output_tokens, rows)

    weight, bias = filled(lm_head.weight.detach()), None if lm_head.bias is None else filled(lm_head.bias.detach())
    return _with_lm_head(model, weight, bias)


def tokens_of(d2t: Int[Tensor, " outputs"]) -> Int[Tensor, " outputs"]:
    """Return the target's token for each output, in increasing order.

    ``d2t`` contains, for each output, its token minus the output's number, as in folders of speculators.
    """
    return torch.arange(len(d2t), device=d2t.device) + d2t


def d2t_of(tokens: Sequence[int]) -> Int[Tensor, " outputs"]:
    """Return the differences whose `tokens_of` are these tokens, on the CPU."""
    return torch.tensor(tokens) - torch.arange(len(tokens))


def without_d2t(
    header: Mapping[str, StoredTensor], outputs: int | None, folder: Path, remedy: str
) -> dict[str, StoredTensor]:
    """Return a header without ``d2t``; raise UserError unless d2t has ``outputs`` whole numbers, or is missing if that
    is None.
    """
    rest = dict(header)
    found, wanted = rest.pop("d2t", None), None if outputs is None else StoredTensor("I64", (outputs,))
    if found != wanted:
        size = "unknown" if outputs is None else f"not a list of {outputs} whole numbers"
        raise UserError(f"{folder} does not fit its config: d2t is {size}; {remedy}")
    return rest


def check_d2t(d2t: Int[Tensor, " outputs"], vocab_size: int, folder: Path, remedy: str) -> None:
    """Raise UserError unless the tokens of ``d2t`` increase and are below ``vocab_size``."""
    tokens = tokens_of(d2t)
    if not bool((tokens.diff() > 0).all()) or tokens[0] < 0 or tokens[-1] >= vocab_size:
        raise UserError(f"d2t in {folder} does not give increasing tokens of the target: {remedy}")


def over_vocabulary(
    logits: Float[Tensor, "*rows outputs"], output_tokens: Int[Tensor, " outputs"] | None, vocab_size: int
) -> Float[Tensor, "*rows vocab"]:
    """Map a draft's logits to the target's vocabulary of ``vocab_size`` tokens.

    Tokens that the draft cannot write get -inf; tokens that only the draft has are dropped. ``output_tokens``: the
    token id of each output; None if output i is token i.
    """
    if output_tokens is not None:
        whole = logits.new_full((*logits.shape[:-1], vocab_size), -torch.inf)
        return whole.index_copy_(-1, output_tokens, logits)
    missing = vocab_size - logits.shape[-1]
    return nn.functional.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[..., :vocab_size]


def _with_lm_head(model: PreTrainedModel, weight: Tensor, bias: Tensor | None) -> PreTrainedModel:
    """Copy the model with its own frozen lm_head; all other weights are shared."""
    lm_head = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    lm_head.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        lm_head.bias = nn.Parameter(bias, requires_grad=False)
    shared: dict[int, Any] = {id(parameter): parameter for parameter in model.parameters()}  # deepcopy's memo
    other: PreTrainedModel = copy.deepcopy(model, shared | {id(model.get_output_embeddings()): lm_head})
    other.config.tie_word_embeddings = False
    other.config.get_text_config(decoder=True).tie_word_embeddings = False
    return other


def write_output_tokens(folder: str | Path, token_ids: Iterable[int]) -> None:
    """Mark a draft's folder as trimmed to ``token_ids``.

    `loading.load_draft` reads the mark; transformers ignores it.
    """
    config_path = Path(folder) / "config.json"
    if not config_path.is_file():
        raise UserError(f"{folder} does not contain a model: config.json is missing")
    config = json.loads(config_path.read_text())
    tokens = sorted(token_ids)
    _check_tokens(tokens, config.get("vocab_size", max(tokens, default=0) + 1))
    (Path(folder) / OUTPUT_TOKENS_NAME).write_text(json.dumps(tokens) + "\n")
    config_path.write_text(json.dumps({**config, OUTPUT_TOKENS_KEY: OUTPUT_TOKENS_NAME}, indent=2) + "\n")


def read_output_tokens(model: PreTrainedModel, name: str) -> tuple[int, ...] | None:
    """Return the tokens that a trimmed draft from this folder or Hub id can write; None if it is not trimmed."""
    file_name = getattr(model.config, OUTPUT_TOKENS_KEY, None)
    if file_name is None:
        return None
    if file_name != OUTPUT_TOKENS_NAME:
        raise UserError(f"config.json of {name} names the tokens' file {file_name!r}: name it {OUTPUT_TOKENS_NAME}")
    try:
        tokens = json.loads((local_folder(name, weights=False) / file_name).read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file_name} of {name} cannot be read: {error}") from error
    if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
        raise UserError(f"{file_name} of {name} is not a list of token ids: write it with write_output_tokens")
    _check_tokens(tokens, model.config.get_text_config(decoder=True).vocab_size)
    return tuple(tokens)


def _check_tokens(tokens: Sequence[int], vocab_size: int) -> None:
    if not tokens:
        raise UserError("the trimmed vocabulary is empty: use at least one token")
    check_once("token", tokens)
    if outside := [token for token in tokens if not 0 <= token < vocab_size]:
        raise UserError(f"token {outside[0]} is unknown to the draft, which has 0 to {vocab_size - 1}: omit it")
