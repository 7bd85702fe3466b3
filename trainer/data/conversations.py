"""Conversations read from rows: with answers, for training, or without answers, for a target to answer."""

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.fields import (
    ANSWER_FIELDS,
    PROMPT_FIELDS,
    UNSPOKEN,
    UNTRAINED,
    Prompt,
    Tools,
    answer_of,
    find_answer,
    find_prompt,
    prompt_of,
    tools_of,
    unread_columns,
    warn_of_unread,
)
from decoding.fields import Message as Message
from decoding.jsonl import location_of, parse_row, unparsed_rows, without_nulls
from decoding.prompts import encode_prompt
from trainer.data.sources import Row
from trainer.recipe.common import DataSection

ANSWER_TOKENS = "answer_tokens"
"""Field in which `headstart regenerate` stores the target's tokens: a list of token ids per answer."""
PROMPT_TOKENS = "prompt_tokens"
"""Field in which `headstart regenerate` stores the tokens before each answer, as a server rendered them."""
TRUNCATED = "truncated"
"""Field in which `headstart regenerate` records that the last answer was cut off and lacks its end token."""
_ASKED = ("role", "content", "name", "tool_call_id")
"""Message fields that are sent to a target."""
_TOLD = (ANSWER_TOKENS, PROMPT_TOKENS, TRUNCATED, "tools", "functions")
"""Columns that describe a conversation without being part of its messages."""
_CALLED = "called"
"""Field of a recorded tool result in a turn: the name of the function that was called; this field is not sent."""

Format = Literal["messages", "sharegpt", "prompt_answer", "text"]


@dataclass(frozen=True)
class Transcript:
    """An interpreted row: a conversation with answers, or a plain text."""

    where: str
    """The row's location for error messages."""
    format: Format
    messages: tuple[Message, ...] = ()
    """The conversation, as `decoding.fields.check_messages` returns it; empty for a plain text."""
    text: str = ""
    """The plain text; empty for a conversation."""
    fields: tuple[str, str] | None = None
    """Names of the prompt and answer fields in ``prompt_answer`` rows."""
    answer_tokens: Any = None
    """The row's `ANSWER_TOKENS`, unchecked; None if absent."""
    prompt_tokens: Any = None
    """The row's `PROMPT_TOKENS`, unchecked; None if absent."""
    cut_off: bool = False
    """True if the last answer was cut off, so its end is not trained."""
    tools: Tools | None = None
    """The functions that the assistant may call."""
    unread: tuple[str, ...] = ()
    """What is ignored: columns that are neither read nor known as metadata, and what `Prompt.unread` says."""


def transcript_of(row: Row, section: DataSection) -> Transcript:
    """Interpret a row according to the recipe's data section; raise a UserError that names an unusable row."""
    fields, where = row.fields(), row.where
    format = _format_of(fields, section, where)
    if format == "text":
        if not isinstance(text := fields[section.text_field], str):
            raise UserError(f"{where}: field {section.text_field!r} contains {type(text).__name__}, not text")
        return Transcript(where, format, text=text, unread=unread_columns(fields, {section.text_field}, ()))
    own = {"messages": "messages", "sharegpt": "conversations"}.get(format, section.prompt_field)
    prompt = prompt_of(fields, own, where)
    columns, pair = {*prompt.columns, *_TOLD}, None
    reply = section.answer_field or find_answer(fields)
    if reply in fields and (format == "prompt_answer" or prompt.messages[-1]["role"] != "assistant"):
        pair = (prompt.name, reply)
        columns, prompt = {*columns, reply}, _answered(prompt, fields, reply, where)
    is_bad = fields.get("label", fields.get("kto_tag")) is False
    messages = [message | (UNTRAINED if is_bad else {}) for message in prompt.messages]
    tools, unread = tools_of(fields, where), (*unread_columns(fields, columns, messages), *prompt.unread)
    tokens = fields.get(ANSWER_TOKENS), fields.get(PROMPT_TOKENS)
    return Transcript(where, format, tuple(messages), "", pair, *tokens, fields.get(TRUNCATED) is True, tools, unread)


