"""Descriptions of an export: formats, task, exported artefact, and the folder from which the export starts."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from decoding.errors import UserError
from decoding.files.folder import is_heads_folder
from decoding.files.gguf_file import is_gguf
from decoding.files.hub import hub_name, local_folder
from decoding.files.quickstart import is_embedded
from decoding.model.dspark_config import is_dspark_folder
from decoding.model.eagle3_config import is_eagle3_folder
from decoding.rules.best_tree import Paths
from trainer.files.folders import check_links, scratch_beside

HEADS, DRAFT, DSPARK, EAGLE3 = "heads", "a draft model", "a DSpark draft", "an EAGLE-3 draft"
NESTED = "speculators"
"""Format with the nested layout of the library speculators."""


@dataclass(frozen=True)
class Format:
    """A format of `headstart export`; `exporter.functions_of` names the code that writes it."""

    kinds: tuple[str, ...]
    library: str
    """The Hub's ``library_name``."""
    types: tuple[str, ...] = ()
    """Number types that can be chosen; empty for a format that keeps the stored type."""


FORMATS = {
    "heads": Format((HEADS,), "headstart"),
    "dspark": Format((DSPARK,), "vllm"),
    "eagle3": Format((EAGLE3,), "vllm"),
    NESTED: Format((DSPARK, EAGLE3), "speculators"),
    "draft": Format((DRAFT,), "transformers"),
    "gguf": Format((DRAFT, DSPARK, EAGLE3), "gguf", ("f32", "f16", "bf16", "q8_0")),
}


@dataclass(frozen=True)
class ExportTask:
    """The weights to export, and the format in which to write them."""

    source: Path
    """Folder of the trained artefact."""
    folder: Path
    """Existing empty folder to fill."""
    format: str
    target: str | None = None
    """Folder or Hub id of the model for which the artefact drafts; None if it is unknown."""
    tree: Paths = ()
    """Tree that replaces the tree of the artefact; empty to keep that tree."""
    type: str | None = None
    """Type of the stored numbers, if the format offers a choice; None for the format's default."""
    trust_remote_code: bool = False


@dataclass(frozen=True)
class Artefact:
    """Description of the exported weights for the card. ``heads`` is 0 for a draft."""

    format: str
    parameters: int
    dtype: str
    hidden_size: int
    vocab_size: int
    layers: int
    heads: int = 0
    tree_nodes: int = 0
    shared_lm_head: bool = False
    markov_rank: int = 0
    """Rank of the Markov bias, which depends on the previous token; 0 if there is none."""
    at_once: int = 0
    """Number of tokens that a DSpark draft drafts in one forward pass; 0 for any other artefact."""
    dflash: bool = False
    """True for a DFlash draft: each mask predicts the token in its own place, without a bias."""
    eagle3: bool = False
    rounded: bool = False
    """True if the format's number type rounds some of the weights."""

    @property
    def method(self) -> str:
        """``medusa``, ``dspark``, ``dflash``, ``eagle3`` or ``draft-model``."""
        if self.at_once:
            return "dflash" if self.dflash else "dspark"
        return "eagle3" if self.eagle3 else "medusa" if self.heads else "draft-model"

    @property
    def reads_states(self) -> bool:
        """True for a draft that reads its target's states."""
        return self.eagle3 or self.at_once > 0


def kind_held_in(source: Path) -> str:
    """Return which kind of artefact a folder contains: `HEADS`, `DRAFT`, `DSPARK` or `EAGLE3`."""
    if is_heads_folder(source):
        return HEADS
    return DSPARK if is_dspark_folder(source) else EAGLE3 if is_eagle3_folder(source) else DRAFT


def check_format(source: Path, format: str, type: str | None = None) -> None:
    """Reject an unknown type, a folder that has no weights or has links that lead out of the folder, and a format that
    does not fit the weights.
    """
    if not source.is_dir():
        raise UserError(f"the folder {source} does not exist: use the folder of a training run, or its final folder")
    for pattern, what in (("config.json", "no config.json"), ("*.safetensors", "no .safetensors file")):
        if not any(source.glob(pattern)):
            raise UserError(f"{source} contains no weights ({what}): use the final folder of a training run")
    check_links(source)
    held, types = kind_held_in(source), FORMATS[format].types
    if held not in FORMATS[format].kinds:
        fitting = " or ".join(name for name, other in FORMATS.items() if held in other.kinds)
        raise UserError(f"{source} contains {held}, which format {format!r} does not accept: use format {fitting}")
    if type is not None and type not in types:
        remedy = f"use one of {', '.join(types)}" if types else "omit --type; this format keeps the stored type"
        raise UserError(f"format {format!r} lacks the type {type!r}: {remedy}")


def artefact_folder(source: Path) -> Path:
    """Return the folder with the weights: ``source``, or its ``final`` folder if ``source`` is a run's folder."""
    final = source / "final"
    return final if not (source / "config.json").is_file() and (final / "config.json").is_file() else source


@contextmanager
def opened(source: Path, destination: Path, trust_remote_code: bool = False) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the folder with the weights of a run, a checkpoint or a Hub id, and sentences on its preparation.

    A checkpoint is first turned into an artefact in a temporary folder next to ``destination``. If a run has no
    ``final`` folder, its newest checkpoint is used. Raises the errors of `trainer.run.train.consolidate`.
    """
    fetched = is_gguf(source) or is_embedded(source) or hub_name(source) is not None
    folder, checkpoint = local_folder(source) if fetched else artefact_folder(source), None
    if not (folder / "config.json").is_file() and folder.is_dir():
        from trainer.run.checkpoint import newest_checkpoint  # training is slow to import

        checkpoint = newest_checkpoint(folder) or newest_checkpoint(folder / "checkpoints")
    if checkpoint is None:
        yield folder, ()
        return
    from trainer.run.train import consolidate

    with scratch_beside(destination) as scratch:
        made = scratch / "final"
        yield made, (consolidate(checkpoint, made, trust_remote_code=trust_remote_code),)
