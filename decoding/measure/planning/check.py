"""The check of a plan: the planned forms measured next to plain decoding, in turns, on prompts it was not made from."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import groupby
from typing import Any, NamedTuple

from decoding.drafters.base import Drafter
from decoding.drafters.registry import parse_drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.figures import PLAIN, told
from decoding.measure.planning.forms import Load
from decoding.metrics import ratio_of_rates
from decoding.model.causal_lm import CausalLM

_BATCHES = 4


class PromptGroup(NamedTuple):
    """Tokens, seconds and passes of one group of prompts, without its prefills."""

    tokens: float
    seconds: float
    passes: int


def check_plan(
    target: CausalLM,
    load: Load,
    plan: Mapping[str, Any],
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    advance: Callable[[], Any] = lambda: None,
) -> list[dict[str, Any]]:
    """Measure the best form of every drafter at every batch size; return predicted and measured speed-ups.

    ``plan`` holds the figures of `decoding.measure.planning.planner.Planner.run`. ``advance`` is called after each
    batch size. ValueError by `check_rows`.
    """
    check_rows(prompts, [cell["batch_size"] for cell in plan["cells"]])
    rows: list[dict[str, Any]] = []
    for cell in plan["cells"]:
        if cell["context"] is not None:
            continue
        chosen = {choice["best"]["spec"]: choice for choice in cell["choices"]}
        drafters: dict[str, Drafter | None] = {PLAIN: None, **{spec: load(parse_drafter(spec)) for spec in chosen}}
        groups = measure_in_turns(target, drafters, prompts, config, cell["batch_size"])
        rows += [_row(cell["batch_size"], choice, groups[spec], groups[PLAIN]) for spec, choice in chosen.items()]
        advance()
    return rows


def check_rows(prompts: Sequence[Sequence[int]], batch_sizes: Sequence[int]) -> None:
    """Raise ValueError for fewer prompts than the largest batch has rows, which would stay empty."""
    if len(prompts) < max(batch_sizes):
        raise ValueError(
            f"{len(prompts)} prompts to check with do not fill a batch of {max(batch_sizes)}: give more prompts, raise "
            "--limit, or lower --batch-size"
        )


def measure_in_turns(
    target: CausalLM,
    drafters: Mapping[str, Drafter | None],
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    batch_size: int,
) -> dict[str, list[PromptGroup]]:
    """Decode groups of four batches by every drafter (None: plainly) in turns, in rotating order.

    In a group a waiting prompt takes the row of a finished one. The seconds are of passes with all rows of the batch,
    for which plans are made.
    """
    count = max(1, len(prompts) // (_BATCHES * batch_size))
    groups = [prompts[first::count] for first in range(count)]
    names = list(drafters)
    for name in names:
        _decode(target, drafters[name], groups[0][:batch_size], config, batch_size)  # warm-up
    found: dict[str, list[PromptGroup]] = {name: [] for name in names}
    for index, group in enumerate(groups):
        first = index % len(names)
        seeded = replace(config, seed=config.seed + index * len(prompts))
        for name in (*names[first:], *names[:first]):
            found[name].append(_decode(target, drafters[name], group, seeded, batch_size))
    return found


def _decode(
    target: CausalLM,
    drafter: Drafter | None,
    group: Sequence[Sequence[int]],
    config: DecodingConfig,
    batch_size: int,
) -> PromptGroup:
    """Decode to the end. The seconds are of passes with all rows; their tokens are as many a row as in all passes.

    Which rows stay to the end depends on what is accepted: tokens of the full passes alone would favour the fast texts.
    """
    steps = Engine(target, drafter).steps(group, config, batch_size=batch_size)
    after_prefill = (step for _, step in steps if not step.is_prefill)
    passes = [list(rows) for _, rows in groupby(after_prefill, key=lambda step: step.total_seconds)]  # one for all rows
    every = [step for rows in passes for step in rows]
    timed = [step for rows in passes if len(rows) == batch_size for step in rows]
    if not timed:
        raise ValueError(
            f"no pass of the check had all {batch_size} rows: give more prompts, raise --limit, or lower --batch-size"
        )
    per_row = sum(len(step.tokens) for step in every) / len(every)
    return PromptGroup(per_row * len(timed), sum(step.total_seconds for step in timed), len(timed))


def _row(
    batch_size: int, choice: Mapping[str, Any], mine: Sequence[PromptGroup], plain: Sequence[PromptGroup]
) -> dict[str, Any]:
    """Compare one prediction with its measurement. Their ratio is above 1 if the plan promised too much."""
    measured = ratio_of_rates([(*ours[:2], *theirs[:2]) for ours, theirs in zip(mine, plain, strict=True)])
    form = choice["best"]
    tokens = sum(group.tokens for group in mine) / max(1, sum(group.passes for group in mine))
    return {
        "batch_size": batch_size,
        "drafter": choice["drafter"],
        "spec": form["spec"],
        "predicted": form["speedup"],
        "measured": told(measured),
        "ratio": form["speedup"] / measured.value,
        "tokens_per_pass": {"predicted": form["tokens_per_pass"], "measured": tokens},
    }
