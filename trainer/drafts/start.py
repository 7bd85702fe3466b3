"""The initial weights of a draft (layers of its target, a small model, or random weights), and the folder of the
finished draft.
"""

import copy
import difflib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from decoding.errors import UserError
from decoding.files.folder import read_output_tokens, reason, write_output_tokens
from decoding.files.stored import check_finite
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import check_same_tokenizer, dspark_folder, eagle3_folder, load_model, load_tokenizer
from decoding.model.vocabulary import trimmed_vocabulary, with_filled_vocabulary
from trainer.data.batch import Example
from trainer.files.transformers4 import write_model
from trainer.recipe.draft import DraftSection, InitSection
from trainer.target.initial import most_frequent_trained


class InitialDraft(NamedTuple):
    """A draft before training, in fp32 on its target's device, with all parameters trainable."""

    model: PreTrainedModel
    output_tokens: Int[Tensor, " outputs"] | None
    """The token that each lm_head row writes, in increasing order; None means that row i writes token i."""


def initial_draft(
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    section: DraftSection,
    examples: Sequence[Example],
    trust_remote_code: bool = False,
    longest: int = 0,
) -> InitialDraft:
    """Make a recipe's draft, with its vocabulary trimmed to the most frequent tokens in the answers if the section asks
    for this. ``longest`` is the length of the longest text that the draft reads: prompt and answer, within the target's
    context. Raises UserError for a draft that does not fit because of another tokenizer, too small a context or
    vocabulary, missing layers, or an invalid config.
    """
    init = section.init
    if init.from_model is None and getattr(target.model, "_is_stateful", False):  # some of these layers may not work
        raise UserError(_no_draft(target))
    model = _started(target, tokenizer, init, trust_remote_code)
    model.to(target.device, torch.float32)  # type: ignore[arg-type]  # transformers' stubs
    draft = CausalLM(model)
    if draft.no_trees is not None:
        raise UserError(_no_draft(draft))
    given = "from_model" if init.from_model else "from_config" if init.from_config else "from_target"
    check_reads(draft, target, f"draft.init.{given}", examples, longest)
    known = min(draft.vocab_size, target.vocab_size)
    written: Sequence[int] | None = None if init.from_model is None else read_output_tokens(model, init.from_model)
    if section.vocabulary is not None:
        if written is not None:
            raise UserError(
                f"draft.vocabulary is {section.vocabulary} but draft.init.from_model, {init.from_model}, is already "
                f"trimmed to {len(written)} tokens: leave draft.vocabulary out to keep these tokens"
            )
        written = most_frequent_trained(section.vocabulary, known, target, tokenizer, examples)
    if written is not None:
        draft = trimmed_vocabulary(model, [token for token in written if token < known])
    draft.model.requires_grad_(True)
    return InitialDraft(draft.model, draft.output_tokens)


def _no_draft(model: CausalLM) -> str:
    return (
        f"{model.no_trees}, so it cannot be a draft: set draft.init.from_model to a small full-attention model with "
        "the target's tokenizer, or train heads or a DSpark draft"
    )


def _started(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase, init: InitSection, trust_remote_code: bool
) -> PreTrainedModel:
    if init.from_model is not None:
        folders = {"dspark": dspark_folder(init.from_model), "eagle3": eagle3_folder(init.from_model)}
        for kind in (kind for kind, folder in folders.items() if folder is not None):
            raise UserError(
                f"draft.init.from_model, {init.from_model}, is {'a DSpark' if kind == 'dspark' else 'an EAGLE-3'} "
                f"draft: add draft.{kind}, as in recipes/any/{kind}.yaml, or use another draft"
            )
        check_same_tokenizer(tokenizer, load_tokenizer(init.from_model, trust_remote_code))
        model = load_model(init.from_model, torch.float32, target.device, trust_remote_code)
        remedy = "use an earlier checkpoint of that model, or another draft"
        check_finite(dict(model.named_parameters()), f"draft.init.from_model, {init.from_model},", remedy)
        return model
    if init.from_config is not None:
        return draft_from_config(target.model, init.from_config, trust_remote_code)
    assert init.from_target is not None, "the section's default"
    return draft_from_target(target.model, init.from_target.layers, trust_remote_code)


