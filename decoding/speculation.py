"""Speculative decoding of a batch in one call: from tensors or lists of prompts to padded sequences."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from decoding.drafters import Drafter
from decoding.errors import UserError
from decoding.generate import DecodingConfig, Engine
from decoding.metrics import Acceptance, acceptance
from decoding.model import loading
from decoding.model.causal_lm import CausalLM
from decoding.policies import Policy, default_policy, named_policy
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import RULES, Rule
from decoding.text import Generation, Step, TextDecoder, check_ids, check_tensor_of_ids


@dataclass(frozen=True, eq=False)
class SpeculativeOutput:
    """The decoded texts of a batch.

    ``sequences`` are the prompts, padded on the left, followed by the new tokens; shorter texts are padded on the
    right. ``logprobs``, if requested, are the new tokens' log-probabilities under the target, before any sampling
    control, and 0 after a text's end. ``generations`` contain every step of each text. ``label`` is the rule's label:
    lossless or lossy.
    """

    sequences: Int[Tensor, "batch length"]
    generations: tuple[Generation, ...]
    label: str
    logprobs: Float[Tensor, "batch new"] | None = None

    @property
    def acceptance(self) -> Acceptance:
        """Acceptance figures over all texts, without the prefills."""
        return acceptance([generation.counts for generation in self.generations])

    @property
    def tokens_per_pass(self) -> float:
        """Tokens per target pass: 1 for plain decoding, NaN if no text continued past its prefill."""
        return self.acceptance.tokens_per_pass.value


def speculate(
    target: CausalLM | PreTrainedModel,
    drafter: Drafter | None,
    input_ids: Tensor | Sequence[Sequence[int]],
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int = DecodingConfig.max_new_tokens,
    sampling: SamplingConfig | None = None,
    rule: Rule | str | None = None,
    policy: Policy | str | None = None,
    batch_size: int | None = None,
    seed: int | None = None,
    eos_token_ids: Sequence[int] | None = None,
    pad_token_id: int | None = None,
    stop_strings: Sequence[str] = (),
    tokenizer: TextDecoder | None = None,
    logprobs: bool = False,
    **controls: Any,
) -> SpeculativeOutput:
    """Decode prompts with a drafter (None: plain decoding), ``batch_size`` at a time (None: all together).

    ``input_ids``: (batch, length), or a list of prompts of any length. A tensor's shorter rows are padded on the left;
    ``attention_mask`` marks the padding. Sampling controls are passed as a `SamplingConfig`, or as its fields by name
    (``temperature=0.7``); the default is greedy decoding. ``rule`` may be a name in `RULES`. ``policy`` may be
    ``adaptive`` or ``fixed``; the default is ``fixed`` if a ``seed`` is passed, so that passes can be repeated, and
    otherwise ``adaptive``. Texts end at ``eos_token_ids`` (default: the EOS tokens in the model's generation config) or
    at ``stop_strings``, which need the ``tokenizer``. Prompt i is decoded with the seed ``seed + i`` (with the seed i
    if ``seed`` is None), independently of the other prompts in the batch.
    """
    if sampling is not None and controls:
        raise UserError(f"both sampling and {', '.join(controls)} are set: use one or the other")
    target = target if isinstance(target, CausalLM) else CausalLM(target)
    config = DecodingConfig(
        max_new_tokens=max_new_tokens,
        sampling=sampling or SamplingConfig(**controls),
        rule=named_rule(rule) if isinstance(rule, str) else rule,
        eos_token_ids=loading.eos_token_ids(target.model) if eos_token_ids is None else tuple(eos_token_ids),
        stop_strings=tuple(stop_strings),
        seed=seed or 0,
        logprobs=logprobs,
    )
    padding = padding_token(target.model.generation_config, pad_token_id, config.eos_token_ids)
    if isinstance(input_ids, Tensor):
        if attention_mask is None and pad_token_id is not None and bool((input_ids[:, :1] == pad_token_id).any()):
            raise UserError(f"a prompt begins with the pad token {pad_token_id}", "pass the attention_mask")
        prompts = Prompts.of_tensor(input_ids, attention_mask)
    else:
        prompts = Prompts.of_lists(input_ids, padding, target.device)
    policy = policy or default_policy(seed)
    engine = Engine(target, drafter, named_policy(policy) if isinstance(policy, str) else policy, tokenizer)
    return decode_prompts(engine, prompts, config, batch_size, padding)


def named_rule(name: str) -> Rule:
    """Return the acceptance rule of this name in `RULES`."""
    if name not in RULES:
        raise UserError(f"no rule is called {name!r}: choose one of {', '.join(RULES)}")
    return RULES[name]


class Prompts(NamedTuple):
    """Prompts of a batch.

    ``rows``: the tokens of each prompt. ``padded``: the prompts as they were passed, of shape (batch, width).
    """

    rows: list[list[int]]
    padded: Tensor

    @property
    def width(self) -> int:
        return self.padded.shape[1]

    @staticmethod
    def of_tensor(input_ids: Tensor, mask: Tensor | None) -> "Prompts":
        """Read the prompts from a tensor. Tokens that the mask hides are dropped: the model would ignore them."""
        check_tensor_of_ids(input_ids)
        if input_ids.dim() != 2 or 0 in input_ids.shape:
            raise UserError(f"input_ids has shape {tuple(input_ids.shape)}: use (batch, length of at least 1)")
        if mask is None:
            return Prompts(input_ids.tolist(), input_ids)
        if mask.shape != input_ids.shape:
            raise UserError(
                f"attention_mask has shape {tuple(mask.shape)}: use the shape of input_ids, {tuple(input_ids.shape)}"
            )
        kept = mask.bool().to(input_ids.device)
        if not bool(kept[:, -1].all()):
            raise UserError("a prompt ends in padding: pad on the left (tokenizer.padding_side='left')")
        return Prompts([row[keep].tolist() for row, keep in zip(input_ids, kept, strict=True)], input_ids)

    @staticmethod
    def of_lists(prompts: Sequence[Sequence[int]], padding: int | None, device: torch.device) -> "Prompts":
        if isinstance(prompts, str):
            check_ids(prompts)
        if not prompts:
            raise UserError("the list of prompts is empty: use at least one")
        prompts = [prompt.tolist() if isinstance(prompt, Tensor) else prompt for prompt in prompts]
        for prompt in prompts:
            check_ids(prompt)
        if padding is None and len({len(prompt) for prompt in prompts}) > 1:
            raise UserError("prompts of different lengths are padded in the result: use pad_token_id")
        rows = [list(prompt) for prompt in prompts]
        tensors = [torch.tensor(row, dtype=torch.long, device=device) for row in rows]
        padded = pad_sequence(tensors, batch_first=True, padding_value=padding or 0, padding_side="left")
        return Prompts(rows, padded)

    def repeated(self, count: int) -> "Prompts":
        return Prompts([row for row in self.rows for _ in range(count)], self.padded.repeat_interleave(count, 0))


def decode_prompts(
    engine: Engine,
    prompts: Prompts,
    config: DecodingConfig,
    batch_size: int | None,
    padding: int | None,
    streamer: BaseStreamer | None = None,
) -> SpeculativeOutput:
    """Decode the prompts, and pad the texts with ``padding`` into one tensor. A streamer receives a single text."""
    rows = prompts.rows
    if padding is None and config.stop_strings and len(rows) > 1:
        raise UserError("texts that end at stop strings are padded in the result: use pad_token_id")
    if streamer is not None:
        streamer.put(prompts.padded.cpu())
    steps: list[list[Step]] = [[] for _ in rows]
    batch_size = len(rows) if batch_size is None else batch_size
    for index, step in engine.steps(rows, config, batch_size=batch_size):
        steps[index].append(step)
        if streamer is not None:
            for token in step.tokens:  # `generate` also passes one token at a time
                streamer.put(torch.tensor([token]))
    if streamer is not None:
        streamer.end()
    generations = tuple(Generation.of(of_one) for of_one in steps)
    device = prompts.padded.device
    new = [torch.tensor(generation.tokens, dtype=torch.long, device=device) for generation in generations]
    new_padded = pad_sequence(new, batch_first=True, padding_value=padding or 0)
    logprobs = None
    if config.logprobs:
        values = [[value for step in generation.steps for value in step.logprobs] for generation in generations]
        logprobs = pad_sequence([torch.tensor(row, device=device) for row in values], batch_first=True)
    return SpeculativeOutput(torch.cat([prompts.padded, new_padded], dim=1), generations, config.label, logprobs)


def padding_token(config: GenerationConfig | None, given: int | None, eos: Sequence[int]) -> int | None:
    """Return the token that pads texts: ``given``, or the config's pad token, or the first of ``eos``, or None."""
    configured = None if config is None else config.pad_token_id
    return next((token for token in (given, configured, *eos[:1]) if token is not None), None)
