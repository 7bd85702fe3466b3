"""Tensors that a target computes for the tokens of a data set, on disk: written once, read at every step.

A folder holds shards of rows (see `trainer.files.shards`), ``weights.safetensors`` where some tensors belong to no
example, and ``manifest.json``, which names the target and the data that the folder was made from, and the rows of each
example. An `Identity` defines the row and its tensors; a `Writer` computes them.
"""

import json
import math
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, ClassVar, Generic, NamedTuple, Protocol, Self, TypeVar

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.measure.machine import commit, versions
from decoding.model.causal_lm import CausalLM
from trainer.data.batch import Batch, Example, collate
from trainer.files.lock import hold
from trainer.files.shards import (
    Layout,
    digest_of,
    is_begun,
    missing_files,
    shard_name,
    write_sealed,
    write_text,
)
from trainer.processes import ALONE, Process, agreed, on_first
from trainer.terminal.console import say
from trainer.terminal.progress import ProgressBar

MANIFEST, WEIGHTS = "manifest.json", "weights.safetensors"
BATCH_TOKENS = 8192  # of a forward pass, padding included; one example may be longer
_LOGITS = 1 << 28  # of a forward pass that computes them for every token
_SPARE_BYTES = 1 << 28  # left free on the disk, with a twentieth of the bytes to write

OnProgress = Callable[[int, int], None]
"""Called with the rows that this process has written, and the rows that it has to write."""
OnDamaged = Callable[[str], None]
"""Called with the name of a file that is there but not whole, before it is written again."""


