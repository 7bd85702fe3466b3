"""Licences: the artefact's, which its owner gives, and the target's, from its own card. None is guessed."""

import re
from pathlib import Path

from huggingface_hub import ModelCard, try_to_load_from_cache
from yaml import YAMLError

from decoding.measure.markdown import one_line
from decoding.measure.redact import is_hub_id, without_local_paths

_IDENTIFIER = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_LONGEST = 200
_CARD = "README.md"


def check_license(license: str | None) -> None:
    """Refuse a licence that is no identifier of the Hub; it checks against its own list when the card is uploaded."""
    if license is not None and _IDENTIFIER.fullmatch(license) is None:
        raise ValueError(
            f"the license is {license!r}: give the Hub's identifier, such as apache-2.0, mit or llama3.1; "
            "'other' if it has none"
        )


def target_license(target: str | None) -> str | None:
    """Return the licence that a model's own card names: the folder's README.md, or the Hub's in the cache.

    None where there is no card on this machine, or it names no licence.
    """
    card = _card_of(target) if target else None
    if card is None:
        return None
    try:
        data = ModelCard(card.read_text(encoding="utf-8", errors="replace"), ignore_metadata_errors=True).data
    except (ValueError, YAMLError, OSError):
        return None
    named = data.get("license_name") if data.get("license") == "other" else None
    license = named or data.get("license")
    return one_line(without_local_paths(license))[:_LONGEST] or None if isinstance(license, str) else None


def _card_of(target: str) -> Path | None:
    folder = Path(target)
    if folder.is_dir():
        return folder / _CARD if (folder / _CARD).is_file() else None
    repository, _, revision = target.partition("@")
    if not is_hub_id(repository):
        return None
    cached = try_to_load_from_cache(repository, _CARD, revision=revision or None)
    return Path(cached) if isinstance(cached, str) else None
