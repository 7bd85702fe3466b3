"""The command `headstart evaluate`, in one process or in several started by `accelerate launch`."""

import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from decoding.drafters.spec import all_paths
from decoding.errors import UserError
from decoding.fields import warn_of_unread
from decoding.files.fingerprint import prompts_fingerprint, stored_fingerprint, tokenizer_fingerprint
from decoding.files.hub import local_folder, revisions, short_name
from decoding.measure.markdown import one_line
from decoding.measure.measurement import Measurement, report_of
from decoding.measure.methods import EvaluationConfig, settings_of, standard_methods
from decoding.measure.questions import Asker, Question, evenly, read_questions, waves_of
from decoding.measure.records import check_origin, open_records, provenances, record_files
from decoding.measure.redact import published_command, published_name, without_local_paths
from decoding.measure.report.page import write_html
from decoding.measure.report.tables import TerminalReport
from decoding.measure.results import Report, write_report
from decoding.measure.samples import samples_of
from decoding.model.loading import eos_token_ids
from trainer.commands.findings import account
from trainer.commands.models import LoadedModels, load_models, published_specs, read_specs, read_tokenizer
from trainer.commands.options import EvaluateOptions
from trainer.commands.plan import asked_or_planned
from trainer.export.companions import read_provenance
from trainer.files.folders import hold
from trainer.processes import Process, agreed, join_processes, on_first
from trainer.terminal.console import ProgressBar, say, standard_error, standard_output, wide

_FILLED = 0.9
"""Prompts must fill at least this share of a context length. The share is below 1 because a cut prompt loses a few
tokens.
"""
_PUBLISHED = (
    *("dtype", "batch_invariant", "trust_remote_code", "prompt_field", "limit", "task", "max_new_tokens", "rounds"),
    "chat_template_kwargs",
)
"""Options that the report shows unchanged; other options appear as names, as fingerprints or under ``asked``."""


def run_evaluate(options: EvaluateOptions, console: Console | None = None) -> Report | None:
    """Measure, print the table, write report.json and report.html; return the report.

    If there are several processes, each decodes a share of the prompts. The first process writes and returns the
    report; the others return None.
    """
    watched, console = console or standard_error(), console or standard_output()
    for name in ("model", "baseline_endpoint", "concurrency"):
        if getattr(options, name) != getattr(EvaluateOptions, name):
            raise UserError(f"--{name.replace('_', '-')} does nothing without --endpoint", "omit it")
    if not options.target:
        raise UserError("there is nothing to evaluate", "use --target to decode in this process, or --endpoint")
    accelerator = join_processes()
    rank, world = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    logging.set_verbosity_error()  # `generate` of transformers warns about the length of its drafts
    process = Process(rank, world, watched)
    measurement, tokenizer, about = agreed(lambda: _prepared(options, process), patient=True)
    with ExitStack() as stack:
        on_first(lambda: stack.enter_context(hold(options.output)))
        on_first(lambda: check_records(options, about))
        measurement = _measured(options.output, measurement, about, accelerator, watched)
        if rank:
            return None
        report, known = report_of(measurement), provenances(options.output)
        report = replace(
            report,
            **about,
            **{name: known[-1][name] for name in ("hardware", "versions", "commit")},  # the machine may have changed
            commits=tuple(sorted({provenance["commit"] for provenance in known})),
            processors=tuple(sorted({provenance["hardware"]["processor"] for provenance in known})),
            processes=world,
            samples=tuple(samples_of(measurement, report.rows, tokenizer)),
        )
        publish(report, options.output, console)
    return report


def publish(report: Report, output: Path, console: Console) -> None:
    """Write report.json and report.html, and print the table."""
    write_report(report, output / "report.json")
    write_html(report, output / "report.html")
    wide(console).print(TerminalReport(report))
    say(console, f"written: {output / 'report.json'}, {output / 'report.html'}")


