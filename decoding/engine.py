"""A target with its drafter, policy and tokenizer, ready to decode one prompt or a batch, in steps or at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from decoding.drafters.base import Drafter
from decoding.generate import DecodingBatch, DecodingConfig, Generation, Step
from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM
from decoding.policies import FixedPolicy, Policy
from decoding.text import StopCheck, TextDecoder


@dataclass(frozen=True, eq=False)
class Engine:
    """A target with its drafter (None: plain decoding), ready to decode.

    The policy is the only state: it may adapt from text to text. The tokenizer is needed for stop strings only.

    Several threads may decode with one engine. Their steps take turns; on a target with static shapes, which has one
    cache, their calls do, and a stream that was not read for 10 seconds is ended when another call waits.
    """

    target: CausalLM
    drafter: Drafter | None = None
    policy: Policy = field(default_factory=FixedPolicy)
    tokenizer: TextDecoder | None = None

    @overload
    def steps(
        self, prompt: Sequence[int], config: DecodingConfig, *, cache: PreallocatedCache | None = None
    ) -> Iterator[Step]: ...
    @overload
    def steps(
        self,
        prompt: Sequence[Sequence[int]],
        config: DecodingConfig,
        *,
        batch_size: int,
        seeds: Sequence[int] | None = None,
    ) -> Iterator[tuple[int, Step]]: ...
    def steps(
        self,
        prompt: Any,
        config: DecodingConfig,
        *,
        batch_size: int | None = None,
        seeds: Sequence[int] | None = None,
        cache: PreallocatedCache | None = None,
    ) -> Iterator[Any]:
        """Decode a prompt of token ids, or many with ``batch_size``; yield each step when its target pass is done.

        One prompt yields its steps; many yield (index of the prompt from 0, its next step). Rows accept different
        lengths and end at different times; the next prompt takes the row of a finished text. ``seeds`` are the seeds of
        a batch's texts, in place of those that follow from the config.

        A ``cache`` made by ``target.new_cache`` can be handed from one call to the next, also after an interrupted one:
        the prefix that a prompt shares with the text before is then not run again by the target (drafts read the whole
        prompt). The earlier call cannot continue. A `Conversation` keeps one for the turns of a chat.

        ValueError at once, not at the first step, for prompts, rules or drafters that do not fit.
        """
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"batch_size is {batch_size}: give at least 1")
        if batch_size is None and isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], list | tuple):
            raise ValueError(f"{len(prompt)} prompts are given without batch_size: give how many to decode at a time")
        if batch_size is not None and cache is not None:
            raise ValueError("a cache is given with batch_size: give one of them")
        prompts = [prompt] if batch_size is None else prompt
        rows = min(batch_size or 1, len(prompts))
        stop = StopCheck(config.eos_token_ids, config.stop_strings, self.tokenizer)
        batch = DecodingBatch(self.target, self.drafter, self.policy, stop, prompts, config, rows, seeds, cache)
        return (step for _, step in batch.run()) if batch_size is None else batch.run()

    @overload
    def decode(self, prompt: Sequence[int], config: DecodingConfig) -> Generation: ...
    @overload
    def decode(
        self, prompt: Sequence[Sequence[int]], config: DecodingConfig, *, batch_size: int
    ) -> list[Generation]: ...
    def decode(
        self, prompt: Any, config: DecodingConfig, *, batch_size: int | None = None
    ) -> Generation | list[Generation]:
        """Decode a prompt to its end; with ``batch_size`` many prompts, returned in their order."""
        if batch_size is None:
            return Generation.of(tuple(self.steps(prompt, config)))
        steps: list[list[Step]] = [[] for _ in prompt]
        for index, step in self.steps(prompt, config, batch_size=batch_size):
            steps[index].append(step)
        return [Generation.of(of_one) for of_one in steps]