def opening_of(row: Row, section: DataSection) -> tuple[tuple[Message, ...], Tools | None, tuple[str, ...]]:
    """Return a row's first turn, its tools and `Prompt.unread`; raise UserError for a row with an answer."""
    fields, where = row.fields(), row.where
    prompt = prompt_of(fields, section.prompt_field, where)
    said = any(message["role"] == "assistant" for message in prompt.messages)
    if said or (section.answer_field or find_answer(fields)) in fields:
        raise UserError(f"{where}: the row has an answer: use rows without answers, or rows that all have one")
    return _turns(prompt.messages, where)[0], tools_of(fields, where), prompt.unread


def _answered(prompt: Prompt, fields: dict[str, Any], reply: str, where: str) -> Prompt:
    """Append the answer in the column ``reply`` to the messages; answers that belong to the prompt are not trained.

    If the column contains the whole conversation (UltraFeedback), the answer is what follows the last user message.
    """
    answer, asked = answer_of(fields, reply, where), fields[prompt.name]
    if isinstance(asked, list) and len(asked) > 1 and isinstance(asked[0], str):
        raise UserError(f"{where}: field {prompt.name!r} has {len(asked)} turns, but {reply!r} answers only one")
    if any(message["role"] == "user" for message in answer):
        prompt = prompt_of(fields, reply, where)
        last = max(index for index, message in enumerate(prompt.messages) if message["role"] == "user")
        prompt, answer = prompt._replace(messages=prompt.messages[: last + 1]), prompt.messages[last + 1 :]
    given = [message | UNTRAINED for message in prompt.messages[prompt.begins :]]
    return prompt._replace(messages=[*prompt.messages[: prompt.begins], *given, *answer])


def _format_of(fields: dict[str, Any], section: DataSection, where: str) -> Format:
    prompt, answer = section.prompt_field or find_prompt(fields), section.answer_field or find_answer(fields)
    fits: dict[Format, bool] = {
        "messages": "messages" in fields,
        "sharegpt": "conversations" in fields,
        "prompt_answer": {prompt, answer} <= fields.keys(),
        "text": section.text_field in fields,
    }
    named = section.prompt_field or section.answer_field  # if fields are named they are required; a text is not enough
    possible: list[Format] = [name for name in fits if not (named and name == "text")]
    wanted = possible if section.format == "auto" else [section.format]
    format = next((name for name in wanted if fits[name]), None)
    if format is None:
        needed: dict[Format, str] = {
            "messages": "'messages'",
            "sharegpt": "'conversations'",
            "prompt_answer": f"a prompt ({section.prompt_field or ', '.join(PROMPT_FIELDS)}) with an answer "
            f"({section.answer_field or ', '.join(ANSWER_FIELDS)})",
            "text": repr(section.text_field),
        }
        raise UserError(
            f"{where}: the row has the fields {sorted(fields)}, but training needs "
            f"{' or '.join(needed[name] for name in wanted)}",
            "set data.format, data.prompt_field, data.answer_field or data.text_field",
        )
    return format


class AnswerKey(NamedTuple):
    """What identifies an answer: its line in the source (from 1), and its sample's number for this line (from 0)."""

    row: int
    sample: int