def _prepared(
    options: EvaluateOptions, process: Process
) -> tuple[Measurement, PreTrainedTokenizerBase, dict[str, Any]]:
    """Read and check all inputs; return the measurement, the tokenizer, and what the report says about its inputs."""
    config = EvaluationConfig(
        max_new_tokens=options.max_new_tokens,
        rounds=options.rounds,
        temperatures=tuple(options.temperature),
        settings=tuple(options.settings),
        batch_sizes=tuple(options.batch_size),
        contexts=tuple(options.context or (None,)),
        policies=tuple(options.policy),
    )
    temperatures = [setting.temperature for setting in settings_of(config)]
    notes = process.console if process.is_first else Console(quiet=True)
    drafters = asked_or_planned(options.drafter or (), options.plan, options, temperatures, config.batch_sizes, notes)
    specs = read_specs(drafters)
    if not options.restart:
        check_origin(options.output, _settings(options), partly=True)
    every = read_questions(options.prompts, options.prompt_field)
    chosen = chosen_questions(every, options, process)
    tokenizer = read_tokenizer(options.target, options)
    # If prompts have a given length, only first turns are asked, because the length of earlier answers is not known.
    asker = Asker(chosen, tokenizer, all_turns=config.contexts == (None,), filler=every)
    for index in range(len(chosen)):
        asker.prompt(index)  # a prompt that the template rejects is reported before the target is loaded
    models = load_models(options, specs, tokenizer)
    config = replace(config, eos_token_ids=eos_token_ids(models.target.model, tokenizer))
    asker = _fitting(asker, config, models)
    _check_filled(asker, config, options.prompts)
    methods = standard_methods(models.target, models.drafters, config)
    about = {
        "title": one_line(f"{short_name(options.target)} on {Path(published_name(options.prompts)).name}"),
        **_account(options, config, models, asker),
        "prompts_from": one_line(published_name(options.prompts)),
        "prompts_left_out": len(chosen) - len(asker.questions),
    }
    return Measurement(models.target, methods, asker, config, rank=process.rank, world=process.world), tokenizer, about


def _measured(
    output: Path, measurement: Measurement, about: Mapping[str, Any], accelerator: Accelerator | None, watched: Console
) -> Measurement:
    """Decode this process's share of the prompts and record the runs in a file; return the measurement with the records
    of all processes.
    """
    names = ("setting", "name", "label", "drafter", "artefact", "temperature")
    provenance = {
        "identity": identity_of(about),
        "methods": [{name: getattr(method, name) for name in names} for method in measurement.methods],
        "processes": measurement.world,
        **account(),
    }
    records = agreed(lambda: open_records(output, measurement.rank, provenance))
    measurement = replace(measurement, records=records)
    with ProgressBar(watched, "evaluating", measurement.total(), active=measurement.rank == 0) as bar:
        agreed(replace(measurement, on_run=bar.advance).run, patient=True)
    records.close()
    if accelerator is not None:
        for line in gather_object(list(records.lines())):
            records.take(line)
        accelerator.end_training()
    return measurement


# --- questions --------------------------------------------------------------------------------------------------------


def chosen_questions(every: Sequence[Question], options: EvaluateOptions, process: Process) -> list[Question]:
    """Return the questions to ask; raise UserError for a task that is not in the file."""
    of_tasks = every
    if options.task is not None:
        known = sorted({question.task for question in every if question.task is not None})
        if unknown := next((task for task in options.task if task not in known), None):
            raise UserError(
                f"--task is {unknown!r}, but the tasks in {options.prompts} are: {', '.join(known) or 'none'}"
            )
        of_tasks = [question for question in every if question.task in options.task]
    chosen = evenly(of_tasks, options.limit)
    if process.is_first:
        warn_of_unread(options.prompts, Counter(part for question in chosen for part in question.unread))
    if len(chosen) < len(of_tasks) and (tasks := {question.task for question in chosen} - {None}):
        process.say(f"{len(chosen)} of {len(of_tasks)} questions, spread evenly over {len(tasks)} tasks (--limit)")
    return chosen


def _fitting(asker: Asker, config: EvaluationConfig, models: LoadedModels) -> Asker:
    """Drop questions that, with their new tokens, are too long for the target or a drafter; raise UserError if no
    question is left.
    """
    limits = [models.target.max_positions, *(drafter.max_positions for drafter in models.drafters.values())]
    longest = min((limit for limit in limits if limit is not None), default=None)
    if longest is None:
        return asker
    room = longest - config.max_new_tokens
    if too_far := [context for context in config.contexts if context is not None and context > room]:
        raise UserError(
            f"--context {min(too_far)} plus {config.max_new_tokens} new tokens exceeds the {longest} tokens that "
            f"target and drafters support: use at most {room}"
        )
    if None not in config.contexts:
        return asker
    kept = [question for index, question in enumerate(asker.questions) if len(asker.prompt(index)) <= room]
    if not kept:
        raise UserError(
            f"every prompt plus {config.max_new_tokens} new tokens exceeds the {longest} tokens that target and "
            "drafters support: lower --max-new-tokens, or cut the prompts with --context"
        )
    return replace(asker, questions=kept)


