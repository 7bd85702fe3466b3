"""Rows of a data source in a fixed order: .jsonl and .parquet files, folders of them, data sets on the hub.

A hub data set is named ORG/NAME[@REVISION][:CONFIG]. If it is streamed, its rows are fetched while they are read, and
no copy of its files is left on the disk.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: whichever client it uses
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
)

from decoding.errors import UserError
from decoding.jsonl import parse_row, read_lines, read_parquet, without_nulls
from decoding.model.hub import HubName, explained, shortened, without_login
from decoding.model.loading import first_line
from trainer.files.folders import sha256_of
from trainer.recipe.common import DataSection

SET_ASIDE = ".failed.jsonl"
"""End of the name of a file with conversations that `headstart regenerate` set aside."""
_SUFFIXES = (".jsonl", ".parquet")
_HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([^\s:@]+))?(?::([\w.-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Preset(NamedTuple):
    """A set of prompts on the hub, the field of its prompts, and its licence as its card has it."""

    source: str
    field: str
    licence: str


PRESETS = {
    "perfectblend": Preset("mlabonne/open-perfectblend", "conversations", "apache-2.0"),
    "ultrachat": Preset("HuggingFaceH4/ultrachat_200k::train_sft", "messages", "mit"),
    "sharegpt": Preset("Aeala/ShareGPT_Vicuna_unfiltered", "conversations", "apache-2.0"),
    "magpie": Preset("Magpie-Align/Magpie-Llama-3.1-Pro-300K-Filtered", "conversations", "llama3.1"),
    "gsm8k": Preset("openai/gsm8k:main", "question", "mit"),
    "codealpaca": Preset("sahil2801/CodeAlpaca-20k", "instruction", "cc-by-4.0"),
}
"""Prompts by name."""


class Row(NamedTuple):
    """One row: its fields by name, or the reason why it has none."""

    where: str
    """The file and the line, or the data set and the row, as errors name them."""
    content: dict[str, Any] | ValueError
    """ValueError for a line that is not a JSON object; the reader decides whether it stops the run."""

    def fields(self) -> dict[str, Any]:
        """Return the fields; raise the row's ValueError if it has none."""
        if isinstance(self.content, ValueError):
            raise self.content
        return self.content


@dataclass(frozen=True)
class RowSource:
    """Rows of files or of a hub data set, and a digest of all of them."""

    name: str
    sha256: str
    """Digest of the file; of a folder's names and digests; of a hub data set's name, split and fingerprint; of a
    stream's name, split and commit."""
    files: tuple[Path, ...] = ()
    hub: Iterable[dict[str, Any]] | None = None
    """The rows of a hub data set, in place of files."""
    commit: str | None = None
    """The commit of a hub data set that is streamed."""

    @property
    def num_bytes(self) -> int | None:
        """Size of the files; None for a hub data set."""
        return sum(file.stat().st_size for file in self.files) if self.hub is None else None

    def read(self) -> Iterator[Row]:
        """Yield every row, file after file; lines and rows count from 1."""
        for number, fields in enumerate(self.hub or (), start=1):
            yield Row(f"{self.name}, row {number}", without_nulls(fields))
        for file in self.files:
            if file.suffix == ".parquet":
                yield from (Row(f"{file}, row {number}", fields) for number, fields in read_parquet(file))
            else:
                yield from _jsonl_rows(file)


def open_source(name: str, section: DataSection) -> RowSource:
    """Open a file, a folder's files in the order of their names, or the section's split of a data set on the hub.

    Hidden files and conversations that `headstart regenerate` set aside are not data of a folder. Of a streamed set
    only the commit is asked for here. ValueError for a source that is not there or cannot be read.
    """
    path = Path(name)
    if path.is_dir():
        files = tuple(sorted(file for file in path.iterdir() if _is_data(file.name)))
        if not files:
            raise UserError(f"folder {name} holds no data", "put .jsonl or .parquet files into it")
        digests = "".join(f"{file.name} {sha256_of(file)}\n" for file in files)
        return RowSource(name, hashlib.sha256(digests.encode()).hexdigest(), files)
    if path.is_file():
        return RowSource(name, sha256_of(path), (path,))
    found = None if name.endswith((*_SUFFIXES, ".json")) else _HUB_NAME.fullmatch(name)
    if found is None:
        remedy = "give a .jsonl or .parquet file, a folder of them, or ORG/NAME on the hub"
        raise UserError(f"there is no data file {name}", remedy)
    hub = HubName(found[1], found[2])
    return (_streamed if section.streaming else _downloaded)(name, hub, found[3], section)


def stream_prompts(name: str) -> RowSource:
    """Stream ORG/NAME[@REVISION][:CONFIG][:SPLIT] from the hub; ORG/NAME::SPLIT has no configuration."""
    repository, config, split = (*name.split(":", 2), "", "")[:3]
    section = DataSection(train=name, heldout=name, streaming=True, split=split or "train")
    return open_source(f"{repository}:{config}" if config else repository, section)