@dataclass(frozen=True)
class OpenConversation:
    """A conversation to be answered. ``turns[i]`` are the messages between answers i - 1 and i.

    Recorded results of tools in turn i belong, in order, to the calls of answer i - 1. If that answer does not make the
    same calls, the conversation ends with the answer.

    ``index`` (from 0) counts all conversations of a run and determines the seeds. Without ``chat`` there is one turn
    with one message, whose text is continued. ``tools`` are the functions that the target may call. ``model`` is the
    model that the row names. ``spelled`` are the tokens to continue, if they differ from the tokens of the text. If a
    turn has no messages, the target itself writes the user's message.
    """

    key: AnswerKey
    index: int
    turns: tuple[tuple[Message, ...], ...]
    chat: bool
    tools: Tools | None = None
    model: str | None = None
    spelled: tuple[int, ...] | None = None

    def with_answers(self, answers: Sequence[Message]) -> list[Message]:
        """Return the first ``len(answers)`` turns, each with its answer."""
        return [message for index, answer in enumerate(answers) for message in (*self._turn(index, answers), answer)]

    def open_after(self, answers: Sequence[Message]) -> list[Message]:
        """Return the messages up to the next answer."""
        return [*self.with_answers(answers), *self._turn(len(answers), answers)]

    def _turn(self, index: int, answers: Sequence[Message]) -> list[Message]:
        """Return a turn in which each tool result has the id of its call in the previous answer."""
        calls: Iterator[dict[str, Any]] = iter(answers[index - 1].get("tool_calls", ()) if index else ())
        turn = []
        for message in self.turns[index]:
            call = next(calls, {}) if message["role"] == "tool" else {}
            sent = {name: value for name, value in message.items() if name != _CALLED}
            turn.append(sent | ({"tool_call_id": call["id"]} if call.get("id") else {}))
        return turn

    def goes_on(self, answers: Sequence[Message], spelled: bool = False) -> bool:
        """Return True if a turn is left, and its recorded tool results belong to calls that the last answer made.

        With ``spelled`` the calls are part of the text of an answer, so the text must contain the names of the
        functions.
        """
        if not answers or len(answers) == len(self.turns):
            return not answers
        called = [message.get(_CALLED) for message in self.turns[len(answers)] if message["role"] == "tool"]
        if spelled:
            text = answers[-1]["content"]
            return all(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) for name in called if name)
        made = [call["function"]["name"] for call in answers[-1].get("tool_calls", ())]
        return len(made) == len(called) and all(name in (None, own) for name, own in zip(called, made, strict=True))

    @property
    def text(self) -> str:
        """The text to continue if there is no chat."""
        return str(self.turns[0][0]["content"])


def answer_message(content: str, **unspoken: Any) -> Message:
    """Return an answer as a message, including those fields in `decoding.fields.UNSPOKEN` that are not empty."""
    return {"role": "assistant", "content": content, **{name: held for name, held in unspoken.items() if held}}


def is_empty(answer: Message) -> bool:
    """Return True for an answer that has no text, no reasoning and no tool calls."""
    return not answer["content"].strip() and not UNSPOKEN & answer.keys()


@dataclass
class RowNotes:
    """What `read_conversations` noticed in rows."""

    bad: int = 0
    """Number of rows that are not prompts."""
    errors: dict[int, str] = field(default_factory=dict)
    """The errors of the first 20 bad rows, by the numbers of the rows."""
    unread: Counter[str] = field(default_factory=Counter)
    """Number of rows by what is ignored, as in `Transcript.unread`."""

    def report_bad(self, name: str | Path) -> str:
        """Return a sentence with the number of bad rows, the numbers of the first ones, and the first error."""
        rows, first = ", ".join(map(str, self.errors)), next(iter(self.errors.values()))
        more = ", …" * (self.bad > len(self.errors))
        return f"rows of {name} that are not prompts: {self.bad:,} ({rows}{more}); the first error: {first}"


