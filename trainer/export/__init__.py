"""Export of trained heads and drafts in the formats that servers load, with a model card: `export`, and `push`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from decoding.measure.redact import without_local_paths
from decoding.model.stored import SHARD_BYTES
from trainer import quickstart
from trainer.export.artefact import BESIDE, CHECK_PROMPTS, Task
from trainer.export.card import CARD_NAME, FOLDER_NAME, is_own_card, render_card, target_argument
from trainer.export.formats import FORMATS, HEADS, TREES, check_format, check_name, kind_held_in
from trainer.export.formats import write as write_format
from trainer.export.licences import check_license, target_license
from trainer.export.measured import Measured, read_measured, read_report
from trainer.export.origin import Provenance, read_provenance
from trainer.export.push import push
from trainer.export.source import artefact_folder, opened, target_of
from trainer.files.folders import write_folder

if TYPE_CHECKING:
    from trainer.export.planned import Planned
    from trainer.export.served import ServerCommand

__all__ = ["FORMATS", "ExportSummary", "export", "push"]


@dataclass(frozen=True)
class ExportSummary:
    """The result of an export: ``files`` maps names to bytes, ``compared`` tells how they were read back."""

    format: str
    folder: Path
    files: dict[str, int]
    compared: tuple[str, ...]
    commands: "tuple[ServerCommand, ...]"
    """Those of the servers that take the folder."""

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
    report: Path | None = None,
    overwrite: bool = False,
    plan: Path | None = None,
    *,
    target: str | None = None,
    type: str | None = None,
    license: str | None = None,
    trust_remote_code: bool = False,
    shard_bytes: int = SHARD_BYTES,
    prompts: Path | None = None,
    check_prompts: int = CHECK_PROMPTS,
    repository: str | None = None,
    adapters: str | None = None,
) -> ExportSummary:
    """Write the artefact in ``source`` to ``destination`` in one of `FORMATS`, with a model card.

    ``source`` is a run's folder, its ``final`` folder or one of its checkpoints (of a run that was stopped before
    its end the newest is taken), or ``quickstart``: servers of a draft want the embedded target too. The
    destination appears whole or not at all, and only after the written files were read back and found equal to the
    bit. ``report`` is a ``report.json`` by `decoding.measure.evaluate` whose figures go on the card. ``overwrite``
    replaces an earlier export, never a folder that holds anything else. ``plan`` is a ``plan.json`` by
    `decoding.measure.planning` whose tree the format headstart stores, and whose depths by batch size go on the
    card. ``target``: the model that the artefact drafts for, if it is not the one that the training run recorded.
    ``type``: one of the format's types of numbers. ``license``: the Hub's identifier of the licence under which the
    weights are given away, for the card. ``shard_bytes``: the greatest size of a file of weights; heads and drafts
    that take more are written in shards. ``repository``: ORG/NAME that the folder is for. Provenance, report and
    plan go with the weights, without local paths.

    The target decodes ``check_prompts`` prompts with the trained weights and with the files, if both are on this
    machine: prompts of the .jsonl file ``prompts``, by default those that the training run held out.

    Heads that were trained jointly with adapters get the adapted target beside them, in ``target``: ``merged``, or
    the ``adapter`` alone, by default as trained in our own format and merged in others.

    `ValueError` for an unknown format or one that does not fit the artefact, a source without weights, a destination
    that is not empty, a report or a plan that is malformed or of other weights, and files that read back differently.
    """
    source, destination = _found(Path(source)), Path(destination)
    check_license(license)
    check_name(format)
    if prompts is not None and not Path(prompts).is_file():
        raise ValueError(f"there is no file {prompts}: give a .jsonl file of prompts, one a line, as --prompts")
    _check_destination(artefact_folder(source), destination, overwrite)
    with opened(source, destination) as (source, made):
        check_format(source, format, type)
        form = _form_of(source, format, adapters, published=repository is not None)
        provenance = read_provenance(source)
        measured = _measured(Path(report), source, format) if report is not None else None
        planned = _planned(Path(plan), source) if plan is not None else None
        compared = list(made)

        def write(folder: Path) -> None:
            tree = planned.tree if planned else ()
            task = Task(source, folder, format, target or target_of(source), tree, type, trust_remote_code, shard_bytes)
            written = write_format(task)
            told = (*written.compared, *_write_target(task, form))
            _write_beside(folder, source, format, report, plan, repository)
            _check_replaces_all(destination, {CARD_NAME, *_names_in(folder)})
            compared.extend((*told, *_reread(task, target, prompts, check_prompts)))
            card = render_card(
                written.artefact,
                provenance,
                measured,
                commands=_commands(task, planned, provenance, form),
                compared=without_local_paths(compared),
                adapted=form,
                license=license,
                target_license=target_license(task.target),
                repository=repository,
            )
            (folder / CARD_NAME).write_text(card, encoding="utf-8")
            _give_all_files_one_mode(folder)

        write_folder(destination, write)
        files = {name: (destination / name).stat().st_size for name in _names_in(destination)}
        from trainer.export.serve import commands_of  # here, as `push` need not wait for torch

        return ExportSummary(format, destination, files, tuple(compared), commands_of(destination, target, planned))


def _found(source: Path) -> Path:
    """Return the folder of a source, that of the embedded target for ``quickstart``; ValueError if it is not built."""
    if source.exists():
        return source
    if str(source) == quickstart.NAME and not quickstart.is_built():
        raise ValueError(
            "the embedded target is not built yet: headstart generate --target quickstart --prompt x builds it"
        )
    return Path(quickstart.resolve(str(source)))


def _form_of(source: Path, format: str, asked: str | None, published: bool) -> str | None:
    """Return the form of the adapted target beside Medusa-2 heads; its module is imported for those alone."""
    if asked is None and not (source / "target").is_dir():
        return None
    from trainer.export.adapted import form_of

    return form_of(source, format, asked, published)


def _write_target(task: Task, form: str | None) -> tuple[str, ...]:
    """Write the adapted target beside its heads, if there is one."""
    if form is None:
        return ()
    from trainer.export.adapted import write_target

    return (write_target(task, form),)


def _reread(task: Task, target: str | None, prompts: Path | None, count: int) -> tuple[str, ...]:
    """Decode with the files; `trainer.export.reread` is imported here: `push` need not wait for torch."""
    if not count:
        return ()
    from trainer.export.reread import Wanted, reread

    return reread(task, Wanted(target and quickstart.resolve(target), prompts, count))


def _measured(report: Path, source: Path, format: str) -> Measured:
    """Read the report's figures for the card; `ValueError` where the report measured other weights than ``source``."""
    from trainer.export.match import check_measured, drafters_of

    kind = "heads" if kind_held_in(source) == HEADS else "draft"
    stored = read_report(report)
    drafters = drafters_of(stored, source)
    measured = read_measured(without_local_paths(stored), str(report), kind, drafters, chains=format not in TREES)
    check_measured(stored, str(report), source, kind)
    return measured


