"""Removal of local paths and secrets from texts before they are published.

Only `is_hub_id`, `published_command` and `published_name` look at the disk, to check which files exist.
"""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

WITHHELD = "(withheld)"

# Starts of POSIX, home, dot and drive paths and file URLs, then of Windows paths.
# A single backslash does not start a path, because it also occurs in regular expressions.
_START = r"(?:(?:file://)?(?:~[\w.-]*|[A-Za-z]:|\.{1,2})?/|[A-Za-z]:\\|\\\\)"
_WHOLE_PATH = re.compile(rf"{_START}[^\n]*")
# A path inside a longer text has at least two parts and ends at a blank or a quote.
# The lookbehind excludes ORG/NAME, URLs and closing tags.
_PART = r"[^\s'\"`,;)\]}/\\]+"
_PATH_WITHIN = re.compile(rf"(?<![\w:/\\.~<-]){_START}(?:{_PART}[/\\]+)+(?:{_PART})?")
# Access tokens, recognised by the prefixes of their issuers (Hugging Face, OpenAI, GitHub, GitLab, Slack, Amazon,
# Google, wandb), and JSON web tokens.
_TOKENS = (
    r"hf_\w{16,}",
    r"sk-[\w-]{16,}",
    r"gh[pousr]_\w{16,}",
    r"github_pat_\w{16,}",
    r"glpat-[\w-]{16,}",
    r"xox[abeoprs]-[\w-]{10,}",
    r"A[KS]IA[0-9A-Z]{12,}",
    r"AIza[\w-]{30,}",
    r"wandb_v\d_\w{8,}",
    r"eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*",
)
_KEYS = (
    r"(?:api[_-]?key|apikey|password|passwd|secret|access[_-]?key|(?:access|auth|hf|private)[_-]?token|authorization)"
)
_SECRET = re.compile(rf"\b(?:{'|'.join(_TOKENS)})|(?<=://)[^/\s@]+(?=@)")
_HEADER = re.compile(r"\b(bearer\s+|basic\s+(?=[\w+/]{8,}={0,2}(?:\s|$)))[^\s'\"`,;)\]>]+", re.IGNORECASE)
_QUERY = re.compile(
    r"((?:^|[?&;#\s])[\w-]*(?:token|key|secret|password|signature|sig|auth)=)[^&#;\s'\"`)\]>]+", re.IGNORECASE
)
_SECRET_KEY = re.compile(rf"(?:.*[_-])?{_KEYS}|token", re.IGNORECASE)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(name: str) -> bool:
    """Return True if a model's name has the form ORG/NAME of the Hub and no such folder exists."""
    return _HUB_ID.fullmatch(name) is not None and not Path(name).exists()


def hub_repository(name: str) -> str:
    """Return the part ORG/NAME of a data set's name on the Hub, whose form is ORG/NAME[@REVISION][:CONFIG]."""
    return re.split("[@:]", name, maxsplit=1)[0]


def basename(path: str) -> str:
    """Return the last part of a POSIX or Windows path."""
    return re.split(r"[/\\]", path.rstrip("/\\"))[-1]


def without_local_paths(value: Any) -> Any:
    """Return a JSON value without secrets, in which every absolute, home or dot path is cut to its last part."""
    if isinstance(value, dict):
        return {
            without_local_paths(key): WITHHELD if held and _is_secret_key(key) else without_local_paths(held)
            for key, held in value.items()
        }
    if isinstance(value, list | tuple):
        return [without_local_paths(held) for held in value]
    if not isinstance(value, str):
        return value
    value = without_secrets(value)
    if _WHOLE_PATH.fullmatch(value):
        return basename(value)
    return _PATH_WITHIN.sub(lambda match: basename(match.group()), value)


def without_secrets(text: str) -> str:
    """Return the text with secrets replaced by `WITHHELD`; paths stay as they are."""
    for secret in (_HEADER, _QUERY):
        text = secret.sub(rf"\g<1>{WITHHELD}", text)
    return _SECRET.sub(WITHHELD, text)


def published_command(arguments: Sequence[str]) -> str:
    """Return a command line for publication, in which each path is cut to its last part and secrets are withheld."""
    program, *words = arguments or [""]
    return shlex.join([basename(program), *map(_published_word, words)] if program else [])


def _published_word(word: str) -> str:
    """Clean a word of the command line, including an option's value and a drafter's ``NAME:PATH,option=value``."""
    parts = re.split(r"([=,]|(?<=[a-z\d]):)", without_secrets(word)) if "://" not in word else [word]
    return "".join(published_name(part) for part in parts)


def published_name(value: str) -> str:
    """If the value is a path or names an existing file or folder, keep only its last part; withhold secrets."""
    return str(without_local_paths(basename(value) if value and os.path.exists(value) else value))


def _is_secret_key(key: Any) -> bool:
    return isinstance(key, str) and _SECRET_KEY.fullmatch(key) is not None
