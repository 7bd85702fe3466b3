"""Conversations for a target to answer, what came of them, and the files that keep it through a kill.

Beside the answers (``NAME.jsonl``) stand ``NAME.jsonl.meta.json``, which says how they were made, and
``NAME.jsonl.failed.jsonl`` with the conversations that were set aside, each with its reason.
"""

import json
import os
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from transformers import PreTrainedTokenizerBase

from decoding.model.loading import first_line
from decoding.prompts import check_messages, prompt_of, read_rows
from trainer.files.lock import hold_file
from trainer.files.shards import write_text

_KEYS = frozenset({"row", "sample"})
Message = dict[str, str]
Problem = Literal["empty", "truncated", "failed"]


class Key(NamedTuple):
    """Which answer: the source's line (from 1) and the sample of it (from 0)."""

    row: int
    sample: int


@dataclass(frozen=True)
class Conversation:
    """What is to be answered. ``turns[i]`` are the messages that stand between answer i - 1 and answer i.

    ``index`` (from 0) counts all conversations of a run; seeds are made of it. Without ``chat`` there is one turn of
    one message, whose text is to be continued.
    """

    key: Key
    index: int
    turns: tuple[tuple[Message, ...], ...]
    chat: bool

    def with_answers(self, answers: Sequence[str]) -> list[Message]:
        """The first turns, each with its answer."""
        turns = zip(self.turns[: len(answers)], answers, strict=True)
        return [message for turn, answer in turns for message in (*turn, {"role": "assistant", "content": answer})]

    def open_after(self, answers: Sequence[str]) -> list[Message]:
        """The conversation up to the answer that comes next."""
        return [*self.with_answers(answers), *self.turns[len(answers)]]

    @property
    def text(self) -> str:
        """What is to be continued where there is no chat."""
        return self.turns[0][0]["content"]


@dataclass(frozen=True)
class Answered:
    """A finished conversation; its last answer is ``truncated`` where it did not end within the tokens allowed.

    ``tokens``: how many all answers have, their ends included. Where the target's own tokens are known, an endpoint
    does not tell them, ``answer_tokens`` holds those of each answer, with the end if it came to one, and ``differing``
    counts the answers that give others when their text is tokenized again.
    """

    conversation: Conversation
    answers: tuple[str, ...]
    tokens: int
    truncated: bool
    answer_tokens: tuple[tuple[int, ...], ...] | None = None
    differing: int | None = None


@dataclass(frozen=True)
class SetAside:
    """A conversation without an answer to train on. ``again``: whether another run may have more luck with it."""

    conversation: Conversation
    problem: Problem
    reason: str
    again: bool = False


Outcome = Answered | SetAside


class Backend(Protocol):
    """Whoever answers."""

    def outcomes(
        self, conversations: Sequence[Conversation], done: Container[Key], on_tokens: Callable[[int], None]
    ) -> Iterator[list[Outcome]]:
        """What came of the conversations that are not ``done``, a few at a time, each lot to be written at once.

        ``on_tokens`` hears how many tokens were written since it was called last.
        """


def read_conversations(
    path: str | Path, field: str | None, limit: int | None, samples: int, chat: bool
) -> list[Conversation]:
    """The conversations of a .jsonl file's first ``limit`` rows, each row's ``samples`` times.

    The prompt's field is found as `decoding.prompts.read_prompts` finds it. Several turns, and messages of which the
    assistant's are left out, become conversations of several turns, which only a ``chat`` can hold.
    """
    conversations: list[Conversation] = []
    for number, row in read_rows(path):
        if limit is not None and len(conversations) >= limit * samples:
            break
        where = f"{path}, line {number}"
        turns = _turns(prompt_of(row, field, where)[1], where)
        if not chat and (len(turns) > 1 or len(turns[0]) > 1):
            raise ValueError(f"{where}: a conversation of several messages needs a chat template: give one text a row")
        for sample in range(samples):
            conversations.append(Conversation(Key(number, sample), len(conversations), turns, chat))
    if not conversations:
        raise ValueError(f"{path} holds no prompts: give a .jsonl file with one a line, and a limit above 0")
    return conversations


def _turns(value: Any, where: str) -> tuple[tuple[Message, ...], ...]:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        turns: list[list[Message]] = [[]]
        for message in check_messages(value, where):
            if message["role"] != "assistant":
                turns[-1].append({"role": message["role"], "content": message["content"]})
            elif turns[-1]:
                turns.append([])
        found = tuple(tuple(turn) for turn in turns if turn)
    else:
        texts = value if isinstance(value, list) else [value]
        if not all(isinstance(text, str) for text in texts):
            raise ValueError(f"{where}: the prompt is {value!r:.60}, not text")
        found = tuple(({"role": "user", "content": text},) for text in texts)
    if not found:
        raise ValueError(f"{where}: the conversation has nothing to answer: give at least one message of the user")
    return found


