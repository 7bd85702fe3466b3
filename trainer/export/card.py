"""The model card: a description of the artefact, its use, its measured figures and its provenance.

Cards are published, so they hold no local path (see `without_local_paths`).
"""

import shlex
from collections.abc import Sequence
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from huggingface_hub import ModelCard
from jinja2 import Environment, StrictUndefined, Template
from yaml import YAMLError

from decoding.measure.markdown import code, fenced, text
from decoding.measure.redact import without_local_paths
from trainer.export.artefact import Artefact
from trainer.export.measured import Measured
from trainer.export.metadata import TAG, card_data, check_metadata, method_of
from trainer.export.origin import UNKNOWN_TARGET, Provenance

if TYPE_CHECKING:
    from trainer.export.served import ServerCommand

CARD_NAME = "README.md"
FOLDER_NAME = "DIR"
"""The artefact's folder in the card's commands."""
_ADAPTED_TARGET = "ADAPTED_TARGET"
_TARGET_BESIDE = "DIR/target"
_SERVERS = {"vllm": "vLLM", "sglang": "SGLang"}
_KINDS = {
    "medusa": "Medusa heads",
    "draft-model": "Draft model",
    "parallel-draft": "Parallel draft",
}


def render_card(
    artefact: Artefact,
    provenance: Provenance | None,
    measured: Measured | None,
    *,
    commands: "Sequence[ServerCommand]" = (),
    compared: Sequence[str] = (),
    license: str | None = None,
    target_license: str | None = None,
    repository: str | None = None,
    adapted: str | None = None,
) -> str:
    """Return the card: YAML front matter for the Hub, then Markdown. Missing facts are named as missing.

    ``commands``: those of the servers that take the artefact, with `FOLDER_NAME` and `target_argument` as names.
    ``compared``: sentences on what was read back after writing. ``license`` is the artefact's, as its owner gives it;
    ``target_license`` the one that the target's own card names. ``repository``: ORG/NAME that the folder is for.
    ``adapted``: the form of the adapted target beside heads, ``merged`` or ``adapter``; None where there is none.

    Every text from a recipe, a report or a name passes one of the filters `text`, `code` or `fenced`, so that
    it cannot act as Markdown.
    """
    target = provenance.target if provenance else UNKNOWN_TARGET
    on_hub = provenance is not None and provenance.on_hub
    kind = _KINDS[method_of(artefact)]
    title = kind if target == UNKNOWN_TARGET else f"{kind} for {target}"
    metadata = card_data(
        artefact,
        title=title,
        base_model=target if on_hub else None,
        datasets=provenance.hub_data if provenance else (),
        measured=measured,
        license=license,
    )
    card = _template().render(
        front_matter=metadata.to_yaml(),
        artefact=artefact,
        kind=kind,
        title=title,
        target=target,
        target_known=target != UNKNOWN_TARGET,
        target_argument=target_argument(provenance, adapted),
        adapted=adapted,
        provenance=provenance,
        measured=measured,
        commands=commands,
        servers=_SERVERS,
        compared=compared,
        license=license,
        target_license=target_license,
        repository=repository or "ORG/NAME",
    )
    check_metadata(card, metadata)
    return card


def _published(sentence: str) -> str:
    """Escape a sentence that may name folders of this machine, without their paths."""
    return text(without_local_paths(sentence))


def _figure(figure: str) -> str:
    """Keep an interval on one line: narrow tables break before its bracket."""
    return figure.replace(", ", ",\N{NO-BREAK SPACE}")


@cache
def _template() -> Template:
    environment = Environment(  # the output is Markdown, not HTML
        undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    environment.filters |= {"text": text, "code": code, "fenced": fenced, "figure": _figure, "published": _published}
    return environment.from_string(files("trainer.export").joinpath("card.md.j2").read_text(encoding="utf-8"))


def target_argument(provenance: Provenance | None, adapted: str | None = None) -> str:
    """Return the target's name in the card's commands: a folder there, its id on the Hub, or a word explained there."""
    if adapted is not None:
        return _TARGET_BESIDE
    if provenance is not None and provenance.adapted:
        return _ADAPTED_TARGET
    return shlex.quote(provenance.target) if provenance is not None and provenance.on_hub else UNKNOWN_TARGET


def is_own_card(path: Path) -> bool:
    """Return True for a card that `render_card` wrote, also after somebody edited it."""
    if not path.is_file():
        return False
    try:
        card = ModelCard(path.read_text(encoding="utf-8", errors="replace"), ignore_metadata_errors=True)
    except (ValueError, YAMLError):
        return False
    return TAG in (card.data.get("tags") or ())
