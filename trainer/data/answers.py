"""Answers that a target writes to conversations, and the files that keep them through a kill.

Beside the answers (``NAME.jsonl``) stand ``NAME.jsonl.meta.json`` with the settings that made them, and
``NAME.jsonl.failed.jsonl`` with the conversations that were set aside, each with its reason.
"""

import json
import os
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from decoding.jsonl import parse_row
from decoding.model.loading import first_line
from trainer.data.chat import TranscriptEncoder
from trainer.data.conversations import (
    ANSWER_TOKENS,
    TRUNCATED,
    Conversation,
    Key,
    Message,
    is_empty,
    transcript_of,
)
from trainer.data.rows import SET_ASIDE, Row
from trainer.files.lock import hold_file
from trainer.files.shards import write_text
from trainer.recipe.common import DataSection

_KEYS = frozenset({"row", "sample"})
Problem = Literal["empty", "truncated", "failed"]


@dataclass(frozen=True)
class Answered:
    """A finished conversation."""

    conversation: Conversation
    answers: tuple[Message, ...]
    tokens: int
    """Tokens of all answers together, their ends included."""
    truncated: bool
    """True if the last answer did not end within the tokens allowed."""
    answer_tokens: tuple[tuple[int, ...], ...] | None = None
    """The target's own tokens of each answer, with the end if it came to one; None from an endpoint, which does not
    tell them."""
    differing: int | None = None
    """Answers whose text becomes other tokens when it is tokenized again; None from an endpoint."""
    model: str | None = None
    """The model that answered, by its server's name."""


@dataclass(frozen=True)
class SetAside:
    """A conversation without an answer to train on."""

    conversation: Conversation
    problem: Problem
    reason: str
    again: bool = False
    """True if another run should try again: the problem may pass."""


Outcome = Answered | SetAside


class Backend(Protocol):
    """A writer of answers: the target in this process, or endpoints."""

    @property
    def encoder(self) -> TranscriptEncoder | None:
        """The encoder of rows as training has it; None where only a server knows the tokenizer."""

    def outcomes(
        self, conversations: Sequence[Conversation], done: Container[Key], on_tokens: Callable[[int], None]
    ) -> Iterator[list[Outcome]]:
        """Yield the outcomes of the conversations that are not ``done``, a few at a time, to be written at once.

        ``on_tokens`` is called with the number of tokens written since its last call.
        """


class _Lines:
    """A file of JSON objects that grows by whole lines."""

    def __init__(self, path: Path, keys: frozenset[str] = frozenset()) -> None:
        """Read the file, and cut off the half line that a kill may have left.

        ValueError names a damaged line: one that is no object with all of ``keys``.
        """
        self.path = path
        content = path.read_bytes() if path.exists() else b""
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            os.truncate(path, len(whole))
        lines = enumerate(whole.split(b"\n")[:-1], start=1)
        self.rows: list[dict[str, Any]] = [self._read(line, number, keys) for number, line in lines]

    def _read(self, line: bytes, number: int, keys: frozenset[str]) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            problem = first_line(error)
        else:
            if isinstance(row, dict) and keys <= row.keys():
                return row
            problem = f"it is no object with {', '.join(sorted(keys))}"
        raise ValueError(
            f"{self.path}, line {number} is damaged ({problem}): delete that line, and what it held is answered again"
        )

    def append(self, rows: Sequence[dict[str, Any]]) -> None:
        """Write the rows and wait until the disk has them."""
        if not rows:
            return
        with _writing(self.path), self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
        self.rows += rows

    def replace(self, rows: Sequence[dict[str, Any]]) -> None:
        """Replace the whole file in one step."""
        path = self.path.with_name(self.path.name + ".new")
        path.write_bytes(b"")
        fresh = _Lines(path)
        fresh.append(rows)
        os.replace(fresh.path, self.path)
        self.rows = list(rows)


