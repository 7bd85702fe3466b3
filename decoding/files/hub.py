"""Names of models: a folder or a GGUF file, on this machine or on the Hub. Files on the Hub are fetched into the cache.

On the Hub a model is ``ORG/NAME`` or ``ORG/NAME@REVISION``, and a GGUF file is ``ORG/NAME[@REVISION]:FILE.gguf``.
``quickstart`` is the embedded target.

A revision is a branch, a tag, a pull request (``refs/pr/1``) or a commit hash; the default is ``main``. Each process
resolves a revision once, so config, weights and tokenizer come from the same commit even if the branch moves. The Hub's
client fetches the files, with its usual cache (HF_HOME, HF_HUB_CACHE), offline mode (HF_HUB_OFFLINE) and token.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from glob import escape
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from huggingface_hub import constants, snapshot_download
from huggingface_hub.errors import (  # type: ignore[attr-defined]  # HTTPError: whichever client it uses
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, but not in __all__

from decoding.errors import UserError
from decoding.files.gguf_file import converted, is_gguf
from decoding.files.quickstart import embedded_folder, is_embedded
from decoding.files.stored import WEIGHT_FILES, named_files

_SMALL = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py", "README.md")
"""Config, tokenizer, template, card and similar files; code is also fetched, but runs only if trusted."""
_WEIGHTS = (*WEIGHT_FILES, "adapter_model.safetensors")
"""Weight files that this package reads; copies in layouts of other programs are not fetched."""
_FOLDERS = ("*/*",)
_REVISION = re.compile(r"(?!.*(?:\.\.|//))[^\s\\~^:?*\[\x00-\x1f\x7f/,-][^\s\\~^:?*\[\x00-\x1f\x7f,]*")
"""Revisions that git accepts, except names that would lead out of the cache's folder or end the path of a drafter."""
LOG_IN = "run `hf auth login`, or set HF_TOKEN"

_only_cached: ContextVar[bool] = ContextVar("only_cached", default=False)
_commits: dict[tuple[str, str, str, str], str] = {}
"""Commit of each (cache, endpoint, repository, revision) that this process has resolved."""


class HubName(NamedTuple):
    """A repository on the Hub with its branch, tag or commit; ``revision`` None means ``main``.

    ``file``: a GGUF file.
    """

    repo_id: str
    revision: str | None
    file: str | None = None

    def __str__(self) -> str:
        named = self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"
        return named if self.file is None else f"{named}:{self.file}"


def hub_name(name: str | Path) -> HubName | None:
    """Parse a name of the form ORG/NAME[@REVISION][:FILE.gguf]; return None for a path, an existing folder or
    ``quickstart``.

    Raises UserError for a revision that git would not accept, and for a file outside the repository.
    """
    name = str(name)
    repository, _, file = name.partition(":") if is_gguf(name) else (name, "", "")
    repo_id, at, revision = repository.partition("@")
    if is_embedded(name) or (is_gguf(name) and not file):
        return None
    if Path(name).exists() or name.startswith(("/", ".", "~")) or repo_id.count("/") > 1:
        return None
    if at and _REVISION.fullmatch(revision) is None:
        raise UserError(f"{name!r} has {revision!r} as revision: write ORG/NAME@ and a branch, a tag or a commit hash")
    if file.startswith("/") or ".." in PurePosixPath(file).parts:
        raise UserError(f"{name!r} names the file {file!r}, which is outside the repository: write ORG/NAME:FILE.gguf")
    return HubName(repo_id, revision if at else None, file or None)


def local_folder(name: str | Path, weights: bool = True) -> Path:
    """Return the folder of this name. For a Hub id, fetch missing files and return the snapshot in the cache.

    A GGUF file is fetched as a whole and converted; its folder is in another cache. For other models, only the files
    that this package reads are fetched, and weights are fetched only if ``weights`` is true. Raises UserError if the
    folder, repository or revision does not exist or may not be read, or if it is not cached and the Hub cannot be
    reached.
    """
    if is_embedded(name):
        return embedded_folder()
    named = hub_name(name)
    if is_gguf(name):
        return converted(Path(name) if named is None else _snapshot_of_file(named) / str(named.file))
    if named is None:
        if not Path(name).is_dir():
            raise UserError(
                f"there is no folder {name}{similar(Path(name))}: use a folder with a model, or a Hub id such as "
                "ORG/NAME or ORG/NAME@REVISION"
            )
        return Path(name)
    folder = _snapshot(named, [*_SMALL, *(_WEIGHTS if weights else ())])
    files = named_files(folder, "report this to the author of the model") if weights else []
    if missing := [str(path.relative_to(folder)) for path in files if not path.is_file()]:  # shards with other names
        _snapshot(named, [*map(escape, missing)], ())
    return folder


def commit_of(name: str | Path) -> str | None:
    """Return the commit hash of a Hub id (None for a folder). The id is resolved now unless it was resolved earlier."""
    if (named := hub_name(name)) is None:
        return None
    return (local_folder(name, weights=False) if named.file is None else _snapshot_of_file(named)).name