def _planned(plan: Path, source: Path) -> "Planned":
    """Read the plan's part for these weights; its module is imported here: `push` need not wait for torch."""
    from trainer.export.planned import read_planned

    return read_planned(plan, source)


def _write_beside(
    folder: Path, source: Path, format: str, report: Path | None, plan: Path | None, repository: str | None
) -> None:
    """Write provenance, report and plan beside the weights; imported here, as it reads plans with torch's help."""
    from trainer.export.beside import write_beside

    write_beside(folder, source, format, report, plan, repository)


def _commands(
    task: Task, planned: "Planned | None", provenance: Provenance | None, adapted: str | None
) -> "tuple[ServerCommand, ...]":
    """Return the card's commands for servers; their module is imported here: `push` need not wait for torch."""
    from trainer.export.serve import commands_of

    shown = target_argument(provenance, adapted)
    return commands_of(task.folder, task.target, planned, shown=FOLDER_NAME, shown_target=shown)


def _check_destination(source: Path, destination: Path, overwrite: bool) -> None:
    """Refuse a destination that is the source, holds it, is no folder, or has files that may not be replaced."""
    if destination.resolve() in (source.resolve(), *source.resolve().parents):
        raise ValueError(f"the destination {destination} is or holds the source {source}: give another folder")
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise ValueError(f"the destination {destination} is no folder: give another")
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    if not overwrite:
        raise ValueError(f"the destination {destination} is not empty: give another folder, or --overwrite")
    if not is_own_card(destination / CARD_NAME):
        raise ValueError(f"{destination} holds something else than an export of headstart's: give another folder")


def _check_replaces_all(destination: Path, names: set[str]) -> None:
    """Refuse to overwrite an export that holds files which this one lacks."""
    if not destination.is_dir():
        return
    own = names.union(BESIDE)  # an earlier export may have had a report or a plan
    if others := [name for name in _names_in(destination) if name not in own]:
        raise ValueError(
            f"{destination} also holds {others[0]}, which this export would not replace: give another folder"
        )


def _names_in(folder: Path) -> list[str]:
    """Return the names of all that is in a folder and its folders, but of folders that hold something."""
    found = (path for path in sorted(folder.rglob("*")) if not path.is_dir() or not any(path.iterdir()))
    return [path.relative_to(folder).as_posix() for path in found]


def _give_all_files_one_mode(folder: Path) -> None:
    """Give every file the card's mode: safetensors writes for the owner alone, and servers run as other users."""
    mode = (folder / CARD_NAME).stat().st_mode
    for path in folder.rglob("*"):
        if path.is_file():
            path.chmod(mode)
