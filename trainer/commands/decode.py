"""What the commands that decode do: evaluate and generate."""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from decoding.drafters import Drafter, DraftModelDrafter, MedusaDrafter, PromptLookupDrafter
from decoding.drafters.draft_tree import DraftTreeDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig, Step
from decoding.measure.evaluate import EvaluationConfig, evaluate, standard_methods, write_report
from decoding.measure.markdown import one_line
from decoding.measure.redact import published_command, without_local_paths
from decoding.measure.report import terminal_table, write_html
from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import prompts_fingerprint, stored_fingerprint, tokenizer_fingerprint
from decoding.model.loading import (
    eos_token_ids,
    load_draft,
    load_heads,
    load_model,
    load_tokenizer,
    parse_dtype,
)
from decoding.policies import named_policy
from decoding.prompts import encode_prompt, read_prompts
from decoding.rules.sampling import SamplingConfig
from decoding.speculate import named_rule
from decoding.stream import stream_pieces
from trainer.commands.options import EvaluateOptions, GenerateOptions, ModelOptions
from trainer.commands.usage import listed
from trainer.quickstart import resolve
from trainer.run.train import ensure_built
from trainer.terminal.console import say, standard_error, standard_output, wide
from trainer.terminal.progress import ProgressBar


def _load(options: ModelOptions, chains: bool = True) -> tuple[CausalLM, PreTrainedTokenizerBase, dict[str, Drafter]]:
    """The target, its tokenizer, and the drafters that were asked for, by name; ``chains``: those of a draft too."""
    if options.draft_tree and not options.draft:
        raise ValueError("--draft-tree says how a draft model drafts: give one with --draft")
    ensure_built(options.target)
    name = resolve(options.target)
    target = CausalLM(
        load_model(
            name,
            parse_dtype(options.dtype),
            trust_remote_code=options.trust_remote_code,
            device_map=options.device_map,
        )
    )
    tokenizer = load_tokenizer(name, options.trust_remote_code)
    drafters: dict[str, Drafter] = {}
    if options.draft:
        draft = load_draft(options.draft, target, tokenizer, options.trust_remote_code)
        if chains:
            chain = DraftModelDrafter(draft, (1,) * options.draft_tokens)
            drafters[f"draft model, {options.draft_tokens} tokens"] = chain
        if options.draft_tree:
            tree = DraftTreeDrafter(draft, *_tree_bounds(options.draft_tree))
            drafters[f"draft model, tree of {tree.max_nodes - 1}"] = tree
    if options.heads:
        medusa = MedusaDrafter(load_heads(options.heads, target))
        drafters[f"medusa, tree of {medusa.max_nodes - 1}"] = medusa
    return target, tokenizer, drafters


def _tree_bounds(text: str) -> tuple[int, int, int]:
    try:
        depth, width, nodes = (int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"--draft-tree is {text!r}: give depth,width,nodes, such as 5,4,24") from None
    return depth, width, nodes


def run_evaluate(options: EvaluateOptions, console: Console | None = None) -> dict[str, Any]:
    """Measure, print the table, write report.json and report.html; returns the report."""
    watched, console = console or standard_error(), console or standard_output()
    logging.set_verbosity_error()  # `generate` warns about the draft length that assisted generation is given
    target, tokenizer, drafters = _load(options)
    drafters["prompt lookup"] = PromptLookupDrafter()
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
    made_by = _made_by(chosen, tokenizer, prompts)  # now: a file may be another when all is measured
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
    options: EvaluateOptions, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The report's account of itself: the command, its settings, and fingerprints of all that was measured."""
    trusted = options.trust_remote_code
    named = {"target": resolve(options.target), "heads": options.heads, "draft": options.draft}
    kept_apart = {*named, "prompts", "output", "title"}
    settings = {name: value for name, value in vars(options).items() if name not in kept_apart}
    return {
        "command": published_command(sys.argv),
        "settings": without_local_paths(settings),
        "fingerprints": {
            **{name: stored_fingerprint(model, trusted) if model else None for name, model in named.items()},
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "prompts": prompts_fingerprint(prompts),
        },
    }


def _fitting(
    prompts: list[tuple[int, ...]], target: CausalLM, drafters: dict[str, Drafter], options: EvaluateOptions
) -> tuple[list[tuple[int, ...]], int]:
    """The prompts that target and drafts can hold with their new tokens, and how many others were left out."""
    drafts = [draft for drafter in drafters.values() if isinstance(draft := getattr(drafter, "draft", None), CausalLM)]
    holds = min((model.max_positions for model in (target, *drafts) if model.max_positions is not None), default=None)
    if holds is None:
        return prompts, 0
    fitting = [prompt for prompt in prompts if len(prompt) + options.max_new_tokens <= holds]
    too_long = len(prompts) - len(fitting)
    if too_long and not (options.skip_long and fitting):
        remedy = (
            "lower --max-new-tokens" if not fitting else "leave them out with --skip-long, or lower --max-new-tokens"
        )
        holder = "target and draft" if drafts else "the target"
        raise ValueError(
            f"{too_long} of {len(prompts)} prompts, the longest of {max(map(len, prompts))} tokens, do not fit with "
            f"{options.max_new_tokens} new tokens into the {holds} that {holder} can hold: {remedy}, or cut "
            "them with --prompt-tokens"
        )
    return fitting, too_long


def run_generate(options: GenerateOptions, console: Console | None = None) -> None:
    """Stream the text in two colours and say what speculation gained."""
    console = console or standard_output()
    target, tokenizer, drafters = _load(options, chains=not options.draft_tree)
    if options.lookup:
        drafters["prompt lookup"] = PromptLookupDrafter()
    if len(drafters) > 1:
        raise ValueError(f"{' and '.join(drafters)} were asked for: give one of --heads, --draft and --lookup")
    drafter = next(iter(drafters.values()), None)
    prompt = encode_prompt(options.prompt, tokenizer, options.chat)
    config = _decoding_config(options, eos_token_ids(target.model, tokenizer))
    engine = Engine(target, drafter, named_policy(options.policy), tokenizer)
    if drafter is not None and options.compare:
        warm_up = replace(config, max_new_tokens=min(8, config.max_new_tokens))
        engine.decode(prompt, warm_up)
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
    name, label = next(iter(drafters), "plain decoding"), config.rule.label if config.rule else "lossless"
    say(console, _summary(steps, plain, f"{name} ({label})"), style="dim")


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
    """One line: tokens per target pass, tokens/s, speed-up."""
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