def whole_characters(answer: str, truncated: bool) -> str:
    """An answer without the half character that may be left where it was cut off."""
    return answer.rstrip("\N{REPLACEMENT CHARACTER}") if truncated else answer


def read_answer(tokenizer: PreTrainedTokenizerBase, tokens: list[int], truncated: bool) -> str:
    """The text of an answer's tokens, as it is written down and as training compares it."""
    text = tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return whole_characters(str(text), truncated)


class _Lines:
    """A file of JSON objects that grows by whole lines, and starts without the half one that a kill left.

    ``keys`` are what every object has. ValueError names a line that is damaged.
    """

    def __init__(self, path: Path, keys: frozenset[str] = frozenset()) -> None:
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
        with self.path.open("a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
            file.flush()
            os.fsync(file.fileno())
        self.rows += rows

    def replace(self, rows: Sequence[dict[str, Any]]) -> None:
        """Put other rows in the file's place, in one step."""
        path = self.path.with_name(self.path.name + ".new")
        path.write_bytes(b"")
        fresh = _Lines(path)
        fresh.append(rows)
        os.replace(fresh.path, self.path)
        self.rows = list(rows)


class AnswerFile:
    """The answers on disk, held by one run at a time. Opened again with the same settings, it knows what is done.

    A file whose run came to its end is sorted by row and sample.
    """

    def __init__(self, path: Path, settings: dict[str, Any], about: dict[str, Any], keep_truncated: bool) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._keep_truncated = keep_truncated
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
        """Write what is not there yet, the answers or why there are none; returns what was written."""
        news = [self._judged(outcome) for outcome in outcomes if outcome.conversation.key not in self.done]
        self._answers.append([_answer_row(outcome) for outcome in news if isinstance(outcome, Answered)])
        self._set_aside.append([_set_aside_row(outcome) for outcome in news if isinstance(outcome, SetAside)])
        self.done |= {outcome.conversation.key for outcome in news}
        return news

    def finish(self) -> None:
        """Sort what was written as it came."""
        for lines in (self._answers, self._set_aside):
            ordered = sorted(lines.rows, key=lambda row: (row["row"], row["sample"]))
            if ordered != lines.rows:
                lines.replace(ordered)

    def check_not_empty(self) -> None:
        """ValueError where no run has answered anything."""
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
        if not all(answer.strip() for answer in outcome.answers):
            return SetAside(outcome.conversation, "empty", "the answer is empty")
        if outcome.truncated and not self._keep_truncated:
            return SetAside(outcome.conversation, "truncated", "the answer did not end within the tokens allowed")
        return outcome


def _answer_row(outcome: Answered) -> dict[str, Any]:
    conversation = outcome.conversation
    if conversation.chat:
        content: dict[str, Any] = {"messages": conversation.with_answers(outcome.answers)}
    else:
        content = {"prompt": conversation.text, "answer": outcome.answers[0]}
    if outcome.answer_tokens is not None:
        content["answer_tokens"] = outcome.answer_tokens
    return {**conversation.key._asdict(), **content, "tokens": outcome.tokens, "truncated": outcome.truncated}


def _set_aside_row(outcome: SetAside) -> dict[str, Any]:
    return {
        **outcome.conversation.key._asdict(),
        "problem": outcome.problem,
        "reason": outcome.reason,
        "again": outcome.again,
    }


def _begin(path: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
    """Write down how the answers are made, or compare it with how those that are there were made."""
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
        write_text(meta, json.dumps({"settings": settings, "about": about}, indent=2) + "\n")


def _settings_of(meta: Path) -> dict[str, Any] | None:
    """None where the file is not there, empty or damaged."""
    try:
        settings = json.loads(meta.read_bytes())["settings"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None
    return settings if isinstance(settings, dict) else None


def _set_aside_of(path: Path) -> Path:
    """The file of the conversations without an answer."""
    return path.with_name(path.name + ".failed.jsonl")


def _check_settings(path: Path, written: dict[str, Any], settings: dict[str, Any]) -> None:
    for name in {**written, **settings}:
        if written.get(name) != settings.get(name):
            raise ValueError(
                f"{path} was begun with {name} {written.get(name)!r}, not {settings.get(name)!r}: "
                "give what it was begun with, or another output"
            )
