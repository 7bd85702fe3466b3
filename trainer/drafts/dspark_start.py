"""A DSpark draft before training: its sizes, mask token, vocabulary and initial weights."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import HEAD_DIMS, DSparkConfig
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.loading import eos_token_ids, load_dspark
from trainer.data.batch import Example
from trainer.processes import from_first
from trainer.recipe.draft import DraftSection, DSparkSection
from trainer.target.initial import fit_states, most_frequent_trained, start_bias
from trainer.target.loading import OnlineTarget

SCALED = ("linear", "yarn")
"""The scalings of rotary embeddings that llama.cpp supports for a draft. A draft takes them over from its target."""
_UNSCALED = ("rope_theta", "partial_rotary_factor")


def initial_dspark(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase, section: DraftSection, examples: Sequence[Example]
) -> DSparkDraft:
    """Make a recipe's initial draft, in fp32 on the target's device. The draft is either a stored draft or a new one,
    whose random weights come from torch's global seed.

    Raises UserError for sizes that no server loads, and for a mask token that ends a text or occurs in the examples.
    """
    assert section.dspark is not None, "the recipe asks for a DSpark draft"
    ends = eos_token_ids(target.model, tokenizer)
    # The data may contain tokens outside the target's vocabulary.
    largest = max((int(example.tokens.max(initial=0)) for example in examples), default=0)
    occurs = np.zeros(max(target.vocab_size, 1 + largest), np.bool_)
    for example in examples:  # marking is several times faster than sorting each example's tokens
        occurs[example.tokens] = True
    written = np.flatnonzero(occurs).tolist()
    if section.init.from_model is None:
        config = dspark_config(target, tokenizer, section.dspark, {*ends, *written})
        config.check_fits(target)
        chosen: Sequence[int] | None = None
        if section.vocabulary is not None and section.vocabulary < target.vocab_size:
            chosen = most_frequent_trained(section.vocabulary, target.vocab_size, target, tokenizer, examples)
            config = replace(config, draft_vocab_size=len(chosen))
        draft = DSparkDraft(config).to(target.device)
        if chosen is not None:
            draft.write_only(chosen, target.model.get_output_embeddings().weight)
    else:
        draft = _stored_draft(target, tokenizer, section.init.from_model, section)
        config = draft.config
    if config.mask_token_id in {*ends, *written}:
        why = "ends a text" if config.mask_token_id in ends else "occurs in the training data"
        raise UserError(
            f"token {config.mask_token_id} would be the draft's mask, but it {why}: set draft.dspark.mask_token to a "
            "token that no text contains"
        )
    return draft


def _stored_draft(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase, name: str, of_draft: DraftSection
) -> DSparkDraft:
    """Load a draft to train further; raise UserError if its sizes differ from the sizes in the section. A size of None
    in the section matches any size.
    """
    section = of_draft.dspark
    assert section is not None, "the recipe asks for a DSpark draft"
    draft = load_dspark(name, target).float().requires_grad_(True).train()
    if draft.lm_head is not None:
        draft.lm_head.requires_grad_(False)
    config = draft.config = replace(draft.config, tree=())  # the tree will be fitted again
    if config.markov_head_type != "vanilla":
        raise UserError(
            f"draft.init.from_model, {name}, has a {config.markov_head_type} Markov head, which cannot be trained: "
            "use a draft with a vanilla head"
        )
    mask = None if section.mask_token is None else mask_token(tokenizer, target.vocab_size, section.mask_token)
    for key, wanted, held in (
        ("layers", section.layers, config.num_hidden_layers),
        ("block_size", section.block_size, config.block_size),
        ("taps", section.taps, config.target_layer_ids),
        ("intermediate_size", section.intermediate_size, config.intermediate_size),
        ("rope_theta", section.rope_theta, config.rope_theta),
        ("rms_norm_eps", section.rms_norm_eps, config.rms_norm_eps),
        ("markov_rank", section.markov_rank, config.markov_rank),
        ("confidence", section.confidence, config.enable_confidence_head),
        ("sample_from_anchor", section.sample_from_anchor, config.sample_from_anchor),
        ("mask_token", mask, config.mask_token_id),
    ):
        if wanted not in (None, held):
            raise UserError(
                f"draft.init.from_model, {name}, has {key} {held} and not {wanted}: change draft.dspark.{key}, or "
                "use another draft"
            )
    if of_draft.vocabulary is not None and config.outputs > min(of_draft.vocabulary, config.vocab_size):
        raise UserError(
            f"draft.init.from_model, {name}, writes {config.outputs} tokens, more than {of_draft.vocabulary}: "
            "leave draft.vocabulary out to keep these tokens, or use another draft"
        )
    return draft


def dspark_config(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase, section: DSparkSection, used: Collection[int] = ()
) -> DSparkConfig:
    """Return the config of a recipe's draft; sizes default to `layer_sizes`.

    A token in ``used`` cannot be the mask token.
    """
    rope, taps = rotary_of(target), section.taps or spread_taps(target.num_layers)
    check_taps("draft.dspark.taps", taps, target)
    scaled = rope.get("rope_type") in SCALED and section.rope_theta is None
    given = {"intermediate_size": section.intermediate_size, "rms_norm_eps": section.rms_norm_eps}
    return DSparkConfig(
        **layer_sizes(target) | {name: value for name, value in given.items() if value is not None},
        num_hidden_layers=section.layers,
        block_size=section.block_size,
        mask_token_id=mask_token(tokenizer, target.vocab_size, section.mask_token, used),
        target_layer_ids=taps,
        num_target_layers=target.num_layers,
        markov_rank=section.markov_rank,
        enable_confidence_head=section.markov_rank > 0 if section.confidence is None else section.confidence,
        sample_from_anchor=section.sample_from_anchor,
        rope_theta=section.rope_theta or rope.get("rope_theta") or DSparkConfig.rope_theta,
        rope_scaling={key: rope[key] for key in rope if key not in _UNSCALED} if scaled else {},
    )


def check_taps(name: str, taps: Sequence[int], target: CausalLM) -> None:
    """Raise UserError if servers cannot read these taps; ``name`` is the recipe's key for the taps."""
    if list(taps) != sorted(set(taps)):
        raise UserError(f"{name} is {list(taps)}: use layers in increasing order")
    if max(taps) > target.num_layers - 2:
        raise UserError(
            f"{name} is {list(taps)}, but SGLang and llama.cpp cannot read the last layer: use layers from 0 to "
            f"{target.num_layers - 2}"
        )


