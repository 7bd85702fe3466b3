"""Push of a run or of an exported folder to the Hub: weights, card, provenance, report and plan in one commit."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Unpack

from decoding.model.stored import SHARD_BYTES
from trainer.export.artefact import CHECK_PROMPTS, PLAN_NAME, REPORT_NAME, ExportKeywords
from trainer.export.card import CARD_NAME, is_own_card
from trainer.export.hub import Pushed, check_access, upload
from trainer.export.source import artefact_folder


def push(
    source: Path,
    repository: str,
    *,
    format: str | None = None,
    public: bool = False,
    revision: str | None = None,
    pull_request: bool = False,
    message: str | None = None,
    **options: Unpack[ExportKeywords],
) -> Pushed:
    """Push an exported folder as it lies there, or export a run first, into a folder that is removed afterwards.

    A run goes in the ``format`` headstart, or draft if it is a draft, unless another is given, with the report and the
    plan among the ``options`` or in the run's folder. ``options`` are those of `export`, the others those of `upload`;
    so are the errors.
    """
    source = Path(source)
    if not source.is_dir():
        raise ValueError(f"there is no folder {source}: give a run's folder, or one that headstart export wrote")
    check_access(repository)

    def sent(folder: Path) -> Pushed:
        return upload(folder, repository, public=public, revision=revision, pull_request=pull_request, message=message)

    if is_own_card(source / CARD_NAME):
        _refuse_options_of_an_export(source, {"format": format, **options})
        return sent(source)
    from trainer.export import export  # here: an exported folder need not wait for torch

    artefact = artefact_folder(source)
    format = format or _usual_format(artefact)
    report = options.get("report") or _found(source, artefact, REPORT_NAME)
    plan = options.get("plan") or _found(source, artefact, PLAN_NAME)
    options |= {"report": report, "plan": plan}
    with TemporaryDirectory(prefix="headstart-push-") as place:
        folder = Path(place) / repository.partition("/")[2]
        made = export(source, folder, format, repository=repository, **options)
        told = [f"{artefact} in the format {format}", *made.compared]
        for name, path in (("report", report), ("plan", plan)):
            told.append(
                f"with the {name} {path}" if path else f"without a {name}: none lies in {source}, none is given"
            )
        return replace(sent(folder), made=tuple(told))


def _refuse_options_of_an_export(source: Path, options: Mapping[str, object]) -> None:
    """ValueError if one of the options was given, as all are of an export and the folder is exported already."""
    usual = {"check_prompts": CHECK_PROMPTS, "shard_bytes": SHARD_BYTES, "trust_remote_code": False}
    if given := [name for name, value in options.items() if value != usual.get(name)]:
        raise ValueError(
            f"{source} is exported already, and {given[0]} is of the export: leave it out, or give the run's folder"
        )


def _usual_format(artefact: Path) -> str:
    """Return the format by which this project reads the artefact again."""
    from trainer.export.formats import DRAFT, kind_held_in

    return "draft" if kind_held_in(artefact) == DRAFT else "headstart"


def _found(source: Path, artefact: Path, name: str) -> Path | None:
    """Return the file of this name in the run's folder, beside the weights, or in one folder of the run; else None."""
    beside = list(dict.fromkeys(path for path in (source / name, artefact / name) if path.is_file()))
    found = beside[:1] or sorted(path for path in source.glob(f"*/{name}") if path.is_file())
    if len(found) > 1:
        listed = ", ".join(map(str, found))
        raise ValueError(f"{source} holds several files {name} ({listed}): give one by --{Path(name).stem}")
    return found[0] if found else None
