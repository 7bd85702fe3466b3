"""`headstart verify --self-test`: faults planted into engines and servers, and the test that catches each."""

import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from rich.text import Text

from decoding.engine import Engine
from decoding.generate import DecodingConfig, check_prompt
from decoding.measure.proof.faults import Disturbed, planted, tiny_prompts, tiny_target, usual_end
from decoding.measure.proof.finding import Finding
from decoding.measure.proof.loop import EngineWriter, cache_consistency
from decoding.measure.proof.prove import Effort, Writer, prove
from decoding.measure.proof.reference import Reference
from decoding.measure.questions import read_prompts
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_tokenizer
from decoding.rules.sampling import SamplingConfig
from trainer.commands.findings import account, write_findings
from trainer.commands.models import read_target
from trainer.commands.proof_options import VerifyOptions
from trainer.commands.verify import effort_of
from trainer.quickstart import resolve
from trainer.terminal.console import say, title, wide
from trainer.terminal.progress import ProgressBar

_CACHE_PROMPTS = 2
_SERVED_DRAWS = 100
"""Draws from a server of the tiny target, which decodes one text at a time."""


_SERVERS = {
    "none: a right server": (False, 1.0),
    "a server samples at 1.3 times the temperature": (False, 1.3),
    "a server accepts argmax drafts by a softmax q": (True, 1.0),
}
"""Servers to try: True for one that drafts by argmax, and its temperature over the one asked for."""


class _Caught(NamedTuple):
    """A planted fault, or a right engine, and the findings that fail it, as far as the tests went."""

    name: str
    is_right: bool
    failures: list[Finding]
    tests: int

    @property
    def as_it_should(self) -> bool:
        return self.is_right == (not self.failures)

    def as_json(self) -> dict[str, Any]:
        failures = [finding.as_json() for finding in self.failures]
        return {"engine": self.name, "as_it_should": self.as_it_should, "tests": self.tests, "failures": failures}


@dataclass(frozen=True, eq=False)
class _Desk:
    """A target with prompts, on which faults are planted."""

    target: CausalLM
    sampling: SamplingConfig
    eos: tuple[int, ...]
    prompts: list[tuple[int, ...]]
    effort: Effort

    @property
    def reference(self) -> Reference:
        return Reference(self.target, self.sampling, self.eos)


def run_self_test(options: VerifyOptions, console: Console, watched: Console) -> bool:
    """Print each fault with the tests that caught it; return True if all were, and no right engine failed."""
    desk = _desk(options)
    batch_size = 64 if options.target is None else options.batch_size
    served = importlib.util.find_spec("openai") is not None
    if not served:
        say(console, "faults of servers are not tried without openai: pip install 'headstart[endpoint]'")
    engines = planted(desk.target, desk.sampling, desk.eos, batch_size)
    found: list[_Caught] = []
    with ProgressBar(watched, "planting faults", len(engines) + len(_SERVERS) * served) as bar:
        for each in engines:
            found.append(_tried(each.name, each.is_right, each.reference, each.writer, desk, each.writer))
            bar.advance()
        for caught in _on_the_loopback(desk) if served else ():
            found.append(caught)
            bar.advance()
    wide(console).print(_table(found))
    passed = all(each.as_it_should for each in found)
    say(console, _verdict(found, tiny=options.target is None))
    if options.json is not None:
        engines_found = [each.as_json() for each in found]
        write_findings(options.json, {"verdict": "PASS" if passed else "FAIL", **account(), "engines": engines_found})
    return passed


def _verdict(found: list[_Caught], tiny: bool) -> Text:
    slipped = [each.name for each in found if not each.as_it_should]
    if slipped:
        remedy = "" if tiny else "; give more --draws and --rounds"
        return Text.assemble(("FAIL", "bold red"), f": {', '.join(slipped)}{remedy}")
    faults = sum(not each.is_right for each in found)
    told = f": all {faults} planted faults are caught, and no right engine fails"
    return Text.assemble(("PASS", "bold green"), told)


