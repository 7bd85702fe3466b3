"""An export in words: its formats, the task of one, the artefact in numbers, and the folder that it starts from."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from decoding.model.dspark_config import is_dspark_folder
from decoding.model.loading import is_heads_folder
from decoding.rules.best_tree import Paths
from trainer import quickstart
from trainer.files.folders import check_links, scratch_beside

HEADS, DRAFT, DSPARK = "heads", "a draft model", "a DSpark draft"


@dataclass(frozen=True)
class Format:
    """A format of `headstart export`, written by the module of its name.

    That module has ``write(task) -> (Artefact, sentences)`` and ``readers(task, target)``: see `readback`.
    """

    kinds: tuple[str, ...]
    library: str
    """The Hub's ``library_name``."""
    types: tuple[str, ...] = ()
    """Types of numbers to choose among; empty for a format that keeps the stored one."""


FORMATS = {
    "headstart": Format((HEADS,), "headstart"),
    "dspark": Format((DSPARK,), "vllm"),
    "draft": Format((DRAFT,), "transformers"),
    "gguf": Format((DRAFT, DSPARK), "gguf", ("f32", "f16", "bf16", "q8_0")),
}


@dataclass(frozen=True)
class ExportTask:
    """Weights to write in one format."""

    source: Path
    """Folder of the trained artefact."""
    folder: Path
    """Folder to fill, which exists and is empty."""
    format: str
    target: str | None = None
    """Folder or hub id of the model that the artefact drafts for; None if it is unknown."""
    tree: Paths = ()
    """Tree in place of the artefact's own; empty for its own."""
    type: str | None = None
    """Type of the stored numbers, for a format that has several; None for its default."""
    trust_remote_code: bool = False

    @property
    def module(self) -> Any:
        """The module of the format; ValueError if a package that it needs is missing."""
        try:
            return import_module(f"trainer.export.{self.format}")
        except ModuleNotFoundError as error:
            raise ValueError(
                f"format {self.format} needs the package {error.name}: pip install 'headstart[gguf]'"
            ) from error


@dataclass(frozen=True)
class Artefact:
    """The exported weights in numbers, for the card. ``heads`` is 0 for a draft."""

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
    """Rank of the bias by the token before; 0: none."""
    at_once: int = 0
    """Tokens that a DSpark draft drafts in one forward; 0 for any other artefact."""
    rounded: bool = False
    """True if the format's type of numbers has none for some of the weights."""

    @property
    def method(self) -> str:
        """``medusa``, ``dspark``, ``dflash`` for a DSpark draft without a bias, or ``draft-model``."""
        if self.at_once:
            return "dspark" if self.markov_rank else "dflash"
        return "medusa" if self.heads else "draft-model"


def kind_held_in(source: Path) -> str:
    """Return the kind of artefact in a folder: `HEADS`, `DRAFT` or `DSPARK`."""
    if is_heads_folder(source):
        return HEADS
    return DSPARK if is_dspark_folder(source) else DRAFT


def check_format(source: Path, format: str, type: str | None = None) -> None:
    """Reject an unknown type, a folder without weights, links out of it, and a format for artefacts of another kind."""
    if not source.is_dir():
        raise ValueError(f"there is no folder {source}: give that of a training run, or its final folder")
    for pattern, what in (("config.json", "no config.json"), ("*.safetensors", "no .safetensors file")):
        if not any(source.glob(pattern)):
            raise ValueError(f"{source} holds no weights to export ({what}): give the final folder of a training run")
    check_links(source)
    held, types = kind_held_in(source), FORMATS[format].types
    if held not in FORMATS[format].kinds:
        fitting = " or ".join(name for name, other in FORMATS.items() if held in other.kinds)
        raise ValueError(f"{source} holds {held}, which format {format!r} does not take: give format {fitting}")
    if type is not None and type not in types:
        remedy = f"give one of {', '.join(types)}" if types else "leave it out: this format keeps the stored type"
        raise ValueError(f"the type of format {format!r} is {type!r}: {remedy}")


def artefact_folder(source: Path) -> Path:
    """Return the folder with the weights: ``source``, or its ``final`` folder if it is a run's."""
    final = source / "final"
    return final if not (source / "config.json").is_file() and (final / "config.json").is_file() else source


@contextmanager
def opened(source: Path, destination: Path) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield the folder with the weights of a run, a checkpoint or ``quickstart``, and sentences on how it was made.

    Of a checkpoint, or of the newest one of a run that has no ``final`` folder, the artefact is made next to
    ``destination`` and removed in the end. Errors: `trainer.run.finish.consolidate`.
    """
    if str(source) == quickstart.NAME and not source.exists():
        if not quickstart.is_built():
            remedy = "headstart generate --target quickstart --prompt x builds it"
            raise ValueError(f"the embedded target is not built yet: {remedy}")
        source = Path(quickstart.resolve(str(source)))
    folder = artefact_folder(source)
    checkpoint = None if (folder / "config.json").is_file() or not folder.is_dir() else _checkpoint_in(folder)
    if checkpoint is None:
        yield folder, ()
        return
    from trainer.run.finish import consolidate

    with scratch_beside(destination) as scratch:
        made = scratch / "final"
        yield made, (consolidate(checkpoint, made),)


def _checkpoint_in(folder: Path) -> Path | None:
    """Return the folder itself if it is a checkpoint, or the newest checkpoint of a run; None if there is none."""
    from trainer.run.checkpoint import newest_checkpoint

    return newest_checkpoint(folder) or newest_checkpoint(folder / "checkpoints")
