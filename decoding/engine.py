"""A target with its drafter, policy and tokenizer, ready to decode one prompt or a batch, in steps or at once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, overload

from decoding.drafters.base import Drafter
from decoding.errors import UserError
from decoding.generate import DecodingBatch, DecodingConfig, Generation, Step
from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM
from decoding.policies import FixedPolicy, Policy
from decoding.text import StopCheck, TextDecoder


@dataclass(frozen=True, eq=False)
class Engine:
    """A target with its drafter (None: plain decoding), ready to decode.

    Only the policy has state: it may adapt from text to text. The tokenizer is needed for stop strings only.

    Several threads may share an engine; their steps alternate. A target with static shapes has one cache, so there
    whole calls alternate. A stream that has not been read for 10 seconds ends when another call waits for that cache.
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
        """Decode one prompt of token ids, or many with ``batch_size``; yield each step after its target pass.

        One prompt yields its steps; many prompts yield pairs (index of the prompt from 0, its next step). Rows accept
        different lengths, and the next prompt takes the row of a finished text. ``seeds`` replaces the seeds that the
        texts of a batch get from the config.

        A ``cache`` from ``target.new_cache`` may be passed from call to call, also after an interrupted one. The target
        then skips the prefix that a prompt shares with the previous text; drafts read the whole prompt. The earlier
        call cannot continue. `Conversation` uses this between the turns of a chat.

        Raises UserError at the call, not at the first step, for prompts, rules or drafters that do not fit.
        """
        if batch_size is not None and batch_size < 1:
            raise UserError(f"batch_size is {batch_size}: give at least 1")
        if batch_size is None and isinstance(prompt, Sequence) and prompt and isinstance(prompt[0], list | tuple):
            raise UserError(f"{len(prompt)} prompts are given without batch_size: set it to how many to decode at once")
        if batch_size is not None and cache is not None:
            raise UserError("a cache is given with batch_size: give one of them")
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
        """Decode a prompt to its end, or many prompts with ``batch_size``; results are in the prompts' order."""
        if batch_size is None:
            return Generation.of(tuple(self.steps(prompt, config)))
        steps: list[list[Step]] = [[] for _ in prompt]
        for index, step in self.steps(prompt, config, batch_size=batch_size):
            steps[index].append(step)
        return [Generation.of(of_one) for of_one in steps]