class Column(NamedTuple):
    """A tensor of a shard, (rows, *shape)."""

    dtype: torch.dtype
    shape: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Identity(ABC):
    """The origin of a folder: a run with another identity must not use it. Digests are SHA-256 in hexadecimal."""

    noun: ClassVar[str]
    """Name of the folder's content in messages."""
    holding: ClassVar[str]
    """The same name behind "holds", with its article if it has one."""
    row: ClassVar[str]
    """Name of one row in messages."""
    setting: ClassVar[str]
    """Key of the recipe that names the folder."""

    target: str
    """`decoding.model.fingerprint.stored_fingerprint` of the target."""
    tokenizer: str
    data: str
    vocab_size: int
    dtype: str
    """The target's dtype by torch's name, such as ``bfloat16``."""

    @staticmethod
    def of_target(target: CausalLM, fingerprint: str, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return the fields that a target and its tokenizer decide."""
        return {
            "target": fingerprint,
            "tokenizer": digest_of(tokenizer.get_vocab()),
            "vocab_size": target.vocab_size,
            "dtype": str(target.dtype).removeprefix("torch."),
        }

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @abstractmethod
    def columns(self) -> dict[str, Column]:
        """The tensors of a shard, by name."""

    @abstractmethod
    def num_rows(self, example: Example) -> int:
        """Return the number of rows of an example."""

    @property
    def row_bytes(self) -> int:
        return sum(column.row_bytes for column in self.columns().values())

    @property
    def weight_bytes(self) -> int:
        """Bytes of the tensors that belong to no example; 0: the folder has no file of them."""
        return 0


class Writer(Protocol):
    """Computes a folder's tensors by running a target."""

    @property
    def identity(self) -> Identity: ...

    @property
    def batch_tokens(self) -> int:
        """Tokens of a forward pass, padding included; one example may be longer."""

    def weights(self) -> dict[str, Tensor]:
        """Return the tensors that belong to no example, on the CPU."""

    def compute_columns(self, batch: Batch) -> dict[str, Tensor]:
        """Run the target on a batch; return the columns of its rows, one example after the other, on any device."""


def tokens_of_a_forward(vocab_size: int) -> int:
    """Return the tokens of a forward pass that computes logits for each of them."""
    return min(BATCH_TOKENS, _LOGITS // vocab_size)


def estimate_bytes(examples: Sequence[Example], identity: Identity) -> int:
    """Return the bytes of a folder for these examples, but for a few hundred bytes a file."""
    return sum(map(identity.num_rows, examples)) * identity.row_bytes + identity.weight_bytes


def write_store(
    writer: Writer,
    examples: Sequence[Example],
    folder: Path,
    shard_rows: int,
    process: Process = ALONE,
    on_progress: OnProgress | None = None,
    on_damaged: OnDamaged | None = None,
) -> None:
    """Write the missing and the damaged files of a folder for these examples; whole files stay untouched.

    May be killed at any time and called again. Each process writes shards of its own; the folder is complete when all
    processes have returned. Raises ValueError for a folder of another identity, and for a disk that is too small.
    """
    identity = writer.identity
    layout = _begin(folder, identity, examples, shard_rows, process)
    stamp = _stamp(identity, layout)
    missing = set(missing_files(folder, _names(identity, layout)[process.rank :: process.world], stamp, verify=True))
    if on_damaged is not None:
        for name in sorted(name for name in missing if is_begun(folder / name)):
            on_damaged(name)
    if WEIGHTS in missing:
        write_sealed(folder / WEIGHTS, writer.weights(), stamp)
    shards = [shard for shard in range(len(layout.shards)) if shard_name(shard) in missing]
    written, to_write = 0, sum(layout.num_rows(shard) for shard in shards)
    for shard in shards:
        columns = identity.columns().items()
        tensors = {name: torch.empty(layout.num_rows(shard), *shape, dtype=dtype) for name, (dtype, shape) in columns}
        for indices in _batches(layout.shards[shard], examples, layout, writer.batch_tokens):
            batch = collate([examples[index] for index in indices], indices)
            _fill(tensors, layout, batch, writer.compute_columns(batch))
            written += sum(layout.lengths[index] for index in indices)
            if on_progress is not None:
                on_progress(written, to_write)
        write_sealed(folder / shard_name(shard), tensors, stamp)


def _begin(folder: Path, identity: Identity, examples: Sequence[Example], shard_rows: int, process: Process) -> Layout:
    """Return the layout of a folder, for which there is room on its disk; write the manifest of a new one."""
    found = _read_manifest(folder)
    layout = Layout(tuple(identity.num_rows(example) for example in examples), shard_rows)
    if found is not None:
        _check_identity(folder, found["identity"], identity)
        if tuple(found["lengths"]) == layout.lengths:
            layout = replace(layout, shard_rows=found["shard_tokens"])  # the size that the folder was begun with
        else:
            found = None
    folder.mkdir(parents=True, exist_ok=True)
    _check_space(folder, identity, layout)
    if found is None and process.is_first:
        content = {
            "identity": asdict(identity),
            "shard_tokens": shard_rows,
            "commit": commit(),
            "versions": versions(),
            "lengths": layout.lengths,
        }
        write_text(folder / MANIFEST, json.dumps(content))
    return layout


def _read_manifest(folder: Path) -> dict[str, Any] | None:
    """Return the manifest; None without one. ValueError for one that cannot be read: nothing tells its shards' data."""
    path = folder / MANIFEST
    try:
        content = json.loads(path.read_text())
        if not isinstance(content, dict) or not {"identity", "shard_tokens", "lengths"} <= content.keys():
            raise ValueError("it is no manifest")
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{path} cannot be read ({error}). Nothing was changed: start again if the disk failed for a moment, else "
            "remove the file, and the shards that are whole and of this data are used again"
        ) from error
    return content


def _check_identity(folder: Path, found: dict[str, Any], wanted: Identity) -> None:
    names = [field.name for field in fields(wanted)]
    if found.keys() != set(names):
        raise ValueError(f"{folder} holds something else than {wanted.holding}: give {wanted.setting} another folder")
    differing = [name for name in names if found[name] != getattr(wanted, name)]
    if differing:
        raise ValueError(
            f"{folder} holds {wanted.holding} made with {', '.join(_other(n, found[n], wanted) for n in differing)}: "
            f"give {wanted.setting} another folder, or delete this one to write it anew"
        )


def _other(name: str, found: Any, wanted: Identity) -> str:
    """Return words on a field that differs, with both values where these are no digests."""
    if name in ("target", "tokenizer", "data"):
        return f"other {name}"
    return f"{name} {found} and not {getattr(wanted, name)}"


def _stamp(identity: Identity, layout: Layout) -> str:
    return digest_of([asdict(identity), layout.shard_rows, layout.lengths])


def _names(identity: Identity, layout: Layout) -> list[str]:
    shards = [shard_name(shard) for shard in range(len(layout.shards))]
    return [WEIGHTS, *shards] if identity.weight_bytes else shards


def _check_space(folder: Path, identity: Identity, layout: Layout) -> None:
    missing = missing_files(folder, _names(identity, layout), _stamp(identity, layout), verify=False)
    shards = [layout.num_rows(shard) for shard in range(len(layout.shards)) if shard_name(shard) in missing]
    needed = sum(shards) * identity.row_bytes + (identity.weight_bytes if WEIGHTS in missing else 0)
    free = shutil.disk_usage(folder).free
    if needed and needed * 1.05 + _SPARE_BYTES > free:
        raise ValueError(
            f"the {identity.noun} would take {needed / 1e9:.2f} GB more but the disk of {folder} has "
            f"{free / 1e9:.2f} GB free, {_SPARE_BYTES / 1e9:.2f} GB and a twentieth of which are kept: "
            f"give {identity.setting} a larger disk, or fewer data by data.max_rows"
        )


def _batches(
    shard: Sequence[int], examples: Sequence[Example], layout: Layout, batch_tokens: int
) -> Iterator[list[int]]:
    """Yield a shard's examples that have rows in batches, the longest first.

    The examples of a batch are of similar length. The batches do not depend on the files written before, nor on the
    process that writes.
    """
    order = sorted((i for i in shard if layout.lengths[i]), key=lambda index: -len(examples[index].tokens))
    while order:
        count = max(1, batch_tokens // len(examples[order[0]].tokens))
        yield order[:count]
        order = order[count:]


def _fill(tensors: dict[str, Tensor], layout: Layout, batch: Batch, found: dict[str, Tensor]) -> None:
    """Copy each example's rows to their process in its shard."""
    counts = [layout.lengths[index] for index in batch.examples]
    for name, tensor in tensors.items():
        for index, rows in zip(batch.examples, found[name].cpu().split(counts), strict=True):
            tensor[layout.place(index)[1]] = rows.to(tensor.dtype)


MadeFrom = TypeVar("MadeFrom", bound=Identity)


class Store(Generic[MadeFrom]):
    """A folder to read, memory-mapped: only the rows of a batch are copied."""

    def __init__(self, folder: Path, identity: MadeFrom, layout: Layout) -> None:
        self._folder = folder
        self._identity = identity
        self._layout = layout
        self._files: dict[str, Any] = {}

    @classmethod
    def open(cls, folder: Path, identity: MadeFrom, verify: bool = True) -> Self:
        """Open a folder; ValueError unless it is complete and of this identity.

        ``verify`` reads every file and compares its digest; a folder that `write_store` has just checked needs none.
        """
        manifest = _read_manifest(folder)
        write_it = "'headstart features RECIPE'"
        if manifest is None:
            raise ValueError(f"{folder} holds no {identity.noun} (no {MANIFEST}): write it with {write_it}")
        _check_identity(folder, manifest["identity"], identity)
        layout = Layout(tuple(manifest["lengths"]), manifest["shard_tokens"])
        names = _names(identity, layout)
        missing = missing_files(folder, names, _stamp(identity, layout), verify)
        if missing:
            raise ValueError(
                f"{folder} has {len(missing)} of {len(names)} files missing or damaged, {missing[0]} first: "
                f"write them again with {write_it}, which leaves the others as they are"
            )
        return cls(folder, identity, layout)

    def _weight(self, name: str) -> Tensor:
        """Return a tensor that belongs to no example."""
        tensor: Tensor = self._open(WEIGHTS).get_tensor(name)
        return tensor

    def _column(self, name: str, batch: Batch) -> list[Tensor]:
        """Return a column of each example's rows."""
        assert len(batch.examples) == len(batch.tokens), "a batch says which examples it is made of"
        assert min(batch.examples) >= 0, "only examples of the data set are stored"
        found = []
        for index in batch.examples:
            shard, rows = self._layout.place(index)
            found.append(self._open(shard_name(shard)).get_slice(name)[rows])
        return found

    def _open(self, name: str) -> Any:
        if name not in self._files:
            self._files[name] = safe_open(self._folder / name, framework="pt")
        return self._files[name]


def ensure_store(writer: Writer, examples: Sequence[Example], folder: Path, shard_rows: int, process: Process) -> None:
    """Print the total size, then write the missing shards.

    Every process calls this; each waits for the others, and for another run that writes the same folder.
    """
    with ExitStack() as held:
        on_first(lambda: _hold(held, writer.identity, folder, process))
        agreed(lambda: _begin(folder, writer.identity, examples, shard_rows, process))
        agreed(lambda: _write_missing(writer, examples, folder, shard_rows, process), patient=True)


def _hold(held: ExitStack, identity: Identity, folder: Path, process: Process) -> None:
    """Lock a folder against other runs; a whole folder may lie where no lock can be written."""
    try:
        held.enter_context(hold(folder, process.say))
    except OSError:
        Store.open(folder, identity, verify=False)


def _write_missing(
    writer: Writer, examples: Sequence[Example], folder: Path, shard_rows: int, process: Process
) -> None:
    identity = writer.identity
    noun, row = identity.noun, identity.row
    process.say(f"{noun}: {_size_of(examples, identity, folder)}")
    with ProgressBar(process.console, f"writing the {noun}", None, active=process.is_first) as bar:

        def on_progress(written: int, total: int) -> None:
            bar.update(written, total=total, note=f"{written / bar.seconds:,.0f} {row}s/s")

        def on_damaged(name: str) -> None:
            say(process.console, f"{noun}: {name} was damaged or half written, and is written again")

        write_store(writer, examples, folder, shard_rows, process, on_progress, on_damaged)
    if bar.completed:
        process.say(f"{noun}: {bar.completed:,} {row}s written here, {bar.completed / bar.seconds:,.0f} {row}s/s")


def _size_of(examples: Sequence[Example], identity: Identity, folder: Path) -> str:
    rows, size, row = sum(map(identity.num_rows, examples)), estimate_bytes(examples, identity), identity.row
    line = f"{rows:,} {row}s in {folder}, {size / 1e9:.3f} GB: {identity.row_bytes:,} bytes a {row}"
    if identity.weight_bytes:
        line += f" and {identity.weight_bytes / 1e6:.1f} MB for the lm_head"
    return line
