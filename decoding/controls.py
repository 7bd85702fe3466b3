"""Sampling controls of `transformers`: this module reads generation configs and builds logits processors from them."""

import copy
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
from transformers import (
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedConfig,
    RepetitionPenaltyLogitsProcessor,
)

from decoding.errors import UserError
from decoding.rules.sampling import ForPromptLength, LogitsProcessor, SamplingConfig

Processor = LogitsProcessor | ForPromptLength

_REFUSED = {
    "beam search is another algorithm": "num_beams num_beam_groups diversity_penalty constraints force_words_ids",
    "this option selects an algorithm other than sampling": "penalty_alpha dola_layers watermarking_config",
    "this option needs a second pass of the target for every token": "guidance_scale",
    "the target has no encoder": "encoder_repetition_penalty encoder_no_repeat_ngram_size forced_bos_token_id",
    "a text that is cut at its maximum length does not end with EOS": "forced_eos_token_id",
    "this option rewrites the prompt: change the prompt before decoding": "token_healing",
    "repeat the prompt once per text": "num_return_sequences",
    "choose the drafter here, not in the generation config": "prompt_lookup_num_tokens assistant_early_exit "
    "assistant_ensemble_weight speculation_type use_mtp",
}
"""Unsupported options that change the text, grouped by the reason why they are not supported. A value of None, 0 or
False switches an option off.
"""
_REFUSED_IF_SAMPLING = {"use top_k, top_p, min_p or typical_p instead": "top_h epsilon_cutoff eta_cutoff"}
_OFF_AT_ONE = {"num_beams", "num_beam_groups", "guidance_scale", "encoder_repetition_penalty", "num_return_sequences"}
_KNOWN_NAMES = """
do_sample temperature top_k top_p min_p typical_p repetition_penalty eos_token_id sequence_bias no_repeat_ngram_size
bad_words_ids suppress_tokens begin_suppress_tokens min_length min_new_tokens exponential_decay_length_penalty
remove_invalid_values
max_length max_new_tokens max_time stop_strings bos_token_id pad_token_id
early_stopping length_penalty decoder_start_token_id low_memory max_matching_ngram_size is_assistant
num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold assistant_lookbehind target_lookbehind
use_cache cache_implementation cache_config max_cache_len prefill_chunk_size compile_config disable_compile
continuous_batching_config renormalize_logits transformers_version output_attentions output_hidden_states output_scores
output_logits return_dict_in_generate
"""
"""Accepted options. Some are supported, and the rest have no effect here: they set the end of a text (for which
`DecodingConfig` has its own settings), are read only by beam search or an assistant, or control how `generate` computes
and returns its output.
"""
_KNOWN = frozenset(_KNOWN_NAMES.split())


def sampling_from_generation_config(
    config: GenerationConfig, processors: Sequence[Processor] = (), device: torch.device | str = "cpu"
) -> SamplingConfig:
    """Return the controls that `generate` applies with this config and ``logits_processor=processors``, in the order in
    which `generate` applies them.

    The config is read as `generate` reads it: decoding is greedy unless ``do_sample`` is set, and an unset ``top_k`` is
    50. ``device`` is the device of the logits. Length limits and end tokens are not read here; they belong in
    `DecodingConfig`. Raises UserError, with the option's name, if an unsupported option is set.
    """
    sample = bool(config.do_sample)
    _refuse_unsupported(config, {**_REFUSED, **(_REFUSED_IF_SAMPLING if sample else {})})
    penalty = config.repetition_penalty or 1.0
    # `SamplingConfig` applies its repetition penalty before all processors.
    # `generate` applies a sequence bias before the penalty, and a penalty from the caller replaces the config's
    # penalty. In both cases the penalty must be a processor here.
    if penalty != 1 and (config.sequence_bias or RepetitionPenaltyLogitsProcessor in map(type, processors)):
        penalty = 1.0
        merged = _processors(config, processors, device)
    else:
        merged = _processors(config, processors, device, repetition_penalty=None)
    if not sample:
        return SamplingConfig(repetition_penalty=penalty, processors=merged)
    temperature = 1.0 if config.temperature is None else config.temperature
    if temperature == 0:
        raise UserError("temperature is 0 although do_sample is set: set do_sample=False for greedy decoding")
    return SamplingConfig(
        temperature=temperature,
        top_k=50 if config.top_k is None else config.top_k,
        top_p=1.0 if config.top_p is None else config.top_p,
        min_p=config.min_p or 0.0,
        typical_p=1.0 if config.typical_p is None else config.typical_p,
        repetition_penalty=penalty,
        processors=merged,
    )


def _refuse_unsupported(config: GenerationConfig, refused: Mapping[str, str]) -> None:
    for reason, names in refused.items():
        for name in names.split():
            if (value := getattr(config, name, None)) and not (value == 1 and name in _OFF_AT_ONE):
                raise UserError(f"{name} is {value}, which is not supported: {reason}; unset it")
    # Only options that `transformers` defines are checked, because `generate` ignores other entries of configs.
    every = " ".join((*_REFUSED.values(), *_REFUSED_IF_SAMPLING.values())).split()
    for name in sorted(vars(GenerationConfig()).keys() - _KNOWN - set(every)):
        if not name.startswith("_") and getattr(config, name, None) is not None:
            raise UserError(f"{name} is {getattr(config, name)}, which is not supported: unset it")


class _Generating(GenerationMixin):
    """The attributes of a model that `generate` reads to build its logits processors."""

    config = PreTrainedConfig()


def _processors(
    config: GenerationConfig, given: Sequence[Processor], device: torch.device | str, **changes: None
) -> tuple[Processor, ...]:
    """Return the processors that `generate` builds from the config and the caller's processors."""
    own = copy.deepcopy(config)
    own.update(do_sample=False, **changes)  # so that no processors are built for temperature, top_k, ...
    eos = [] if config.eos_token_id is None else torch.as_tensor(config.eos_token_id).flatten().tolist()
    own._eos_token_tensor = torch.tensor(eos, device=device) if eos else None
    for name in ("min_length", "min_new_tokens", "exponential_decay_length_penalty"):
        if getattr(own, name, None) and not eos:
            value = getattr(own, name)
            raise UserError(f"{name} is {value} but eos_token_id is not set: set eos_token_id, or unset {name}")

    @lru_cache(maxsize=256)
    def build(prompt_length: int) -> Any:
        callers = [item.build(prompt_length) if isinstance(item, ForPromptLength) else item for item in given]
        generating: Any = _Generating()
        given_last = LogitsProcessorList(callers)
        return generating._get_logits_processor(own, prompt_length, logits_processor=given_last, device=str(device))

    return (ForPromptLength(build),) if build(1) else ()
