"""The formats of `headstart export`: the kinds of artefact that each holds, and the module that writes it."""

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from decoding.model.stored import read_object
from trainer.export.artefact import Task, Written
from trainer.files.folders import check_links

HEADS, DRAFT, PARALLEL = "heads", "a draft model", "a parallel draft"


@dataclass(frozen=True)
class Format:
    """A format. ``module`` has ``write(task: Task) -> Written``; it is imported on use: `push` need not wait for torch.

    ``library``: the Hub's ``library_name``. ``types``: types of numbers to choose among, by default the nearest to the
    stored one; empty where that is kept.
    """

    module: str
    kinds: tuple[str, ...]
    library: str
    types: tuple[str, ...] = ()


FORMATS = {
    "headstart": Format("headstart", (HEADS, PARALLEL), "headstart"),
    "vllm": Format("vllm", (HEADS,), "vllm"),
    "draft": Format("draft", (DRAFT, PARALLEL), "transformers"),
    "gguf": Format("gguf", (DRAFT,), "gguf", ("f32", "f16", "bf16", "q8_0")),
}

TREES = ("headstart",)
"""Formats whose readers draft trees; with the others servers draft one chain."""


def write(task: Task) -> Written:
    """Write a task's files and read them back; ValueError for a difference, and for what the format cannot hold."""
    written: Written = import_module(f"trainer.export.{FORMATS[task.format].module}").write(task)
    return written


def kind_held_in(source: Path) -> str:
    """Return the kind of artefact in a folder: `HEADS`, `DRAFT` or `PARALLEL`."""
    from decoding.model.loading import is_heads_folder
    from decoding.model.parallel import is_parallel_folder

    if is_heads_folder(source):
        return HEADS
    return PARALLEL if is_parallel_folder(source) else DRAFT


def check_name(format: str) -> None:
    """Refuse an unknown format."""
    if format not in FORMATS:
        raise ValueError(f"format is {format!r}: give one of {', '.join(FORMATS)}")


def check_format(source: Path, format: str, type: str | None = None) -> None:
    """Refuse an unknown format or type, a folder without weights, links out of it, and a format of another kind."""
    check_name(format)
    if not source.is_dir():
        raise ValueError(f"there is no folder {source}: give that of a training run, or its final folder")
    if not (source / "config.json").is_file():
        raise ValueError(f"{source} holds nothing to export (no config.json): give the final folder of a training run")
    if not any(source.glob("*.safetensors")):
        raise ValueError(f"{source} holds no weights (no .safetensors file): give the final folder of a training run")
    check_links(source)
    _refuse_export_for_others(source)
    held, types = kind_held_in(source), FORMATS[format].types
    if held not in FORMATS[format].kinds:
        *others, last = [name for name, other in FORMATS.items() if held in other.kinds]
        fitting = f"{', '.join(others)} or {last}"
        raise ValueError(f"{source} holds {held}, which format {format!r} does not take: give format {fitting}")
    if type is not None and type not in types:
        remedy = f"give one of {', '.join(types)}" if types else "leave it out: this format keeps the stored type"
        raise ValueError(f"the type of format {format!r} is {type!r}: {remedy}")


def _refuse_export_for_others(source: Path) -> None:
    """Refuse heads in vLLM's format: they lack their tree, and may hold a copy of the target's lm_head."""
    if read_object(source / "config.json", "export it again").get("model_type") == "medusa":
        raise ValueError(f"{source} holds heads in vLLM's format: give the folder of the run that they are from")
