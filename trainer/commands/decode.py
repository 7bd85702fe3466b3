"""The commands `headstart evaluate` and `headstart generate`."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from decoding.drafters import Drafter
from decoding.drafters.registry import DrafterLoader, parse_drafter
from decoding.drafters.spec import DrafterSpec
from decoding.engine import Engine
from decoding.generate import DecodingConfig, Step
from decoding.measure.evaluate import EvaluationConfig, evaluate, standard_methods, write_report
from decoding.measure.markdown import one_line
from decoding.measure.redact import published_command, published_name, without_local_paths
from decoding.measure.report import terminal_table, write_html
from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import prompts_fingerprint, stored_fingerprint, tokenizer_fingerprint
from decoding.model.loading import (
    eos_token_ids,
    load_tokenizer,
)
from decoding.policies import FixedPolicy, named_policy
from decoding.prompts import encode_prompt, read_prompts
from decoding.rules.sampling import SamplingConfig
from decoding.speculation import named_rule
from decoding.stream import stream_pieces
from trainer.commands.options import EvaluateOptions, GenerateOptions, ModelOptions
from trainer.commands.plan import Planned, planned
from trainer.commands.target import read_target
from trainer.commands.usage import listed
from trainer.quickstart import resolve
from trainer.terminal.console import say, standard_error, standard_output, wide
from trainer.terminal.progress import ProgressBar


class Models(NamedTuple):
    """A target, its tokenizer, and the drafters that were asked for, each with its spec, by their names in tables."""

    target: CausalLM
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, Drafter]
    specs: dict[str, DrafterSpec]


def _load(options: ModelOptions, asked: Sequence[str]) -> Models:
    """Read all that is to decode; a mistake in a spec is found before the target is read."""
    specs = [parse_drafter(text) for text in asked]
    if again := next((spec for place, spec in enumerate(specs) if spec in specs[:place]), None):
        raise ValueError(f"--drafter {again} is given twice: give it once")
    target, trusted = read_target(options.target, options), options.trust_remote_code
    tokenizer = load_tokenizer(resolve(options.target), trusted)
    loader = DrafterLoader(target, tokenizer, trusted)
    drafters = [loader.load(spec) for spec in specs]
    labels = [drafter.label for drafter in drafters]
    names = [
        f"{label} ({told})" if labels.count(label) > 1 else label
        for label, told in zip(labels, published_specs(specs), strict=True)
    ]
    return Models(target, tokenizer, dict(zip(names, drafters, strict=True)), dict(zip(names, specs, strict=True)))


def published_specs(specs: Sequence[DrafterSpec]) -> list[str]:
    """Return each spec with its path cut to what may be published; those that read alike then are numbered from 2."""
    told: list[str] = []
    for spec in specs:
        text = spec.with_path(None if spec.path is None else published_name(spec.path))
        alike = sum(other.partition(" (")[0] == text for other in told)
        told.append(f"{text} ({alike + 1})" if alike else text)
    return told


def run_evaluate(options: EvaluateOptions, console: Console | None = None) -> dict[str, Any]:
    """Measure, print the table, write report.json and report.html; returns the report."""
    watched, console = console or standard_error(), console or standard_output()
    logging.set_verbosity_error()  # `generate` warns about the draft length that assisted generation is given
    plan = planned(options.plan, options) if options.plan is not None and not options.drafter else None
    asked = options.drafter or ([plan.drafter] if plan and plan.drafter else ())
    say(watched, *(plan.notes if plan else ()))
    target, tokenizer, drafters, specs = _load(options, asked)
    prompts = read_prompts(
        resolve(options.prompts), tokenizer, options.limit, options.prompt_field, options.prompt_tokens
    )
    config = EvaluationConfig(
        max_new_tokens=options.max_new_tokens,
        rounds=options.rounds,
        temperature=options.temperature,
        eos_token_ids=eos_token_ids(target.model, tokenizer),
        settings=listed(options.settings) or EvaluationConfig.settings,
        policies=listed(options.policies) or EvaluationConfig.policies,
    )
    prompts, left_out = _fitting(prompts, target, drafters, options)
    chosen = replace(options, settings=list(config.settings), policies=list(config.policies))  # the defaults in words
    made_by = _made_by(chosen, specs, tokenizer, prompts)  # now: a file may be another when all is measured
    methods = standard_methods(target, drafters, config)
    total = len(methods) * (len(prompts) * config.rounds + 1)
    with ProgressBar(watched, "evaluating", total) as bar:
        report = evaluate(target, methods, prompts, config, bar.advance)
    title = options.title or f"{Path(options.target).name} on {Path(options.prompts).name}"
    report = {"title": one_line(without_local_paths(title)), **made_by, **report, "prompts_left_out": left_out}
    write_report(report, options.output / "report.json")
    write_html(report, options.output / "report.html")
    wide(console).print(terminal_table(report))
    say(console, f"written: {options.output / 'report.json'}, {options.output / 'report.html'}")
    return report


def _made_by(
    options: EvaluateOptions,
    specs: Mapping[str, DrafterSpec],
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Sequence[int]],
) -> dict[str, Any]:
    """Return the report's account of itself: the command, its settings, and fingerprints of all that was measured.

    ``drafters`` has the spec of each drafter by its name in the rows; weights' fingerprints stand under these specs.
    """
    trusted = options.trust_remote_code
    kept_apart = {"target", "drafter", "prompts", "output", "title", "plan"}
    settings = {name: value for name, value in vars(options).items() if name not in kept_apart}
    told = published_specs(list(specs.values()))
    weights = {
        name: stored_fingerprint(spec.path, trusted)
        for name, spec in zip(told, specs.values(), strict=True)
        if spec.path is not None
    }
    return {
        "command": published_command(sys.argv),
        "settings": without_local_paths(settings),
        "drafters": dict(zip(specs, told, strict=True)),
        "fingerprints": {
            "target": stored_fingerprint(resolve(options.target), trusted),
            **weights,
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "prompts": prompts_fingerprint(prompts),
        },
    }


def _fitting(
    prompts: list[tuple[int, ...]], target: CausalLM, drafters: Mapping[str, Drafter], options: EvaluateOptions
) -> tuple[list[tuple[int, ...]], int]:
    """Return the prompts that target and drafters can hold with their new tokens, and the number of the others."""
    limits = [drafter.max_positions for drafter in drafters.values() if drafter.max_positions is not None]
    holder = "target and draft" if limits else "the target"
    limits += [] if target.max_positions is None else [target.max_positions]
    if not limits:
        return prompts, 0
    holds = min(limits)
    fitting = [prompt for prompt in prompts if len(prompt) + options.max_new_tokens <= holds]
    too_long = len(prompts) - len(fitting)
    if too_long and not (options.skip_long and fitting):
        remedy = (
            "lower --max-new-tokens" if not fitting else "leave them out with --skip-long, or lower --max-new-tokens"
        )
        raise ValueError(
            f"{too_long} of {len(prompts)} prompts, the longest of {max(map(len, prompts))} tokens, do not fit with "
            f"{options.max_new_tokens} new tokens into the {holds} that {holder} can hold: {remedy}, or cut "
            "them with --prompt-tokens"
        )
    return fitting, too_long


def run_generate(options: GenerateOptions, console: Console | None = None) -> None:
    """Stream the text in two colours and say what speculation gained."""
    console = console or standard_output()
    plan = _planned(options)
    asked = options.drafter or (plan.drafter if plan else None)
    say(standard_error(), *(plan.notes if plan else ()))
    target, tokenizer, drafters, _ = _load(options, [asked] if asked is not None else ())
    name, drafter = next(iter(drafters.items()), ("plain decoding", None))
    prompt = encode_prompt(options.prompt, tokenizer, options.chat)
    config = _decoding_config(options, eos_token_ids(target.model, tokenizer))
    policy = plan.policy(options.policy, drafter) if plan else named_policy(options.policy)
    engine = Engine(target, drafter, policy, tokenizer)
    if drafter is not None and options.compare:
        warm_up = replace(config, max_new_tokens=min(8, config.max_new_tokens))
        replace(engine, policy=FixedPolicy()).decode(prompt, warm_up)  # too short for another policy to learn from
    steps: list[Step] = []

    def watched() -> Iterator[Step]:
        for step in engine.steps(prompt, config):
            steps.append(step)
            yield step

    for piece in stream_pieces(watched(), tokenizer, hidden=config.eos_token_ids):
        console.print(
            piece.text, end="", style="green" if piece.drafted else None, markup=False, emoji=False, soft_wrap=True
        )
    console.print()
    plain = None
    if drafter is not None and options.compare:
        plain = replace(engine, drafter=None).decode(prompt, replace(config, rule=None)).steps
    say(console, _summary(steps, plain, f"{name} ({config.label})"), style="dim")


def _planned(options: GenerateOptions) -> Planned | None:
    """Return the plan's choice for this prompt; None without a plan, or where a drafter is given as well."""
    if options.plan is None or options.drafter is not None:
        return None
    tokenizer = load_tokenizer(resolve(options.target), options.trust_remote_code)
    length = len(encode_prompt(options.prompt, tokenizer, options.chat))
    return planned(options.plan, options, context=length, temperature=options.temperature)


def _decoding_config(options: GenerateOptions, eos: tuple[int, ...]) -> DecodingConfig:
    sampling = SamplingConfig(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        typical_p=options.typical_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )
    return DecodingConfig(
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        rule=named_rule(options.rule) if options.rule else None,
        eos_token_ids=eos,
        stop_strings=tuple(options.stop or ()),
        seed=options.seed,
    )


def _summary(steps: list[Step], plain: tuple[Step, ...] | None, name: str) -> str:
    """Return one line: tokens per target pass, tokens/s, speed-up."""
    passes = steps[1:]
    emitted = sum(len(step.tokens) for step in passes)
    if not passes:
        return f"{name}: {len(steps[0].tokens)} token in the prefill"
    accepted = sum(step.accepted for step in passes)
    speed = emitted / sum(step.total_seconds for step in passes)
    line = (
        f"{name}: {emitted / len(passes):.2f} tokens per target pass "
        f"({accepted} of {emitted} tokens drafted), {speed:.0f} tokens/s"
    )
    if plain is not None and len(plain) > 1:
        plain_speed = (len(plain) - 1) / sum(step.total_seconds for step in plain[1:])
        line += f", {speed / plain_speed:.2f}× plain decoding ({plain_speed:.0f} tokens/s)"
    return line
