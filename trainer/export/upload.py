"""The upload of an exported folder, unchanged, to the Hugging Face Hub in one commit.

The Hub access token goes only into the request header, never into messages or exceptions. A folder is rejected if one
of its files contains the access token. ``huggingface_hub`` retries failed requests and skips files that the Hub already
has.

This module does not import transformers, so it starts fast.
"""

import mmap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.errors import HTTPError as ClientError  # type: ignore[attr-defined]  # of its HTTP client
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, but not in __all__
from yaml import YAMLError

from decoding.errors import UserError
from decoding.files.hub import LOG_IN, shortened, without_login
from trainer.files.folders import check_links

CARD_NAME = "README.md"
TAG = "headstart"
"""Tag on every card; it identifies a folder as an export."""
_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_REMEDIES = {
    401: f"{LOG_IN} to a valid token",
    403: "use a token with write access, or another repository",
    404: "check the organisation's name and that the token may see this organisation",
}


@dataclass(frozen=True)
class PushSummary:
    """The result of an upload. ``address``: the URL of the repository or of the pull request.

    ``name``: ORG/NAME@COMMIT, with which every command can read these files.
    """

    address: str
    name: str

    def __str__(self) -> str:
        """Return lines for a terminal."""
        return f"uploaded to {self.address}\nuse it as {self.name}"


def push(
    folder: Path,
    repository: str,
    *,
    public: bool = False,
    revision: str | None = None,
    pull_request: bool = False,
    message: str | None = None,
) -> PushSummary:
    """Upload an exported folder to the model repository ORG/NAME in one commit; create a missing repository.

    A new repository is private unless ``public``. An existing repository with the other visibility is rejected, so that
    nothing is published by accident. ``revision``: a branch, by default ``main``, which is created if it does not
    exist. With ``pull_request`` the commit becomes a pull request. Files that the upload does not replace are kept.

    Raises `UserError` with a message of one sentence in these cases: the folder is not an export, a file is a pickle or
    contains the access token, this token is missing, the repository id is malformed, or the Hub rejects the upload or
    cannot be reached.
    """
    folder = Path(folder)
    if pull_request and revision is not None:
        raise UserError(f"a pull request goes to main, but revision is {revision!r}: use only one of these options")
    if TAG not in (card_data(folder / CARD_NAME).get("tags") or ()):
        raise UserError(f"headstart export did not write {folder}: export first, then push the exported folder")
    token = _check_access(repository)
    _check_folder(folder, token)
    api = HfApi(token=token, library_name="headstart")
    address = f"{without_login(api.endpoint)}/{repository}"
    try:
        _check_visibility(api, repository, public)
        if revision is not None:
            api.create_branch(repository, branch=revision, exist_ok=True)
        done = api.upload_folder(
            repo_id=repository,
            folder_path=folder,
            commit_message=message or "Upload with Headstart",
            revision=revision,
            create_pr=pull_request,
        )
        return PushSummary(done.pr_url or address, f"{repository}@{done.oid}")
    except HfHubHTTPError as error:
        status, said = error.response.status_code, shortened(error.server_message or error)
        problem = f"{address} answered {status} ({said}): {_REMEDIES.get(status, 'push again later')}"
    except (ClientError, OSError, ValueError, RuntimeError) as error:
        problem = f"the upload to {address} failed ({type(error).__name__}: {shortened(error)}): push again"
    # Raise outside the handlers: the exception's context would contain the request header and its token.
    raise UserError(problem.replace(token, "(token)"))


def card_data(path: Path) -> Any:
    """Return a card's metadata; an empty object if the card cannot be read."""
    try:
        return ModelCard(path.read_text(encoding="utf-8", errors="replace"), ignore_metadata_errors=True).data
    except (ValueError, YAMLError, OSError):
        return {}


def _check_visibility(api: HfApi, repository: str, public: bool) -> None:
    """Create the repository if it is missing; raise UserError if it exists with a different visibility."""
    if not api.repo_exists(repository):
        api.create_repo(repository, private=not public)
    elif bool(api.repo_info(repository).private) == public:
        kind, remedy = ("private", "without --public") if public else ("public", "with --public")
        raise UserError(f"the repository already exists and is {kind}: change this in its settings, or push {remedy}")


def _check_access(repository: str) -> str:
    """Return the Hub token; raise UserError if there is no token or the repository id is malformed."""
    try:
        validate_repo_id(repository)
        malformed = repository.count("/") != 1
    except HFValidationError:
        malformed = True
    if malformed:
        raise UserError(f"the repository id is {repository!r}: write ORG/NAME with letters, digits, '-', '_' and '.'")
    token = get_token()
    if not token:
        raise UserError(f"no Hub token was found: {LOG_IN}")
    return token


def _check_folder(folder: Path, token: str) -> None:
    """Reject files that must not be published."""
    check_links(folder)
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        if path.suffix.lower() in _PICKLES:
            raise UserError(f"{path} may be a pickle, which can run code when it is loaded: remove it, then push again")
        if path.stat().st_size == 0:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(token.encode()) >= 0:
                raise UserError(f"{path} contains your Hub token: remove the token, then push again")
