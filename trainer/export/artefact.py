"""One export: what a format is asked to write, and what it says of what it wrote."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict

from decoding.model.stored import SHARD_BYTES

if TYPE_CHECKING:
    from decoding.rules.best_tree import Paths

PROVENANCE_NAME, REPORT_NAME, PLAN_NAME = "provenance.json", "report.json", "plan.json"
BESIDE = (PROVENANCE_NAME, REPORT_NAME, PLAN_NAME)
"""Names of what an exported folder tells of its weights, beside the card."""
CHECK_PROMPTS = 20
"""Prompts that are decoded with the written files, where nothing else is asked for."""


class ExportKeywords(TypedDict, total=False):
    """Options of `trainer.export.export`, which tells their meaning, that a push of a run takes too."""

    report: Path | None
    plan: Path | None
    target: str | None
    type: str | None
    prompts: Path | None
    check_prompts: int
    adapters: str | None
    shard_bytes: int
    license: str | None
    trust_remote_code: bool


@dataclass(frozen=True)
class Task:
    """Weights to write in one format."""

    source: Path
    """Folder of the trained artefact."""
    folder: Path
    """Folder to fill, which is there and empty."""
    format: str
    target: str | None = None
    """Folder or hub id of the model that the artefact drafts for; None where nobody knows."""
    tree: "Paths" = ()
    """Tree in place of the artefact's own; empty for its own."""
    type: str | None = None
    """Type of the stored numbers, for a format that has several; None for its default."""
    trust_remote_code: bool = False
    shard_bytes: int = SHARD_BYTES
    """Greatest size of a file of weights, in bytes, where the format knows shards."""


@dataclass(frozen=True)
class Artefact:
    """The exported weights in numbers, for the card. ``heads`` and ``tree_nodes`` are 0 for a draft."""

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
    """Tokens that a parallel draft drafts in one forward; 0 for any other artefact."""
    reads_target: bool = False
    has_mask_row: bool = False
    """True where a parallel draft's mask token is one more row of its vocabulary, not an id that no text has."""

    @property
    def is_draft(self) -> bool:
        return self.heads == 0


class Written(NamedTuple):
    """The result of writing a format: the card's description, and sentences on what was read back and compared."""

    artefact: Artefact
    compared: tuple[str, ...]