def layer_sizes(target: CausalLM) -> dict[str, Any]:
    """Return the sizes of the target's layers, under the names that a draft's config uses.

    Attention heads have the target's width, or the next larger width for which servers have a kernel.
    """
    config, width = target.model.config.get_text_config(decoder=True), target.hidden_size
    heads = config.num_attention_heads
    head_dim = vars(config).get("head_dim") or width // heads
    return {
        "hidden_size": width,
        "intermediate_size": getattr(config, "intermediate_size", None) or 4 * width,
        "num_attention_heads": heads,
        "num_key_value_heads": getattr(config, "num_key_value_heads", None) or heads,
        "head_dim": min((dim for dim in HEAD_DIMS if dim >= head_dim), default=head_dim),
        "vocab_size": target.vocab_size,
        "rms_norm_eps": getattr(config, "rms_norm_eps", None) or DSparkConfig.rms_norm_eps,
        "max_position_embeddings": target.max_positions or 1 << 20,
    }


def rotary_of(target: CausalLM) -> dict[str, Any]:
    """Return the rotary parameters of the target's layers that attend to the whole text; empty if there are none."""
    given = getattr(target.model.config.get_text_config(decoder=True), "rope_parameters", None) or {}
    parameters: dict[str, Any] = given.get("full_attention", given)
    return parameters


def spread_taps(layers: int) -> tuple[int, ...]:
    """Return three evenly spaced layers (five if ``layers`` is at least 24) from the second to the second-to-last."""
    count, highest = (5 if layers >= 24 else 3), layers - 2
    lowest = min(1, highest)
    return tuple(sorted({lowest + index * (highest - lowest) // (count - 1) for index in range(count)}))


def mask_token(
    tokenizer: PreTrainedTokenizerBase, vocab_size: int, name: str | None = None, used: Collection[int] = ()
) -> int:
    """Return the id of a token that no text contains: it is not in ``used`` and not in the chat template.

    By default the mask is the padding token, another special token, an id without a token, or a byte that never occurs
    in UTF-8. Raises UserError if ``name`` is not a token of the target, and if no token is free.
    """
    known = tokenizer.get_vocab()
    if name is not None:
        if known.get(name, vocab_size) >= vocab_size:
            raise UserError(f"draft.dspark.mask_token, {name!r}, is not a token of the target: use an existing token")
        return int(known[name])
    used = {tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.unk_token_id, *used}
    added: dict[int, Any] = tokenizer.added_tokens_decoder
    special = [index for index, token in added.items() if token.special]
    special.sort(key=lambda index: (index != tokenizer.pad_token_id, index))
    template = str(tokenizer.chat_template or "")
    candidates = [index for index in special if added[index].content not in template]
    candidates.append(max(known.values(), default=-1) + 1)
    for byte in ("<0xFF>", "ÿ"):  # the byte 255 in the alphabets of sentencepiece and GPT-2
        if byte in known and known[byte] not in tokenizer(byte, add_special_tokens=False)["input_ids"]:
            candidates.append(known[byte])
    if free := [index for index in candidates if index < vocab_size and index not in used]:
        return free[0]
    raise UserError(
        "the target's tokenizer has no spare token for the mask: set draft.dspark.mask_token to a token that "
        "your data never contains"
    )


_QUIET = 0.3
"""Initial weights of the last norm of a draft whose bias is fitted. These weights are small, because the logits of
untrained layers would hide the bias."""


@torch.no_grad()
def start_dspark(draft: DSparkDraft, states: OnlineTarget, examples: Sequence[Example], most: int) -> None:
    """Set the bias of a new draft to the result of `fit_states` on ``most`` tokens of the examples.

    Every process calls this.
    """
    assert draft.markov is not None, "only a bias is fitted"
    lm_head = states.lm_head if draft.lm_head is None else draft.lm_head.weight
    rank = draft.config.markov_rank
    start_bias(draft.markov, from_first(lambda: fit_states(states, examples, 0, most).start(rank)), lm_head)
    draft.norm.weight.fill_(_QUIET)
