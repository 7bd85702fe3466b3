"""The command `headstart evaluate`: one process, or several that `accelerate launch` starts."""

import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from accelerate import Accelerator
from accelerate.utils import gather_object
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from decoding.drafters.spec import DrafterSpec
from decoding.measure.evaluate import (
    EvaluationConfig,
    Measurement,
    cells_of,
    measure,
    report_of,
    standard_methods,
    write_report,
)
from decoding.measure.machine import commit, hardware, versions
from decoding.measure.markdown import one_line
from decoding.measure.methods import Method, settings_of
from decoding.measure.questions import Asker, Question, evenly, read_questions
from decoding.measure.records import check_identity, open_records, provenances, record_files
from decoding.measure.redact import published_command, published_name, without_local_paths
from decoding.measure.report import terminal_table, write_html
from decoding.measure.samples import samples_of
from decoding.measure.waves import waves_of
from decoding.model.fingerprint import prompts_fingerprint, tokenizer_fingerprint
from decoding.model.hub import revisions, short_name
from decoding.model.loading import eos_token_ids
from trainer.commands.models import LoadedModels, load_models, published_specs
from trainer.commands.options import EvaluateOptions
from trainer.commands.plan import asked_or_planned
from trainer.files.lock import hold
from trainer.processes import Process, agreed, join_processes, on_first
from trainer.quickstart import resolve
from trainer.target.fingerprints import kept_fingerprint
from trainer.terminal.console import say, standard_error, standard_output, wide
from trainer.terminal.progress import ProgressBar

_SAMPLE_CHARACTERS = 400
_FILLED = 0.9
"""Share of a context that its prompts fill at least; cuts between tokens take some off."""


class _Asked(NamedTuple):
    """The questions to ask: ``left_out`` did not fit, ``cut`` lost their beginning; the file has ``of``."""

    asker: Asker
    left_out: int
    cut: int
    of: int


def run_evaluate(options: EvaluateOptions, console: Console | None = None) -> dict[str, Any]:
    """Measure, print the table and two texts, write report.json and report.html; return the report.

    Of several processes each decodes its share, and the first one writes and returns the report; the others return {}.
    """
    watched, console = console or standard_error(), console or standard_output()
    accelerator = join_processes()
    rank, world = (0, 1) if accelerator is None else (accelerator.process_index, accelerator.num_processes)
    logging.set_verbosity_error()  # `generate` warns about the draft length that assisted generation is given
    process = Process(rank, world, watched)
    measurement, made_by, asked, tokenizer = agreed(lambda: _prepared(options, process), patient=True)
    with ExitStack() as held:
        on_first(lambda: held.enter_context(hold(options.output)))
        on_first(lambda: _check_records(options, made_by))
        measurement = _measured(options.output, measurement, made_by, accelerator, watched)
        if rank:
            return {}
        report = _report(options, made_by, asked, measurement, tokenizer)
        write_report(report, options.output / "report.json")
        write_html(report, options.output / "report.html")
    wide(console).print(terminal_table(report))
    show_samples(console, report["samples"])
    say(console, f"written: {options.output / 'report.json'}, {options.output / 'report.html'}")
    return report


def _prepared(
    options: EvaluateOptions, process: Process
) -> tuple[Measurement, dict[str, Any], _Asked, PreTrainedTokenizerBase]:
    """Read and check everything that is measured; return also the run's account of itself."""
    config = _config(options)
    asked_for = asked_or_planned(
        options.drafter or (),
        options.plan,
        options,
        [setting.temperature for setting in settings_of(config)],
        config.batch_sizes,
        config.contexts,
        process.console if process.is_first else Console(quiet=True),
    )
    every, chosen = _chosen(options, process)
    models = load_models(options, asked_for, options.static)
    config = replace(config, eos_token_ids=eos_token_ids(models.target.model, models.tokenizer))
    asked = _questions(every, chosen, options, config, models)
    made_by = _made_by(options, config, models.specs, asked.asker, models.tokenizer)
    made_by["settings"]["static"] = models.target.static or "off"
    methods = standard_methods(models.target, models.drafters, config)
    measurement = Measurement(models.target, methods, asked.asker, config, rank=process.rank, world=process.world)
    return measurement, made_by, asked, models.tokenizer


def _measured(
    output: Path,
    measurement: Measurement,
    made_by: Mapping[str, Any],
    accelerator: Accelerator | None,
    watched: Console,
) -> Measurement:
    """Decode this process's share into its file of runs; return the measurement with the records of all processes."""
    provenance = _provenance(made_by, measurement.methods, measurement.world)
    records = agreed(lambda: open_records(output, measurement.rank, provenance))
    measurement = replace(measurement, records=records)
    with ProgressBar(watched, "evaluating", measurement.total(), active=measurement.rank == 0) as bar:
        agreed(lambda: measure(replace(measurement, on_run=bar.advance)), patient=True)
    records.close()
    if accelerator is not None:
        for line in gather_object(list(records.lines())):
            records.take(line)
        accelerator.end_training()
    return measurement


