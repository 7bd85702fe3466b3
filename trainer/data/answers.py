"""Regenerated answers: the run that requests answers, and the files, which stay intact if the run is killed.

The answers are in ``NAME.jsonl``, their settings are in ``NAME.jsonl.meta.json``, and the conversations that were set
aside, each with a reason, are in ``NAME.jsonl.failed.jsonl``.
"""

import json
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol

from rich.console import Console

from decoding.errors import UserError
from decoding.jsonl import parse_row
from trainer.data.answer_rows import RowFile, writing
from trainer.data.chat import TranscriptEncoder
from trainer.data.conversations import (
    ANSWER_TOKENS,
    PROMPT_TOKENS,
    TRUNCATED,
    AnswerKey,
    Message,
    OpenConversation,
    is_empty,
    transcript_of,
)
from trainer.data.sources import SET_ASIDE, Row
from trainer.files.folders import hold_file, write_text
from trainer.recipe.common import DataSection
from trainer.terminal.console import ProgressBar, say

_META = ".meta.json"
_JUDGED, _MUCH = 32, 0.2
"""From this number of answers on, `answer` warns once if more than this share of the answers is cut off."""
Problem = Literal["empty", "failed"]


@dataclass(frozen=True)
class AnsweredConversation:
    """A finished conversation."""

    conversation: OpenConversation
    answers: tuple[Message, ...]
    tokens: int
    """Number of tokens of all answers, including end tokens."""
    truncated: bool
    """True if the last answer did not end within the allowed number of tokens."""
    answer_tokens: tuple[tuple[int, ...], ...] | None = None
    """The target's tokens of each answer, with the end token if it was reached; None if an endpoint does not report
    them.
    """
    prompt_tokens: tuple[tuple[int, ...], ...] | None = None
    """The tokens before each answer, as an endpoint rendered them; None if the target's own template rendered them."""
    model: str | None = None
    """The server's name for the model that answered."""


@dataclass(frozen=True)
class FailedConversation:
    """A conversation without an answer to train on."""

    conversation: OpenConversation
    problem: Problem
    reason: str
    again: bool = False
    """True if another run should try again, because the problem may be temporary."""


Outcome = AnsweredConversation | FailedConversation


class Backend(Protocol):
    """A source of answers: the target in this process, or endpoints."""

    @property
    def encoder(self) -> TranscriptEncoder | None:
        """The encoder that training will use; None if only a server knows the tokenizer."""

    def outcomes(
        self, conversations: Iterable[OpenConversation], done: Container[AnswerKey], on_tokens: Callable[[int], None]
    ) -> Iterator[list[Outcome]]:
        """Yield the outcomes of conversations that are not ``done``, in small groups, each of which is written
        immediately.

        ``on_tokens`` is called with the number of tokens written since its last call.
        """


