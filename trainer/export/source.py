"""The artefact of a training run: its folder, and the model that it drafts for."""

from pathlib import Path

from trainer import quickstart
from trainer.export.card import read_stored_provenance

_FINAL = "final"
_DRAFT_TOKENS = 4


def artefact_folder(source: Path) -> Path:
    """Return the folder with the weights: ``source``, or its ``final`` folder if it is a run's."""
    final = source / _FINAL
    return final if not (source / "config.json").is_file() and (final / "config.json").is_file() else source


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
    """Return the tokens that a draft was trained to draft at a time; 4 where that is not recorded."""
    stored = read_stored_provenance(source)
    section = stored["recipe"].get("draft") if stored else None
    length = section.get("num_draft_tokens") if isinstance(section, dict) else None
    return length if type(length) is int and length > 0 else _DRAFT_TOKENS
