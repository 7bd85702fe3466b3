"""Peers in every table: transformers' own decoding, timed as ours is."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import in_eval_mode
from decoding.rules.sampling import ForPromptLength, SamplingConfig


class TimedText(NamedTuple):
    """A decoded text: its new tokens, how many of them came at the first emission, and the time before and after it.

    The seconds of a text of a batch are the batch's, divided by its rows.
    """

    tokens: tuple[int, ...]
    first_tokens: int
    first_seconds: float
    decode_seconds: float


class _Clock(BaseStreamer):
    """Streamer that notes when `generate` first emits new tokens; the prompt, streamed before, is not counted."""

    def __init__(self) -> None:
        self.puts = 0
        self.first_at = 0.0
        self.first_tokens = 0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first_at = time.perf_counter()
            self.first_tokens = value.numel()

    def end(self) -> None:
        pass


def transformers_generate(
    target: CausalLM,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    assistant: CausalLM | None = None,
    num_assistant_tokens: int | None = None,
) -> list[TimedText]:
    """Decode prompts, padded on the left, by `model.generate` with the same controls; each text ends with its EOS.

    With ``assistant`` one prompt is decoded by assisted generation. ``num_assistant_tokens`` fixes the draft length, as
    ours is fixed. None keeps `transformers`' defaults: a length that adapts, and a confidence threshold that ends a
    draft early.
    """
    longest = max(len(prompt) for prompt in prompts)
    generation_config = _generation_config(config)
    pad: int = generation_config.pad_token_id
    rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    input_ids = torch.tensor(rows, device=target.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    attention_mask = (torch.arange(longest, device=target.device) >= longest - lengths[:, None]).long()
    models = [target.model] if assistant is None else [target.model, assistant.model]
    options: dict[str, Any] = {} if assistant is None else {"assistant_model": assistant.model}
    generate: Callable[..., Tensor] = target.model.generate  # type: ignore[assignment]  # a mixin's, not in the type
    clock = _Clock()
    with _seeded(target, config), _bare_generation_configs(models, num_assistant_tokens):
        begin = time.perf_counter()
        output = generate(
            input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            logits_processor=_processors(config.sampling),
            streamer=clock,
            **options,
        )
        end = time.perf_counter()
    first, rest = (seconds / len(prompts) for seconds in (clock.first_at - begin, end - clock.first_at))
    texts: list[TimedText] = []
    for row in output[:, longest:].tolist():
        stop = next((index + 1 for index, token in enumerate(row) if token in config.eos_token_ids), len(row))
        texts.append(TimedText(tuple(row[:stop]), clock.first_tokens // len(prompts), first, rest))
    return texts


@contextmanager
def _seeded(target: CausalLM, config: DecodingConfig) -> Iterator[None]:
    """Seed torch's global generators, which `generate` draws from, within the block; restore them after it."""
    with torch.random.fork_rng([target.device] if target.device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        yield


@contextmanager
def _bare_generation_configs(models: Sequence[PreTrainedModel], num_assistant_tokens: int | None) -> Iterator[None]:
    """Replace the models' generation configs by default ones within the block; restore them after it.

    Models in training mode are in eval mode within the block.

    `generate` takes unset controls from the model's config, and the draft length from the assistant's: fixed to
    ``num_assistant_tokens``, or `transformers`' defaults.
    """
    with ExitStack() as restored:
        for model in models:
            restored.enter_context(in_eval_mode(model))
            restored.callback(setattr, model, "generation_config", model.generation_config)
            model.generation_config = GenerationConfig()
            if num_assistant_tokens is not None:
                model.generation_config.num_assistant_tokens = num_assistant_tokens
                model.generation_config.num_assistant_tokens_schedule = "constant"
                model.generation_config.assistant_confidence_threshold = 0
        yield


def _processors(sampling: SamplingConfig) -> LogitsProcessorList:
    if any(isinstance(processor, ForPromptLength) for processor in sampling.processors):
        raise ValueError("transformers' generate has no processors by prompt length: compare with it without them")
    return LogitsProcessorList(sampling.processors)


def _generation_config(config: DecodingConfig) -> GenerationConfig:
    sampling = config.sampling
    controls: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        controls = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,  # `generate` refuses 0; None disables it
            "typical_p": sampling.typical_p,
        }
    return GenerationConfig(
        max_new_tokens=config.max_new_tokens,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=list(config.eos_token_ids) or None,
        pad_token_id=config.eos_token_ids[0] if config.eos_token_ids else 0,
        **controls,
    )
