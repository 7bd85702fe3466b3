"""What must not be published: local paths and secrets. Pure functions of texts, but for looking what is a file here."""

import os
import re
import shlex
from collections.abc import Iterator, Sequence
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
# As their makers mark them: Hugging Face, OpenAI, GitHub, GitLab, Slack, Amazon, Google, wandb; a JSON web token; a
# request's header.
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
_DRAFTER = re.compile(r"(?P<name>[a-z][a-z-]+):(?P<path>[^,=]+)(?P<options>(?:,.*)?)")
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
    value = without_secrets(value)
    if _WHOLE_PATH.fullmatch(value):
        return basename(value)
    return _PATH_WITHIN.sub(lambda found: basename(found.group()), value)


def without_secrets(text: str) -> str:
    """A text with its secrets withheld, paths and all else as they are."""
    for secret in (_HEADER, _QUERY):
        text = secret.sub(rf"\g<1>{WITHHELD}", text)
    return _SECRET.sub(WITHHELD, text)


def published_command(arguments: Sequence[str]) -> str:
    """A command line as it may be published: paths cut to their last part, the values of secret options withheld."""
    return shlex.join(_published(arguments))


def _published(arguments: Sequence[str]) -> Iterator[str]:
    secret = False
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=")
        if secret and not argument.startswith("-"):
            yield WITHHELD
        elif equals and _is_secret_key(option.lstrip("-")):
            yield f"{option}={WITHHELD}"
        elif equals:
            yield f"{without_local_paths(option)}={_published_value(value)}"
        else:
            yield basename(argument) if place == 0 else _published_value(argument)
        secret = not equals and argument.startswith("-") and _is_secret_key(argument.lstrip("-"))


def _published_value(value: str) -> str:
    """An option's value: a name, or a drafter's ``NAME:PATH,option=value`` with its path cut."""
    spec = _DRAFTER.fullmatch(value)
    if spec is None or value.startswith(("file:", "http:", "https:")):
        return published_name(value)
    return f"{spec['name']}:{published_name(spec['path'])}{spec['options']}"


def published_name(value: str) -> str:
    """A file or folder that is here by its name alone, however it is written; other paths cut to their last part."""
    return str(without_local_paths(basename(value) if value and os.path.exists(value) else value))


def _is_secret_key(key: Any) -> bool:
    return isinstance(key, str) and _SECRET_KEY.fullmatch(key) is not None