def _desk(options: VerifyOptions) -> _Desk:
    sampling = SamplingConfig(temperature=options.temperature)
    if sampling.greedy:
        raise ValueError("--self-test plants faults of sampling: give a --temperature above 0")
    if options.endpoint is not None or options.model is not None or options.drafter or options.rule:
        raise ValueError("--self-test brings engines of its own: leave out --endpoint, --model, --drafter and --rule")
    if options.top_k or options.top_p != 1 or options.min_p:
        raise ValueError("--self-test samples by temperature alone: leave out --top-k, --top-p and --min-p")
    if options.target is None:
        target, prompts = tiny_target(), tiny_prompts()
        effort = Effort(max_new_tokens=24, draws=300, rounds=3, alpha=options.alpha, seed=options.seed)
    else:
        if options.prompts is None:
            raise ValueError(f"--self-test on the target {options.target} needs --prompts: give a .jsonl file")
        effort = effort_of(options)
        tokenizer = load_tokenizer(resolve(options.target), options.trust_remote_code)
        prompts = read_prompts(
            resolve(options.prompts), tokenizer, options.limit, options.prompt_field, chat=options.chat
        )
        target = read_target(options.target, options, options.static)
        for prompt in prompts:
            check_prompt(target, prompt, DecodingConfig(options.max_new_tokens))
    end = usual_end(target, sampling, prompts, effort.max_new_tokens)
    return _Desk(target, sampling, (end,), prompts, effort)


def _tried(
    name: str, is_right: bool, reference: Reference, writer: Writer, desk: _Desk, engine: EngineWriter | None = None
) -> _Caught:
    """Run the tests, of a faulty engine up to the first that fails."""
    failures, tests = [], 0
    for finding in _findings(reference, writer, desk, engine):
        tests += 1
        if not finding.passed:
            failures.append(finding)
            if not is_right:
                break
    return _Caught(name, is_right, failures, tests)


def _findings(reference: Reference, writer: Writer, desk: _Desk, engine: EngineWriter | None) -> Iterator[Finding]:
    if engine is not None:
        config = DecodingConfig(
            desk.effort.max_new_tokens, engine.config.sampling, engine.config.rule, engine.config.eos_token_ids
        )
        yield cache_consistency(engine.engine, desk.prompts[:_CACHE_PROMPTS], config)
    yield from prove(reference, writer, desk.prompts, desk.effort)


def _on_the_loopback(desk: _Desk) -> Iterator[_Caught]:
    """Try a right server and two faulty ones."""
    fewer = replace(desk, effort=replace(desk.effort, draws=min(_SERVED_DRAWS, desk.effort.draws)))
    for name, (argmax, heat) in _SERVERS.items():
        engine = Engine(desk.target, Disturbed(desk.target, argmax=True) if argmax else None)
        with _served_writer(engine, desk, heat) as writer:
            yield _tried(name, name.startswith("none"), desk.reference, writer, fewer)


@contextmanager
def _served_writer(engine: Engine, desk: _Desk, heat: float) -> Iterator[Writer]:
    from trainer.servers.client import ServedModel
    from trainer.servers.connection import Endpoint
    from trainer.servers.loopback import NAME, served
    from trainer.servers.writer import ServedWriter

    with served(engine, desk.eos, heat) as address, ServedModel(Endpoint(address=address, model=NAME)) as model:
        yield ServedWriter(model, desk.reference, None, desk.prompts[0])


def _table(found: list[_Caught]) -> Table:
    table = Table(title=title("planted faults"))
    for name in ("fault", "", "caught by", "p"):
        table.add_column(name)
    for each in found:
        first = each.failures[0] if each.failures else None
        by = f"{first.test}: {first.seen}" if first else f"nothing, by {each.tests} tests"
        p = "" if first is None or first.p_value is None else f"{first.p_value:.1e}"
        verdict = "as it should" if each.as_it_should else "WRONG"
        table.add_row(each.name, Text(verdict, style="green" if each.as_it_should else "bold red"), by, p)
    return table
