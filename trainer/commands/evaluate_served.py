"""`headstart evaluate --endpoint`: measures a server's speed-up at each concurrency from its streamed answers."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from hashlib import sha256
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console

from decoding.errors import UserError
from decoding.measure.figures import PLAIN
from decoding.measure.markdown import one_line
from decoding.measure.methods import EvaluationConfig, Method, Run, Setting, settings_of
from decoding.measure.questions import Question, read_questions
from decoding.measure.records import GridCell, RunKey, line_of, open_records, read_lines, record_files
from decoding.measure.redact import published_command, published_name, without_local_paths
from decoding.measure.results import Report
from decoding.measure.served import SERVED, Timing, served_figures, shares_of_time
from decoding.metrics import StepCount
from decoding.prompts import read_variables
from trainer.commands.evaluate import check_records, chosen_questions, identity_of, publish
from trainer.commands.findings import account
from trainer.commands.models import check_endpoint, connect
from trainer.commands.options import EvaluateOptions
from trainer.files.folders import hold
from trainer.processes import Process
from trainer.servers.answers import StreamedAnswer
from trainer.servers.client import ServedModel
from trainer.servers.counters import find_counts
from trainer.terminal.console import ProgressBar, standard_error, standard_output

_PUBLISHED = (
    *("prompt_field", "limit", "task", "chat_template_kwargs", "max_new_tokens", "rounds"),
    *("settings", "temperature", "concurrency"),
)
_OF_THIS_PROCESS = ("target", "drafter", "batch_size", "context", "policy", "plan", "dtype", "trust_remote_code")


class Cell(NamedTuple):
    """The answers of one endpoint to all questions in one round, at one concurrency (``load``) and with one setting."""

    method: Method
    setting: Setting
    load: GridCell
    round: int

    def key(self, wave: int) -> RunKey:
        return RunKey(self.load, wave, 0, self.setting.name, self.method.name, self.round)


def run_evaluate_served(
    options: EvaluateOptions, console: Console | None = None, clock: Callable[[], float] = time.perf_counter
) -> Report:
    """Measure the endpoints alternately, print the table, write report.json and report.html, and return the report."""
    watched, console = console or standard_error(), console or standard_output()
    config = _checked(options)
    every = read_questions(options.prompts, options.prompt_field)
    questions = chosen_questions(every, options, Process(0, 1, watched))
    if len(questions) < max(options.concurrency):
        raise UserError(
            f"--concurrency {max(options.concurrency)} needs that many prompts, but there are {len(questions)}",
            "raise --limit, or lower --concurrency",
        )
    addresses = {SERVED: options.endpoint, PLAIN: options.baseline_endpoint}
    names = [name for name, address in addresses.items() if address is not None]
    methods = [
        Method(setting.name, name, "unproved", None, temperature=setting.temperature)
        for setting in settings_of(config)
        for name in names
    ]
    loads = [GridCell(concurrency, None) for concurrency in options.concurrency]
    about = _about(options, questions, names)
    with ExitStack() as stack:
        stack.enter_context(hold(options.output))
        check_records(options, about)
        given = [{name: getattr(method, name) for name in ("setting", "name")} for method in methods]
        provenance = {"identity": identity_of(about), "methods": given, "processes": 1, **account()}
        records = open_records(options.output, 0, provenance)
        stack.callback(records.close)
        known, waves = records.by_key, range(len(questions))
        every_cell = _cells(methods, config, loads)
        missing = [cell for cell in every_cell if not all(cell.key(wave) in known for wave in waves)]
        servers = {name: stack.enter_context(connect(addresses[name] or "", options.model or "")) for name in names}
        bar = stack.enter_context(ProgressBar(watched, "evaluating", len(missing) * len(questions)))
        models = {line["method"]: line["model"] for line in reversed(_lines(options)) if line["model"] is not None}
        sessions = {
            name: _Session(server, options, questions, clock, bar.advance, models.get(name))
            for name, server in servers.items()
        }
        for cell in missing:
            for line in sessions[cell.method.name].lines(cell):
                records.add(line)
        lines = _lines(options)
    tasks = {question.id: question.task for question in questions}
    models = {name: session.model for name, session in sessions.items()}
    report = replace(
        served_figures(lines, methods, loads, tasks),
        **{**about, **account()},
        models=models,
        questions=len(questions),
        rounds=config.rounds,
        max_new_tokens=config.max_new_tokens,
    )
    answered_as = sorted({model for model in models.values() if model is not None})
    if len(answered_as) > 1:
        note = f"The endpoints serve {' and '.join(map(repr, answered_as))}: compare servers of one target."
        report = replace(report, notes=(*report.notes, note))
    publish(report, options.output, console)
    return report


def _lines(options: EvaluateOptions) -> list[dict[str, Any]]:
    return [line for file in record_files(options.output) for line in read_lines(file) if "timing" in line]


def _checked(options: EvaluateOptions) -> EvaluationConfig:
    """Return the settings; raise UserError for options that contradict each other."""
    for address in (options.endpoint, options.baseline_endpoint or options.endpoint):
        check_endpoint(address, options.model)
    if changed := [name for name in _OF_THIS_PROCESS if getattr(options, name) != getattr(EvaluateOptions, name)]:
        raise UserError(f"--{changed[0].replace('_', '-')} does nothing with --endpoint", "omit it")
    if "typical" in options.settings:
        raise UserError("--settings typical does not work with --endpoint", "use greedy, sampling, or both")
    if options.endpoint == options.baseline_endpoint:
        raise UserError("--baseline-endpoint is the same as --endpoint", "start a second server without speculation")
    return EvaluationConfig(
        options.max_new_tokens, options.rounds, tuple(options.temperature), settings=tuple(options.settings)
    )


def _cells(methods: Sequence[Method], config: EvaluationConfig, loads: Sequence[GridCell]) -> Iterator[Cell]:
    """Yield the cells. In each round every endpoint has one turn, and the order of the endpoints is reversed in the
    next round.
    """
    turn = count()
    for setting in settings_of(config):
        mine = [method for method in methods if method.setting == setting.name]
        for load in loads:
            for repetition in range(config.rounds):
                for method in mine[:: -1 if next(turn) % 2 else 1]:
                    yield Cell(method, setting, load, repetition)


class _Session:
    """A measured endpoint. ``model``: the name of the first model that answered."""

    def __init__(
        self,
        server: ServedModel,
        options: EvaluateOptions,
        questions: Sequence[Question],
        clock: Callable[[], float],
        on_answer: Callable[[], None],
        model: str | None,
    ) -> None:
        self._server, self._options, self._questions = server, options, questions
        self._clock, self._on_answer = clock, on_answer
        self._uncached: bool | None = None
        """True if the server accepts fields that forbid reuse of an earlier prefill; None if unknown."""
        self.model = model

    def lines(self, cell: Cell) -> list[dict[str, Any]]:
        """Measure a cell and return its record lines; the first line also contains the server's counters. Raise
        UserError if the model changes.
        """
        bodies = [self._body(index, cell) for index in range(len(self._questions))]
        # The first field is for llama.cpp, and the second is for vLLM and SGLang.
        anew = {"cache_prompt": False, "cache_salt": f"{time.time_ns()}"}
        if self._uncached is None:  # tested only in the first cell; this request also warms up the server
            self._uncached = self._server.takes({**bodies[0], **anew}, self._clock)
        before = find_counts(self._server.metrics(), self._server.served.model)
        asked = [{**body, **(anew if self._uncached else {})} for body in bodies]
        answers = self._server.streamed(asked, cell.load.batch_size, self._on_answer, self._clock)
        after = find_counts(self._server.metrics(), self._server.served.model)
        for model in (answer.model for answer in answers if answer.model is not None):
            self.model = self.model or model
            if model != self.model:
                raise UserError(
                    f"the endpoint first served {self.model!r} and then {model!r}",
                    "measure a server that serves the same model throughout",
                )
        shares = shares_of_time([(answer.begin, answer.end) for answer in answers])
        lines = []
        for wave, (body, answer, share) in enumerate(zip(bodies, answers, shares, strict=True)):
            asks = {name: body.get(name) for name in ("messages", "prompt", "tools")}
            named = {"prompts": [self._questions[wave].id], "digests": [_fingerprint(asks)]}
            run = Run((), answer.tokens or 0, 0.0, share, _steps(answer))
            timing = Timing(answer.begin, answer.end, answer.arrivals, answer.tokens, _fingerprint(answer.text))
            lines.append(line_of(cell.key(wave), **named, runs=[run], timing=timing, model=answer.model))
        if after is not None:
            lines[0]["counters"] = asdict(after.since(before))
        return lines

    def _body(self, index: int, cell: Cell) -> dict[str, Any]:
        question, options = self._questions[index], self._options
        messages = list(question.opening)
        plain = "\n".join(message["content"] for message in messages)  # a system message comes first
        body: dict[str, Any] = {"prompt": plain} if question.plain else {"messages": messages}
        if question.tools:
            body["tools"] = question.tools
        if options.chat_template_kwargs:
            body["chat_template_kwargs"] = read_variables(options.chat_template_kwargs)
        seed = cell.round * len(self._questions) + index
        return {**body, "max_tokens": options.max_new_tokens, "temperature": cell.setting.temperature, "seed": seed}


def _steps(answer: StreamedAnswer) -> tuple[StepCount, ...]:
    """Return one step count for each pass of an answer. Each count includes the target's own token; the order of the
    passes is unknown.
    """
    return tuple(
        StepCount(accepted + 1, accepted, answer.drafts, answer.drafts)
        for accepted, times in enumerate(answer.passes)
        for _ in range(times)
    )


def _fingerprint(value: Any) -> str:
    return sha256(repr(value).encode()).hexdigest()[:12]


def _about(options: EvaluateOptions, questions: Sequence[Question], names: Sequence[str]) -> dict[str, Any]:
    """Return the report's account of its inputs; addresses are omitted because they may change or contain secrets."""
    model = one_line(published_name(options.model or ""))
    texts = [(question.id, question.task, question.opening, question.plain, question.tools) for question in questions]
    return {
        "title": one_line(f"{model}, served, on {Path(published_name(options.prompts)).name}"),
        "command": published_command(sys.argv),
        "settings": without_local_paths({name: getattr(options, name) for name in _PUBLISHED}),
        "asked": {"turns": "first", "endpoints": list(names)},
        "drafters": {},
        "fingerprints": {"target": f"served as {model}", "tokenizer": "of the server", "prompts": _fingerprint(texts)},
        "prompts_from": one_line(published_name(options.prompts)),
    }
