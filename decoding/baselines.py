"""transformers' own decoding, timed like ours: the peers in every table."""

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import BaseStreamer

from decoding.generate import DecodingConfig
from decoding.target import CausalLM


class TimedText(NamedTuple):
    """New tokens, how many of them came with the first emission, and the time before and after it."""

    tokens: tuple[int, ...]
    first_tokens: int
    first_seconds: float
    decode_seconds: float


class _Clock(BaseStreamer):
    """Notes when `generate` first emits tokens. It streams the prompt first, which is not counted."""

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
    prompt: Sequence[int],
    config: DecodingConfig,
    assistant: CausalLM | None = None,
    num_assistant_tokens: int | None = None,
) -> TimedText:
    """`model.generate` with the same controls; with ``assistant``, assisted generation.

    ``num_assistant_tokens`` fixes the draft length, as ours is fixed; without it the assistant keeps its own defaults
    (a length that adapts, a confidence threshold that stops early).
    """
    input_ids = torch.tensor([list(prompt)], device=target.device)
    options: dict[str, Any] = {}
    if assistant is not None:
        options["assistant_model"] = _with_draft_length(assistant, num_assistant_tokens)
    torch.manual_seed(config.seed)
    clock = _Clock()
    begin = time.perf_counter()
    output = target.model.generate(
        input_ids,
        attention_mask=torch.ones_like(input_ids),
        generation_config=_generation_config(config),
        streamer=clock,
        **options,
    )
    end = time.perf_counter()
    tokens = tuple(output[0, len(prompt) :].tolist())
    return TimedText(tokens, clock.first_tokens, clock.first_at - begin, end - clock.first_at)


def _with_draft_length(assistant: CausalLM, num_assistant_tokens: int | None) -> Any:
    config = assistant.model.generation_config
    assert config is not None
    fixed = num_assistant_tokens is not None
    # None stands for transformers' own default; the threshold adapts during generation, so it is set anew each time.
    config.num_assistant_tokens = num_assistant_tokens
    config.num_assistant_tokens_schedule = "constant" if fixed else None
    config.assistant_confidence_threshold = 0 if fixed else None
    return assistant.model


def _generation_config(config: DecodingConfig) -> GenerationConfig:
    sampling = config.sampling
    controls: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        controls = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,
        }
    return GenerationConfig(
        max_new_tokens=config.max_new_tokens,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=list(config.eos_token_ids) or None,
        pad_token_id=config.eos_token_ids[0] if config.eos_token_ids else 0,
        **controls,
    )