def _check_filled(asker: Asker, config: EvaluationConfig, prompts: str) -> None:
    """Reject a context or a batch size that the questions cannot fill; results would be mislabelled."""
    for size in config.batch_sizes:
        if (largest := max(len(wave.questions) for wave in waves_of(asker.tasks, size))) < size:
            raise UserError(
                f"--batch-size {size} needs that many questions of one task, but the largest task has {largest}: "
                f"raise --limit, or use at most {largest}"
            )
    for context in filter(None, config.contexts):
        lengths = [len(asker.prompt(index, context)) for index in range(len(asker.questions))]
        if (filled := int(median(lengths))) < _FILLED * context:
            raise UserError(
                f"--context {context} needs more text than {prompts} has (prompts would have {filled} tokens): use at "
                f"most {filled}, or a file with more text"
            )


# --- the report's account of itself -----------------------------------------------------------------------------------


def _settings(options: EvaluateOptions) -> dict[str, Any]:
    """Return the settings that are known before a model is loaded."""
    shown = without_local_paths({name: getattr(options, name) for name in _PUBLISHED})
    lists = {name: list(getattr(options, name)) for name in ("settings", "temperature", "batch_size", "policy")}
    return {**shown, **lists, "context": list(options.context or (None,))}


def _account(options: EvaluateOptions, config: EvaluationConfig, models: LoadedModels, asker: Asker) -> dict[str, Any]:
    """Return an account of the evaluation, without local paths: the command, its settings, and the fingerprints of all
    inputs.

    ``drafters`` maps the name that the report's rows show for a drafter to its spec; ``fingerprints`` maps specs to the
    fingerprints of their weights.
    """
    trusted, specs = options.trust_remote_code, list(models.specs.values())
    names = published_specs(specs)
    paths = all_paths(dict(zip(names, specs, strict=True)))
    prompts = [asker.prompt(index, context) for context in config.contexts for index in range(len(asker.questions))]
    return {
        "command": published_command(sys.argv),
        "settings": {**_settings(options), "static": models.target.shapes},
        "asked": {**asker.asked(), "contexts": list(config.contexts)},
        "drafters": dict(zip(models.specs, names, strict=True)),
        "trained": {
            name: training
            for name, spec in models.specs.items()
            if spec.path is not None and (training := _training(spec.path)) is not None
        },
        "fingerprints": {
            "target": stored_fingerprint(options.target, trusted),
            **{name: stored_fingerprint(path, trusted) for name, path in paths.items()},
            "tokenizer": tokenizer_fingerprint(asker.tokenizer),
            "prompts": prompts_fingerprint(prompts),
        },
        "revisions": revisions({"target": options.target, **paths}),
    }


def _training(drafter: str) -> dict[str, Any] | None:
    """Return for how many steps and tokens a drafter was trained, on which file, and on how many rows. Return None if
    this project did not train the drafter.
    """
    stored = read_provenance(local_folder(drafter, weights=False))
    if stored is None:
        return None
    file = published_name(str(stored["recipe"].get("data", {}).get("train")))
    rows = next((held["rows"] for name, held in stored["data"].items() if published_name(name) == file), None)
    return {"steps": stored.get("steps"), "tokens": stored.get("tokens"), "rows": rows, "file": file}


def identity_of(about: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that determines the runs, as a flat object, so that an error can name a changed key."""
    return {**about["settings"], **about["asked"], "drafters": about["drafters"], **about["fingerprints"]}


def check_records(options: EvaluateOptions, about: Mapping[str, Any]) -> None:
    """Drop earlier runs if --restart is set; raise UserError if the folder contains runs with other settings."""
    if options.restart:
        for file in record_files(options.output):
            file.unlink()
    check_origin(options.output, identity_of(about))