def _is_data(name: str) -> bool:
    return name.endswith(_SUFFIXES) and not name.startswith(".") and not name.endswith(SET_ASIDE)


def _jsonl_rows(file: Path) -> Iterator[Row]:
    for number, line in read_lines(file):
        where = f"{file}, line {number}"
        try:
            content: dict[str, Any] | ValueError = parse_row(line, where)
        except ValueError as error:
            content = error
        yield Row(where, content)


# --- data sets on the hub ---------------------------------------------------------------------------------------------


def _downloaded(name: str, hub: HubName, config: str | None, section: DataSection) -> RowSource:
    import datasets

    try:
        rows: Any = datasets.load_dataset(hub.repo_id, config, split=section.split, revision=hub.revision)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise ValueError(
            f"there is no file or folder {name}, and split {section.split!r} of a hub data set of that name cannot be "
            f"read: {first_line(error)}"
        ) from error
    digest = hashlib.sha256(f"{name}\n{section.split}\n{rows._fingerprint}".encode()).hexdigest()
    return RowSource(name, digest, hub=rows)


def _streamed(_: str, hub: HubName, config: str | None, section: DataSection) -> RowSource:
    """Return a stream under a name without its revision: the cached tokens are the same if the commit is."""
    name = ":".join(part for part in (hub.repo_id, config) if part)
    commit = _commit_of(hub)
    digest = hashlib.sha256(repr((name, section.split, commit, "streamed")).encode()).hexdigest()
    return RowSource(name, digest, hub=_Stream(hub, config, section.split, commit), commit=commit)


@dataclass(frozen=True)
class _Stream:
    """Rows of a hub data set's split, fetched while they are read, always those of one commit."""

    hub: HubName
    config: str | None
    split: str
    commit: str

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows from the first on; ValueError, in one sentence, if they cannot be fetched or read."""
        import datasets

        unreadable = (HTTPError, OSError, ValueError, TypeError, EOFError, RuntimeError)
        number, name = 0, self.hub.repo_id
        try:
            for row in self._open():
                yield row
                number += 1
            return
        except (*unreadable, datasets.exceptions.DatasetsError) as error:
            problem = str(error) if isinstance(error, UserError) else _explained(error, self.hub)
        # Raised here, outside the handler: an exception's context would hold the request and its header.
        raise ValueError(
            f"the stream of {name} broke off after {number:,} rows: {problem}; the next start reads it from its first "
            "row"
            if number
            else f"{name} cannot be streamed from the hub: {problem}"
        )

    def _open(self) -> Iterable[dict[str, Any]]:
        import datasets

        HfApi().auth_check(self.hub.repo_id, repo_type="dataset")  # the datasets library hides why it is refused
        splits: Any = datasets.load_dataset(self.hub.repo_id, self.config, revision=self.commit, streaming=True)
        if self.split not in splits:
            remedy = (
                "give one as data.split or data.heldout_split, or as ORG/NAME::SPLIT of --prompts, and take a part of "
            )
            remedy += "it by data.max_rows, or --limit"
            raise UserError(f"it has no split {self.split!r} but {' and '.join(splits)}", remedy)
        rows: Iterable[dict[str, Any]] = splits[self.split]
        return rows


def _commit_of(hub: HubName) -> str:
    if hub.revision is not None and _COMMIT.fullmatch(hub.revision):
        return hub.revision
    try:
        # Not the list of the set's files, which may be long.
        sha = HfApi().dataset_info(hub.repo_id, revision=hub.revision, expand=["sha"]).sha
    except (HTTPError, OSError, ValueError) as error:
        problem = _explained(error, hub)
    else:
        assert sha is not None, "it was asked for"
        return sha
    raise ValueError(f"there is no file or folder {hub.repo_id}, and it cannot be streamed from the hub: {problem}")


def _explained(error: Exception, hub: HubName) -> str:
    """Say in one sentence why nothing was fetched, and what helps, without the queries of addresses (signatures)."""
    address = without_login(constants.ENDPOINT)
    remedy = "or name the commit whose tokens are cached here, as ORG/NAME@COMMIT"
    problem, cause = shortened(error) or type(error).__name__, error
    causes: list[BaseException] = []
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__  # type: ignore[assignment]
    for each in causes:
        if isinstance(each, OfflineModeIsEnabled):
            problem = f"HF_HUB_OFFLINE is set: unset it, {remedy}"
        elif isinstance(each, RemoteEntryNotFoundError) and each is not error:
            continue  # a set need not have a card
        elif isinstance(each, HfHubHTTPError):
            problem = explained(each, hub, f"{address}/datasets/{hub.repo_id}")
        elif isinstance(each, HTTPError):
            problem = f"{address} cannot be reached ({type(each).__name__}): check the connection, {remedy}"
        else:
            continue
        break
    return re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", r"\1", problem)
