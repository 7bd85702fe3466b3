"""Findings as JSON, for the commands with ``--json FILE``, and a command's account of itself."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from decoding.measure.machine import commit, hardware, versions
from decoding.measure.redact import published_command

PRINTED = "-"
"""The file's name by which findings are printed, in place of the text."""


def account() -> dict[str, Any]:
    """Return the command line as it may be published, the machine, the versions and the commit."""
    return {
        "command": published_command(sys.argv),
        "hardware": hardware(),
        "versions": versions(),
        "commit": commit(),
    }


def write_findings(file: str, content: Mapping[str, Any]) -> None:
    """Write findings to a file, whose folder need not exist, or print them; NaN becomes null."""
    from decoding.measure.figures import without_nan  # it imports torch, which a command may do without
    from trainer.files.shards import write_text

    text = json.dumps(without_nan(dict(content)), indent=2) + "\n"
    if file == PRINTED:
        print(text, end="")
        return
    Path(file).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(file), text)
