"""The artefact of a training run: its folder, and the model that it drafts for."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainer import quickstart
from trainer.export.origin import read_stored_provenance
from trainer.files.folders import scratch_beside

_FINAL = "final"
USUAL_DRAFT_TOKENS = 4
"""Depth of a draft's chain where neither its training nor a plan tells one."""


def artefact_folder(source: Path) -> Path:
    """Return the folder with the weights: ``source``, or its ``final`` folder if it is a run's."""
    final = source / _FINAL
    return final if not (source / "config.json").is_file() and (final / "config.json").is_file() else source


@contextmanager
def opened(source: Path, destination: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the folder with the weights of a run or a checkpoint, and what is to be told of it.

    Of a checkpoint, or of the newest one of a run that has no ``final`` folder, the artefact is made beside
    ``destination`` and removed in the end. Errors: `trainer.run.finish.consolidate`.
    """
    folder = artefact_folder(source)
    checkpoint = None if (folder / "config.json").is_file() else _checkpoint_in(folder)
    if checkpoint is None:
        yield folder, ()
        return
    from trainer.run.finish import consolidate

    with scratch_beside(destination) as scratch:
        made = scratch / _FINAL
        yield made, (consolidate(checkpoint, made),)


def _checkpoint_in(folder: Path) -> Path | None:
    """Return the folder itself if it is a checkpoint, or the newest checkpoint of a run; None if there is none."""
    if not folder.is_dir():
        return None
    from trainer.run.checkpoint import newest_checkpoint

    return newest_checkpoint(folder) or newest_checkpoint(folder / "checkpoints")


def target_of(source: Path) -> str | None:
    """Return the folder or ORG/NAME@COMMIT of the model that an artefact was trained for; None if it is not recorded.

    Heads that were trained jointly with adapters belong to the adapted target beside them. A folder of another machine
    may not be here.
    """
    stored = read_stored_provenance(source)
    if stored is None:
        return None
    if stored["recipe"].get("adapters") is not None:
        from trainer.heads.medusa2 import TARGET_FOLDER

        return str(source / TARGET_FOLDER)
    name = stored["revisions"].get("target") or stored["target"].get("name") or stored["recipe"].get("target")
    return None if not name else quickstart.resolve(str(name))


def chain_length(source: Path) -> int:
    """Return the tokens that a draft was trained to draft at a time; the usual depth where that is not recorded."""
    stored = read_stored_provenance(source)
    section = stored["recipe"].get("draft") if stored else None
    length = section.get("num_draft_tokens") if isinstance(section, dict) else None
    return length if type(length) is int and length > 0 else USUAL_DRAFT_TOKENS
