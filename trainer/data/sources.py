"""Rows of a data source in a fixed order. Sources are .jsonl and .parquet files, folders of them, and hub data sets.

A hub data set is named ORG/NAME[@REVISION][:CONFIG]. A streamed data set is fetched while its rows are read, and leaves
no copy on the disk.
"""

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError of any HTTP client
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
)

from decoding.errors import UserError, first_line
from decoding.files.hub import HubName, explained, shortened, without_login
from decoding.jsonl import location_of, parse_row, unparsed_rows, without_nulls
from trainer.files.folders import sha256_of
from trainer.recipe.common import DataSection

SET_ASIDE = ".failed.jsonl"
"""Suffix of files with conversations that `headstart regenerate` set aside."""
DRAWS = ".draws.jsonl"
"""Suffix of files with prompts that a target wrote itself, next to their answers."""
_NOT_DATA = (SET_ASIDE, DRAWS)
_SUFFIXES = (".jsonl", ".parquet")
_HUB_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([^\s:@]+))?(?::([\w.-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


class Preset(NamedTuple):
    """A set of prompts on the hub, its prompt field, and its licence according to its card."""

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
"""Sets of prompts on the hub, by their names in commands."""


class Row(NamedTuple):
    """One row: its fields by name, or the error that explains why it has no fields."""

    where: str
    """The row's location for error messages: file and line, or data set and row."""
    content: dict[str, Any] | UserError
    """The UserError of a line that is not a JSON object; the reader decides whether it stops the run."""

    def fields(self) -> dict[str, Any]:
        """Return the fields; raise the row's UserError if it has no fields."""
        if isinstance(self.content, UserError):
            raise self.content
        return self.content


@dataclass(frozen=True)
class RowSource:
    """Rows of files or of a hub data set, and a fingerprint of all rows."""

    name: str
    sha256: str
    """Fingerprint of a file, or of a folder's file names and files. For a hub data set, the fingerprint of its name,
    its split, and its own fingerprint or, if it is streamed, its commit.
    """
    files: tuple[Path, ...] = ()
    hub: Iterable[dict[str, Any]] | None = None
    """The rows of a hub data set, for which ``files`` is empty."""
    commit: str | None = None
    """The commit of a streamed hub data set."""

    @property
    def num_bytes(self) -> int | None:
        """Size of the files; None for a hub data set."""
        return sum(file.stat().st_size for file in self.files) if self.hub is None else None

    def read(self) -> Iterator[Row]:
        """Yield all rows, file after file; lines and rows are counted from 1."""
        for number, fields in enumerate(self.hub or (), start=1):
            yield Row(f"{self.name}, row {number}", without_nulls(fields))
        for file in self.files:
            for number, line in unparsed_rows(file):
                where = location_of(file, number, line)
                try:
                    yield Row(where, parse_row(line, where))
                except UserError as error:
                    yield Row(where, error)


def open_source(name: str, section: DataSection) -> RowSource:
    """Open a file, a folder's files in order of name, or the section's split of a hub data set.

    In a folder, hidden files and the files that `headstart regenerate` writes next to its answers are ignored. For a
    streamed data set, only the commit is requested here. Raises UserError for a missing or unreadable source.
    """
    path = Path(name)
    if path.is_dir():
        listed = (file for file in sorted(path.iterdir()) if not file.name.startswith("."))
        files = tuple(file for file in listed if file.suffix in _SUFFIXES and not file.name.endswith(_NOT_DATA))
        if not files:
            raise UserError(f"folder {name} contains no data", "add .jsonl or .parquet files")
        lines = "".join(f"{file.name} {sha256_of(file)}\n" for file in files)
        return RowSource(name, hashlib.sha256(lines.encode()).hexdigest(), files)
    if path.is_file():
        return RowSource(name, sha256_of(path), (path,))
    match = None if name.endswith((*_SUFFIXES, ".json")) else _HUB_NAME.fullmatch(name)
    if match is None:
        remedy = "pass a .jsonl or .parquet file, a folder of them, or ORG/NAME on the hub"
        raise UserError(f"data file {name} does not exist", remedy)
    hub = HubName(match[1], match[2])
    return (_streamed if section.streaming else _downloaded)(name, hub, match[3], section)


def stream_prompts(name: str) -> RowSource:
    """Stream ORG/NAME[@REVISION][:CONFIG][:SPLIT] from the hub. ORG/NAME::SPLIT omits the configuration."""
    repository, config, split = (*name.split(":", 2), "", "")[:3]
    section = DataSection(train=name, heldout=name, streaming=True, split=split or "train")
    return open_source(f"{repository}:{config}" if config else repository, section)


# --- data sets on the hub ---------------------------------------------------------------------------------------------


def _downloaded(name: str, hub: HubName, config: str | None, section: DataSection) -> RowSource:
    import datasets

    try:
        rows: Any = datasets.load_dataset(hub.repo_id, config, split=section.split, revision=hub.revision)
    except (OSError, ValueError, datasets.exceptions.DatasetsError) as error:
        raise UserError(
            f"file or folder {name} does not exist, and split {section.split!r} of the hub data set with that name "
            f"cannot be read: {first_line(error)}"
        ) from error
    fingerprint = hashlib.sha256(f"{name}\n{section.split}\n{rows._fingerprint}".encode()).hexdigest()
    return RowSource(name, fingerprint, hub=rows)


def _streamed(_: str, hub: HubName, config: str | None, section: DataSection) -> RowSource:
    """Return a stream whose name omits the revision, so that all revisions that name the same commit share the cached
    tokens.
    """
    name = ":".join(part for part in (hub.repo_id, config) if part)
    commit = _commit_of(hub)
    fingerprint = hashlib.sha256(repr((name, section.split, commit, "streamed")).encode()).hexdigest()
    return RowSource(name, fingerprint, hub=_Stream(hub, config, section.split, commit), commit=commit)


@dataclass(frozen=True)
class _Stream:
    """Rows of one split of a hub data set at one commit, fetched while they are read."""

    hub: HubName
    config: str | None
    split: str
    commit: str

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield all rows; raise a one-sentence UserError if they cannot be fetched or read."""
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
        # Raise outside the handler: the exception's context would hold the request and its header.
        raise UserError(
            f"the stream of {name} broke off after {number:,} rows: {problem}; the next run reads it from the first row"
            if number
            else f"{name} cannot be streamed from the hub: {problem}"
        )

    def _open(self) -> Iterable[dict[str, Any]]:
        import datasets

        HfApi().auth_check(self.hub.repo_id, repo_type="dataset")  # the datasets library hides the reason for a refusal
        splits: Any = datasets.load_dataset(self.hub.repo_id, self.config, revision=self.commit, streaming=True)
        if self.split not in splits:
            remedy = "use one of these as data.split or in ORG/NAME::SPLIT; data.max_rows or --limit takes some rows"
            raise UserError(f"it lacks the split {self.split!r}; it has {' and '.join(splits)}", remedy)
        rows: Iterable[dict[str, Any]] = splits[self.split]
        return rows


def _commit_of(hub: HubName) -> str:
    if hub.revision is not None and _COMMIT.fullmatch(hub.revision):
        return hub.revision
    try:
        # Because of ``expand``, the list of files, which may be long, is not fetched.
        sha = HfApi().dataset_info(hub.repo_id, revision=hub.revision, expand=["sha"]).sha
    except (HTTPError, OSError, ValueError) as error:
        problem = _explained(error, hub)
    else:
        assert sha is not None, "the request expands the sha"
        return sha
    raise UserError(f"file or folder {hub.repo_id} does not exist, and the hub data set cannot be streamed: {problem}")


def _explained(error: Exception, hub: HubName) -> str:
    """Explain in one sentence why fetching failed and what to do. Queries in URLs are removed, because they may contain
    signatures.
    """
    address = without_login(constants.ENDPOINT)
    remedy = "or pass the commit whose tokens are cached on this machine, as ORG/NAME@COMMIT"
    problem, raised = shortened(error) or type(error).__name__, error
    causes: list[BaseException] = []
    while raised is not None:
        causes.append(raised)
        raised = raised.__cause__ or raised.__context__  # type: ignore[assignment]
    for cause in causes:
        if isinstance(cause, OfflineModeIsEnabled):
            problem = f"HF_HUB_OFFLINE is set: unset it, {remedy}"
        elif isinstance(cause, RemoteEntryNotFoundError) and cause is not error:
            continue  # a data set may have no card
        elif isinstance(cause, HfHubHTTPError):
            problem = explained(cause, hub, f"{address}/datasets/{hub.repo_id}")
        elif isinstance(cause, HTTPError):
            problem = f"{address} cannot be reached ({type(cause).__name__}): check the connection, {remedy}"
        else:
            continue
        break
    return re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", r"\1", problem)