def read_conversations(
    path: str | Path,
    field: str | None,
    limit: int | None,
    samples: int,
    chat: bool,
    stream: Iterable[dict[str, Any]] | None = None,
    notes: RowNotes | None = None,
) -> Iterator[OpenConversation]:
    """Yield ``samples`` conversations without answers for each of a file's first ``limit`` rows, as they are read.

    ``stream`` replaces the rows of the file. With ``notes``, rows that are not prompts are skipped and noted, but an
    error is raised at the end if no row is a prompt; what is ignored is logged at the end.

    The prompt's field is found as in `decoding.measure.questions.read_prompts`. A row with several turns, or with
    answers of the assistant between its messages, becomes a conversation of several turns. Such a conversation requires
    ``chat``. Raises UserError for a file without prompts and, without ``notes``, for a row that is not a prompt.
    """
    count = 0
    for number, line in unparsed_rows(path) if stream is None else enumerate(map(without_nulls, stream), start=1):
        where = location_of(path, number, line)
        try:
            row = parse_row(line, where)
            prompt = prompt_of(row, field, where)
            turns, tools = _turns(prompt.messages, where), tools_of(row, where)
        except UserError as error:
            if notes is None:
                raise
            notes.bad += 1
            if notes.bad <= 20:
                notes.errors[number] = str(error)
            continue
        if not chat:
            if sum(message["role"] != "system" for turn in turns for message in turn) > 1:
                raise UserError(f"{where}: a conversation needs a chat template: use one text per row")
            turns = (({"role": "user", "content": "\n".join(message["content"] for message in turns[0])},),)
        if notes is not None:
            columns = unread_columns(row, {*prompt.columns, *ANSWER_FIELDS, *_TOLD}, prompt.messages)
            notes.unread.update((*columns, *prompt.unread))
        model = row["model"] if isinstance(row.get("model"), str) else None
        for sample in range(samples):
            yield OpenConversation(AnswerKey(number, sample), count, turns, chat, tools, model)
            count += 1
        if limit is not None and count >= limit * samples:
            break
    if not count:
        empty = f"{path} contains no prompts: use a file with a prompt per line, and a limit above 0"
        raise UserError(notes.report_bad(path) if notes and notes.bad else empty)
    if notes is not None:
        warn_of_unread(path, notes.unread)


def check_prompts(path: str | Path, field: str | None, limit: int | None) -> None:
    """Check a file's rows up to its first ``limit`` prompts: raise UserError if one is not a prompt, and log what is
    ignored.
    """
    deque(read_conversations(path, field, limit, 1, chat=True, notes=(notes := RowNotes())), maxlen=0)
    if notes.bad:
        raise UserError(notes.report_bad(path))


def _turns(messages: Sequence[Message], where: str) -> tuple[tuple[Message, ...], ...]:
    """Return the messages between answers. If there are no answers, each user message ends a turn, as in Spec-Bench."""
    turns, made = list[list[Message]]([[]]), list[tuple[Any, Any]]()
    answered = any(message["role"] == "assistant" for message in messages)
    for message in messages:
        if message["role"] == "assistant":
            calls = [call for call in message.get("tool_calls") or () if isinstance(call, dict)]
            functions = [(call.get("id"), call.get("function")) for call in calls]
            made = [(call_id, function.get("name")) for call_id, function in functions if isinstance(function, dict)]
        else:
            asked = {name: message[name] for name in _ASKED if message.get(name) is not None}
            if message["role"] == "tool":
                named = [name for call_id, name in made if call_id and call_id == asked.get("tool_call_id")]
                named += [asked.get("name"), *(name for _, name in made[len(turns[-1]) :])]  # without ids: by order
                asked[_CALLED] = next(filter(None, named), None)
            turns[-1].append(asked)
        if turns[-1] and message["role"] == ("assistant" if answered else "user"):
            turns.append([])
    filled = tuple(tuple(turn) for turn in turns if turn)
    if not filled:
        raise UserError(f"{where}: the conversation has nothing to answer: add at least one user message")
    return filled


HeldOut = list[tuple[OpenConversation, tuple[int, ...]]]
"""Held-out prompts with their token ids."""


def read_heldout(path: str | Path, field: str | None, limit: int | None, tokenizer: PreTrainedTokenizerBase) -> HeldOut:
    """Return the first ``limit`` prompts of a file with their token ids."""
    chat = tokenizer.chat_template is not None
    conversations = read_conversations(path, field, limit, 1, chat)
    return [(asked, encode_prompt(asked.open_after(()), tokenizer, chat, asked.tools)) for asked in conversations]


def short_enough(heldout: HeldOut, holds: int, max_new_tokens: int) -> HeldOut:
    """Return the prompts that leave room for ``max_new_tokens`` new tokens; raise UserError if there are none.

    ``holds`` is the length in tokens of the longest text that both the target and the speculator support.
    """
    fitting = [(asked, prompt) for asked, prompt in heldout if 0 < len(prompt) <= holds - max_new_tokens]
    if not fitting:
        raise UserError(f"no held-out prompt leaves room for {max_new_tokens} new tokens: lower max_new_tokens")
    return fitting
