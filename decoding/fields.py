"""Prompts, answers and tools in data rows, under the field names that data sets use."""

import json
from contextlib import suppress
from typing import Any

from decoding.errors import UserError

PROMPT_FIELDS = (
    *("prompt", "question", "instruction", "problem", "query", "turns", "messages", "conversations", "input", "text"),
)
ANSWER_FIELDS = ("answer", "response", "output", "completion", "solution", "canonical_solution", "code", "instances")
"""``instances`` is self-instruct's list of inputs with outputs; the first output is the answer."""
UNSPOKEN = frozenset({"tool_calls", "reasoning_content"})
"""Fields of a message that may replace its content."""
Tools = list[Any]
"""Functions that an assistant may call, as chat templates and OpenAI's chat API define them."""
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
"""ShareGPT's speaker names -> roles of chat templates."""
_ABOUT = ("input", "context")  # fields with the text that an instruction refers to, in Alpaca and Dolly
_TEXT_ANSWERS = ("answer", "response", "completion")
"""Fields that make ``text`` in the same row a prompt. So does ``code`` in mbpp, recognised by its ``task_id``."""


def find_prompt(row: dict[str, Any]) -> str | None:
    """Return the first of `PROMPT_FIELDS` that the row has, or None."""
    return next((name for name in PROMPT_FIELDS if row.get(name) is not None), None)


def find_answer(row: dict[str, Any]) -> str | None:
    """Return the first of `ANSWER_FIELDS` that the row has; next to a ``text`` prompt only `_TEXT_ANSWERS` count."""
    known = ANSWER_FIELDS
    if find_prompt(row) == "text":
        known = (*_TEXT_ANSWERS, *(("code",) if "task_id" in row else ()))
    return next((name for name in known if row.get(name) is not None), None)


def prompt_of(row: dict[str, Any], field: str | None, where: str) -> tuple[str, Any]:
    """Return the name and the value of a row's prompt field: ``field``, else the first of `PROMPT_FIELDS`.

    A non-empty ``input`` or ``context`` is appended to an ``instruction``; ``conversations`` become messages. Raises
    UserError, naming the row by ``where``, if the field is missing.
    """
    name = field or find_prompt(row)
    if name is None or name not in row:
        wanted = f"the field {field!r}" if field else f"a field of {', '.join(PROMPT_FIELDS)}"
        raise UserError(f"{where}: the row lacks {wanted}; it has {', '.join(sorted(row))}")
    value = row[name]
    if name == "conversations":
        return name, messages_of(value, where)
    if name != "instruction" or not isinstance(value, str):
        return name, value
    holder = _first_instance(row, where) if "instances" in row else row
    about = next((field for field in _ABOUT if holder.get(field)), None)
    text = holder[about] if about else ""
    if not isinstance(text, str):
        raise UserError(f"{where}: field {about!r} is {type(text).__name__}, not text")
    return name, f"{value}\n\n{text}" if text.strip() else value


def answer_of(row: dict[str, Any], name: str, where: str) -> Any:
    """Return the value of a row's answer field ``name``, found by `find_answer`."""
    return _first_instance(row, where).get("output") if name == "instances" else row[name]


def _first_instance(row: dict[str, Any], where: str) -> dict[str, Any]:
    instances = row["instances"]
    if not isinstance(instances, list) or not instances or not isinstance(instances[0], dict):
        raise UserError(f"{where}: the instances are {instances!r:.60}, not a list of inputs with outputs")
    first: dict[str, Any] = instances[0]
    return first


def tools_of(row: dict[str, Any], where: str) -> Tools | None:
    """Return a row's tools, or None.

    ShareGPT rows give tools as JSON text, often without OpenAI's ``{"type": "function", "function": ...}``; both forms
    are accepted. Raises UserError, naming the row by ``where``, for anything else.
    """
    tools = row.get("tools")
    if isinstance(tools, str):
        with suppress(ValueError):
            tools = json.loads(tools or "null")
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise UserError(f"{where}: the tools are {tools!r:.60}, not a list of functions: correct or remove the field")
    return [tool if {"type", "function"} & tool.keys() else {"type": "function", "function": tool} for tool in tools]


def messages_of(turns: Any, where: str) -> list[dict[str, Any]]:
    """Turn a ShareGPT row's ``conversations`` into messages for a chat template; UserError names a bad turn."""
    if not isinstance(turns, list) or not turns:
        raise UserError(f"{where}: the conversations are {turns!r:.60}, not a list of turns")
    if isinstance(turns[0], dict) and "role" in turns[0]:  # messages under ShareGPT's field name
        return check_messages(turns, where)
    return [_message(turn, where) for turn in turns]


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("from", "value")):
        raise UserError(f"{where}: a turn is {turn!r:.60}, without text in 'from' and 'value'")
    if turn["from"] not in _ROLES:
        raise UserError(f"{where}: a turn is from {turn['from']!r}: use one of {', '.join(_ROLES)}")
    return {"role": _ROLES[turn["from"]], "content": turn["value"]}


def check_messages(value: Any, where: str) -> list[dict[str, Any]]:
    """Return messages in the form that chat templates take, with role and content as text; else raise UserError.

    A message with only tool calls or reasoning gets an empty content. JSON arguments of a call (OpenAI's format) become
    an object, as servers pass them to templates.
    """
    if not isinstance(value, list) or not value:
        raise UserError(f"{where}: the messages are {value!r:.60}, not a list of messages")
    return [_checked(message, where) for message in value]


def _checked(message: Any, where: str) -> dict[str, Any]:
    checked = dict(message) if isinstance(message, dict) else {}
    if (reasoning := checked.pop("reasoning", None)) and not checked.get("reasoning_content"):
        checked["reasoning_content"] = reasoning  # the name that templates read
    if checked.get("content") is None and any(checked.get(name) for name in UNSPOKEN):
        checked["content"] = ""
    if isinstance(parts := checked.get("content"), list):
        kinds = [part.get("type") if isinstance(part, dict) else None for part in parts]
        if others := sorted({str(kind) for kind in kinds if kind != "text"}):
            found = " and ".join(others)
            raise UserError(f"{where}: a message has parts of type {found}, not only text: omit it")
        checked["content"] = "".join(str(part.get("text", "")) for part in parts)
    if not all(isinstance(checked.get(key), str) for key in ("role", "content")):
        raise UserError(f"{where}: a message is {message!r:.60}, without text in role and content")
    if isinstance(calls := checked.get("tool_calls"), list):
        checked["tool_calls"] = [_with_object(call) for call in calls]
    return checked


def _with_object(call: Any) -> Any:
    """Return a tool call with its JSON arguments as an object; anything else is returned unchanged."""
    try:
        return {**call, "function": {**call["function"], "arguments": json.loads(call["function"]["arguments"])}}
    except (TypeError, KeyError, ValueError):
        return call
