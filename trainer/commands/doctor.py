"""The command `headstart doctor`: this machine, the installed packages, and whether target and drafters fit."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from decoding.drafters.spec import DrafterSpec
from decoding.measure.redact import without_local_paths
from decoding.model.loading import parse_dtype
from trainer import quickstart
from trainer.commands.drafters import asked_drafters
from trainer.commands.findings import PRINTED, account, write_findings
from trainer.commands.proof_options import DoctorOptions
from trainer.doctor.advice import Advice, next_steps
from trainer.doctor.drafter import examine, parts_of
from trainer.doctor.dtypes import dtype_findings, measure
from trainer.doctor.finding import Finding, Section, has_problem, note
from trainer.doctor.machine import Machine, free_bytes, machine_findings, probe_hub, read_machine
from trainer.doctor.packages import installed_version, package_findings, read_wanted
from trainer.doctor.proof import SMALL, Loading, prove
from trainer.doctor.reading import Skeleton, read_skeleton
from trainer.doctor.target import check_memory, target_findings
from trainer.terminal.console import say, standard_error, standard_output

_LONGEST = 2048
"""Tokens of the longest text, where neither the user nor the target says."""
_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def run_doctor(options: DoctorOptions, console: Console | None = None) -> bool:
    """Check and print; return False if a problem was found. ValueError for names that cannot be read at all."""
    console, watch = console or standard_output(), standard_error()
    parse_dtype(options.dtype)
    if options.drafter and options.target is None:
        raise ValueError(f"--drafter is {options.drafter[0]}, which is checked against a target: give --target too")
    specs = asked_drafters(options.drafter or ())
    machine = read_machine()
    sections = [Section("machine", tuple(_machine(machine, options)))]
    say(watch, "measuring products in each dtype …", style="dim")
    sections.append(Section("dtypes, measured here", tuple(dtype_findings(measure(), options.dtype))))
    sections.append(Section("packages", tuple(package_findings(read_wanted(), installed_version))))
    models = [] if options.target is None else _models(options, specs, machine, watch)
    sections += models
    target_fits, drafters_fit = (
        not any(has_problem(section.findings) for section in part) for part in (models[:1], models[1:])
    )
    advice = next_steps(options.target, specs, target_fits, drafters_fit)
    if options.json is not None:
        write_findings(options.json, {**account(), **_as_json(sections, advice)})
    if options.json != PRINTED:
        show(sections, advice, console)
    return not any(has_problem(section.findings) for section in sections)


def _machine(machine: Machine, options: DoctorOptions) -> list[Finding]:
    found = machine_findings(machine, os.environ)
    return [*found, probe_hub()] if options.hub else found


def _models(options: DoctorOptions, specs: Sequence[DrafterSpec], machine: Machine, watch: Console) -> list[Section]:
    """Return the sections of the target and of each drafter."""
    name = str(options.target)
    if name == quickstart.NAME and not quickstart.is_built():
        missing = note(
            "files", "not built yet", "headstart train recipes/quickstart/medusa1.yaml, which builds it first"
        )
        return [Section(f"target {name}", (missing,))]
    say(watch, f"reading {name} …", style="dim")
    trusted = options.trust_remote_code
    findings, target = read_skeleton(quickstart.resolve(name), parse_dtype(options.dtype), trusted, name)
    if target is None:
        return [Section(f"target {name}", tuple(findings))]
    longest = options.longest or min(_LONGEST, target.model.max_positions or _LONGEST)
    examined = [examine(spec, target, longest, trusted) for spec in specs]
    drafts = [each.draft for each in examined if each.draft is not None]
    parts, free = parts_of(specs, examined), free_bytes(machine, spread=options.device_map is not None)
    findings += [*target_findings(target, longest), check_memory(target, parts, drafts, longest, free)]
    of_drafters = [list(each.findings) for each in examined]
    if _is_to_decode(options, target, parts, free) and not any(map(has_problem, (findings, *of_drafters))):
        say(watch, "decoding …", style="dim")
        own, theirs = prove(_loading(options, target, parts, free), specs)
        findings.append(own)
        for held, proved in zip(of_drafters, theirs, strict=False):
            held.append(proved)
    return [
        Section(f"target {name}", tuple(findings)),
        *(Section(f"drafter {spec}", tuple(held)) for spec, held in zip(specs, of_drafters, strict=True)),
    ]


def _in_fp32(target: Skeleton, parts: Sequence[tuple[str, int]]) -> float:
    """Return the bytes of all weights in fp32."""
    return (target.bytes + sum(count for _, count in parts)) * 4 / target.model.dtype.itemsize


def _is_to_decode(options: DoctorOptions, target: Skeleton, parts: Sequence[tuple[str, int]], free: int | None) -> bool:
    """Tell if models are loaded: as the user says, else if they are small and here already."""
    if options.decode is not None:
        return options.decode
    here = any(target.folder.glob("*.safetensors"))
    return here and _in_fp32(target, parts) <= min(SMALL, (free or SMALL) / 2)


def _loading(options: DoctorOptions, target: Skeleton, parts: Sequence[tuple[str, int]], free: int | None) -> Loading:
    """Load in fp32, where texts must be equal, if that fits twice; else in the dtype asked for."""
    fits = _in_fp32(target, parts) <= (free or SMALL) / 2
    dtype = torch.float32 if fits else parse_dtype(options.dtype)
    return Loading(target.name, dtype, options.device_map, options.trust_remote_code)


def _as_json(sections: Sequence[Section], advice: Sequence[Advice]) -> dict[str, Any]:
    """Return JSON values without local paths."""
    findings = [finding for section in sections for finding in section.findings]
    content: dict[str, Any] = without_local_paths(
        {
            "problems": sum(finding.status == "problem" for finding in findings),
            "notes": sum(finding.status == "note" for finding in findings),
            "sections": [section.as_json() for section in sections],
            "next": [each._asdict() for each in advice],
        }
    )
    return content


def show(sections: Sequence[Section], advice: Sequence[Advice], console: Console) -> None:
    """Print the sections, what to run next, and a last line that counts problems and notes."""
    for section in sections:
        say(console, section.title, style="bold")
        _print(section.findings, console)
    say(console, "next", style="bold")
    for each in advice:
        say(console, f"  {each.reason}:", style="dim")
        say(console, f"    {each.command}")
    say(console, *_verdict([finding for section in sections for finding in section.findings]))


def _print(findings: Sequence[Finding], console: Console) -> None:
    """Print a line for each finding; on a terminal wrapped beside its name, elsewhere whole."""
    if not console.is_terminal:
        for finding in findings:
            remedy = f"; {finding.remedy}" if finding.remedy else ""
            say(console, f"  {finding.status}: {finding.check}: {finding.found}{remedy}")
        return
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True, min_width=len("  problem"))
    table.add_column(no_wrap=True, min_width=len("special tokens"))
    table.add_column(overflow="fold")
    for finding in findings:
        told = Text(finding.found)
        if finding.remedy:
            told.append(f"\n→ {finding.remedy}", style="bold")
        table.add_row(Text(f"  {finding.status}", style=_STYLES[finding.status]), Text(finding.check), told)
    console.print(table)


def _verdict(findings: Sequence[Finding]) -> list[Text]:
    """Return the last line, after the names of what is wrong."""
    problems = [finding.check for finding in findings if finding.status == "problem"]
    notes = sum(finding.status == "note" for finding in findings)
    told = f"{notes} {'note' if notes == 1 else 'notes'}"
    if not problems:
        return [Text(f"no problem, {told}", style="bold green")]
    count = f"{len(problems)} {'problem' if len(problems) == 1 else 'problems'}"
    return [Text(f"{count} ({', '.join(problems)}), {told}", style="bold red")]
