"""Export of trained heads and drafts in the formats that servers load, with a model card: `export`, and `push`."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from decoding.measure.redact import without_local_paths
from trainer.export.card import CARD_NAME, Artefact, is_own_card, read_provenance, read_report, render_card
from trainer.export.hub import push
from trainer.export.measured import Measured, read_measured
from trainer.files.folders import write_folder

if TYPE_CHECKING:
    from decoding.rules.best_tree import Paths
    from trainer.export.planned import Planned

__all__ = ["FORMATS", "ExportSummary", "export", "push"]

FORMATS = {
    "headstart": ("heads", "a parallel draft"),
    "vllm": ("heads",),
    "draft": ("a draft model", "a parallel draft"),
}
"""Format -> the kinds of artefact that it holds."""


@dataclass(frozen=True)
class ExportSummary:
    """The result of an export: ``files`` maps names to bytes, ``compared`` tells how the read-back was compared."""

    format: str
    folder: Path
    files: dict[str, int]
    compared: str

    def __str__(self) -> str:
        """Return lines for a terminal."""
        listed = "\n".join(f"  {name}  {size:,} bytes" for name, size in self.files.items())
        return f"{self.folder}, format {self.format}:\n{listed}\n{self.compared}"


def export(
    source: Path,
    destination: Path,
    format: str,
    report: Path | None = None,
    overwrite: bool = False,
    plan: Path | None = None,
) -> ExportSummary:
    """Write the artefact in ``source`` to ``destination`` in one of `FORMATS`, with a model card.

    The destination appears whole or not at all, and only after the written files were read back and found equal to the
    bit. ``report`` is a ``report.json`` by `decoding.measure.evaluate` whose figures go on the card.
    ``overwrite`` replaces an earlier export, never a folder that holds anything else. ``plan`` is a ``plan.json`` by
    `decoding.measure.planning` whose tree the format headstart stores, and whose depths by batch size go on the card.

    `ValueError` for an unknown format or one that does not fit the artefact, a source without weights, a destination
    that is not empty, a report or a plan that is malformed or of other weights, and files that read back differently.
    """
    source, destination = Path(source), Path(destination)
    _check_source(source, format)
    _check_destination(source, destination, overwrite)
    provenance = read_provenance(source)
    measured = _measured(Path(report), source) if report is not None else None
    planned = _planned(Path(plan), source) if plan is not None else None
    compared: list[str] = []

    def write(folder: Path) -> None:
        artefact, sentence = _write(source, folder, format, planned.tree if planned else ())
        (folder / CARD_NAME).write_text(render_card(artefact, provenance, measured, planned), encoding="utf-8")
        _give_all_files_one_mode(folder)
        _check_is_export(destination, {path.name for path in folder.iterdir()})
        compared.append(sentence)

    write_folder(destination, write)
    files = {path.name: path.stat().st_size for path in sorted(destination.iterdir())}
    return ExportSummary(format, destination, files, compared[0])


def _measured(report: Path, source: Path) -> Measured:
    """Read the report's figures for the card; `ValueError` where the report measured other weights than ``source``."""
    from trainer.export.match import check_measured, drafters_of

    kind = "heads" if _held_in(source) == "heads" else "draft"
    stored = read_report(report)
    measured = read_measured(without_local_paths(stored), str(report), kind, drafters_of(stored, source))
    check_measured(stored, str(report), source, kind)
    return measured


def _planned(plan: Path, source: Path) -> "Planned":
    """Read the plan's part for these weights; its module is imported here: `push` need not wait for torch."""
    from trainer.export.planned import read_planned

    return read_planned(plan, source)


def _write(source: Path, folder: Path, format: str, tree: "Paths") -> tuple[Artefact, str]:
    """Write one format. Its module is imported here: `push` need not wait for torch.

    ``tree`` replaces that of the artefact in the format headstart; empty for the artefact's own.
    """
    if format == "headstart":
        from trainer.export import draft, headstart

        if _held_in(source) == "heads":
            return headstart.write(source, folder, tree)
        return draft.write(source, folder, format, tree)
    if format == "vllm":
        from trainer.export import vllm

        return vllm.write(source, folder)
    from trainer.export import draft

    return draft.write(source, folder, format)


def _check_source(source: Path, format: str) -> None:
    """Refuse a folder without weights, and a format of the other kind of artefact."""
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}: give one of {', '.join(FORMATS)}")
    if not (source / "config.json").is_file():
        raise ValueError(f"{source} holds nothing to export (no config.json): give the final folder of a training run")
    if not any(source.glob("*.safetensors")):
        raise ValueError(f"{source} holds no weights (no .safetensors file): give the final folder of a training run")
    held = _held_in(source)
    if held not in FORMATS[format]:
        fitting = " or ".join(name for name, holds in FORMATS.items() if held in holds)
        raise ValueError(f"{source} holds {held}, which format {format!r} cannot: give format {fitting}")


def _held_in(source: Path) -> str:
    """Return the kind of artefact in a folder, as in `FORMATS`."""
    from decoding.model.loading import is_heads_folder
    from decoding.model.parallel import is_parallel_folder

    if is_heads_folder(source):
        return "heads"
    return "a parallel draft" if is_parallel_folder(source) else "a draft model"


def _check_destination(source: Path, destination: Path, overwrite: bool) -> None:
    """Refuse a destination that is the source, holds it, is no folder, or has files and no ``overwrite``."""
    if destination.resolve() in (source.resolve(), *source.resolve().parents):
        raise ValueError(f"the destination {destination} is or holds the source {source}: give another folder")
    if destination.is_symlink() or (destination.exists() and not destination.is_dir()):
        raise ValueError(f"the destination {destination} is no folder: give another")
    if not overwrite and destination.is_dir() and any(destination.iterdir()):
        raise ValueError(f"the destination {destination} is not empty: give another folder, or overwrite it")


def _check_is_export(destination: Path, names: set[str]) -> None:
    """Refuse to overwrite a folder that is no export (its card tells) or holds files that this export lacks."""
    if not destination.is_dir() or not any(destination.iterdir()):
        return
    if not is_own_card(destination / CARD_NAME):
        raise ValueError(f"{destination} holds something else than an export of headstart's: give another folder")
    others = sorted(path.name for path in destination.iterdir() if path.name not in names or not path.is_file())
    if others:
        raise ValueError(
            f"{destination} also holds {others[0]}, which this export would not replace: give another folder"
        )


def _give_all_files_one_mode(folder: Path) -> None:
    """Give every file the card's mode: safetensors writes for the owner alone, and servers run as other users."""
    mode = (folder / CARD_NAME).stat().st_mode
    for path in folder.iterdir():
        path.chmod(mode)
