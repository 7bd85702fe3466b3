"""The command `headstart verify`: PASS or FAIL of an engine in this process, of a server, or of the tests."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.drafters.registry import DrafterLoader
from decoding.drafters.spec import DrafterSpec
from decoding.engine import Engine
from decoding.generate import DecodingConfig, check_prompt
from decoding.measure.proof.finding import Finding, all_pass
from decoding.measure.proof.loop import EngineWriter, accepts_itself, cache_consistency
from decoding.measure.proof.prove import Effort, power, prove
from decoding.measure.proof.reference import Reference
from decoding.measure.questions import read_prompts
from decoding.measure.redact import published_name
from decoding.model.fingerprint import prompts_fingerprint, stored_fingerprint
from decoding.model.hub import revisions
from decoding.model.loading import eos_token_ids, load_tokenizer
from decoding.rules.sampling import SamplingConfig
from decoding.speculation import named_rule
from trainer.commands.findings import PRINTED, account, write_findings
from trainer.commands.models import read_specs, read_target
from trainer.commands.proof_options import VerifyOptions
from trainer.commands.served import check_endpoint, connect
from trainer.quickstart import resolve
from trainer.terminal.console import say, standard_error, standard_output
from trainer.terminal.progress import ProgressBar

_CACHE_PROMPTS = 4
"""Prompts after which the cache is compared; each takes a text of its own."""


class _Input(NamedTuple):
    """All that a proof reads."""

    reference: Reference
    tokenizer: PreTrainedTokenizerBase
    prompts: list[tuple[int, ...]]
    effort: Effort


def run_verify(options: VerifyOptions, console: Console | None = None) -> bool:
    """Prove, print each finding, write --json; return True for PASS."""
    watched = console or standard_error()
    console = watched if options.json == PRINTED else console or standard_output()
    if options.self_test:
        from trainer.commands.verify_self_test import run_self_test

        return run_self_test(options, console, watched)
    specs = _check(options)
    given = _read(options, max(1, len(specs)))
    sentences, figures = power(given.reference, given.prompts, given.effort)
    say(console, *(f"power: {sentence}" for sentence in sentences))
    engines: dict[str, list[Finding]] = {}
    proofs = (
        _served(options, given, watched)
        if options.endpoint is not None
        else _in_process(options, given, specs, watched)
    )
    for name, finding in proofs:
        if name not in engines:
            say(console, f"{name}:")
        engines.setdefault(name, []).append(finding)
        say_finding(console, finding)
    passed = all_pass([finding for findings in engines.values() for finding in findings])
    say(console, _verdict(passed, engines))
    if options.json is not None:
        _write(options, specs, given, figures, engines, passed)
    if options.json not in (None, PRINTED):
        say(console, f"written: {options.json}")
    return passed


def say_finding(console: Console, finding: Finding) -> None:
    """Print a verdict, its test, its p-value and its figures on one line."""
    chance = "" if finding.p_value is None else f", p {_p_value(finding.p_value)}"
    style = {"PASS": "green", "OPEN": "yellow", "FAIL": "bold red"}[finding.verdict]
    say(console, Text.assemble((finding.verdict, style), f"  {finding.test}{chance}: {finding.seen}"))


def _p_value(value: float) -> str:
    return "= 0" if value == 0 else "= 1" if value == 1 else f"< {value:.1e}" if value < 1e-3 else f"= {value:.3f}"


def _verdict(passed: bool, engines: dict[str, list[Finding]]) -> Text:
    every = [finding for findings in engines.values() for finding in findings]
    named = {verdict: [finding.test for finding in every if finding.verdict == verdict] for verdict in ("FAIL", "OPEN")}
    count = f"{len(every)} tests"
    if not passed:
        said = Text.assemble(("FAIL", "bold red"), f": {len(named['FAIL'])} of {count}: {_listed(named['FAIL'])}")
    elif not named["OPEN"]:
        return Text.assemble(("PASS", "bold green"), f": all {count}")
    else:
        said = Text.assemble(("PASS", "bold green"), f": {len(every) - len(named['OPEN'])} of {count}")
    if named["OPEN"]:
        said.append(f"; {_listed(named['OPEN'])} could not tell: give more draws (--draws, --draw-prompts)")
    return said


def _listed(tests: Sequence[str]) -> str:
    return ", ".join(dict.fromkeys(tests))


def _check(options: VerifyOptions) -> list[DrafterSpec]:
    """Refuse options that do not go together, before anything is loaded; return the drafters to prove."""
    if options.target is None or options.prompts is None:
        raise ValueError("give --target and --prompts, or --self-test for a test of the tests")
    check_endpoint(options)
    if options.endpoint is not None and (options.drafter or options.rule):
        raise ValueError("--drafter and --rule are of this process; an --endpoint decodes as it likes")
    if options.rule is not None:
        named_rule(options.rule)
        if options.temperature == 0:
            raise ValueError(f"--rule {options.rule} is of sampling: give a --temperature above 0")
    return read_specs(options.drafter or ())


def _read(options: VerifyOptions, engines: int) -> _Input:
    assert options.target is not None and options.prompts is not None
    sampling = SamplingConfig(
        temperature=options.temperature, top_k=options.top_k, top_p=options.top_p, min_p=options.min_p
    )
    effort = effort_of(options, engines)
    name, trusted = resolve(options.target), options.trust_remote_code
    tokenizer = load_tokenizer(name, trusted)
    prompts = read_prompts(resolve(options.prompts), tokenizer, options.limit, options.prompt_field, chat=options.chat)
    target = read_target(options.target, options, options.static)
    for prompt in prompts:
        check_prompt(target, prompt, DecodingConfig(options.max_new_tokens))
    reference = Reference(target, sampling, eos_token_ids(target.model, tokenizer))
    return _Input(reference, tokenizer, prompts, effort)


def effort_of(options: VerifyOptions, engines: int = 1) -> Effort:
    """Return the samples that the options ask for."""
    return Effort(
        max_new_tokens=options.max_new_tokens,
        draws=options.draws,
        draw_prompts=options.draw_prompts,
        alpha=options.alpha,
        seed=options.seed,
        rounds=options.rounds,
        engines=engines,
    )


def _in_process(
    options: VerifyOptions, given: _Input, specs: Sequence[DrafterSpec], watched: Console
) -> Iterator[tuple[str, Finding]]:
    """Yield the findings of each drafter's engine, of plain decoding if there is none, and of the loop itself."""
    reference = given.reference
    target = reference.target
    loader = DrafterLoader(target, given.tokenizer, options.trust_remote_code)
    drafters: list[Drafter | None] = [loader.load(spec) for spec in specs]
    drafters = drafters or [None]
    config = DecodingConfig(
        max_new_tokens=options.max_new_tokens,
        sampling=reference.sampling,
        rule=named_rule(options.rule) if options.rule else None,
        eos_token_ids=reference.eos_token_ids,
        seed=options.seed,
    )
    few = given.prompts[:_CACHE_PROMPTS]
    yield "the loop", accepts_itself(target, given.prompts, _without_rule(config), options.batch_size)
    labels = ["plain decoding" if drafter is None else drafter.label for drafter in drafters]
    for number, (label, drafter) in enumerate(zip(labels, drafters, strict=True), start=1):
        name = f"{label} ({number})" if labels.count(label) > 1 else label
        engine = Engine(target, drafter)
        with _progress(watched, name) as (on_texts, on_answer):
            writer = EngineWriter(engine, config, options.batch_size, on_answer)
            for finding in prove(reference, writer, given.prompts, given.effort, on_texts):
                yield name, finding
        yield name, cache_consistency(engine, few, config)


