"""A store on disk of what a target computes for a data set. The store is written once and read at every step.

A folder contains shards of rows (see `trainer.files.folders`), ``weights.safetensors`` for tensors shared by all
examples, and ``manifest.json`` with the origin and the rows of each example. An `Origin` defines the row and its
tensors; a `Writer` computes them.
"""

import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.measure.machine import commit, versions
from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Batch, Example, collate
from trainer.files.folders import (
    ShardLayout,
    fingerprint_of,
    hold,
    is_begun,
    is_whole,
    shard_name,
    write_sealed,
    write_text,
)
from trainer.processes import ALONE, Process, agreed, on_first
from trainer.terminal.console import ProgressBar, say

MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
BATCH_TOKENS = 8192  # in a forward pass, including padding; a single example may be longer
_LOGITS = 1 << 28  # largest number of logits in a forward pass
_SPARE_BYTES = 1 << 28  # left free on the disk, in addition to a twentieth of the bytes to write


class Column(NamedTuple):
    """A tensor of a shard, of shape (rows, *shape)."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Origin(ABC):
    """Everything from which a stored folder was made. Runs with another origin must not use the folder. Fingerprints
    are SHA-256 in hexadecimal.
    """

    noun: ClassVar[str]
    """The name of the content in messages."""
    row: ClassVar[str]
    """The name of a row in messages."""
    setting: ClassVar[str]
    """The recipe's key for the folder."""

    target: str
    """`decoding.files.fingerprint.stored_fingerprint` of the target."""
    tokenizer: str
    data: str
    vocab_size: int
    dtype: str
    """The target's dtype by its name in torch, such as ``bfloat16``."""

    @staticmethod
    def of_target(target: CausalLM, fingerprint: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the fields that depend on the target and its tokenizer."""
        return {
            "target": fingerprint,
            "tokenizer": fingerprint_of(tokenizer.get_vocab()),
            "vocab_size": target.vocab_size,
            "dtype": str(target.dtype).removeprefix("torch."),
        }

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @abstractmethod
    def columns(self) -> dict[str, Column]:
        """Return the tensors of a shard, by name."""

    @abstractmethod
    def num_rows(self, example: Example) -> int:
        """Return the number of rows of an example."""

    @property
    def row_bytes(self) -> int:
        return sum(column.row_bytes for column in self.columns().values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the tensors shared by all examples; 0 if there are none."""
        return 0


class Writer(Protocol):
    """Writer that runs a target and computes a folder's tensors."""

    @property
    def origin(self) -> Origin: ...

    @property
    def batch_tokens(self) -> int:
        """Tokens of a forward pass, including padding; a single example may be longer."""

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors shared by all examples, on the CPU."""

    def compute_columns(self, batch: Batch) -> dict[str, Tensor]:
        """Run the target on a batch; return the columns of all rows, example by example, on any device."""


def tokens_of_a_forward(vocab_size: int) -> int:
    """Return the largest number of tokens of a forward pass that computes logits at each token."""
    return min(BATCH_TOKENS, _LOGITS // vocab_size)


def estimate_bytes(examples: Sequence[Example], origin: Origin) -> int:
    """Return the size of a folder for these examples, up to a few hundred bytes per file."""
    return sum(map(origin.num_rows, examples)) * origin.row_bytes + origin.weight_bytes


# --- reading ----------------------------------------------------------------------------------------------------------

MadeFrom = TypeVar("MadeFrom", bound=Origin)


class Store(Generic[MadeFrom]):
    """A complete folder, memory-mapped: only the rows of a batch are copied. ``layout`` is from `ensure_store`.

    Raises UserError if files are missing on this machine, because all machines must share the folder.
    """

    def __init__(self, folder: Path, origin: MadeFrom, layout: ShardLayout) -> None:
        self._folder = folder
        self.origin = origin
        self._layout = layout
        self._files: dict[str, Any] = {}
        if missing := _missing(_files(origin, layout), folder, _fingerprint(origin, layout)):
            raise UserError(
                f"another process has written {missing[0]}, but {folder} on this machine does not contain this file",
                f"set {origin.setting} to a folder that all machines share",
            )

    def _column(self, name: str, batch: Batch) -> list[Tensor]:
        assert len(batch.examples) == len(batch.tokens), "the batch lists its examples"
        assert min(batch.examples) >= 0, "only examples of the data set are stored"
        rows_of = []
        for index in batch.examples:
            shard, rows = self._layout.find(index)
            rows_of.append(self._open(shard_name(shard)).get_slice(name)[rows])
        return rows_of

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self._folder / name, framework="pt")
        return self._files[name]


def _files(origin: Origin, layout: ShardLayout) -> list[str]:
    shards = [shard_name(shard) for shard in range(len(layout.shards))]
    return [WEIGHTS, *shards] if origin.weight_bytes else shards


def _fingerprint(origin: Origin, layout: ShardLayout) -> str:
    return fingerprint_of([asdict(origin), layout.shard_rows, layout.lengths])


def _missing(names: Sequence[str], folder: Path, fingerprint: str, verify: bool = False) -> list[str]:
    """Return the names of files that are missing, incomplete, of another origin or, with ``verify``, damaged."""
    return [name for name in names if not is_whole(folder / name, fingerprint, verify)]


def _read_manifest(folder: Path, origin: Origin) -> ShardLayout | None:
    """Return the layout of a folder; None without a manifest.

    Raises UserError for a manifest that is unreadable or has another origin.
    """
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
        recorded, layout = content["identity"], ShardLayout(tuple(content["lengths"]), content["shard_tokens"])
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} cannot be read ({error or type(error).__name__})",
            "start again if the disk failed for a moment, otherwise remove this file; intact shards of this data are "
            "reused",
        ) from error
    names = [field.name for field in fields(origin)]
    remedy = f"set {origin.setting} to another folder"
    if recorded.keys() != set(names):
        raise UserError(f"{folder} does not contain {origin.noun}", remedy)
    if other := [name for name in names if recorded[name] != getattr(origin, name)]:
        differing = ", ".join(
            f"other {name}"
            if name in ("target", "tokenizer", "data")
            else f"{name} {recorded[name]} and not {getattr(origin, name)}"
            for name in other
        )
        raise UserError(
            f"{folder} contains {origin.noun} made with {differing}", f"{remedy}, or delete this folder to start again"
        )
    return layout


# --- writing ----------------------------------------------------------------------------------------------------------


def ensure_store(
    writer: Writer, examples: Sequence[Example], folder: Path, shard_rows: int, process: Process = ALONE
) -> ShardLayout:
    """Write the missing and damaged files of a folder for these examples; return its layout.

    Intact files stay untouched, so a call may be killed and repeated. Every process calls this function, writes a share
    of the shards, and waits for the other processes and for other runs that write the same folder. A folder that is
    complete may be on a disk without locks. Raises UserError if the folder was written with another origin, or the disk
    is too small.
    """
    with ExitStack() as held:

        def hold_folder() -> None:
            try:
                held.enter_context(hold(folder, process.say))
            except OSError:
                origin, layout = writer.origin, _read_manifest(folder, writer.origin)
                if layout is None or _missing(_files(origin, layout), folder, _fingerprint(origin, layout)):
                    raise

        on_first(hold_folder)
        layout = agreed(lambda: _begin(writer.origin, examples, folder, shard_rows, process))
        agreed(lambda: _write_missing(writer, examples, folder, layout, process), patient=True)
    return layout


def _begin(origin: Origin, examples: Sequence[Example], folder: Path, shard_rows: int, process: Process) -> ShardLayout:
    """Check that the disk has room, and return the folder's layout; if the folder is new, write its manifest."""
    lengths = tuple(origin.num_rows(example) for example in examples)
    stored = _read_manifest(folder, origin)
    begun = stored is not None and stored.lengths == lengths
    layout = stored if begun and stored is not None else ShardLayout(lengths, shard_rows)
    folder.mkdir(parents=True, exist_ok=True)
    _check_space(folder, origin, layout)
    rows, size, row = sum(lengths), estimate_bytes(examples, origin), origin.row
    weights = f" and {origin.weight_bytes / 1e6:.1f} MB for the lm_head" if origin.weight_bytes else ""
    line = f"{rows:,} {row}s in {folder}, {size / 1e9:.3f} GB: {origin.row_bytes:,} bytes per {row}{weights}"
    process.say(f"{origin.noun}: {line}")
    if not begun and process.is_first:
        made = {"identity": asdict(origin), "commit": commit(), "versions": versions()}
        write_text(folder / MANIFEST, json.dumps({**made, "shard_tokens": shard_rows, "lengths": lengths}))
    return layout


def _check_space(folder: Path, origin: Origin, layout: ShardLayout) -> None:
    sizes = {shard_name(shard): layout.num_rows(shard) * origin.row_bytes for shard in range(len(layout.shards))}
    sizes[WEIGHTS] = origin.weight_bytes
    needed = sum(sizes[name] for name in _missing(_files(origin, layout), folder, _fingerprint(origin, layout)))
    free = shutil.disk_usage(folder).free
    if needed and needed * 1.05 + _SPARE_BYTES > free:
        raise UserError(
            f"the {origin.noun} would take {needed / 1e9:.2f} GB more, but {folder} has {free / 1e9:.2f} GB free "
            f"(5% and {_SPARE_BYTES / 1e9:.2f} GB are kept in reserve)",
            f"set {origin.setting} to a larger disk, or lower data.max_rows",
        )


def _write_missing(
    writer: Writer, examples: Sequence[Example], folder: Path, layout: ShardLayout, process: Process
) -> None:
    origin, noun, row = writer.origin, writer.origin.noun, writer.origin.row
    fingerprint = _fingerprint(origin, layout)
    own = _files(origin, layout)[process.rank :: process.world]
    missing = {*_missing(own, folder, fingerprint, verify=True)}
    for name in sorted(name for name in missing if is_begun(folder / name)):
        say(process.console, f"{noun}: {name} was damaged or incomplete and is written again")
    if WEIGHTS in missing:
        write_sealed(folder / WEIGHTS, writer.weights(), fingerprint)
    shards = [shard for shard in range(len(layout.shards)) if shard_name(shard) in missing]
    to_write = sum(layout.num_rows(shard) for shard in shards)
    with ProgressBar(process.console, f"writing the {noun}", None, active=process.is_first) as bar:
        for shard in shards:
            columns = origin.columns().items()
            rows = layout.num_rows(shard)
            tensors = {name: torch.empty(rows, *shape, dtype=dtype) for name, (dtype, shape) in columns}
            for indices in _batches(layout.shards[shard], examples, layout, writer.batch_tokens):
                batch = collate([examples[index] for index in indices], indices)
                computed, counts = writer.compute_columns(batch), [layout.lengths[index] for index in indices]
                for name, tensor in tensors.items():
                    for index, part in zip(indices, computed[name].cpu().split(counts), strict=True):
                        tensor[layout.find(index)[1]] = part.to(tensor.dtype)
                written = bar.completed + sum(layout.lengths[index] for index in indices)
                bar.update(written, total=to_write, note=f"{written / bar.seconds:,.0f} {row}s/s")
            write_sealed(folder / shard_name(shard), tensors, fingerprint)
    if bar.completed:
        process.say(f"{noun}: this process wrote {bar.completed:,} {row}s, {bar.completed / bar.seconds:,.0f} {row}s/s")


def _batches(
    shard: Sequence[int], examples: Sequence[Example], layout: ShardLayout, batch_tokens: int
) -> Iterator[list[int]]:
    """Yield the examples of a shard that have rows, in batches of examples of similar length; the longest come first.

    Batches depend neither on files that exist already nor on the process.
    """
    order = sorted((i for i in shard if layout.lengths[i]), key=lambda index: -len(examples[index].tokens))
    while order:
        count = max(1, batch_tokens // len(examples[order[0]].tokens))
        yield order[:count]
        order = order[count:]
