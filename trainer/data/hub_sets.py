"""Data sets on the hub: their names, and streams of their rows that leave no copy of their files on the disk."""

import hashlib
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from huggingface_hub import HfApi, constants
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: whichever client it uses
    HfHubHTTPError,
    HTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
)

from decoding.model.hub import HubName, explained, shortened, without_login
from trainer.recipe.common import DataSection

_NAME = re.compile(r"([\w-][\w.-]*/[\w.-]+)(?:@([^\s:@]+))?(?::([\w.-]+))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_SEED = 0
"""Seed of a shuffled stream: fixed, as the cached tokens serve runs of any ``training.seed``."""


class HubSet(NamedTuple):
    """A data set on the hub; ``revision`` None is ``main``, ``config`` None its only or its default configuration."""

    repository: str
    revision: str | None
    config: str | None


def hub_set(name: str) -> HubSet | None:
    """Read a name of the form ORG/NAME[@REVISION][:CONFIG]; None for any other."""
    found = _NAME.fullmatch(name)
    return None if found is None else HubSet(found[1], found[2], found[3])


def datasets_library(name: str) -> Any:
    """Import the datasets library; ValueError with the remedy if there is none to read ``name`` with."""
    try:
        import datasets
    except ImportError as error:
        raise ValueError(
            f"reading {name} needs the datasets library: pip install headstart[data], or give a .jsonl file"
        ) from error
    return datasets


@dataclass(frozen=True)
class Stream:
    """Rows of a hub data set's split, fetched while they are read, always those of one commit."""

    place: HubSet
    split: str
    commit: str
    shuffle_buffer: int | None

    @staticmethod
    def of(place: HubSet, section: DataSection) -> "Stream":
        """Return the stream of the section's split; asks the hub for the commit alone, or for nothing if it is named.

        ValueError, in one sentence, if the hub does not tell the commit or the datasets library is missing.
        """
        datasets_library(place.repository)
        return Stream(place, section.split, _commit_of(place), section.shuffle_buffer)

    @property
    def name(self) -> str:
        """ORG/NAME[:CONFIG], the same whether the commit was named or found: the cached tokens are the same too."""
        return ":".join(part for part in (self.place.repository, self.place.config) if part)

    @property
    def sha256(self) -> str:
        """Digest of what decides the rows and their order."""
        drawn_by = datasets_library(self.name).__version__
        order = None if self.shuffle_buffer is None else (self.shuffle_buffer, _SEED, drawn_by)
        return hashlib.sha256(repr((self.name, self.split, self.commit, "streamed", order)).encode()).hexdigest()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows from the first on; ValueError, in one sentence, where they cannot be fetched or read."""
        library, number = datasets_library(self.place.repository), 0
        unreadable = (
            HTTPError,
            OSError,
            ValueError,
            TypeError,
            EOFError,
            RuntimeError,
            library.exceptions.DatasetsError,
        )
        try:
            for row in self._open(library):
                yield row
                number += 1
            return
        except unreadable as error:
            problem = _explained(error, self.place)
        # Raised here, outside the handler: an exception's context would hold the request and its header.
        raise ValueError(
            f"the stream of {self.place.repository} broke off after {number:,} rows: {problem}; the next start reads "
            "it from its first row"
            if number
            else f"{self.place.repository} cannot be streamed from the hub: {problem}"
        )

    def _open(self, datasets: Any) -> Any:
        repository, _, config = self.place
        HfApi().auth_check(repository, repo_type="dataset")  # the datasets library hides the reasons of a refusal
        splits = datasets.load_dataset(repository, config, revision=self.commit, streaming=True)
        if self.split not in splits:
            raise _NoSplitError(
                f"it has no split {self.split!r} but {' and '.join(splits)}: give one as data.split (of held-out "
                "rows data.heldout_split), and take a part of it by data.max_rows"
            )
        rows = splits[self.split]
        return rows if self.shuffle_buffer is None else rows.shuffle(_SEED, buffer_size=self.shuffle_buffer)


class _NoSplitError(ValueError):
    """A split that is not there, in a sentence of ours."""


def _commit_of(place: HubSet) -> str:
    if place.revision is not None and _COMMIT.fullmatch(place.revision):
        return place.revision
    try:
        # Not the list of the set's files, which may be long.
        sha = HfApi().dataset_info(place.repository, revision=place.revision, expand=["sha"]).sha
    except (HTTPError, OSError, ValueError) as error:
        problem = _explained(error, place)
    else:
        assert sha is not None, "it was asked for"
        return sha
    raise ValueError(
        f"there is no file or folder {place.repository}, and it cannot be streamed from the hub: {problem}"
    )


def _explained(error: Exception, place: HubSet) -> str:
    """Say in one sentence why nothing was fetched, and what helps."""
    address = without_login(constants.ENDPOINT)
    remedy = "or name the commit whose tokens are cached here, as ORG/NAME@COMMIT"
    for cause in _causes(error):
        if isinstance(cause, OfflineModeIsEnabled):
            return f"HF_HUB_OFFLINE is set: unset it, {remedy}"
        if isinstance(cause, RemoteEntryNotFoundError) and cause is not error:
            continue  # a set need not have a card
        if isinstance(cause, HfHubHTTPError):
            named = HubName(place.repository, place.revision)
            return _without_query(explained(cause, named, f"{address}/datasets/{place.repository}"))
        if isinstance(cause, HTTPError):
            return f"{address} cannot be reached ({type(cause).__name__}): check the connection, {remedy}"
    told = str(error) if isinstance(error, _NoSplitError) else shortened(error)
    return _without_query(told or type(error).__name__)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__


def _without_query(text: str) -> str:
    """Return a text without the queries of its addresses, which may be signed."""
    return re.sub(r"(https?://[^\s?'\"]*)\?[^\s'\"]*", r"\1", text)
