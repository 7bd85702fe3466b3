"""An exported folder as servers see it: which kind of speculator it holds, read from its own files alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from decoding.model.architecture import shortest_window
from decoding.model.heads import read_config as read_heads_config
from decoding.model.loading import UNREADABLE, is_heads_folder
from decoding.model.parallel import is_parallel_folder
from decoding.model.parallel import read_config as read_parallel_config
from decoding.model.stored import read_object, weights_header
from trainer.export.source import artefact_folder

OWN_HEADS, VLLM_HEADS = "heads in headstart's own format", "heads in vLLM's format"
DRAFT, PARALLEL, OWN_PARALLEL, GGUF = "a draft", "a parallel draft", "a parallel draft with parts", "a draft as GGUF"
_REMEDY = "export it again"
_OUTPUT_LAYERS = ("lm_head.", "embed_out.")
"""Starts of the output layer's name in all families of drafts."""


@dataclass(frozen=True)
class Exported:
    """The speculator in a folder."""

    folder: Path
    kind: str
    """One of this module's names of kinds."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The object in config.json; empty for GGUF."""
    most: int | None = None
    """The most tokens that it drafts in one step: the heads, or those of a parallel draft; None without a limit."""
    reads: tuple[str, ...] = ()
    """Parts that no server knows of, such as ``a bias by the token before``."""
    has_mask_row: bool = False
    """True where a parallel draft's mask token is one more row of its vocabulary, not an id that no text has."""
    file: str | None = None
    """Name of the GGUF file."""

    @property
    def vocab_size(self) -> int | None:
        """The tokens that it knows; None where the files do not tell."""
        inner = self.config.get("text_config")
        size = self.config.get("vocab_size", inner.get("vocab_size") if isinstance(inner, dict) else None)
        return size if isinstance(size, int) else None

    @property
    def window(self) -> int | None:
        """The tokens that a layer of a draft attends to, as transformers reads config.json; None: the whole text.

        None too for heads, and for a config that transformers cannot read.
        """
        try:
            config = AutoConfig.for_model(**self.config)
        except UNREADABLE:
            return None
        return shortest_window(config.get_text_config(decoder=True))

    @property
    def lacks_lm_head(self) -> bool:
        """True if the config asks for an lm_head of its own and the weights hold none."""
        if self.config.get("tie_word_embeddings") is not False:
            return False
        names = weights_header(self.folder, _REMEDY)
        return bool(names) and not any(name.startswith(_OUTPUT_LAYERS) for name in names)

    @property
    def is_heads(self) -> bool:
        return self.kind in (OWN_HEADS, VLLM_HEADS)

    @property
    def spec(self) -> str:
        """The drafter's name by which this project decodes with the folder."""
        named = {PARALLEL: "parallel", OWN_PARALLEL: "parallel"}
        return "heads" if self.is_heads else named.get(self.kind, "draft")


def read_exported(folder: Path) -> Exported:
    """Read what a folder holds: one that `export` wrote, or a training run's; ValueError for anything else."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: export first, or hf download ORG/NAME --local-dir {folder}")
    folder = artefact_folder(folder)
    if files := sorted(path.name for path in folder.glob("*.gguf")):
        if len(files) > 1:
            raise ValueError(f"{folder} holds {len(files)} GGUF files ({', '.join(files)}): give a folder with one")
        return Exported(folder, GGUF, file=files[0])
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no speculator (no config.json, no .gguf): give a folder of headstart export")
    config = read_object(folder / "config.json", _REMEDY)
    if is_heads_folder(folder):
        own = read_heads_config(folder)
        return Exported(folder, OWN_HEADS, config, own.num_heads, _bias(own.markov_rank))
    if config.get("model_type") == "medusa":
        return Exported(folder, VLLM_HEADS, config, _count(config, "num_heads", folder))
    if is_parallel_folder(folder):
        parts = read_parallel_config(folder)
        reader = ("the target's states",) if parts.target_hidden_size is not None else ()
        reads = _bias(parts.markov_rank) + reader
        more = parts.mask_token == parts.vocab_size - 1
        return Exported(folder, OWN_PARALLEL if reads else PARALLEL, config, parts.tokens, reads, more)
    return Exported(folder, DRAFT, config)


def _bias(rank: int) -> tuple[str, ...]:
    return ("a bias by the token before",) if rank else ()


def _count(config: Mapping[str, Any], key: str, folder: Path) -> int:
    count = config.get(key)
    if type(count) is not int or count < 1:
        raise ValueError(f"{folder / 'config.json'} has {count!r} as {key}, not a number of heads: {_REMEDY}")
    return count
