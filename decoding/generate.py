"""THE decoding loop: propose, verify, commit. Every drafter and every rule goes through it, plain decoding too."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from decoding.cache import PreallocatedCache
from decoding.drafters.base import Drafter
from decoding.metrics import StepCount
from decoding.proposal import Proposal
from decoding.sampling import (
    GeneratorSource,
    RandomSource,
    SamplingConfig,
    penalised_logits,
    probabilities,
    seen_tokens,
)
from decoding.target import CausalLM
from decoding.tree import TokenTree
from decoding.verify import GREEDY, Rule, Verdict, lossless_rule


class TextDecoder(Protocol):
    """The part of a tokenizer that stop strings need."""

    def decode(self, token_ids: list[int]) -> Any: ...


@dataclass(frozen=True)
class DecodingConfig:
    """How to decode. With ``rule`` None the rule is greedy at temperature 0, else the lossless one that fits."""

    max_new_tokens: int = 128
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    rule: Rule | None = None
    eos_token_ids: tuple[int, ...] = ()
    stop_strings: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: give at least 1")
        if self.rule is not None and self.sampling.greedy != (self.rule is GREEDY):
            wanted = "temperature 0" if self.rule is GREEDY else "a temperature above 0"
            raise ValueError(f"the {self.rule.name} rule needs {wanted}; it is {self.sampling.temperature:g}")
        if "" in self.stop_strings:
            raise ValueError("a stop string is empty: give at least one character")


class Step(NamedTuple):
    """One turn of the loop: one target pass, and what came of it.

    ``tokens`` are the tokens emitted, of which the first ``accepted`` were drafted and the last, unless the text ended
    first, was written by the target. ``offered`` is the depth that could have been accepted. The first step of a text
    is its prefill: one token, nothing offered.
    """

    tokens: tuple[int, ...]
    accepted: int
    offered: int
    drafted: int
    draft_seconds: float
    verify_seconds: float
    total_seconds: float
    is_prefill: bool = False

    @property
    def counts(self) -> StepCount:
        """What the acceptance figures are made of."""
        return StepCount(len(self.tokens), self.accepted, self.offered, self.drafted)


def decode_steps(
    target: CausalLM,
    drafter: Drafter | None,
    prompt: Sequence[int],
    config: DecodingConfig,
    tokenizer: TextDecoder | None = None,
) -> Iterator[Step]:
    """Decode ``prompt`` (token ids) step by step, as each target pass is done. Without a drafter: plain decoding."""
    loop = _Loop(target, drafter, prompt, config, tokenizer)
    yield loop.prefill()
    while not loop.finished:
        yield loop.step()


@dataclass(frozen=True)
class Generation:
    """A finished text: its new tokens, and the steps that made them."""

    tokens: tuple[int, ...]
    steps: tuple[Step, ...]


def speculate(
    target: CausalLM,
    drafter: Drafter | None,
    prompt: Sequence[int],
    config: DecodingConfig,
    tokenizer: TextDecoder | None = None,
) -> Generation:
    """Decode ``prompt`` to its end."""
    steps = tuple(decode_steps(target, drafter, prompt, config, tokenizer))
    return Generation(tuple(token for step in steps for token in step.tokens), steps)


class _Loop:
    """The state of one text being decoded."""

    def __init__(
        self,
        target: CausalLM,
        drafter: Drafter | None,
        prompt: Sequence[int],
        config: DecodingConfig,
        tokenizer: TextDecoder | None,
    ) -> None:
        longest = len(prompt) + config.max_new_tokens
        check_prompt(target, prompt, config)
        self.target, self.config = target, config
        self.tokens = list(prompt)
        self.prompt_length = len(prompt)
        self.finished = False
        self.source: RandomSource = GeneratorSource(torch.Generator().manual_seed(config.seed))
        self.session = drafter.open(target, config.sampling, self.source, longest) if drafter else None
        self.cache: PreallocatedCache = target.new_cache(longest + (drafter.max_nodes if drafter else 1))
        self.hidden: Tensor = torch.empty(0)
        self.seen = torch.zeros(target.vocab_size, dtype=torch.bool, device=target.device)
        self.stop = _StopCheck(config, tokenizer)

    @torch.inference_mode()
    def prefill(self) -> Step:
        """Run the prompt and emit the first token."""
        begin = time.perf_counter()
        output = self.target.append(torch.tensor(self.tokens), self.cache)
        self._synchronize()
        verified = time.perf_counter()
        verdict = self._decide(Proposal.root_only(self.tokens[-1], self.target.device), output.logits)
        self.hidden = output.hidden[-1]
        emitted = self._emit((verdict.token,))
        end = time.perf_counter()
        return Step(emitted, 0, 0, 0, 0.0, verified - begin, end - begin, is_prefill=True)

    @torch.inference_mode()
    def step(self) -> Step:
        """Propose, verify, commit."""
        begin = time.perf_counter()
        proposal = self._propose()
        tree = proposal.tree
        drafted = time.perf_counter()
        start = self.cache.length
        output = self.target.verify(tree, self.cache)
        self._synchronize()
        verified = time.perf_counter()
        verdict = self._decide(proposal, output.logits)
        last = verdict.path[-1] if verdict.path else 0
        self.hidden = output.hidden[last]
        self.cache.commit(start, (0, *verdict.path))
        emitted = self._emit((*(tree.token_list[node] for node in verdict.path), verdict.token))
        end = time.perf_counter()
        # What stands behind the end of a text that ends inside the block was neither offered nor accepted.
        cut = len(emitted) <= len(verdict.path)
        accepted = len(emitted) if cut else len(verdict.path)
        offered = len(emitted) if cut else tree.shape.max_depth
        return Step(emitted, accepted, offered, len(tree) - 1, drafted - begin, verified - drafted, end - begin)

    def _propose(self) -> Proposal:
        # The target writes one token itself, so a deeper tree than this could not be emitted whole.
        room = self.prompt_length + self.config.max_new_tokens - len(self.tokens) - 1
        if self.session is None or room < 1:
            return Proposal.root_only(self.tokens[-1], self.target.device)
        proposal = self.session.propose(self.tokens, self.hidden, room)
        self._synchronize()
        return proposal

    def _decide(self, proposal: Proposal, logits: Tensor) -> Verdict:
        sampling = self.config.sampling
        seen = self._seen_at_nodes(proposal.tree) if sampling.penalises else None
        if sampling.greedy:
            return GREEDY(proposal, penalised_logits(logits, sampling, seen), self.source)
        # Where nothing is drafted there is no draft to judge, and every rule writes from p.
        rule = self.config.rule if self.config.rule and len(proposal.tree) > 1 else lossless_rule(proposal)
        return rule(proposal, probabilities(logits, sampling, seen), self.source)

    def _seen_at_nodes(self, tree: TokenTree) -> Tensor:
        self.seen[self.tokens] = True
        return seen_tokens(self.seen, tree)

    def _emit(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Append to the text, up to its end if the end is among them."""
        room = self.prompt_length + self.config.max_new_tokens - len(self.tokens)
        kept, ended = self.stop.cut(self.tokens[self.prompt_length :], tokens[:room])
        self.tokens += kept
        self.finished = ended or len(kept) >= room
        return kept

    def _synchronize(self) -> None:
        """Make the split of the time true on a GPU, where work is queued."""
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