def _config(options: EvaluateOptions) -> EvaluationConfig:
    """Return the settings, before anything is read; ValueError for those that cannot be."""
    if options.turns not in ("all", "first"):
        raise ValueError(f"--turns is {options.turns!r}: give all or first")
    if options.skip_long and options.cut_long:
        raise ValueError("--skip-long and --cut-long are both given: leave long prompts out, or cut them")
    if options.context and options.prompt_tokens:
        raise ValueError("--context and --prompt-tokens are both given: each sets the length of the prompts")
    return EvaluationConfig(
        max_new_tokens=options.max_new_tokens,
        rounds=options.rounds,
        temperatures=tuple(options.temperature),
        settings=tuple(options.settings),
        policies=tuple(options.policies),
        seed=options.seed,
        batch_sizes=tuple(options.batch_size),
        contexts=tuple(options.context or (None,)),
    )


# --- questions --------------------------------------------------------------------------------------------------------


def _chosen(options: EvaluateOptions, process: Process) -> tuple[list[Question], list[Question]]:
    """Return all questions of the file, and those to ask; ValueError for tasks that it lacks."""
    every = read_questions(resolve(options.prompts), options.prompt_field)
    wanted = options.task
    of_tasks = every
    if wanted is not None:
        known = sorted({question.task for question in every if question.task is not None})
        if unknown := next((task for task in wanted if task not in known), None):
            raise ValueError(f"--task is {unknown!r}, but {options.prompts} has {', '.join(known) or 'no tasks'}")
        of_tasks = [question for question in every if question.task in wanted]
    chosen = evenly(of_tasks, options.limit)
    if len(chosen) < len(of_tasks) and (tasks := {question.task for question in chosen} - {None}):
        process.say(f"{len(chosen)} of {len(of_tasks)} questions, evenly over {len(tasks)} tasks (--limit)")
    return every, chosen


def _questions(
    every: Sequence[Question],
    chosen: Sequence[Question],
    options: EvaluateOptions,
    config: EvaluationConfig,
    models: LoadedModels,
) -> _Asked:
    """Return the chosen questions that target and drafters can hold; ValueError for contexts that do not fit."""
    # A prompt of a given length has no room that is known beforehand for the answers before a later turn.
    all_turns = options.turns == "all" and config.contexts == (None,) and options.prompt_tokens is None
    asker = Asker(chosen, models.tokenizer, options.thinking, all_turns, options.prompt_tokens, every)
    asked = _fitting(_Asked(asker, 0, 0, len(every)), config, models, options)
    _check_filled(asked.asker, config, options.prompts)
    return asked


def _fitting(asked: _Asked, config: EvaluationConfig, models: LoadedModels, options: EvaluateOptions) -> _Asked:
    """Return the questions that target and drafters can hold with their new tokens; others are left out or cut."""
    asker = asked.asker
    limits = [drafter.max_positions for drafter in models.drafters.values() if drafter.max_positions is not None]
    holder = "target and draft" if limits else "the target"
    limits += [] if models.target.max_positions is None else [models.target.max_positions]
    if not limits:
        return asked
    holds = min(limits)
    if too_far := [each for each in config.contexts if each is not None and each + config.max_new_tokens > holds]:
        raise ValueError(
            f"--context {min(too_far)} does not fit with {config.max_new_tokens} new tokens into the {holds} that "
            f"{holder} can hold: give {holds - config.max_new_tokens} at most"
        )
    if None not in config.contexts:
        return asked
    lengths = [len(asker.prompt(place)) for place in range(len(asker.questions))]
    fits = [length + config.max_new_tokens <= holds for length in lengths]
    too_long = fits.count(False)
    if options.cut_long and too_long and holds > config.max_new_tokens:
        return asked._replace(asker=replace(asker, longest=holds - config.max_new_tokens), cut=too_long)
    if too_long and not (options.skip_long and any(fits)):
        remedy = "leave them out with --skip-long, or lower --max-new-tokens" if any(fits) else "lower --max-new-tokens"
        raise ValueError(
            f"{too_long} of {len(lengths)} prompts, the longest of {max(lengths)} tokens, do not fit with "
            f"{config.max_new_tokens} new tokens into the {holds} that {holder} can hold: {remedy}, or cut "
            "them with --cut-long"
        )
    kept = [question for question, fit in zip(asker.questions, fits, strict=True) if fit]
    return asked._replace(asker=replace(asker, questions=kept), left_out=too_long)


def _check_filled(asker: Asker, config: EvaluationConfig, prompts: str) -> None:
    """Raise ValueError for a context, or a batch size, that the questions do not reach: figures would bear its name."""
    for size in config.batch_sizes:
        if (largest := max(len(wave.places) for wave in waves_of(asker.tasks, size))) < size:
            raise ValueError(
                f"--batch-size {size} needs as many questions of one task, and the largest task has {largest}: raise "
                f"--limit, or give {largest} at most"
            )
    for context in (each for each in config.contexts if each is not None):
        lengths = [len(asker.prompt(place, context)) for place in range(len(asker.questions))]
        if (filled := int(median(lengths))) < _FILLED * context:
            raise ValueError(
                f"--context {context} is more than the texts of {prompts} fill: prompts would have {filled} tokens; "
                f"give {filled} at most, or a file with more text"
            )