def _without_rule(config: DecodingConfig) -> DecodingConfig:
    return DecodingConfig(config.max_new_tokens, config.sampling, None, config.eos_token_ids, seed=config.seed)


def _served(options: VerifyOptions, given: _Input, watched: Console) -> Iterator[tuple[str, Finding]]:
    """Yield the findings of a served model."""
    from trainer.servers.writer import ServedWriter

    name = f"{published_name(options.model or '')}, served"  # vLLM's own names are paths
    with connect(options) as model:
        writer = ServedWriter(model, given.reference, given.tokenizer, given.prompts[0])
        with _progress(watched, name) as (on_texts, writer.on_answer):
            for finding in prove(given.reference, writer, given.prompts, given.effort, on_texts):
                yield name, finding
        yield name, _told(writer)


def _told(writer: Any) -> Finding:
    """Return how the server told its tokens; a finding that fails nothing."""
    seen = f"the server told {writer.source}"
    if not writer.takes_ids:
        seen += "; it takes no prompts of token ids, so that texts were sent"
    if writer.retold:
        seen += f"; {writer.unlike} of {writer.retold} texts do not read back, and others may have had other tokens"
    if writer.refused_controls:
        seen += f"; it takes no {' and no '.join(writer.refused_controls)}: its own may be in force"
    names = ("source", "takes_ids", "refused_controls", "retold", "unlike")
    figures = {name: getattr(writer, name) for name in names}
    return Finding("tokens", writer.unlike == 0, seen, figures=figures)


@contextmanager
def _progress(watched: Console, name: str) -> Iterator[tuple[Callable[[str, int], None], Callable[[], None]]]:
    """Show the work; yields what is to be told of each batch of texts, and of each text."""
    with ProgressBar(watched, f"proving {name}", None) as bar:

        def on_texts(what: str, texts: int) -> None:
            bar.begin(0)
            bar.update(total=texts, note=f"{what} texts")

        yield on_texts, bar.advance


def _write(
    options: VerifyOptions,
    specs: Sequence[DrafterSpec],
    given: _Input,
    figures: dict[str, Any],
    engines: dict[str, list[Finding]],
    passed: bool,
) -> None:
    assert options.json is not None and options.target is not None
    report = {
        "verdict": "PASS" if passed else "FAIL",
        **account(),
        "dtype": options.dtype,
        "static": options.static,
        "fingerprints": {
            "target": stored_fingerprint(resolve(options.target), options.trust_remote_code),
            "prompts": prompts_fingerprint(given.prompts),
        },
        "revisions": revisions({"target": resolve(options.target), **{str(spec): spec.path for spec in specs}}),
        "power": figures,
        "engines": {name: [finding.as_json() for finding in findings] for name, findings in engines.items()},
    }
    write_findings(options.json, report)
