"""What the columns and messages in rows of data sets mean, under all the names that data sets use for them.

| columns | meaning |
|---|---|
| `CONVERSATIONS` | messages, including the assistant's answers |
| `PROMPT_FIELDS` | a prompt: a text, a list with one text per turn, or messages |
| `ANSWER_FIELDS` | the answer: a text or messages; if the first message is the user's, they are a whole conversation |
| `SYSTEM_FIELDS` | the system message, unless the messages begin with one (LLaMA-Factory) |
| ``history`` | earlier turns: pairs of question and answer (LLaMA-Factory), or messages |
| `_ABOUT` | a text to which the prompt refers; it is appended to the prompt (Alpaca, Dolly) |
| ``tools``, ``functions`` | functions that the assistant may call |
| ``label``, ``kto_tag`` | false: the answer is bad, so training leaves it out (TRL, LLaMA-Factory) |
| `METADATA` | descriptions of the row, which are not part of its text |
"""

import json
import logging
from collections import Counter
from collections.abc import Iterable, Set
from contextlib import suppress
from typing import Any, NamedTuple

from decoding.errors import UserError

_LOGGER = logging.getLogger(__name__)

CONVERSATIONS = ("messages", "conversations", "chosen")
"""Columns whose messages contain answers. ``chosen`` is one of them only in preference rows without a prompt (TRL)."""
PROMPT_FIELDS = (
    *("prompt", "question", "instruction", "problem", "query", "turns", "messages", "conversations", "input", "text"),
    *("chosen",),
)
ANSWER_FIELDS = (
    *("answer", "response", "output", "completion", "solution", "canonical_solution", "code", "instances", "chosen"),
)
"""In self-instruct, ``instances`` is a list of inputs with outputs; the first output is the answer."""
SYSTEM_FIELDS = ("system", "system_prompt", "system_message")
_ABOUT, _REFERRING = ("input", "context"), ("prompt", "question", "instruction", "query")
METADATA = frozenset(
    (
        *("id", "index", "idx", "uid", "uuid", "row", "sample", "tokens", "hash", "model", "generator", "rejected"),
        *("source", "dataset", "origin", "license", "url", "language", "lang", "timestamp", "date", "created", "split"),
        *("category", "subcategory", "task", "type", "topic", "domain", "subject", "tags", "label", "kto_tag"),
        *("difficulty", "level", "score", "scores", "score_chosen", "score_rejected", "rating", "quality", "reward"),
        *("metadata", "meta", "extra_info", "num_turns", "num_tokens", "test", "test_list", "entry_point"),
        "parallel_tool_calls",
    )
)
"""Columns and message fields that are never read as text, in addition to those that end in ``_id``."""
UNSPOKEN = frozenset({"tool_calls", "reasoning_content"})
"""Fields of a message that may replace its content."""
REASONING = ("reasoning_content", "thinking")
"""Names under which chat templates read an answer's reasoning; a checked message has either both names or none."""
Message = dict[str, Any]
Tools = list[Any]
"""Functions that an assistant may call, as chat templates and OpenAI's chat API define them."""
_CALLS = ("function_call", "tool_call")  # the text of such a message is a call as JSON (LLaMA-Factory's ShareGPT)
_ROLES = {
    **dict.fromkeys(("user", "human", "prompter"), "user"),
    **dict.fromkeys(("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "ai", *_CALLS), "assistant"),
    **dict.fromkeys(("system", "developer"), "system"),
    **dict.fromkeys(("tool", "observation", "function", "function_response", "tool_response", "ipython"), "tool"),
    **{name: name for name in ("environment", "document")},  # roles that only some templates know
}
"""Maps names of speakers to roles of chat templates. Case and hyphens do not matter."""
_FLAGS = ("weight", "loss_weight", "train", "training", "train_on_turn", "loss", "loss_mask")
"""Flags of a message. The value 0 or false excludes the message from training (OpenAI, LLaMA-Factory, Axolotl,
ms-swift, verl).
"""
UNTRAINED = {"weight": 0}
"""The entry that marks a checked message which training must leave out (OpenAI)."""
_GREETING = "the assistant's greeting before the first question"
_SPOKEN = ("role", "from", "content", "value")
_EMPTY: tuple[Any, ...] = (None, "", [], {})
_TEXT_ANSWERS = ("answer", "response", "completion")
"""If a row has one of these fields, the row's ``text`` is a prompt. In rows of mbpp, which have a ``task_id``, the
field ``code`` has the same effect."""


def find_prompt(row: dict[str, Any]) -> str | None:
    """Return the first of `PROMPT_FIELDS` that the row has, or None; ``chosen`` counts only if it is a list."""
    known = PROMPT_FIELDS if isinstance(row.get("chosen"), list) else PROMPT_FIELDS[:-1]
    return next((name for name in known if row.get(name) is not None), None)


def find_answer(row: dict[str, Any]) -> str | None:
    """Return the first of `ANSWER_FIELDS` that the row has; if the prompt is ``text``, only `_TEXT_ANSWERS` count."""
    known = ANSWER_FIELDS
    if find_prompt(row) == "text":
        known = (*_TEXT_ANSWERS, *(("code",) if "task_id" in row else ()))
    return next((name for name in known if row.get(name) is not None), None)


class Prompt(NamedTuple):
    """The prompt in a row, and the columns from which it was read."""

    name: str
    """The column of the prompt itself."""
    messages: list[Message]
    """System message, history, and the prompt itself, as messages in the form that `check_messages` returns."""
    columns: frozenset[str]
    """The columns that the messages come from."""
    begins: int
    """Number of messages before the prompt itself."""
    unread: tuple[str, ...]
    """What is left out of the messages, in words: a greeting, or nothing."""


def prompt_of(row: dict[str, Any], field: str | None, where: str) -> Prompt:
    """Return the row's prompt and the messages before the prompt.

    The prompt is read from the column ``field``, or from the first of `PROMPT_FIELDS` that the row has. What the
    assistant says before the user's first message is left out: it answers nothing, and many templates reject it.

    Raises UserError, naming the row by ``where``, if the column is missing or contains neither text nor messages.
    """
    name = field or find_prompt(row)
    if name is None or name not in row:
        wanted = f"the field {field!r}" if field else f"one of the fields {', '.join(PROMPT_FIELDS)}"
        remedy = "rename the prompt's field, or name it: data.prompt_field in recipes, --prompt-field in most commands"
        raise UserError(f"{where}: the row lacks {wanted}; it has {', '.join(sorted(row))}", remedy)
    own = check_messages(row[name], where) if name in CONVERSATIONS else _spoken(row[name], name, "user", where)
    columns, before = {name}, list[Message]()
    holder = _first_instance(row, where) if name == "instruction" and "instances" in row else row
    about = next((key for key in _ABOUT if _is_text(holder.get(key))), None)
    if about and name in _REFERRING and isinstance(row[name], str):
        own[0]["content"] = "\n\n".join(filter(None, (own[0]["content"], holder[about])))
        columns.add(about)
    system = next((key for key in SYSTEM_FIELDS if _is_text(row.get(key))), None)
    if own[0]["role"] == "system":
        before.append(own.pop(0))
    elif system:
        before.append({"role": "system", "content": row[system]})
        columns.add(system)
    if earlier := _history(row.get("history"), where):
        before += earlier
        columns.add("history")
    said = before + own
    first = next((index for index, message in enumerate(said) if message["role"] == "user"), 0)
    kept = [i for i, m in enumerate(said) if i >= first or m["role"] != "assistant" or "tool_calls" in m]
    begins, unread = sum(index < len(before) for index in kept), (_GREETING,) * (len(kept) < len(said))
    return Prompt(name, [said[index] for index in kept], frozenset(columns), begins, unread)


def answer_of(row: dict[str, Any], name: str, where: str) -> list[Message]:
    """Return the row's answer in the column ``name``, found by `find_answer`, as messages."""
    value = _first_instance(row, where).get("output") if name == "instances" else row[name]
    return _spoken(value, name, "assistant", where)


def unread_columns(row: dict[str, Any], columns: Set[str], messages: Iterable[Message]) -> tuple[str, ...]:
    """Return the columns whose content is ignored: all columns of the row that are not in ``columns``, are not
    metadata, are not empty, and do not repeat a text of ``messages`` or of a column in ``columns``.
    """
    said = [*_EMPTY, *(message["content"] for message in messages), *(row.get(name) for name in columns)]
    return tuple(
        name for name, value in row.items() if name not in columns and not is_metadata(name) and value not in said
    )


def warn_of_unread(name: object, unread: Counter[str]) -> None:
    """Log the unread columns and messages of the rows of a source; ``unread`` counts the rows of each."""
    if unread:
        listed = " and ".join(f"{what} ({count:,} rows)" for what, count in unread.items())
        _LOGGER.warning("%s has content that is not read: %s; docs/how-to/data.md says what is read", name, listed)


def is_metadata(name: str) -> bool:
    """Return True for the name of a column or message field that is never read as text."""
    return name in METADATA or name.endswith("_id")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _spoken(value: Any, name: str, role: str, where: str) -> list[Message]:
    """Return a column's value as messages.

    Texts without a role get the role ``role``; a user may have several texts.
    """
    if isinstance(value, str):
        return [{"role": role, "content": value}]
    if role == "user" and isinstance(value, list) and value and not isinstance(value[0], dict):
        return [message for entry in value for message in _spoken(entry, name, role, where)]
    if isinstance(value, dict | list):
        return check_messages(value if isinstance(value, list) else [value], where)
    held = "is empty (null)" if value is None else f"contains {type(value).__name__}"
    raise UserError(f"{where}: field {name!r} {held}, not text or messages", "correct or omit the row")


def _history(value: Any, where: str) -> list[Message]:
    """Return earlier turns as messages; the list is empty if the value has another form."""
    turns = value if isinstance(value, list) else []
    if turns and all(isinstance(turn, dict) for turn in turns):
        return check_messages(turns, where)
    if not all(isinstance(turn, list) and len(turn) == 2 and all(map(_is_text, turn)) for turn in turns):
        return []
    pairs = (zip(("user", "assistant"), turn, strict=True) for turn in turns)
    return [{"role": role, "content": text} for pair in pairs for role, text in pair]


def _first_instance(row: dict[str, Any], where: str) -> dict[str, Any]:
    instances = row["instances"]
    if not isinstance(instances, list) or not instances or not isinstance(instances[0], dict):
        raise UserError(f"{where}: the instances are {instances!r:.60}, not a list of inputs with outputs")
    first: dict[str, Any] = instances[0]
    return first


def tools_of(row: dict[str, Any], where: str) -> Tools | None:
    """Return a row's tools, or None.

    ShareGPT rows have tools as JSON text, often without OpenAI's ``{"type": "function", "function": ...}``; OpenAI's
    older rows call them ``functions``. All forms are accepted. Raises UserError, naming the row by ``where``, for
    anything else.
    """
    tools = row.get("tools") or row.get("functions")
    if isinstance(tools, str):
        with suppress(ValueError):
            tools = json.loads(tools or "null")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: the tools are {tools!r:.60}, not a list of functions: correct or remove the field")
    return [tool if {"type", "function"} & tool.keys() else {"type": "function", "function": tool} for tool in tools]


def check_messages(value: Any, where: str) -> list[Message]:
    """Return messages in the form that chat templates take, with role and content as text.

    Raises UserError if the value cannot be brought into this form.

    Messages have ``role`` and ``content`` (OpenAI) or ``from`` and ``value`` (ShareGPT). A message with only tool calls
    or reasoning gets an empty content, and reasoning is stored under all names in `REASONING`. A ``refusal`` (OpenAI)
    becomes the missing content. Older forms of calls become ``tool_calls``, and JSON arguments (OpenAI's format) become
    an object, as servers pass them to templates. Empty fields are left out.
    """
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: the messages are {value!r:.60}, not a list of messages")
    return [_checked(message, where) for message in value]


def _checked(message: Any, where: str) -> Message:
    given = message if isinstance(message, dict) else {}
    speaker, content = given.get("role", given.get("from")), given.get("content", given.get("value"))
    rest = {name: held for name, held in given.items() if name not in _SPOKEN and held not in _EMPTY}
    refusal = rest.pop("refusal", None)
    content = refusal if content in (None, "") and refusal else content
    name = speaker.lower().replace("-", "_") if isinstance(speaker, str) else None
    if name is not None and name not in _ROLES:
        raise UserError(f"{where}: a message is from {speaker!r}: use one of {', '.join(_ROLES)}")
    if name in _CALLS and (calls := _calls(content)):
        rest["tool_calls"], content = calls, ""
    for held in ("tool_calls", "function_call"):
        if calls := _calls(rest.get(held)):
            del rest[held]
            rest["tool_calls"] = calls
            break
    thoughts = [rest.pop(key) for key in (*REASONING, "reasoning") if key in rest]
    if thoughts:
        rest |= dict.fromkeys(REASONING, thoughts[0])
    if any(thought != thoughts[0] for thought in thoughts):
        raise UserError(f"{where}: a message has two different reasoning texts: keep one")
    flags = [rest.pop(flag) for flag in _FLAGS if flag in rest]
    if any(flag not in (0, 1) for flag in flags):
        raise UserError(f"{where}: a message has {' and '.join(map(repr, flags))} as its weight: use 0 or 1")
    rest |= {} if all(flags) else UNTRAINED
    if content == [] and _ROLES.get(name or "") == "user":  # the only part was perhaps an image, and was left out
        raise UserError(f"{where}: a user's message has no parts: omit the row")
    content = "" if content in (None, []) and UNSPOKEN & rest.keys() else _joined(content, where)
    if name is None or not isinstance(content, str):
        raise UserError(f"{where}: a message is {message!r:.60}, but role and content must both be text: omit the row")
    return {"role": _ROLES[name], "content": content, **rest}


def is_trained(message: Message) -> bool:
    """Return True for a checked message of the assistant, unless it is excluded from training."""
    return message["role"] == "assistant" and not UNTRAINED.items() <= message.items()


def _joined(content: Any, where: str) -> Any:
    """Return a list of text parts as one text; anything else is returned unchanged."""
    if not isinstance(content, list):
        return content
    kinds = [part.get("type") if isinstance(part, dict) else None for part in content]
    if others := sorted({str(kind) for kind in kinds if kind != "text"}):
        raise UserError(f"{where}: a message has parts of type {' and '.join(others)}, not only text: omit the row")
    return "".join(str(part.get("text", "")) for part in content)


def _calls(value: Any) -> list[Any] | None:
    """Return tool calls in OpenAI's form. ``value`` is a list of calls, a single call, or the JSON text of either; for
    anything else, return None.
    """
    with suppress(TypeError, ValueError):
        value = json.loads(value)
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(call, dict) and ("name" in call or isinstance(call.get("function"), dict)) for call in calls):
        return None
    return [_with_object(call if "function" in call else {"type": "function", "function": call}) for call in calls]


def _with_object(call: Any) -> Any:
    """Return a tool call with its JSON arguments as an object; anything else is returned unchanged."""
    try:
        return {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
    except (TypeError, KeyError, ValueError):
        return call
