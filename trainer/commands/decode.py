"""The command `headstart generate`, and the models of every command that decodes with drafters."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.drafters.registry import DrafterLoader
from decoding.drafters.spec import DrafterSpec
from decoding.engine import Engine
from decoding.generate import DecodingConfig, Step
from decoding.measure.redact import published_name
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import (
    eos_token_ids,
    load_tokenizer,
)
from decoding.policies import FixedPolicy, named_policy
from decoding.prompts import encode_prompt
from decoding.rules.sampling import SamplingConfig
from decoding.speculation import named_rule
from decoding.stream import stream_pieces
from trainer.commands.drafters import asked_drafters
from trainer.commands.options import GenerateOptions
from trainer.commands.plan import Planned, check_plan_is_used, check_planned, planned, policy_maker
from trainer.commands.shared_options import ModelOptions
from trainer.commands.target import read_target
from trainer.quickstart import resolve
from trainer.terminal.console import say, standard_error, standard_output


class Models(NamedTuple):
    """A target, its tokenizer, and the drafters that were asked for, each with its spec, by their names in tables."""

    target: CausalLM
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, Drafter]
    specs: dict[str, DrafterSpec]


def load_models(options: ModelOptions, asked: Sequence[str]) -> Models:
    """Read all that is to decode; a mistake in a spec is found before the target is read."""
    specs = asked_drafters(asked)
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


def run_generate(options: GenerateOptions, console: Console | None = None) -> None:
    """Stream the text in two colours and say what speculation gained."""
    console = console or standard_output()
    plan, asked = _planned(options)
    target, tokenizer, drafters, specs = load_models(options, asked)
    name, drafter = next(iter(drafters.items()), ("plain decoding", None))
    prompt = encode_prompt(options.prompt, tokenizer, options.chat)
    config = _decoding_config(options, eos_token_ids(target.model, tokenizer))
    make_policy = policy_maker(plan, specs, len(prompt))
    policy = named_policy(options.policy) if drafter is None else make_policy(options.policy, name, drafter)
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


def _planned(options: GenerateOptions) -> tuple[Planned | None, list[str]]:
    """Return the plan, if one is given, and the drafter: as asked, else as planned for a prompt of this length."""
    given = [] if options.drafter is None else [options.drafter]
    if options.plan is None:
        return None, given
    check_plan_is_used(options.drafter, (options.policy,), "--policy")
    plan = planned(options.plan, options, (options.temperature,))
    tokenizer = load_tokenizer(resolve(options.target), options.trust_remote_code)
    length = len(encode_prompt(options.prompt, tokenizer, options.chat))
    chosen, notes = ([], []) if given else plan.drafters((1,), (length,))
    say(standard_error(), *plan.notes, *notes)
    check_planned(plan, (options.policy,), given)
    return plan, given or chosen


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
