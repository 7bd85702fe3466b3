"""Rows of a data source in a fixed order: .jsonl and .parquet files, folders of them, data sets on the hub."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from decoding.jsonl import parse_row, read_lines, read_parquet, without_nulls
from decoding.model.loading import first_line
from trainer.data.hub_sets import HubSet, Stream, datasets_library, hub_set
from trainer.files.folders import sha256_of
from trainer.recipe.common import DataSection

SET_ASIDE = ".failed.jsonl"
"""End of the name of a file with conversations that `headstart regenerate` set aside."""
_SUFFIXES = (".jsonl", ".parquet")


class Row(NamedTuple):
    """One row: its fields by name, or the reason why it has none."""

    where: str
    """The file and the line, or the data set and the row, as errors name them."""
    content: dict[str, Any] | ValueError
    """ValueError for a line that is not a JSON object; the reader decides whether it stops the run."""

    def fields(self) -> dict[str, Any]:
        """Return the fields; raise the row's ValueError where it has none."""
        if isinstance(self.content, ValueError):
            raise self.content
        return self.content


@dataclass(frozen=True)
class RowSource:
    """Rows of files or of a hub data set, and a digest of all of them."""

    name: str
    files: tuple[Path, ...]
    hub: Any
    """A ``datasets.Dataset``, or a `Stream`, in place of files."""
    sha256: str
    """Digest of the file; of a folder's names and digests; of a hub data set's name, split and fingerprint; of a
    stream's name, split, commit and order."""

    @property
    def num_bytes(self) -> int | None:
        """Size of the files; None for a hub data set."""
        return sum(file.stat().st_size for file in self.files) if self.hub is None else None

    @property
    def commit(self) -> str | None:
        """The commit of a hub data set that is streamed; None for all else."""
        return self.hub.commit if isinstance(self.hub, Stream) else None

    def read(self) -> Iterator[Row]:
        """Yield every row, file after file; lines and rows count from 1."""
        if self.hub is not None:
            yield from _named(self.name, enumerate(map(without_nulls, self.hub), start=1))
        for file in self.files:
            if file.suffix == ".parquet":
                yield from _named(str(file), read_parquet(file))
            else:
                yield from _jsonl_rows(file)


def open_source(name: str, section: DataSection) -> RowSource:
    """Open a file, a folder's files in the order of their names, or the section's split of a data set on the hub.

    Hidden files and conversations that `headstart regenerate` set aside are not data of a folder. A hub data set is
    named ORG/NAME[@REVISION][:CONFIG]. If it is streamed, only its commit is asked for here, and rows are fetched as
    they are read. ValueError for a source that is not there or cannot be read.
    """
    path = Path(name)
    if path.is_dir():
        files = tuple(sorted(file for file in path.iterdir() if _is_data(file.name)))
        if not files:
            raise ValueError(f"folder {name} holds no data: put .jsonl or .parquet files into it")
        digests = "".join(f"{file.name} {sha256_of(file)}\n" for file in files)
        return RowSource(name, files, None, hashlib.sha256(digests.encode()).hexdigest())
    if path.is_file():
        return RowSource(name, (path,), None, sha256_of(path))
    hub = None if name.endswith((*_SUFFIXES, ".json")) else hub_set(name)
    if hub is None:
        raise ValueError(
            f"there is no data file {name}: give a .jsonl or .parquet file, a folder of them, or ORG/NAME on the hub"
        )
    if section.streaming:
        stream = Stream.of(hub, section)
        return RowSource(stream.name, (), stream, stream.sha256)
    rows = _hub_data_set(name, hub, section.split)
    digest = hashlib.sha256(f"{name}\n{section.split}\n{rows._fingerprint}".encode()).hexdigest()
    return RowSource(name, (), rows, digest)


def _is_data(name: str) -> bool:
    return name.endswith(_SUFFIXES) and not name.startswith(".") and not name.endswith(SET_ASIDE)


def _hub_data_set(name: str, hub: HubSet, split: str) -> Any:
    datasets = datasets_library(name)
    try:
        return datasets.load_dataset(hub.repository, hub.config, split=split, revision=hub.revision)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"there is no file or folder {name}, and split {split!r} of a hub data set of that name cannot be read: "
            f"{first_line(error)}"
        ) from error


def _jsonl_rows(file: Path) -> Iterator[Row]:
    for number, line in read_lines(file):
        where = f"{file}, line {number}"
        try:
            content: dict[str, Any] | ValueError = parse_row(line, where)
        except ValueError as error:
            content = error
        yield Row(where, content)


def _named(name: str, rows: Iterable[tuple[int, dict[str, Any]]]) -> Iterator[Row]:
    return (Row(f"{name}, row {number}", fields) for number, fields in rows)