def check_prompt(target: CausalLM, prompt: Sequence[int], config: DecodingConfig) -> None:
    """Refuse what cannot be decoded: an empty prompt, tokens the target does not know, more than its context holds."""
    if not prompt:
        raise ValueError("the prompt is empty: give at least one token (a BOS token will do)")
    if unknown := [token for token in prompt if not 0 <= token < target.vocab_size]:
        raise ValueError(
            f"the prompt holds token {unknown[0]} but the target knows 0 to {target.vocab_size - 1}: "
            "use its own tokenizer"
        )
    longest = len(prompt) + config.max_new_tokens
    if target.max_positions is not None and longest > target.max_positions:
        raise ValueError(
            f"a prompt of {len(prompt)} tokens and {config.max_new_tokens} new ones make {longest}, but the target's "
            f"context holds {target.max_positions}: shorten the prompt or lower max_new_tokens"
        )


class _StopCheck:
    """Finds where a text ends inside a block of new tokens."""

    def __init__(self, config: DecodingConfig, tokenizer: TextDecoder | None) -> None:
        if config.stop_strings and tokenizer is None:
            raise ValueError("stop strings need the tokenizer: pass it along")
        self._eos = frozenset(config.eos_token_ids)
        self._strings = config.stop_strings
        self._tokenizer = tokenizer
        # A character is at most four byte tokens; a few more for one cut at the front.
        self._tail = 4 * max((len(string) for string in self._strings), default=0) + 4

    def cut(self, text: list[int], tokens: tuple[int, ...]) -> tuple[tuple[int, ...], bool]:
        """The tokens up to and including the one that ends the text, and whether one does."""
        for index, token in enumerate(tokens):
            if token in self._eos or (self._strings and self._holds_stop_string([*text, *tokens[: index + 1]])):
                return tokens[: index + 1], True
        return tokens, False

    def _holds_stop_string(self, text: list[int]) -> bool:
        assert self._tokenizer is not None
        tail = self._tokenizer.decode(text[-self._tail :])
        return any(string in tail for string in self._strings)
