"""The work of the export command: check, write, read back, describe the result on a card, and list server commands."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from decoding.errors import UserError
from decoding.measure.redact import without_local_paths
from decoding.model.causal_lm import CausalLM
from trainer.export import folder_formats
from trainer.export.card import FOLDER_NAME, CardFigures, card_figures, read_own_report, render_card, target_argument
from trainer.export.companions import (
    ServingPlan,
    copy_target,
    read_provenance,
    read_serving_plan,
    target_of,
    write_companions,
)
from trainer.export.readback import Readers, check_drafts
from trainer.export.serve import ServerCommand, Serving, commands_of
from trainer.export.task import FORMATS, Artefact, ExportTask, artefact_folder, check_format, opened
from trainer.export.upload import CARD_NAME
from trainer.files.folders import write_folder
from trainer.heads.medusa2 import TARGET_FOLDER

NO_PROMPTS = Path("none")
"""Value of ``prompts`` that skips the decoding check."""


Writer = Callable[[ExportTask], tuple[Artefact, tuple[str, ...]]]
"""Function that writes the weights, and returns their description and sentences on what was read back."""


@dataclass(frozen=True)
class ExportSummary:
    """The result of an export. ``files`` maps names to sizes in bytes; ``compared`` has sentences on what was read
    back.
    """

    format: str
    folder: Path
    files: dict[str, int]
    compared: tuple[str, ...]
    commands: tuple[ServerCommand, ...]
    """Commands that start the servers that accept the folder."""

    def __str__(self) -> str:
        """Return lines for a terminal."""
        listed = "\n".join(f"  {name}  {size:,} bytes" for name, size in self.files.items())
        lines = [f"{self.folder}, format {self.format}:", listed, *self.compared]
        for command in self.commands:
            lines += [f"\n{command.server}:", command.shell]
            lines += [f"  note: {note}" for note in command.notes]
            lines += [f"  warning: {warning}" for warning in command.warnings]
        return "\n".join(lines)


def export(
    source: Path,
    destination: Path,
    format: str,
    *,
    report: Path | None = None,
    plan: Path | None = None,
    target: str | None = None,
    type: str | None = None,
    prompts: Path | None = None,
    license: str | None = None,
    trust_remote_code: bool = False,
) -> ExportSummary:
    """Write the artefact in ``source`` to ``destination`` in one of `FORMATS`, with a model card.

    ``source``: a run's folder (for a stopped run, its newest checkpoint is exported), its ``final`` folder, one of its
    checkpoints, or the folder or Hub id of another trainer's draft. ``quickstart`` exports the embedded target, for
    servers that run a draft for this target. ``report``: a ``report.json``; the card shows its figures. ``plan``: a
    ``plan.json``. The formats heads, dspark and speculators store the plan's tree; the servers' commands use the plan's
    depths by batch size. ``target``: the model for which the artefact drafts, if it differs from the recorded target.
    ``type``: one of the format's number types. ``license``: the Hub's identifier of the weights' licence. ``prompts``:
    a .jsonl file; by default the prompts that the training run held out. If the target is on this machine, it decodes
    these prompts with the trained weights and with the exported files. `NO_PROMPTS` skips this check.

    The destination appears complete or not at all, and only after the files were read back and compared. Provenance and
    report are written next to the weights, without local paths. For heads that were trained jointly with adapters, the
    folder ``target`` contains the adapted target.

    Raises UserError if the format does not fit the artefact, the source lacks weights, the destination is not empty,
    the report or plan is malformed or describes other weights, or a file reads back differently.
    """
    source, destination = Path(source), Path(destination)
    if format not in FORMATS:
        raise UserError(f"format is {format!r}: use one of {', '.join(FORMATS)}")
    if prompts not in (None, NO_PROMPTS) and not Path(prompts).is_file():
        raise UserError(f"the file {prompts} does not exist: use a .jsonl file with one prompt per line as --prompts")
    _check_destination(artefact_folder(source), destination)
    with opened(source, destination, trust_remote_code) as (source, made):
        check_format(source, format, type)
        measured = None if report is None else read_own_report(Path(report), source)
        request = _Request(
            made,
            measured,
            None if measured is None else card_figures(measured, chains=format != "heads"),
            None if plan is None else read_serving_plan(Path(plan), source),
            license,
            target,
            prompts,
        )
        tree, model = request.planned.tree if request.planned else (), target or target_of(source)
        task = ExportTask(source, destination, format, model, tree, type, trust_remote_code)
        results: list[tuple[Artefact, tuple[str, ...]]] = []
        write_folder(destination, lambda folder: results.append(_write(replace(task, folder=folder), request)))
    artefact, compared = results[0]
    paths = (path for path in sorted(destination.rglob("*")) if path.is_file())
    files = {path.relative_to(destination).as_posix(): path.stat().st_size for path in paths}
    served = str(destination / TARGET_FOLDER) if (destination / TARGET_FOLDER).is_dir() else model
    commands = commands_of(Serving(artefact, destination, str(destination), served, plan=request.planned))
    return ExportSummary(format, destination, files, compared, commands)


class _Request(NamedTuple):
    """The inputs of an export in addition to the weights: report, plan, licence, and the target and prompts of the
    check.
    """

    made: tuple[str, ...]
    """Sentences on how the source was prepared."""
    report: dict[str, Any] | None
    figures: CardFigures | None
    planned: ServingPlan | None
    license: str | None
    target: str | None
    """Target that the user named; None for the recorded target."""
    prompts: Path | None


def functions_of(format: str) -> tuple[Writer, Callable[[ExportTask, CausalLM], Readers]]:
    """Return two functions: one writes a format, and one loads trained and written weights for `check_drafts`."""
    match format:
        case "heads":
            return folder_formats.write_heads, folder_formats.heads_readers
        case "draft":
            return folder_formats.write_draft_model, folder_formats.draft_readers
        case "dspark" | "eagle3" | "speculators":
            return folder_formats.write_state_draft, folder_formats.state_draft_readers
    try:
        from trainer.export import gguf
    except ModuleNotFoundError as error:
        raise UserError(f"format {format} needs the package {error.name}: pip install 'headstart[gguf]'") from error
    return gguf.write, gguf.readers


def _write(task: ExportTask, request: _Request) -> tuple[Artefact, tuple[str, ...]]:
    """Fill the task's folder; return the artefact's description and sentences on what was read back."""
    write, readers = functions_of(task.format)
    artefact, sentences = write(task)
    compared = [*request.made, *sentences]
    if adapted := (task.source / TARGET_FOLDER).is_dir():
        compared.append(copy_target(task.source, task.folder))
    write_companions(task.folder, task.source, request.report)
    if request.prompts != NO_PROMPTS:
        compared.extend(check_drafts(task, readers, request.target, request.prompts, artefact.rounded))
    provenance = read_provenance(task.source)
    argument = target_argument(provenance, adapted)
    card = render_card(
        artefact,
        provenance,
        request.figures,
        commands=commands_of(Serving(artefact, task.folder, FOLDER_NAME, task.target, argument, request.planned)),
        compared=without_local_paths(compared),
        adapted=adapted,
        license=request.license,
    )
    (task.folder / CARD_NAME).write_text(card, encoding="utf-8")
    mode = (task.folder / CARD_NAME).stat().st_mode  # safetensors makes files private, but another user may read them
    for path in filter(Path.is_file, task.folder.rglob("*")):
        path.chmod(mode)
    return artefact, tuple(compared)


def _check_destination(source: Path, destination: Path) -> None:
    """Reject a destination that is the source, contains it, is not a folder, or is not empty."""
    if destination.resolve() in (source.resolve(), *source.resolve().parents):
        raise UserError(f"the destination {destination} is or contains the source {source}: use another folder")
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise UserError(f"the destination {destination} is not a folder: use another path")
    if destination.is_dir() and any(destination.iterdir()):
        raise UserError(f"the destination {destination} is not empty: remove it, or use another folder")
