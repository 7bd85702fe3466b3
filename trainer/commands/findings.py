"""Writes the findings of checking commands as lines, JSON and JUnit XML, and describes how a command was run."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from rich.console import Console
from rich.text import Text

from decoding.measure.machine import commit, hardware, versions
from decoding.measure.markdown import visible
from decoding.measure.proof.finding import Finding
from decoding.measure.redact import published_command, without_local_paths
from trainer.terminal.console import say

PRINTED = "-"
"""With this file name, the findings are printed as JSON instead of text."""
_STYLES = {"ok": "green", "note": "yellow", "open": "yellow", "problem": "bold red"}


def say_findings(console: Console, findings: Sequence[Finding]) -> None:
    """Print one line per finding: status, check, values and remedy."""
    for finding in findings:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        status = Text(f"  {finding.status}", style=_STYLES[finding.status])
        say(console, Text.assemble(status, f": {finding.check}: {finding.found}{remedy}"))


def summary(findings: Sequence[Finding]) -> Text:
    """Return the last line of a command: PASS, or FAIL with the names of the problems, and the numbers of notes and
    undecided checks.
    """
    problems = [finding.check for finding in findings if finding.status == "problem"]
    others = ", ".join(
        f"{count} {status}" for status in ("note", "open") if (count := sum(f.status == status for f in findings))
    )
    failed = f"FAIL: {len(problems)} of {len(findings)} checks: {', '.join(dict.fromkeys(problems))}"
    headline = (
        Text(failed, style="bold red") if problems else Text(f"PASS: all {len(findings)} checks", style="bold green")
    )
    return Text.assemble(headline, f" ({others})" if others else "")


def account() -> dict[str, Any]:
    """Return the command line without private parts, the machine, the versions and the commit."""
    return {"command": published_command(sys.argv), "hardware": hardware(), "versions": versions(), "commit": commit()}


def report(findings: Mapping[str, Sequence[Finding]], **more: Any) -> dict[str, Any]:
    """Return the findings by subject, together with the `account` of the command, without private parts."""
    every = {title: [finding.as_json() for finding in of_title] for title, of_title in findings.items()}
    problems = sum(finding.status == "problem" for of_title in findings.values() for finding in of_title)
    content: dict[str, Any] = without_local_paths({"problems": problems, **more, "findings": every})
    return {**account(), **content}


def write_findings(file: str, content: Any) -> None:
    """Write findings as JSON to a file (and create its folder), or print them; dataclasses become objects."""
    from decoding.measure.results import as_json  # this imports torch, which some commands do not need
    from trainer.files.folders import write_text

    text = json.dumps(as_json(content), indent=2) + "\n"
    if file == PRINTED:
        print(text, end="")
        return
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(file), text)


def write_junit(file: Path, findings: Mapping[str, Sequence[Finding]]) -> None:
    """Write findings as JUnit XML: a suite per subject, a failure per problem, a skipped test per undecided check."""
    from trainer.files.folders import write_text

    suites = Element("testsuites", name="headstart verify")
    for title, of_title in findings.items():
        suite = SubElement(suites, "testsuite", name=visible(title), tests=str(len(of_title)))
        for name, status in (("failures", "problem"), ("skipped", "open")):
            suite.set(name, str(sum(finding.status == status for finding in of_title)))
        for finding in of_title:
            case = SubElement(suite, "testcase", classname=visible(title), name=visible(finding.check))
            told = visible(str(without_local_paths(finding.found)))
            if kind := {"problem": "failure", "open": "skipped"}.get(finding.status):
                SubElement(case, kind, message=told).text = finding.remedy and visible(finding.remedy)
            else:
                SubElement(case, "system-out").text = told
    indent(suites)
    file.parent.mkdir(parents=True, exist_ok=True)
    write_text(file, tostring(suites, encoding="unicode", xml_declaration=True) + "\n")