# --- the run's account of itself --------------------------------------------------------------------------------------


def _made_by(
    options: EvaluateOptions,
    config: EvaluationConfig,
    specs: Mapping[str, DrafterSpec],
    asker: Asker,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    """Return the report's account of itself: the command, its settings, and fingerprints of all that is measured.

    ``drafters`` has the spec of each drafter by its name in the rows; weights' fingerprints stand under these specs.
    """
    trusted = options.trust_remote_code
    in_words = {
        "settings": list(config.settings),
        "policies": list(config.policies),
        "temperature": list(config.temperatures),
        "batch_size": list(config.batch_sizes),
        "context": list(config.contexts),
    }
    kept_apart = {"target", "drafter", "prompts", "output", "title", "restart", "plan"}
    settings = {name: value for name, value in {**vars(options), **in_words}.items() if name not in kept_apart}
    told = published_specs(list(specs.values()))
    weights = {
        name: kept_fingerprint(spec.path, trusted)
        for name, spec in zip(told, specs.values(), strict=True)
        if spec.path is not None
    }
    prompts = [asker.prompt(place, context) for context in config.contexts for place in range(len(asker.questions))]
    return {
        "command": published_command(sys.argv),
        "settings": without_local_paths(settings),
        "asked": {**asker.asked(), "contexts": list(config.contexts)},
        "drafters": dict(zip(specs, told, strict=True)),
        "fingerprints": {
            "target": kept_fingerprint(resolve(options.target), trusted),
            **weights,
            "tokenizer": tokenizer_fingerprint(tokenizer),
            "prompts": prompts_fingerprint(prompts),
        },
        "revisions": revisions(
            {"target": resolve(options.target)}
            | {name: spec.path for name, spec in zip(told, specs.values(), strict=True)}
        ),
    }


def _provenance(made_by: Mapping[str, Any], methods: Sequence[Method], world: int) -> dict[str, Any]:
    """Return the first line of a file of runs."""
    names = ("setting", "name", "label", "drafter", "artefact", "temperature")
    told = [{name: getattr(method, name) for name in names} for method in methods]
    about = {"command": made_by["command"], "hardware": hardware(), "versions": versions(), "commit": commit()}
    return {"identity": _identity(made_by), "methods": told, "processes": world, **about}


def _identity(made_by: Mapping[str, Any]) -> dict[str, Any]:
    """Return everything that makes the runs, flat, so that a difference can be named."""
    return {**made_by["settings"], **made_by["asked"], "drafters": made_by["drafters"], **made_by["fingerprints"]}


def _check_records(options: EvaluateOptions, made_by: Mapping[str, Any]) -> None:
    """Drop earlier runs if asked to; ValueError for a folder of other runs."""
    if options.restart:
        for file in record_files(options.output):
            file.unlink()
    check_identity(options.output, _identity(made_by))


# --- the report -------------------------------------------------------------------------------------------------------


def _report(
    options: EvaluateOptions,
    made_by: Mapping[str, Any],
    asked: _Asked,
    measurement: Measurement,
    tokenizer: PreTrainedTokenizerBase,
) -> dict[str, Any]:
    title = options.title or f"{short_name(options.target)} on {Path(options.prompts).name}"
    figures = report_of(measurement)
    known = provenances(options.output)
    return {
        "title": one_line(without_local_paths(title)),
        **made_by,
        **figures,
        **{name: known[-1][name] for name in ("hardware", "versions", "commit")},  # of the runs, not of this process
        "commits": sorted({each["commit"] for each in known}),
        "processors": sorted({each["hardware"]["processor"] for each in known}),
        "processes": measurement.world,
        "prompts_from": one_line(published_name(options.prompts)),
        "questions_in_file": asked.of,
        "prompts_left_out": asked.left_out,
        "prompts_cut": asked.cut,
        "grid_cells": [cell._asdict() for cell in cells_of(measurement.config)],
        "samples": samples_of(measurement, figures["rows"], tokenizer),
    }


def show_samples(console: Console, samples: Sequence[Mapping[str, Any]]) -> None:
    """Print two short texts, accepted draft tokens in green."""
    shown = [*samples[:1], *[sample for sample in samples if sample["setting"] != samples[0]["setting"]][:1]]
    for sample in shown:
        about = ", ".join(filter(None, (sample["setting"], sample["method"], sample["task"])))
        text, left = Text(), _SAMPLE_CHARACTERS
        for written, drafted in sample["pieces"]:
            piece = written[:left]
            text.append(piece, style="green" if drafted else None)
            left -= len(piece)
        text.append("" if left else " …")
        say(console, Text(f"{about} (green: from the draft)", style="dim"), text)
