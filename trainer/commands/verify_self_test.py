"""`headstart verify --self-test`: faults planted into engines and servers, and the test that catches each."""

import importlib.util
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain

from rich.console import Console

from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.proof.faults import Disturbed, planted, tiny_prompts, tiny_target, usual_end
from decoding.measure.proof.finding import Finding, all_pass, judged
from decoding.measure.proof.loop import cache_consistency
from decoding.measure.proof.prove import Effort, prove
from decoding.measure.proof.reference import Reference
from decoding.rules.sampling import SamplingConfig
from trainer.commands.findings import report, say_findings, summary, write_findings
from trainer.commands.proof_options import VerifyOptions
from trainer.commands.verify import read_input
from trainer.terminal.console import say
from trainer.terminal.progress import ProgressBar

_CACHE_PROMPTS = 2
_SERVED_DRAWS = 100
"""Draws from a server of the tiny target, which decodes one text at a time."""
_BATCH = 64

_SERVERS = {
    "none: a right server": (False, 1.0),
    "a server samples at 1.3 times the temperature": (False, 1.3),
    "a server accepts argmax drafts by a softmax q": (True, 1.0),
}
"""Servers to try: True for one that drafts by argmax, and its temperature over the one asked for."""


def run_self_test(options: VerifyOptions, console: Console, watch: Console) -> bool:
    """Print each fault with the test that caught it; return True if all were, and no right engine failed."""
    reference, prompts, effort = _read(options)
    served = importlib.util.find_spec("openai") is not None
    if not served:
        say(console, "faults of servers are not tried without openai: pip install 'headstart[endpoint]'")
    found: list[Finding] = []
    with ProgressBar(watch, "planting faults", None) as bar:
        of_servers = _servers(reference, prompts, effort) if served else ()
        for finding in chain(_engines(reference, prompts, effort), of_servers):
            found.append(finding)
            bar.advance()
    say(console, "planted faults:")
    say_findings(console, found)
    say(console, summary(found))
    if options.json is not None:
        verdict = "PASS" if all_pass(found) else "FAIL"
        write_findings(options.json, report({"planted faults": found}, verdict=verdict))
    return all_pass(found)


def _read(options: VerifyOptions) -> tuple[Reference, list[tuple[int, ...]], Effort]:
    sampling = SamplingConfig(temperature=options.temperature)
    if sampling.greedy:
        raise ValueError("--self-test plants faults of sampling: give a --temperature above 0")
    if options.endpoint or options.model or options.drafter or options.rule or options.top_k or options.top_p != 1:
        raise ValueError("--self-test brings engines of its own: give --target and --prompts, or neither")
    if options.target is None:
        target, prompts = tiny_target(), tiny_prompts()
        effort = Effort(max_new_tokens=24, draws=300, rounds=3, seed=options.seed)
    else:
        if options.prompts is None:
            raise ValueError(f"--self-test on the target {options.target} needs --prompts: give a .jsonl file")
        given = read_input(options, 1)
        target, prompts, effort = given.reference.target, given.prompts, given.effort
    end = usual_end(target, sampling, prompts, effort.max_new_tokens)
    return Reference(target, sampling, (end,)), prompts, effort


def _engines(reference: Reference, prompts: list[tuple[int, ...]], effort: Effort) -> Iterator[Finding]:
    """Yield the outcome of each engine of this process."""
    for each in planted(reference.target, reference.sampling, reference.eos_token_ids, _BATCH):
        own = each.writer.config
        config = DecodingConfig(effort.max_new_tokens, own.sampling, own.rule, own.eos_token_ids)

        def findings(each=each, config=config) -> Iterator[Finding]:  # type: ignore[no-untyped-def]  # of this loop
            yield cache_consistency(each.writer.engine, prompts[:_CACHE_PROMPTS], config)
            yield from prove(each.reference, each.writer, prompts, effort)

        yield _outcome(each.name, each.is_right, findings())


def _servers(reference: Reference, prompts: list[tuple[int, ...]], effort: Effort) -> Iterator[Finding]:
    """Yield the outcome of a right server and of two faulty ones."""
    from trainer.servers.client import ServedModel
    from trainer.servers.connection import Endpoint
    from trainer.servers.loopback import NAME, served
    from trainer.servers.writer import ServedWriter

    fewer = replace(effort, draws=min(_SERVED_DRAWS, effort.draws))
    target = reference.target
    for name, (argmax, heat) in _SERVERS.items():
        engine = Engine(target, Disturbed(target, argmax=True) if argmax else None)
        with (
            served(engine, reference.eos_token_ids, heat) as address,
            ServedModel(Endpoint(address=address, model=NAME)) as model,
        ):
            writer = ServedWriter(model, reference, None, prompts[0])
            yield _outcome(name, name.startswith("none"), prove(reference, writer, prompts, fewer))


def _outcome(name: str, is_right: bool, findings: Iterable[Finding]) -> Finding:
    """Return whether a right engine passes every test, or a faulty one fails a test, of which the first counts."""
    tests, failure = 0, None
    for finding in findings:
        tests += 1
        if not finding.passed:
            failure = finding
            break
    by = f"no test of {tests} fails" if failure is None else f"caught by {failure.check}: {failure.found}"
    figures = {"tests": tests, "caught_by": failure and failure.check}
    return judged(name, is_right == (failure is None), by, **figures)
