"""The command `headstart doctor`: this machine, the installed packages, and whether target and drafters fit."""

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from decoding.measure.redact import without_local_paths
from decoding.model.dtypes import parse_dtype
from trainer.commands.findings import PRINTED, account, write_findings
from trainer.commands.proof_options import DoctorOptions
from trainer.doctor.advice import Advice, Case, next_steps
from trainer.doctor.dtypes import dtype_findings, measure
from trainer.doctor.finding import Finding, Section, has_problem
from trainer.doctor.machine import Machine, free_bytes, machine_findings, probe_hub, read_machine
from trainer.doctor.packages import installed_version, package_findings, read_wanted
from trainer.terminal.console import say, standard_error, standard_output

if TYPE_CHECKING:
    from decoding.drafters.spec import DrafterSpec
    from trainer.doctor.models import Checked

_STYLES = {"ok": "green", "note": "yellow", "problem": "bold red"}


def run_doctor(options: DoctorOptions, console: Console | None = None) -> bool:
    """Check and print; return False if a problem was found. ValueError for names that nothing can be read from.

    transformers, which takes longer to import than all else here, is left alone unless a target is given.
    """
    console, watch = console or standard_output(), standard_error()
    parse_dtype(options.dtype)
    specs = _specs(options)
    machine = read_machine()
    models, formats = ([], ()) if options.target is None else _models(options, options.target, specs, machine, watch)
    packages = Section("packages", tuple(package_findings(read_wanted(), installed_version)))
    say(watch, "measuring products in each dtype …", style="dim")
    sections = [
        Section("machine", tuple(_machine(machine, options))),
        Section("dtypes, measured here", tuple(dtype_findings(measure(), options.dtype))),
        packages,
        *models,
    ]
    fits = [not has_problem(section.findings) for section in models]
    faults = tuple(finding.remedy for finding in packages.findings if finding.status == "problem")
    advice = next_steps(Case(options.target, tuple(specs), formats, all(fits[:1]), all(fits[1:]), faults))
    if options.json is not None:
        write_findings(options.json, {**account(), **_as_json(sections, advice)})
    if options.json != PRINTED:
        show(sections, advice, console)
    return not any(has_problem(section.findings) for section in sections)


def _specs(options: DoctorOptions) -> "list[DrafterSpec]":
    if not options.drafter:
        return []
    if options.target is None:
        raise ValueError(f"--drafter is {options.drafter[0]}, which is checked against a target: give --target too")
    from trainer.commands.models import read_specs

    return read_specs(options.drafter)


def _machine(machine: Machine, options: DoctorOptions) -> list[Finding]:
    found = machine_findings(machine, os.environ)
    return [*found, probe_hub()] if options.hub else found


def _models(
    options: DoctorOptions, target: str, specs: "Sequence[DrafterSpec]", machine: Machine, watch: Console
) -> "Checked":
    say(watch, f"reading {target} …", style="dim")
    from trainer.doctor.models import Request, check_models

    return check_models(
        Request(
            target,
            tuple(specs),
            options.dtype,
            options.longest,
            options.decode,
            free_bytes(machine),
            options.trust_remote_code,
        )
    )


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
