"""Push of a run or of an exported folder to the Hub: weights, card, provenance, report and plan in one commit."""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

from trainer.export.artefact import PLAN_NAME, REPORT_NAME
from trainer.export.card import CARD_NAME, is_own_card
from trainer.export.hub import Pushed, check_access, upload
from trainer.export.source import artefact_folder


def push(
    source: Path,
    repository: str,
    *,
    format: str | None = None,
    report: Path | None = None,
    plan: Path | None = None,
    target: str | None = None,
    type: str | None = None,
    license: str | None = None,
    trust_remote_code: bool = False,
    public: bool = False,
    revision: str | None = None,
    pull_request: bool = False,
    message: str | None = None,
) -> Pushed:
    """Push an exported folder as it lies there, or export a run first, into a folder that is removed afterwards.

    A run goes in the ``format`` headstart, or draft if it is a draft, unless another is given, with the ``report`` and
    the ``plan`` that are given or lie in the run's folder. The options up to ``trust_remote_code`` are those of
    `export`, the others those of `upload`; so are the errors.
    """
    source = Path(source)
    if not source.is_dir():
        raise ValueError(f"there is no folder {source}: give a run's folder, or one that headstart export wrote")
    check_access(repository)

    def sent(folder: Path) -> Pushed:
        return upload(folder, repository, public=public, revision=revision, pull_request=pull_request, message=message)

    if is_own_card(source / CARD_NAME):
        for_export = {"format": format, "report": report, "plan": plan, "target": target, "type": type}
        if given := [name for name, value in {**for_export, "license": license}.items() if value is not None]:
            raise ValueError(
                f"{source} is exported already, and {given[0]} is of the export: leave it out, or give the run's folder"
            )
        return sent(source)
    from trainer.export import export  # here: an exported folder need not wait for torch

    artefact = artefact_folder(source)
    format = format or _usual_format(artefact)
    report, plan = report or _found(source, artefact, REPORT_NAME), plan or _found(source, artefact, PLAN_NAME)
    with TemporaryDirectory(prefix="headstart-push-") as place:
        folder = Path(place) / repository.partition("/")[2]
        made = export(
            source,
            folder,
            format,
            report,
            plan=plan,
            target=target,
            type=type,
            license=license,
            trust_remote_code=trust_remote_code,
            repository=repository,
        )
        told = [f"{artefact} in the format {format}", *made.compared]
        for name, path in (("report", report), ("plan", plan)):
            told.append(
                f"with the {name} {path}" if path else f"without a {name}: none lies in {source}, none is given"
            )
        return replace(sent(folder), made=tuple(told))


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
