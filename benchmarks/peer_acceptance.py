"""Tokens per target pass of drafts in the real decoding loop: two trainers' drafts on the same prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from decoding.drafters import DraftModelDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.metrics import Estimate, StepCount, acceptance
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_draft
from decoding.rules.sampling import SamplingConfig

DRAFT_TOKENS = 4
TEMPERATURES = {"greedy": 0.0, "T=1": 1.0}


def measure(
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    arms: Mapping[str, Sequence[Path]],
    pairs: Mapping[str, tuple[str, str]],
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
) -> dict[str, Any]:
    """``acceptance`` of each arm, a name for some folders of drafts, over its drafts together; and of each pair of arms
    ``over_peer``, the first's tokens per pass over the second's. Both greedy and at T=1, as plain JSON values."""
    found: dict[str, Any] = {"acceptance": {arm: {} for arm in arms}, "over_peer": {name: {} for name in pairs}}
    drafts = {arm: [load_draft(str(folder), target, tokenizer) for folder in folders] for arm, folders in arms.items()}
    for setting, temperature in TEMPERATURES.items():
        decoding = replace(config, sampling=SamplingConfig(temperature))
        texts = {arm: [steps_of(target, each, prompt, decoding) for prompt in prompts] for arm, each in drafts.items()}
        for arm, steps in texts.items():
            figures = acceptance(steps)
            found["acceptance"][arm][setting] = {
                "passes": figures.passes,
                "tokens_per_pass": figures.tokens_per_pass._asdict(),
                "conditional_acceptance": [estimate._asdict() for estimate in figures.conditional],
            }
        for name, (ours, theirs) in pairs.items():
            found["over_peer"][name][setting] = paired_ratio(texts[ours], texts[theirs])._asdict()
    return found


def steps_of(
    target: CausalLM, drafts: Sequence[CausalLM], prompt: Sequence[int], config: DecodingConfig
) -> list[StepCount]:
    """The decoding steps of a prompt's texts, one of each draft: in one list, since they are much the same text."""
    steps = []
    for draft in drafts:
        drafter = DraftModelDrafter(draft, (1,) * DRAFT_TOKENS)
        steps += [step.counts for step in Engine(target, drafter).decode(prompt, config).steps[1:]]
    return steps


def paired_ratio(
    ours: Sequence[Sequence[StepCount]], theirs: Sequence[Sequence[StepCount]], resamples: int = 1000
) -> Estimate:
    """Our tokens per pass over theirs on the same prompts, with a 95% bootstrap interval over the prompts."""
    counts = [
        [sum(step.emitted for step in mine), len(mine), sum(step.emitted for step in other), len(other)]
        for mine, other in zip(ours, theirs, strict=True)
    ]
    values = torch.tensor(counts, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(len(values), (resamples, len(values)), generator=generator)
    tokens, passes, their_tokens, their_passes = torch.cat((values.sum(0)[None], values[chosen].sum(1))).T
    ratios = (tokens / passes) / (their_tokens / their_passes)
    low, high = ratios[1:].quantile(torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Estimate(float(ratios[0]), low, high, len(values))
