"""What must not be published: local paths and secrets. Pure functions of texts."""

import re
from pathlib import Path
from typing import Any

WITHHELD = "(withheld)"

# POSIX, home, dot and drive paths, and file URLs; then Windows' own. A lone backslash begins a regular expression.
_START = r"(?:(?:file://)?(?:~[\w.-]*|[A-Za-z]:|\.{1,2})?/|[A-Za-z]:\\|\\\\)"
_WHOLE_PATH = re.compile(rf"{_START}[^\n]*")
# Inside a longer text a path has two parts or more and ends at a blank or a quote. What stands before it tells it
# from ORG/NAME, URLs and closing tags.
_PART = r"[^\s'\"`,;)\]}/\\]+"
_PATH_WITHIN = re.compile(rf"(?<![\w:/\\.~<-]){_START}(?:{_PART}[/\\]+)+(?:{_PART})?")
_SECRET = re.compile(r"\b(?:hf_\w{16,}|sk-[\w-]{16,})|(?<=://)[^/\s@]+(?=@)")
_SECRET_KEY = re.compile(r"(?:.*_)?(?:api_key|apikey|password|secret|access_token|auth_token|hf_token)", re.IGNORECASE)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Whether a model's name is ORG/NAME on the Hub and no folder here."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def basename(path: str) -> str:
    """The last part of a path of any system."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def without_local_paths(value: Any) -> Any:
    """A JSON value with every absolute, home or dot path cut to its last part, and secrets withheld."""
    if isinstance(value, dict):
        return {
            without_local_paths(key): WITHHELD if held and _is_secret_key(key) else without_local_paths(held)
            for key, held in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_local_paths(held) for held in value]
    if not isinstance(value, str):
        return value
    if _WHOLE_PATH.fullmatch(value):
        return basename(value)
    value = _PATH_WITHIN.sub(lambda found: basename(found.group()), value)
    return _SECRET.sub(WITHHELD, value)


def _is_secret_key(key: Any) -> bool:
    return isinstance(key, str) and _SECRET_KEY.fullmatch(key) is not None
