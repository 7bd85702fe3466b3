"""`headstart serve-command`: the commands that serve a folder, for a shell; what to know of them beside."""

from typing import Any

from trainer.commands.artefact_options import ServeCommandOptions
from trainer.commands.findings import PRINTED, write_findings
from trainer.export.serve import commands_of, refusals_of
from trainer.export.served import ServerCommand
from trainer.terminal.console import say, standard_error


def run_serve_command(options: ServeCommandOptions) -> tuple[ServerCommand, ...]:
    """Print the commands to standard output, and their notes and warnings to standard error.

    ValueError for a folder that no server takes, and for what `commands_of` refuses.
    """
    commands = commands_of(options.folder, options.target, options.plan, options.server, options.depth)
    refused = refusals_of(options.folder) if options.server is None else {}
    if not commands:
        raise ValueError(next(iter(refused.values())))
    if options.json is not None:
        write_findings(options.json, {"commands": [_as_json(command) for command in commands], "refused": refused})
    if options.json != PRINTED:
        for command in commands:
            _print(command)
        for reason in refused.values():
            say(standard_error(), f"not: {reason}")
    return commands


def _print(command: ServerCommand) -> None:
    """Print a command; a shell takes all that goes to standard output."""
    watched = standard_error()
    say(watched, f"{command.server}:", style="bold")
    print(command.shell, flush=True)
    for note in command.notes:
        say(watched, f"  note: {note}")
    for warning in command.warnings:
        say(watched, f"  warning: {warning}", style="yellow")


def _as_json(command: ServerCommand) -> dict[str, Any]:
    return {
        "server": command.server,
        "argv": list(command.argv),
        "shell": command.shell,
        "notes": list(command.notes),
        "warnings": list(command.warnings),
    }