class AnswerFile:
    """The answers on disk, which one run at a time locks.

    If the file is reopened with the same settings, finished answers are recognised.
    """

    def __init__(
        self, path: Path, settings: dict[str, Any], about: dict[str, Any], encoder: TranscriptEncoder | None = None
    ) -> None:
        """Open or create the file. ``encoder`` is `Backend.encoder`; rows that it rejects are set aside."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self.set_aside_path = path.with_name(path.name + SET_ASIDE)
        """The file of conversations without an answer, each with a reason."""
        self._encoder = encoder
        with ExitStack() as until_read:
            until_read.enter_context(hold_file(path))
            _begin(path, self.set_aside_path, settings, about)
            self._answers = RowFile(path)
            self._set_aside = RowFile(self.set_aside_path, {"again", "reason"}, lambda row: bool(row["again"]))
            self._set_aside.settle()
            self._held = until_read.pop_all()
        self.done = {*self._answers.offsets, *self._set_aside.offsets}

    def __enter__(self) -> "AnswerFile":
        return self

    def __exit__(self, *error: object) -> None:
        self._held.close()

    def add(self, outcomes: Sequence[Outcome]) -> list[Outcome]:
        """Write the outcomes that are not in the file yet; return them."""
        news = [self._judged(outcome) for outcome in outcomes if outcome.conversation.key not in self.done]
        self._answers.append([_row_of(outcome) for outcome in news if isinstance(outcome, AnsweredConversation)])
        self._set_aside.append([_row_of(outcome) for outcome in news if isinstance(outcome, FailedConversation)])
        return news

    def finish(self) -> None:
        """Sort both files by row and sample; outcomes were written as they arrived."""
        for lines in (self._answers, self._set_aside):
            lines.settle()

    def check_not_empty(self) -> None:
        """Raise UserError if no run answered any conversation."""
        if self._answers.offsets:
            return
        first = self._set_aside.first()
        raise UserError(
            f"nothing was answered: all {len(self._set_aside.offsets)} conversations were set aside. In line "
            f"{first['row']} the reason was: {first['reason']}; {self.set_aside_path} lists all reasons"
        )

    def _judged(self, outcome: Outcome) -> Outcome:
        """Return the outcome, or a failure for an answer that is empty or that training would reject."""
        if isinstance(outcome, FailedConversation):
            return outcome
        conversation = outcome.conversation
        if any(map(is_empty, outcome.answers)):
            return FailedConversation(conversation, "empty", "the answer is empty")
        try:
            fields = parse_row(json.dumps(_row_of(outcome)).encode(), "the answer")
            transcript = transcript_of(Row("the answer", fields), DataSection(train="", heldout=""))
            if self._encoder is not None:
                self._encoder.encode(transcript)
        except UserError as error:
            if outcome.answer_tokens is not None:  # perhaps the text is usable without the tokens
                return self._judged(replace(outcome, answer_tokens=None, prompt_tokens=None))
            return FailedConversation(conversation, "failed", f"training would reject the answer: {error}")
        return outcome


def _row_of(outcome: Outcome) -> dict[str, Any]:
    conversation = outcome.conversation
    row: dict[str, Any] = conversation.key._asdict()
    if isinstance(outcome, FailedConversation):
        return row | {"problem": outcome.problem, "reason": outcome.reason, "again": outcome.again}
    if conversation.chat:
        row["messages"] = conversation.with_answers(outcome.answers)
        if conversation.tools:
            row["tools"] = conversation.tools
    else:
        row |= {"prompt": conversation.text, "answer": outcome.answers[0]["content"]}
    if outcome.answer_tokens is not None:
        row[ANSWER_TOKENS] = outcome.answer_tokens
        if outcome.prompt_tokens is not None:
            row[PROMPT_TOKENS] = outcome.prompt_tokens
    return row | {"tokens": outcome.tokens, TRUNCATED: outcome.truncated}


def described_prompts(source: Path) -> list[Any]:
    """Return how files of regenerated answers describe their prompts: by a name, or by a description with counts if the
    target wrote the prompts.

    ``source`` is a file or a folder of files. The list is empty for answers that were not regenerated.
    """
    prompts = []
    for file in sorted(source.glob("*.jsonl")) if source.is_dir() else [source]:
        with suppress(OSError, ValueError, KeyError, TypeError):  # not a file that `AnswerFile` wrote
            prompts.append(json.loads(file.with_name(f"{file.name}{_META}").read_bytes())["about"]["prompts"])
    return prompts


def _begin(path: Path, set_aside: Path, settings: dict[str, Any], about: dict[str, Any]) -> None:
    """Record the settings of the answers, or check that they equal the settings of an existing file."""
    meta = path.with_name(path.name + _META)
    try:
        content = json.loads(meta.read_bytes())
        written, told = content["settings"], content["about"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        written = told = None
    if isinstance(written, dict) and isinstance(told, dict):
        for name in {**written, **settings}:
            if written.get(name) != settings.get(name):
                raise UserError(
                    f"{path} was started with {name} {written.get(name)!r}, not {settings.get(name)!r}",
                    "use the original settings, or another output",
                )
        prompts = about.get("prompts")
        if isinstance(prompts, dict) and prompts != told.get("prompts"):  # the target has written more prompts
            told["prompts"] = prompts
            with writing(path):
                write_text(meta, json.dumps(content, indent=2) + "\n")
        return
    if any(file.exists() and file.stat().st_size for file in (path, set_aside)):
        what = "is damaged" if meta.exists() else "is missing"
        raise UserError(
            f"{meta} {what}, so the settings of {path} are unknown", "restore this file, or use another output"
        )
    with writing(path):  # the settings are on the disk before any answer
        write_text(meta, json.dumps({"settings": settings, "about": about}, indent=2) + "\n")


# --- one run ----------------------------------------------------------------------------------------------------------


@dataclass
class Summary:
    """The counts of one run that requests answers.

    ``reasoned`` counts answers with reasoning, and ``reasoned_only`` counts answers that consist only of reasoning.
    ``other_models`` counts conversations that name a different model from the one that answered. ``texts_alone`` counts
    conversations without the target's tokens.
    """

    rows: int = 0
    before: int = 0
    answered: int = 0
    answers: int = 0
    tokens: int = 0
    truncated: int = 0
    unasked: int = 0
    reasoned: int = 0
    reasoned_only: int = 0
    other_models: int = 0
    empty: int = 0
    failed: int = 0
    texts_alone: int = 0
    seconds: float = 0.0

    def count(self, outcome: Outcome) -> None:
        if isinstance(outcome, FailedConversation):
            self.empty += outcome.problem == "empty"
            self.failed += outcome.problem == "failed"
            return
        self.answered += 1
        self.answers += len(outcome.answers)
        self.tokens += outcome.tokens
        self.truncated += outcome.truncated
        self.texts_alone += outcome.answer_tokens is None
        self.unasked += len(outcome.conversation.turns) - len(outcome.answers)
        reasoned = [answer for answer in outcome.answers if "reasoning_content" in answer]
        self.reasoned += len(reasoned)
        self.reasoned_only += sum(not answer["content"].strip() and "tool_calls" not in answer for answer in reasoned)
        asked, answered_by = outcome.conversation.model, outcome.model
        self.other_models += None not in (asked, answered_by) and asked != answered_by

    @property
    def set_aside(self) -> int:
        """Number of conversations without an answer to train on."""
        return self.empty + self.failed


def answer(
    backend: Backend,
    conversations: Iterable[OpenConversation],
    answers: AnswerFile,
    console: Console,
    total: int | None = None,
    title: str = "answering",
) -> Summary:
    """Answer the conversations that have no answer in the file, and write each outcome as it arrives.

    Returns the counts. Conversations are read only when they are needed. ``total`` is the number of conversations, if
    known. ``title`` is shown before the progress.
    """
    summary, warned = Summary(), False
    tokens, before = 0, min(len(answers.done), total or 0)
    with ProgressBar(console, title, total, before) as bar:

        def counted() -> Iterator[OpenConversation]:
            for conversation in conversations:
                summary.rows += 1
                summary.before += conversation.key in answers.done
                yield conversation

        def note() -> str:
            return f"{summary.answered / bar.seconds:,.1f} answers/s, {tokens / bar.seconds:,.0f} tokens/s"

        def on_tokens(count: int) -> None:
            nonlocal tokens
            tokens += count
            bar.update(note=note())

        for outcomes in backend.outcomes(counted(), answers.done, on_tokens):
            for outcome in answers.add(outcomes):
                summary.count(outcome)
                bar.advance()
            if not warned and summary.answered >= _JUDGED and summary.truncated > _MUCH * summary.answered:
                warned, cut_off = True, f"{summary.truncated:,} of {summary.answered:,} answers were cut off so far"
                say(console, f"warning: {cut_off}: start again with a larger --max-new-tokens and another --output")
        summary.seconds = bar.seconds
    answers.finish()
    return summary
