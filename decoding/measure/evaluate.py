"""Evaluation: prompts x methods -> figures relative to plain decoding, measured in turns in one process.

For every prompt each method decodes once per round, in rotating order, so that a machine that slows down slows all
methods alike; speed-ups are ratios of paired runs. `transformers`' own `generate` is one of the methods.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from decoding.drafters.base import Drafter
from decoding.drafters.draft_model import DraftModelDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig, check_prompt
from decoding.measure.baselines import transformers_generate
from decoding.measure.machine import commit, hardware, versions
from decoding.metrics import (
    Acceptance,
    StepCount,
    acceptance,
    predicted_speedup,
    ratio_of_rates,
    ratio_of_sums,
    spread,
)
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import Costs, measure_cost_curve
from decoding.policies import FixedPolicy, Policy, named_policy
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import typical_acceptance

PLAIN = "plain"
TRANSFORMERS = "transformers generate"
_ASSISTED = "transformers assisted"


class Run(NamedTuple):
    """One decoded text: ``first_seconds`` to its first tokens, then ``decode_tokens`` in ``decode_seconds``."""

    tokens: tuple[int, ...]
    decode_tokens: int
    first_seconds: float
    decode_seconds: float
    counts: tuple[StepCount, ...] = ()
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


@dataclass(frozen=True)
class Method:
    """A way to decode under a setting (greedy, T=1, ...), with its label, lossless or lossy."""

    setting: str
    name: str
    label: str
    decode: Callable[[Sequence[int], int], Run]
    """Function (prompt, seed) -> Run."""
    max_nodes: int = 1
    artefact: str | None = None
    """Kind of the trained artefact that drafts: "heads", "draft", or None."""
    drafter: str | None = None
    """Name of the drafter among those measured (a peer's is the one whose draft it uses); None for plain decoding."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Settings of an evaluation. ``temperature`` is that of sampling and of typical acceptance."""

    max_new_tokens: int = 96
    rounds: int = 1
    temperature: float = 1.0
    eos_token_ids: tuple[int, ...] = ()
    settings: tuple[str, ...] = ("greedy", "sampling", "typical")
    policies: tuple[str, ...] = ("fixed",)
    """Names of `decoding.policies`; every drafter gets a row with each."""
    seed: int = 0


def our_method(
    target: CausalLM,
    setting: str,
    name: str,
    drafter: Drafter | None,
    config: DecodingConfig,
    policy: Policy | None = None,
) -> Method:
    """Make the method of a drafter (None: plain decoding) in this project's loop; a policy adapts over all texts."""
    engine = Engine(target, drafter, policy or FixedPolicy())

    def run(prompt: Sequence[int], seed: int) -> Run:
        generation = engine.decode(prompt, replace(config, seed=seed))
        prefill, *steps = generation.steps
        return Run(
            tokens=generation.tokens,
            decode_tokens=len(generation.tokens) - 1,
            first_seconds=prefill.total_seconds,
            decode_seconds=sum(step.total_seconds for step in steps),
            counts=tuple(step.counts for step in steps),
            draft_seconds=sum(step.draft_seconds for step in steps),
            verify_seconds=sum(step.verify_seconds for step in steps),
        )

    label = "lossy" if config.rule is not None and not config.rule.lossless else "lossless"
    if drafter is None:
        return Method(setting, name, label, run)
    return Method(setting, name, label, run, drafter.max_nodes, drafter.artefact)


def transformers_method(
    target: CausalLM,
    setting: str,
    name: str,
    config: DecodingConfig,
    assistant: CausalLM | None = None,
    num_assistant_tokens: int | None = None,
) -> Method:
    """Make the method of `transformers`' generate, or of assisted generation, under the same controls."""

    def run(prompt: Sequence[int], seed: int) -> Run:
        text = transformers_generate(target, prompt, replace(config, seed=seed), assistant, num_assistant_tokens)
        return Run(text.tokens, len(text.tokens) - text.first_tokens, text.first_seconds, text.decode_seconds)

    return Method(setting, name, "lossless", run, artefact="draft" if assistant is not None else None)


def standard_methods(target: CausalLM, drafters: dict[str, Drafter], config: EvaluationConfig) -> list[Method]:
    """Make a method for plain decoding, for transformers' peers and for every drafter, under each setting."""
    methods: list[Method] = []
    for setting in config.settings:
        if setting not in ("greedy", "sampling", "typical"):
            raise ValueError(f"setting is {setting!r}: give greedy, sampling or typical")
        sampling = SamplingConfig() if setting == "greedy" else SamplingConfig(temperature=config.temperature)
        decoding = DecodingConfig(
            max_new_tokens=config.max_new_tokens,
            sampling=sampling,
            rule=typical_acceptance() if setting == "typical" else None,
            eos_token_ids=config.eos_token_ids,
        )
        label = "greedy" if setting == "greedy" else f"T={config.temperature:g}"
        if setting == "typical":
            label += ", typical"
        methods.append(our_method(target, label, PLAIN, None, replace(decoding, rule=None)))
        if setting != "typical":
            methods += _peers(target, label, drafters, decoding)
        for name, drafter in drafters.items():
            for policy in config.policies:
                full_name = name if policy == "fixed" else f"{name}, {policy}"
                method = our_method(target, label, full_name, drafter, decoding, named_policy(policy))
                methods.append(replace(method, drafter=name))
    return methods


def _peers(target: CausalLM, setting: str, drafters: dict[str, Drafter], decoding: DecodingConfig) -> list[Method]:
    """Make transformers' generate, and assisted generation with the first draft, at its depth and by default."""
    peers = [transformers_method(target, setting, TRANSFORMERS, decoding)]
    for name, drafter in drafters.items():
        # transformers takes a vocabulary of another size for another tokenizer, so a padded draft has no peer.
        if isinstance(drafter, DraftModelDrafter) and drafter.draft.vocab_size == target.vocab_size:
            depth = drafter.max_depth
            assisted = [
                transformers_method(target, setting, f"{_ASSISTED}, {depth} tokens", decoding, drafter.draft, depth),
                transformers_method(target, setting, f"{_ASSISTED}, its defaults", decoding, drafter.draft),
            ]
            return [*peers, *(replace(peer, drafter=name) for peer in assisted)]
    return peers


def evaluate(
    target: CausalLM,
    methods: Sequence[Method],
    prompts: Sequence[Sequence[int]],
    config: EvaluationConfig,
    on_run: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Measure every method on every prompt; return the report (see `write_report` and `decoding.measure.report`).

    ``on_run`` is called after each run, for a progress bar. ValueError, before any run, for a prompt that is too long.
    """
    if not prompts:
        raise ValueError("there are no prompts to evaluate on: give at least one")
    if config.rounds < 1:
        raise ValueError(f"rounds is {config.rounds}: give at least 1")
    for prompt in prompts:  # before the first run, not after an hour
        check_prompt(target, prompt, DecodingConfig(config.max_new_tokens))
    runs: dict[tuple[str, str], list[Run]] = {(method.setting, method.name): [] for method in methods}
    began = time.perf_counter()
    for method in methods:
        method.decode(max(prompts, key=len), config.seed)  # warm-up, with the prompt that needs the most memory
        on_run()
    for round_index in range(config.rounds):
        for index, prompt in enumerate(prompts):
            turn = (round_index + index) % len(methods)
            for method in (*methods[turn:], *methods[:turn]):
                seed = config.seed + round_index * len(prompts) + index
                runs[method.setting, method.name].append(method.decode(prompt, seed))
                on_run()
    costs = Costs(measure_cost_curve(target))
    report = {
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "parameters": sum(parameter.numel() for parameter in target.model.parameters()),
        "prompts": len(prompts),
        "rounds": config.rounds,
        "max_new_tokens": config.max_new_tokens,
        "seconds": time.perf_counter() - began,
        "cost_curve_ms": {str(size): 1000 * seconds for size, seconds in costs.target_pass.items()},
        "rows": [_row(method, runs, costs, target, prompts) for method in methods],
    }
    plain_values: dict[str, Any] = without_nan(report)
    return plain_values


def _row(
    method: Method,
    runs: dict[tuple[str, str], list[Run]],
    costs: Costs,
    target: CausalLM,
    prompts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Compute one method's figures, as JSON values."""
    mine = runs[method.setting, method.name]
    plain = runs[method.setting, PLAIN]
    peer = runs.get((method.setting, TRANSFORMERS))
    row: dict[str, Any] = {
        "setting": method.setting,
        "method": method.name,
        "label": method.label,
        "artefact": method.artefact,
        "drafter": method.drafter,
        "tokens_per_second": _tokens_per_second(mine, len(prompts), with_prefill=False),
        "tokens_per_second_with_prefill": _tokens_per_second(mine, len(prompts), with_prefill=True),
        **_speedups("speedup", mine, plain, len(prompts)),
        **_speedups("speedup_with_prefill", mine, plain, len(prompts), with_prefill=True),
        **_speedups("speedup_over_transformers", mine, peer, len(prompts)),
    }
    if method.setting == "greedy":
        row["identical_to_plain"] = _compare(mine, plain, target, prompts)
    if any(run.counts for run in mine):
        # Greedy rounds repeat one text: they add observations of time, but none of acceptance.
        texts = mine[: len(prompts)] if method.setting == "greedy" else mine
        row |= _acceptance_figures(method, texts, costs)
    return row


def _tokens_and_seconds(mine: Sequence[Run], prompts: int, with_prefill: bool) -> list[tuple[float, float]]:
    """Return (tokens, seconds) for each prompt, summed over its rounds, which are not independent texts."""
    tokens = [len(run.tokens) if with_prefill else run.decode_tokens for run in mine]
    seconds = [run.decode_seconds + (run.first_seconds if with_prefill else 0) for run in mine]
    return [(float(sum(tokens[prompt::prompts])), sum(seconds[prompt::prompts])) for prompt in range(prompts)]


def _tokens_per_second(mine: Sequence[Run], prompts: int, with_prefill: bool) -> dict[str, float]:
    """Return tokens per second over all runs, with an interval over prompts."""
    return ratio_of_sums(_tokens_and_seconds(mine, prompts, with_prefill))._asdict()


def _speedups(
    name: str, mine: Sequence[Run], other: Sequence[Run] | None, prompts: int, with_prefill: bool = False
) -> dict[str, Any]:
    """Return two ratios of tokens per second to the other's: the spread of paired runs, and the ratio of totals.

    Their keys are ``name`` and ``name``_of_totals. Totals weigh a prompt by its tokens, the spread weighs runs alike.
    """
    if other is None:
        return {f"{name}_of_totals": None, name: None}
    both = [
        (*ours, *theirs)
        for ours, theirs in zip(
            *(_tokens_and_seconds(runs, prompts, with_prefill) for runs in (mine, other)), strict=True
        )
    ]
    return {f"{name}_of_totals": ratio_of_rates(both)._asdict(), name: _paired(mine, other, with_prefill)}


def _speed(run: Run, with_prefill: bool) -> float:
    if with_prefill:
        return len(run.tokens) / (run.first_seconds + run.decode_seconds)
    return run.decode_tokens / run.decode_seconds if run.decode_tokens and run.decode_seconds else 0.0


def _paired(mine: Sequence[Run], other: Sequence[Run], with_prefill: bool) -> dict[str, float]:
    """Return the spread of ratios of tokens per second, each on the same prompt in the same round."""
    pairs = [(_speed(a, with_prefill), _speed(b, with_prefill)) for a, b in zip(mine, other, strict=True)]
    return spread([a / b for a, b in pairs if a and b])._asdict()


def _acceptance_figures(method: Method, mine: Sequence[Run], costs: Costs) -> dict[str, Any]:
    figures = acceptance([run.counts for run in mine])
    total = sum(run.decode_seconds for run in mine)
    draft = sum(run.draft_seconds for run in mine)
    verify = sum(run.verify_seconds for run in mine)
    plain_step = costs.pass_over(1)
    passes = max(figures.passes, 1)
    predicted = predicted_speedup(
        figures.tokens_per_pass.value,
        draft_cost=draft / passes / plain_step,
        verify_cost=costs.pass_over(method.max_nodes) / plain_step,
        overhead=(total - draft - verify) / passes / plain_step,
    )
    return {
        "passes": figures.passes,
        "tokens_per_pass": figures.tokens_per_pass._asdict(),
        "conditional_acceptance": [estimate._asdict() for estimate in figures.conditional],
        "unconditional_acceptance": [estimate._asdict() for estimate in figures.unconditional],
        "accepted_per_drafted": figures.accepted_per_drafted._asdict(),
        "accepted_length_histogram": {str(length): n for length, n in figures.length_histogram.items()},
        "time_split": {"draft": draft / total, "verify": verify / total, "overhead": (total - draft - verify) / total}
        if total
        else None,
        "predicted_speedup": predicted,
    }


def _compare(
    mine: Sequence[Run], plain: Sequence[Run], target: CausalLM, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Count the greedy texts equal to plain decoding's, and measure how close the logits are where texts differ.

    In fp32 on a CPU all must be equal. In bf16 a pass over n tokens rounds differently from n passes over one, so
    near-ties may fall either way. ``largest_margin`` is the largest difference between the logits of the two tokens at
    which texts first differ: a small one shows a near-tie. ``ended_early`` counts the pairs in which one text ended
    where the other went on, which no near-tie explains; if there are only such pairs, the margin is null.
    """
    margins: list[float] = []
    ended_early = 0
    for index, (ours, theirs) in enumerate(zip(mine, plain, strict=True)):
        if ours.tokens == theirs.tokens:
            continue
        prompt = prompts[index % len(prompts)]
        at = next((i for i, (a, b) in enumerate(zip(ours.tokens, theirs.tokens, strict=False)) if a != b), None)
        if at is None:
            ended_early += 1
            continue
        text = [*prompt, *theirs.tokens[:at]]
        logits = target.prefill([text], target.new_cache(len(text))).logits[0].float()
        margins.append(abs(float(logits[ours.tokens[at]] - logits[theirs.tokens[at]])))
    return {
        "identical": len(mine) - len(margins) - ended_early,
        "of": len(mine),
        "largest_margin": max(margins, default=None if ended_early else 0.0),
        "ended_early": ended_early,
    }


def measure_acceptance(
    target: CausalLM,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    batch_size: int = 1,
    on_text: Callable[[], None] = lambda: None,
) -> Acceptance:
    """Decode the prompts by the decoding loop, without peers or timing, and return the acceptance figures.

    Prompt i is decoded with the seed ``config.seed + i``. ``on_text`` is called after each text, for a progress bar.
    """
    texts: list[list[StepCount]] = [[] for _ in prompts]
    room = [config.max_new_tokens for _ in prompts]
    for place, step in Engine(target, drafter).steps(prompts, config, batch_size=batch_size):
        if not step.is_prefill:
            texts[place].append(step.counts)
        room[place] -= len(step.tokens)
        if not room[place] or (step.tokens and step.tokens[-1] in config.eos_token_ids):
            on_text()
    return acceptance(texts)


def write_report(report: dict[str, Any], path: Path) -> None:
    """Write the report as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=2, allow_nan=False) + "\n")


def without_nan(value: Any) -> Any:
    """Replace NaN and infinity, which JSON lacks, by null: the figure could not be measured."""
    if isinstance(value, dict):
        return {key: without_nan(held) for key, held in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(held) for held in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