def write_draft(draft: CausalLM, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a finished draft as a transformers folder; `decoding.model.loading.load_draft` restores it bit for bit.

    `with_filled_vocabulary` adds the missing lm_head rows of a trimmed draft, because servers need all rows.
    """
    whole = with_filled_vocabulary(draft)
    write_model(whole, tokenizer, folder)
    if draft.output_tokens is not None:
        write_output_tokens(folder, draft.output_tokens.tolist())


# --- from the target ------------------------------------------------------------------------------------------------


def draft_from_target(
    target: PreTrainedModel, layers: int | Sequence[int], trust_remote_code: bool = False
) -> PreTrainedModel:
    """Make a model of some of the target's layers, in the target's dtype on the CPU.

    ``layers`` is either a list or a number. A list names layers in order, and negative numbers count from the end. A
    number says how many layers to take, evenly spaced from the first to the last; 1 means the first layer.
    """
    if getattr(target, "hf_quantizer", None) is not None:
        raise UserError(
            "the target is quantised, so its layers cannot be trained as a draft: set draft.init.from_model to a small "
            "model with the target's tokenizer, or train heads or a DSpark draft"
        )
    config = copy.deepcopy(target.config.get_text_config(decoder=True))
    kept = _chosen_layers(layers, config.num_hidden_layers)
    _set_layers(config, kept)
    draft = _new_model(config, target.dtype, trust_remote_code)
    # The text part of a multimodal model is an architecture in its own right.
    source, state = {name.replace("language_model.", ""): part for name, part in target.state_dict().items()}, {}
    for name in draft.state_dict():
        parts = name.split(".")
        # In every family the first number in a parameter's name is its layer (model.layers.3., transformer.h.3.).
        position = next((index for index, part in enumerate(parts) if part.isdigit()), None)
        if position is not None:
            parts[position] = str(kept[int(parts[position])])
        if (own := ".".join(parts)) not in source:
            raise UserError(
                f"the target, a {type(target).__name__}, lacks a parameter {own}: merge its adapters if it has any, or "
                "set draft.init.from_model or draft.init.from_config"
            )
        state[name] = source[own]
    draft.load_state_dict(state)
    _keep_ends(draft, target)
    return draft


def _chosen_layers(layers: int | Sequence[int], total: int) -> list[int]:
    if isinstance(layers, int):
        kept = _evenly_spaced(layers, total) if layers <= total else []
    else:
        kept = [layer + total if layer < 0 else layer for layer in layers]
    if not kept or min(kept) < 0 or max(kept) >= total:
        raise UserError(f"draft.init.from_target.layers is {layers}: use some of the target's layers 0 to {total - 1}")
    return kept


def _evenly_spaced(count: int, total: int) -> list[int]:
    """Return ``count`` evenly spaced numbers from 0 to total - 1, including both; if ``count`` is 1, return 0."""
    return [(2 * index * (total - 1) + count - 1) // (2 * (count - 1)) if count > 1 else 0 for index in range(count)]


def _set_layers(config: PreTrainedConfig, kept: Sequence[int]) -> None:
    """Keep only these layers in a config, in its ``layer_types`` and in other lists with an entry per layer."""
    total = config.num_hidden_layers
    config.num_hidden_layers = len(kept)
    for name, value in config.to_dict().items():
        if isinstance(value, list) and len(value) == total:
            setattr(config, name, [value[layer] for layer in kept])


def _new_model(config: PreTrainedConfig, dtype: torch.dtype, trust_remote_code: bool) -> PreTrainedModel:
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "auto_map"):
        raise UserError(
            f"transformers has no separate {config.model_type} model, so layers of the target cannot be a draft: set "
            "draft.init.from_model to a small model with the target's tokenizer, or train heads or a DSpark draft"
        )
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=trust_remote_code)
    return model


def _keep_ends(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """Copy the special tokens of the target's generation config, but not its sampling settings."""
    if (ends := target.generation_config) is not None:
        draft.generation_config = GenerationConfig(
            bos_token_id=ends.bos_token_id, eos_token_id=ends.eos_token_id, pad_token_id=ends.pad_token_id
        )


# --- from a config --------------------------------------------------------------------------------------------------


def draft_from_config(
    target: PreTrainedModel, changes: Mapping[str, Any], trust_remote_code: bool = False
) -> PreTrainedModel:
    """Make a model of the target's architecture with random weights from torch's global seed, in fp32 on the CPU.

    ``changes`` are the config keys that differ from the target's config. If the number of layers changes, lists with an
    entry per layer take evenly spaced entries of the target's lists.
    """
    base = target.config.get_text_config(decoder=True)
    known = {*(base.to_dict().keys() - PreTrainedConfig().to_dict().keys()), *base.attribute_map, "tie_word_embeddings"}
    if wrong := [key for key in changes if key not in known - {"vocab_size", "auto_map", "model_type"}]:
        nearest = difflib.get_close_matches(str(wrong[0]), known, n=3, cutoff=0.4)
        raise UserError(
            f"draft.init.from_config cannot set {wrong[0]!r} for a {base.model_type} draft: use keys such as "
            f"{', '.join(nearest or sorted(known))}, and draft.vocabulary for the vocabulary"
        )
    config = copy.deepcopy(base)
    names = ("num_hidden_layers", base.attribute_map.get("num_hidden_layers", "num_hidden_layers"))  # GPT-2: n_layer
    layers = next((changes[name] for name in names if name in changes), base.num_hidden_layers)
    try:
        _set_layers(config, _evenly_spaced(layers, base.num_hidden_layers))
        config = type(base).from_dict({**config.to_dict(), **_heads_that_follow(base, changes), **changes})
        draft = _new_model(config, torch.float32, trust_remote_code)
        with torch.no_grad():
            draft.eval()(torch.zeros((1, 2), dtype=torch.long), use_cache=False)
    except Exception as error:  # model families raise different errors for inconsistent sizes
        raise UserError(f"draft.init.from_config is not a valid {base.model_type} config: {reason(error)}") from error
    _keep_ends(draft, target)
    return draft


def _heads_that_follow(base: PreTrainedConfig, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attention sizes that follow from other sizes in the target: head_dim, and one key head per attention
    head.
    """
    hidden_size = changes.get("hidden_size", base.hidden_size)
    heads = changes.get("num_attention_heads", base.num_attention_heads)
    follow = {}
    if getattr(base, "head_dim", None) == base.hidden_size // base.num_attention_heads:
        follow["head_dim"] = hidden_size // heads
    if getattr(base, "num_key_value_heads", None) == base.num_attention_heads:
        follow["num_key_value_heads"] = heads
    return follow


# --- checks, and the vocabulary ---------------------------------------------------------------------------------------


def check_reads(draft: CausalLM, target: CausalLM, key: str, examples: Sequence[Example], longest: int) -> None:
    """Reject a draft that cannot read the data's tokens, or texts of ``longest`` tokens; ``key`` names the draft in the
    recipe.
    """
    if draft.max_positions is not None and draft.max_positions < longest:
        raise UserError(
            f"the draft from {key} reads at most {draft.max_positions} tokens, but this run has texts of {longest}: "
            "lower data.max_length and evaluation.max_new_tokens, or use another draft"
        )
    if draft.vocab_size < target.vocab_size:  # models of one family may pad their vocabularies
        largest = max(int(example.tokens.max()) for example in examples)
        if largest >= draft.vocab_size:
            raise UserError(
                f"the draft from {key} knows tokens 0 to {draft.vocab_size - 1}, but the training data contains "
                f"token {largest}: use a draft with the target's vocabulary"
            )