def revisions(names: Mapping[str, str | Path | None]) -> dict[str, str]:
    """Return, for each of ``names`` that is a Hub id, the text ORG/NAME@COMMIT[:FILE.gguf], which says exactly which
    files were read. The keys stay the same.
    """
    return {
        key: str(named._replace(revision=commit_of(name)))
        for key, name in names.items()
        if name is not None and (named := hub_name(name)) is not None
    }


def short_name(name: str) -> str:
    """Return the last part of a folder's path, or NAME@REVISION of a Hub id, for titles."""
    named = hub_name(name)
    return Path(name).name if named is None else str(named).partition("/")[2] or str(named)


def _snapshot_of_file(named: HubName) -> Path:
    """Fetch one file of a repository; return the snapshot's folder."""
    folder = _snapshot(named, [escape(str(named.file))], ())
    if not (folder / str(named.file)).is_file():
        raise UserError(
            f"{named.repo_id} has no file {named.file}, or the file is not cached: check the name on the Hub"
        )
    return folder


@contextmanager
def only_cached(wanted: bool = True) -> Iterator[None]:
    """Send no requests to the Hub inside this context; HF_HUB_OFFLINE switches requests off in a whole process."""
    before = _only_cached.set(wanted or _only_cached.get())
    try:
        yield
    finally:
        _only_cached.reset(before)


def _snapshot(named: HubName, patterns: Sequence[str], ignored: Sequence[str] = _FOLDERS) -> Path:
    """Fetch the repository's files that match the patterns; return their folder, named after the commit."""
    revision = named.revision or constants.DEFAULT_REVISION
    key = (str(constants.HF_HUB_CACHE), str(constants.ENDPOINT), named.repo_id, revision)
    try:
        validate_repo_id(named.repo_id)
        folder = snapshot_download(
            named.repo_id,
            revision=_commits.get(key, revision),
            allow_patterns=list(patterns),
            ignore_patterns=list(ignored),
            local_files_only=_only_cached.get(),
        )
    except (HTTPError, OSError, HFValidationError, LocalEntryNotFoundError) as error:
        problem = explained(error, named, f"{without_login(constants.ENDPOINT)}/{named.repo_id}")
    else:
        _commits[key] = Path(folder).name
        return Path(folder)
    # Raised outside the handler, because the exception's context would contain the request and its headers.
    raise UserError(
        f"{str(named)!r} cannot be loaded: there is no such folder{similar(Path(str(named)))}, and loading it "
        f"from the Hub failed: {problem}"
    )


def explained(error: Exception, named: HubName, page: str) -> str:
    """Explain in one sentence why fetching from a repository failed and what to do; ``page`` is its page on the Hub."""
    repo_id, address = named.repo_id, without_login(constants.ENDPOINT)
    if isinstance(error, HFValidationError):
        return "the name is not a Hub id: write ORG/NAME or ORG/NAME@REVISION"
    if isinstance(error, GatedRepoError):
        return f"the repository is gated: accept its terms at {page}, then {LOG_IN}"
    if isinstance(error, RepositoryNotFoundError):
        return f"{address} has no {repo_id} that you may read: check the name; if the repository is private, {LOG_IN}"
    if isinstance(error, RevisionNotFoundError):
        return f"{repo_id} lacks the revision {named.revision!r}: use a branch, a tag or a whole commit hash"
    cause = (error.__cause__ or error) if isinstance(error, LocalEntryNotFoundError) else error
    if isinstance(cause, HfHubHTTPError):
        status = cause.response.status_code
        answers = {
            401: f"{address} does not accept your access token (401): {LOG_IN} to a valid token",
            403: f"your access token may not read {repo_id} (403): use a token that may read it",
            429: f"{address} received too many requests (429): wait a few minutes, or {LOG_IN} for a higher limit",
        }
        return answers.get(
            status, f"{address} answered {status} ({shortened(cause.server_message or cause)}): try again later"
        )
    if not isinstance(error, LocalEntryNotFoundError):
        return f"{type(error).__name__}: {shortened(error)}"
    if _only_cached.get() or isinstance(cause, OfflineModeIsEnabled):
        revision = f" {named.file}" * bool(named.file) + f" --revision {named.revision}" * bool(named.revision)
        return (
            f"the repository is not completely cached, and downloads are switched off "
            f"(HF_HUB_OFFLINE, local_files_only): fetch it once with `hf download {repo_id}{revision}`, "
            "or allow downloads"
        )
    return (
        f"{address} cannot be reached ({type(cause).__name__}), and the repository is not completely cached: "
        "check the connection"
    )


def shortened(text: object) -> str:
    """Return another program's message on one line, at most 300 characters, without logins in addresses."""
    return without_login(" ".join(str(text).split()))[:300]


def without_login(address: object) -> str:
    """Return an address without a user name and password."""
    return re.sub(r"(?<=://)[^/@]*@", "", str(address))


def similar(folder: Path) -> str:
    """Return a suggestion of existing folders with similar names, or an empty text."""
    parent = folder.parent
    siblings = [path.name for path in parent.iterdir() if path.is_dir()] if parent.is_dir() else []
    close = get_close_matches(folder.name, siblings)
    return f" (is it {' or '.join(str(parent / name) for name in close)}?)" if close else ""
