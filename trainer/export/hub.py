"""Upload of an exported folder to the Hugging Face Hub.

The token goes into the request header and nowhere else, neither into messages nor into exceptions. A folder whose files
hold the token is refused.
"""

import mmap
import re
from pathlib import Path

from huggingface_hub import HfApi, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError
from huggingface_hub.errors import HTTPError as ClientError  # type: ignore[attr-defined]  # whichever client it uses
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, but not in __all__

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")


def push(folder: str | Path, repo_id: str, public: bool = False, endpoint: str | None = None) -> str:
    """Upload an exported folder to the model repository ORG/NAME, creating it if it is missing; returns its address.

    A new repository is private unless ``public``; an existing one of the other visibility is refused, so that nothing
    is published by accident. ``endpoint`` is another Hub's address. Files that the upload does not replace stay.

    `ValueError`, always one sentence, for a folder without an exported artefact, a pickle or the token among its files,
    a malformed repository id, no token, a refusal of the Hub, and a Hub that cannot be reached.
    """
    folder = Path(folder)
    _check_folder(folder)
    _check_repo_id(repo_id)
    token = get_token()
    if not token:
        raise ValueError("there is no token for the Hub: run `hf auth login`, or set HF_TOKEN")
    _refuse_token_in_files(folder, token)
    api = HfApi(endpoint=endpoint, token=token, library_name="headstart")
    address = re.sub(r"(?<=://)[^/@]*@", "", str(api.endpoint))
    problem = _upload(api, folder, repo_id, public, address)
    if problem is not None:
        # Raised here, outside the handler: an exception's context would hold the request and its header.
        raise ValueError(problem.replace(token, "(token)"))
    return f"{address}/{repo_id}"


def _check_folder(folder: Path) -> None:
    """Refuse a folder that `export` did not write."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: export first, then push the exported folder")
    has_weights = any((folder / name).is_file() for name in ("model.safetensors", "model.safetensors.index.json"))
    for there, name in ((has_weights, "model.safetensors"), ((folder / "README.md").is_file(), "README.md")):
        if not there:
            raise ValueError(f"{folder} holds no exported artefact ({name} is missing): export first")
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in PICKLES:
            raise ValueError(f"{path} may be a pickle, which runs code when it is loaded: remove it, then push again")


def _check_repo_id(repo_id: str) -> None:
    try:
        validate_repo_id(repo_id)
        malformed = repo_id.count("/") != 1
    except HFValidationError:
        malformed = True
    if malformed:
        raise ValueError(f"the repository id is {repo_id!r}: give ORG/NAME, of letters, digits, '-', '_' and '.'")


def _refuse_token_in_files(folder: Path, token: str) -> None:
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.stat().st_size == 0:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(token.encode()) >= 0:
                raise ValueError(f"{path} contains your token for the Hub: remove it there, then push again")


def _upload(api: HfApi, folder: Path, repo_id: str, public: bool, address: str) -> str | None:
    """Upload the folder; return the reason of a failure in one sentence, else None."""
    try:
        if not _create(api, repo_id, public) and bool(api.repo_info(repo_id).private) == public:
            return (
                f"{repo_id} exists and is private: change that in its settings, or push without making it public"
                if public
                else f"{repo_id} exists and is public: make it private in its settings, or push with public on"
            )
        api.upload_folder(repo_id=repo_id, folder_path=folder, commit_message="Upload with Headstart")
    except HfHubHTTPError as error:
        return _explain(error, repo_id, address)
    except (ClientError, OSError, ValueError, RuntimeError, LookupError) as error:
        return f"the upload to {address} failed ({type(error).__name__}: {_one_line(error)}): check it, then push again"
    return None


def _create(api: HfApi, repo_id: str, public: bool) -> bool:
    """Create the repository; False where it exists: a token without the right to create may still write to it."""
    try:
        api.create_repo(repo_id, private=not public)
    except HfHubHTTPError as refusal:
        if refusal.response.status_code not in (401, 402, 403, 409):
            raise
        try:
            api.repo_info(repo_id)
        except HfHubHTTPError:
            raise refusal from None
        return False
    return True


def _explain(error: HfHubHTTPError, repo_id: str, address: str) -> str:
    status = error.response.status_code
    if status == 401:
        return f"{address} does not accept the token (401): run `hf auth login`, or set HF_TOKEN to a valid one"
    if status == 403:
        return f"the token may not write to {repo_id} (403): use one with write access to it, or another repository"
    if status == 404:
        return f"{address} knows no {repo_id} (404): check the organisation's name and that the token may see it"
    said = f", saying {_one_line(error.server_message)!r}" if error.server_message else ""
    return f"{address} answered {status}{said}: nothing was published by this attempt; push again later"


def _one_line(text: object) -> str:
    return " ".join(str(text).split())[:300]
