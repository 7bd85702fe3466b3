"""Upload of an exported folder to the Hugging Face Hub: one commit, resumed where a connection broke.

The token goes into the request header and nowhere else, neither into messages nor into exceptions. A folder whose files
hold the token is refused.
"""

import json
import mmap
import re
import time
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, RepoCard, get_token
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, RevisionNotFoundError
from huggingface_hub.errors import HTTPError as ClientError  # type: ignore[attr-defined]  # whichever client it uses
from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]  # documented, but not in __all__

from decoding.measure.redact import is_hub_id
from decoding.model.hub import LOG_IN, shortened, without_login
from decoding.model.stored import read_object
from trainer.files.folders import check_links

PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt")
_WEIGHTS = ("*.safetensors", "*.gguf")
_MESSAGE = "Upload with Headstart"
_TRIES = 4
"""Times that a request is sent which the Hub's client sends once; it repeats uploads of files by itself."""
_SENT_ONCE = re.compile(r"/api/(repos/create|validate-yaml|models/[^/]+/[^/]+(/(commit|branch|revision)/.*)?)$")
_PASSING = (408, 429, 500, 502, 503, 504)
_LONGEST_WAIT = 60
"""Seconds; a Hub that asks for more is told of instead."""


@dataclass(frozen=True)
class Pushed:
    """The result of an upload."""

    address: str
    """The repository's address."""
    commit: str
    """Hash of the commit that holds the files."""
    files: dict[str, int]
    """Bytes by file name: the content of the folder."""
    changed: bool = True
    """False where the repository held these very files."""
    pull_request: str | None = None
    """Address of the pull request, if one was asked for."""
    made: tuple[str, ...] = ()
    """Sentences on the export that was made for it."""

    @property
    def name(self) -> str:
        """ORG/NAME@COMMIT, by which every command reads these files again."""
        return f"{'/'.join(self.address.split('/')[-2:])}@{self.commit}"

    def __str__(self) -> str:
        """Return lines for a terminal."""
        listed = "\n".join(f"  {name}  {size:,} bytes" for name, size in self.files.items())
        found = "sent" if self.changed else "nothing was sent, as the repository holds these very files"
        lines = [*self.made, f"{self.pull_request or self.address}: {found}", listed, f"read it as {self.name}"]
        return "\n".join(lines)


def upload(
    folder: str | Path,
    repo_id: str,
    *,
    public: bool = False,
    revision: str | None = None,
    pull_request: bool = False,
    message: str | None = None,
) -> Pushed:
    """Upload an exported folder to the model repository ORG/NAME in one commit, creating it if it is missing.

    A new repository is private unless ``public``; an existing one of the other visibility is refused, so that nothing
    is published by accident. ``revision``: a branch, made if it is missing; by default ``main``. With ``pull_request``
    the commit becomes a pull request. Files that the upload does not replace stay. What the Hub holds already is not
    sent again, so that the same call goes on after a failure.

    `ValueError`, always one sentence, for a folder without an exported artefact, a pickle or the token among its files,
    a malformed repository id, no token, a refusal of the Hub, and a Hub that cannot be reached.
    """
    folder = Path(folder)
    if pull_request and revision is not None:
        raise ValueError(f"a pull request goes to main, but revision is {revision!r}: give one of the two")
    _check_folder(folder)
    token = check_access(repo_id)
    _refuse_token_in_files(folder, token)
    api = HfApi(token=token, library_name="headstart")
    address = without_login(api.endpoint)
    work = _Upload(api, folder, repo_id, public, revision, pull_request, message or _MESSAGE, address)
    problem = work.run()
    if isinstance(problem, str):
        # Raised here, outside the handler: an exception's context would hold the request and its header.
        raise ValueError(problem.replace(token, "(token)"))
    return problem


def check_access(repo_id: str) -> str:
    """Return the token for the Hub; ValueError without one, and for a malformed repository id."""
    try:
        validate_repo_id(repo_id)
        malformed = repo_id.count("/") != 1
    except HFValidationError:
        malformed = True
    if malformed:
        raise ValueError(f"the repository id is {repo_id!r}: give ORG/NAME, of letters, digits, '-', '_' and '.'")
    token = get_token()
    if not token:
        raise ValueError(f"there is no token for the Hub: {LOG_IN}")
    return token


def _check_folder(folder: Path) -> None:
    """Refuse a folder that `export` did not write."""
    if not folder.is_dir():
        raise ValueError(f"there is no folder {folder}: give a run's folder, or one that headstart export wrote")
    has_weights = any(True for pattern in _WEIGHTS for _ in folder.glob(pattern))
    for there, name in ((has_weights, "model.safetensors"), ((folder / "README.md").is_file(), "README.md")):
        if not there:
            raise ValueError(f"{folder} holds no exported artefact ({name} is missing): export first")
    check_links(folder)
    for path in sorted(folder.rglob("*")):
        if path.suffix.lower() in PICKLES:
            raise ValueError(f"{path} may be a pickle, which runs code when it is loaded: remove it, then push again")
        if path.name == "adapter_config.json":
            base = read_object(path, "export again").get("base_model_name_or_path")
            if not is_hub_id(str(base)):
                raise ValueError(f"{path} names {base}, a folder of this machine: export with --adapters merged")


def _refuse_token_in_files(folder: Path, token: str) -> None:
    for path in sorted(folder.rglob("*")):
        if not path.is_file() or path.stat().st_size == 0:
            continue
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            if content.find(token.encode()) >= 0:
                raise ValueError(f"{path} contains your token for the Hub: remove it there, then push again")