class AnswerFile:
    """The answers on disk, held by one run at a time; opened again with the same settings, it knows which are done.

    `finish` sorts the file by row and sample.
    """

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        about: dict[str, Any],
        keep_truncated: bool,
        encoder: TranscriptEncoder | None = None,
    ) -> None:
        """``encoder``: as of `Backend`; a row that it refuses is set aside."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._keep_truncated, self._encoder = keep_truncated, encoder
        with ExitStack() as until_read:
            until_read.enter_context(hold_file(path))
            _begin(path, settings, about)
            self._answers = _Lines(path, _KEYS)
            self._set_aside = _Lines(_set_aside_of(path), _KEYS | {"again", "reason"})
            self._held = until_read.pop_all()
        settled = [row for row in self._set_aside.rows if not row["again"]]
        if len(settled) < len(self._set_aside.rows):
            self._set_aside.replace(settled)
        self.before = len(self._answers.rows)
        self.done = {Key(row["row"], row["sample"]) for row in (*self._answers.rows, *settled)}

    @property
    def set_aside_path(self) -> Path:
        """The file of the conversations without an answer, each with its reason."""
        return self._set_aside.path

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def add(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Write the outcomes that are not in the file yet; return these."""
        news = [self._judged(outcome) for outcome in outcomes if outcome.conversation.key not in self.done]
        self._answers.append([_answer_row(outcome) for outcome in news if isinstance(outcome, Answered)])
        self._set_aside.append([_set_aside_row(outcome) for outcome in news if isinstance(outcome, SetAside)])
        self.done |= {outcome.conversation.key for outcome in news}
        return news

    def finish(self) -> None:
        """Sort the answers and the conversations set aside, which were written in the order they came."""
        for lines in (self._answers, self._set_aside):
            ordered = sorted(lines.rows, key=lambda row: (row["row"], row["sample"]))
            if ordered != lines.rows:
                lines.replace(ordered)

    def check_not_empty(self) -> None:
        """Raise ValueError if no conversation was answered by any run."""
        if self._answers.rows:
            return
        first = self._set_aside.rows[0]
        raise ValueError(
            f"nothing was answered: all {len(self._set_aside.rows)} conversations were set aside, that of line "
            f"{first['row']} because: {first['reason']}; {self._set_aside.path} names every reason"
        )

    def _judged(self, outcome: Outcome) -> Outcome:
        if isinstance(outcome, SetAside):
            return outcome
        if any(map(is_empty, outcome.answers)):
            return SetAside(outcome.conversation, "empty", "the answer is empty")
        if outcome.truncated and not self._keep_truncated:
            return SetAside(outcome.conversation, "truncated", "the answer did not end within the tokens allowed")
        try:
            self._check_trainable(_answer_row(outcome))
        except ValueError as error:
            if outcome.answer_tokens is not None:  # the text alone may do
                return self._judged(replace(outcome, answer_tokens=None))
            return SetAside(outcome.conversation, "failed", f"training would refuse it: {error}")
        return outcome

    def _check_trainable(self, row: dict[str, Any]) -> None:
        """Raise ValueError for a row that training would refuse."""
        where = "the answer"
        fields = parse_row(json.dumps(row).encode(), where)
        transcript = transcript_of(Row(where, fields), DataSection(train="", heldout=""))
        if self._encoder is not None:
            self._encoder.encode(transcript)


def _answer_row(outcome: Answered) -> dict[str, Any]:
    conversation = outcome.conversation
    if conversation.chat:
        content: dict[str, Any] = {"messages": conversation.with_answers(outcome.answers)}
        if conversation.tools:
            content["tools"] = conversation.tools
    else:
        content = {"prompt": conversation.text, "answer": outcome.answers[0]["content"]}
    if outcome.answer_tokens is not None:
        content[ANSWER_TOKENS] = outcome.answer_tokens
    return {**conversation.key._asdict(), **content, "tokens": outcome.tokens, TRUNCATED: outcome.truncated}


def _set_aside_row(outcome: SetAside) -> dict[str, Any]:
    return {
        **outcome.conversation.key._asdict(),
        "problem": outcome.problem,
        "reason": outcome.reason,
        "again": outcome.again,
    }


def _begin(path: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
    """Write down the settings that make the answers, or compare them with those that made the file."""
    meta = path.with_name(path.name + ".meta.json")
    if path.exists() and not (meta.exists() and meta.stat().st_size):
        raise ValueError(f"{path} is there already and was not written by this command: name another output")
    written = _settings_of(meta)
    if written is not None:
        _check_settings(path, written, settings)
    elif any(lines.exists() and lines.stat().st_size for lines in (path, _set_aside_of(path))):
        raise ValueError(
            f"{meta} is damaged, so nothing tells how {path} was made: put that file back, or name another output"
        )
    else:  # nothing was answered yet; on the disk before any answer is
        with _writing(path):
            write_text(meta, json.dumps({"settings": settings, "about": about}, indent=2) + "\n")


def _settings_of(meta: Path) -> dict[str, Any] | None:
    """Return the settings in the file; None where it is not there, empty or damaged."""
    try:
        settings = json.loads(meta.read_bytes())["settings"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return settings if isinstance(settings, dict) else None


def _set_aside_of(path: Path) -> Path:
    """Return the path of the file of conversations without an answer."""
    return path.with_name(path.name + SET_ASIDE)


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """Name the file, and the remedy, in the error of a disk that takes no more."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"{path} cannot be written ({error.strerror or error}): make room there, then start the same command "
            "again; what was answered before is kept"
        ) from error


def _check_settings(path: Path, written: dict[str, Any], settings: dict[str, Any]) -> None:
    for name in {**written, **settings}:
        if written.get(name) != settings.get(name):
            raise ValueError(
                f"{path} was begun with {name} {written.get(name)!r}, not {settings.get(name)!r}: "
                "give what it was begun with, or another output"
            )
