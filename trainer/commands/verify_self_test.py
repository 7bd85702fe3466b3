"""`headstart verify --self-test`: faults planted into engines, and the test that catches each."""

from collections.abc import Iterable, Iterator

from rich.console import Console

from decoding.generate import DecodingConfig
from decoding.measure.proof.faults import planted, tiny_prompts, tiny_target, usual_end
from decoding.measure.proof.finding import Finding, all_pass, judged
from decoding.measure.proof.loop import cache_consistency
from decoding.measure.proof.prove import Effort, prove
from decoding.measure.proof.reference import Reference
from decoding.rules.sampling import SamplingConfig
from trainer.commands.findings import report, say_findings, summary, write_findings
from trainer.commands.proof_options import VerifyOptions
from trainer.terminal.console import say
from trainer.terminal.progress import ProgressBar

_CACHE_PROMPTS = 2
_BATCH = 64


def run_self_test(options: VerifyOptions, console: Console, watch: Console) -> bool:
    """Print each fault with the test that caught it; return True if all were, and no right engine failed."""
    reference, prompts, effort = _read(options)
    found: list[Finding] = []
    with ProgressBar(watch, "planting faults", None) as bar:
        for finding in _engines(reference, prompts, effort):
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
    if any((options.target, options.prompts, options.endpoint, options.model, options.drafter, options.rule)):
        raise ValueError("--self-test brings a target and engines of its own: give it alone")
    target, prompts = tiny_target(), tiny_prompts()
    effort = Effort(max_new_tokens=24, draws=300, rounds=3, seed=options.seed)
    return Reference(target, sampling, (usual_end(target, sampling, prompts, effort.max_new_tokens),)), prompts, effort


def _engines(reference: Reference, prompts: list[tuple[int, ...]], effort: Effort) -> Iterator[Finding]:
    """Yield the outcome of each engine of this process."""
    for each in planted(reference.target, reference.sampling, reference.eos_token_ids, _BATCH):
        own = each.writer.config
        config = DecodingConfig(effort.max_new_tokens, own.sampling, own.rule, own.eos_token_ids)

        def findings(each=each, config=config) -> Iterator[Finding]:  # type: ignore[no-untyped-def]  # of this loop
            yield cache_consistency(each.writer.engine, prompts[:_CACHE_PROMPTS], config)
            yield from prove(each.reference, each.writer, prompts, effort)

        yield _outcome(each.name, each.is_right, findings())


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