@dataclass(frozen=True)
class _Upload:
    """One upload and its tries."""

    api: HfApi
    folder: Path
    repo_id: str
    public: bool
    revision: str | None
    pull_request: bool
    message: str
    address: str

    def run(self) -> Pushed | str:
        """Upload; return the result, or the reason of a failure in one sentence.

        After a failure that passes all is done again: what the Hub has by then is not sent twice.
        """
        for left in range(_TRIES - 1, -1, -1):
            try:
                return self._once()
            except HfHubHTTPError as error:
                wait = _wait_for(error) if error.response.status_code in _PASSING else None
                if wait is None or wait > _LONGEST_WAIT or not left or not self._may_repeat(error):
                    return self._explain(error)
            except ClientError as error:
                wait = 2 ** (_TRIES - 1 - left)
                if not left or not self._may_repeat(error):
                    return self._failed(error)
            except (OSError, ValueError, RuntimeError, LookupError) as error:
                return self._failed(error)
            time.sleep(wait)
        raise AssertionError("the last try returns")

    def _once(self) -> Pushed | str:
        if (refusal := self._check_card()) is not None:
            return refusal
        created = self._create()
        before = None if created else self.api.repo_info(self.repo_id)
        if before is not None and bool(before.private) == self.public:
            return (
                f"{self.repo_id} exists and is private: change that in its settings, or push without making it public"
                if self.public
                else f"{self.repo_id} exists and is public: make it private in its settings, or push with --public"
            )
        head = before.sha if before is not None else None
        if self.revision is not None:
            self.api.create_branch(self.repo_id, branch=self.revision, exist_ok=True)
            head = self.api.repo_info(self.repo_id, revision=self.revision).sha
        done = self.api.upload_folder(
            repo_id=self.repo_id,
            folder_path=self.folder,
            commit_message=self.message,
            revision=self.revision,
            create_pr=self.pull_request,
        )
        files = {
            str(path.relative_to(self.folder)): path.stat().st_size
            for path in sorted(self.folder.rglob("*"))
            if path.is_file()
        }
        return Pushed(f"{self.address}/{self.repo_id}", done.oid, files, done.oid != head, done.pr_url)

    def _check_card(self) -> str | None:
        """Let the Hub judge the card's metadata, before a repository is made for it; return what it refuses."""
        try:
            RepoCard.load(self.folder / "README.md").validate("model")  # a ModelCard would mend the metadata first
        except HfHubHTTPError:
            return None  # the upload asks again, with the token, and explains
        except ValueError as error:
            return f"{self.address} does not accept the card's metadata ({_errors_in(str(error))}): correct README.md"
        return None

    def _create(self) -> bool:
        """Create the repository; False where it exists: a token without the right to create may still write to it."""
        try:
            self.api.create_repo(self.repo_id, private=not self.public)
        except HfHubHTTPError as refusal:
            if refusal.response.status_code not in (401, 402, 403, 409):
                raise
            try:
                self.api.repo_info(self.repo_id)
            except HfHubHTTPError as other:
                raise (other if refusal.response.status_code == 409 else refusal) from None
            return False
        return True

    def _may_repeat(self, error: ClientError) -> bool:
        """Return True for a request that the client did not repeat, and that does no harm if it is done twice."""
        try:
            request = error.response.request if isinstance(error, HfHubHTTPError) else error.request
        except RuntimeError:  # the error knows no request
            return False
        path = str(request.url.path)
        twice = self.pull_request and "/commit/" in path  # there would be two pull requests
        return _SENT_ONCE.search(path) is not None and not twice

    def _failed(self, error: Exception) -> str:
        if str(error).startswith("Invalid metadata in README.md"):
            return f"{self.address} does not accept the card's metadata ({shortened(error)}): correct README.md"
        told = f"{type(error).__name__}: {shortened(error)}"
        return f"the upload to {self.address} failed ({told}): {self._remedy()}"

    def _remedy(self) -> str:
        if self.pull_request:
            return f"look at {self.address}/{self.repo_id}/discussions for a pull request, then push again"
        return "check it, then push again: what has arrived is not sent again"

    def _explain(self, error: HfHubHTTPError) -> str:
        status, repo_id, address = error.response.status_code, self.repo_id, self.address
        said = f", saying {shortened(error.server_message)!r}" if error.server_message else ""
        if status == 401:
            return f"{address} does not accept the token (401): {LOG_IN} to a valid one"
        if status == 402:
            return f"{address} asks for payment (402){said}: free some of its storage, or push to another organisation"
        if status == 403:
            return f"the token may not write to {repo_id} (403){said}: use one with write access, or another repository"
        if isinstance(error, RevisionNotFoundError):
            return f"{repo_id} has no revision {self.revision!r} (404): give another branch"
        if status == 404:
            return f"{address} knows no {repo_id} (404): check the organisation's name and that the token may see it"
        if status in (413, 507):
            return f"{address} has no room for these files ({status}){said}: free some storage, then push again"
        if status == 429:
            return f"{address} got too many requests (429){said}: push again in {_wait_for(error)} seconds"
        return f"{address} answered {status}{said}: nothing was published by this attempt; {self._remedy()}"


def _wait_for(error: HfHubHTTPError) -> int:
    """Return the seconds that the Hub asks to wait before the next try; 1 if it does not say."""
    headers = error.response.headers
    limit = re.search(r";\s*t\s*=\s*(\d+)", headers.get("ratelimit", ""))
    asked = headers.get("retry-after", "").strip()
    return int(asked) if asked.isdigit() else int(limit[1]) if limit else 1


def _errors_in(answer: str) -> str:
    """Return the reasons in the Hub's answer to a card; the answer itself where it holds none."""
    try:
        told = [str(each["message"]) for each in json.loads(answer)["errors"]]
    except (ValueError, KeyError, TypeError):
        told = []
    return shortened("; ".join(told) or answer)
