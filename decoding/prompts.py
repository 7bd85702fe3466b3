"""Prompts and answers in the rows of files: the fields that hold them, and prompts as token ids."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

PROMPT_FIELDS = (
    *("prompt", "question", "instruction", "problem", "query", "turns", "messages", "conversations", "input", "text"),
)
ANSWER_FIELDS = ("answer", "response", "output", "completion", "solution", "canonical_solution", "code", "instances")
"""``instances``, from self-instruct, is a list of objects with an input and an output; the first one counts."""
_WANTED = "a .jsonl file has one JSON object a line, in UTF-8"
_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "system": "system",
    "tool": "tool",
}
"""Names of the speakers in ShareGPT, and their roles in chat templates."""
_ABOUT = ("input", "context")
"""Fields of the text that an instruction is about, in Alpaca and Dolly."""
_TEXT_ANSWERS = ("answer", "response", "completion")
"""Answer fields that make a ``text`` beside them a prompt; so does ``code`` in rows of mbpp, with a ``task_id``."""


def read_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a .jsonl file with line numbers from 1: JSON objects; a string becomes ``{"text": string}``."""
    for number, line in read_lines(path):
        yield number, parse_row(line, f"{path}, line {number}")


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a .jsonl file that are not blank, with their numbers (from 1)."""
    path = Path(path)
    if not path.is_file():
        missing = "is a folder" if path.is_dir() else "is not there"
        raise ValueError(f"{path} {missing}: prompts are read from a .jsonl file, one JSON object a line")
    if path.suffix == ".parquet":
        raise ValueError(f"{path} is Parquet, but prompts are read from a .jsonl file: write its rows as JSON lines")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield number, line


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """Parse one line of a .jsonl file; ``where`` names it in errors."""
    try:
        row = json.loads(line)
        if b"\\u" in line:  # an escape may be half of a surrogate pair, which no tokenizer takes
            json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON ({error.msg.removesuffix(' at')} at column {error.colno}): {_WANTED}"
        ) from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: a \\u escape is half a character ({error.reason}): write the whole one") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason}): {_WANTED}") from error
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, dict):
        raise ValueError(f"{where}: the row is {type(row).__name__}, not an object with fields: write one a line")
    return row


def encode_prompt(
    prompt: str | list[dict[str, str]], tokenizer: PreTrainedTokenizerBase, chat: bool
) -> tuple[int, ...]:
    """Encode a user's message, or the messages so far, by the tokenizer's chat template.

    Without ``chat``, or without a template, it is plain text to continue.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        for message in messages:
            message["content"].encode()
        if chat and tokenizer.chat_template is not None:
            encoded: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)
        else:
            encoded = tokenizer("\n".join(message["content"] for message in messages))
    except UnicodeEncodeError as error:
        raise ValueError(f"the prompt is not UTF-8 text ({error.reason}): give it in that encoding") from error
    except (TemplateError, OverflowError, TypeError) as error:
        raise ValueError(f"the chat template cannot hold this prompt: {error}") from error
    tokens: list[int] = encoded["input_ids"]
    if not tokens and tokenizer.bos_token_id is not None:
        tokens = [int(tokenizer.bos_token_id)]
    return tuple(tokens)


def read_prompts(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    field: str | None = None,
    prompt_tokens: int | None = None,
    chat: bool = True,
) -> list[tuple[int, ...]]:
    """Read the first ``limit`` prompts of a .jsonl file, as token ids.

    ``field`` names the field of the prompt; by default it is the first of `PROMPT_FIELDS` that a row has: an
    instruction with its input, the first of several turns, the messages up to the first answer. A ``text`` without an
    answer beside it is encoded as plain text to continue, even with ``chat``. ``prompt_tokens`` cuts each prompt to its
    first tokens, which makes a prompt of a plain text.
    """
    prompts: list[tuple[int, ...]] = []
    for number, row in read_rows(path):
        if len(prompts) == limit:
            break
        where = f"{path}, line {number}"
        name, value = prompt_of(row, field, where)
        plain = field is None and name == "text" and find_answer(row) is None
        tokens = encode_prompt(_before_the_answer(value, where), tokenizer, chat and not plain)
        prompts.append(tokens[:prompt_tokens] if prompt_tokens else tokens)
    if not prompts:
        raise ValueError(f"{path} holds no prompts: give a .jsonl file with one a line")
    return prompts


def find_prompt(row: dict[str, Any]) -> str | None:
    """Return the first of `PROMPT_FIELDS` that a row has; None if it has none."""
    return next((name for name in PROMPT_FIELDS if row.get(name) is not None), None)


def find_answer(row: dict[str, Any]) -> str | None:
    """Return the first of `ANSWER_FIELDS` that a row has; beside a ``text`` only `_TEXT_ANSWERS` count."""
    known = ANSWER_FIELDS
    if find_prompt(row) == "text":
        known = (*_TEXT_ANSWERS, *(("code",) if "task_id" in row else ()))
    return next((name for name in known if row.get(name) is not None), None)


def prompt_of(row: dict[str, Any], field: str | None, where: str) -> tuple[str, Any]:
    """Return the field of a row's prompt and its value: ``field`` if given, else the first of `PROMPT_FIELDS`.

    An ``instruction`` is followed by the row's ``input`` or ``context``, if that is not empty.
    """
    name = field or find_prompt(row)
    if name is None or name not in row:
        wanted = f"the field {field!r}" if field else f"a field of {', '.join(PROMPT_FIELDS)}"
        raise ValueError(f"{where}: the row lacks {wanted}; it has {', '.join(sorted(row))}")
    value = row[name]
    if name == "conversations":
        return name, messages_of(value, where)
    if name != "instruction" or not isinstance(value, str):
        return name, value
    holder = _first_instance(row, where) if "instances" in row else row
    about = next((field for field in _ABOUT if holder.get(field)), None)
    text = holder[about] if about else ""
    if not isinstance(text, str):
        raise ValueError(f"{where}: field {about!r} holds {type(text).__name__}, not text")
    return name, f"{value}\n\n{text}" if text.strip() else value


def answer_of(row: dict[str, Any], name: str, where: str) -> Any:
    """Return the answer in the field ``name`` of a row."""
    return _first_instance(row, where).get("output") if name == "instances" else row[name]


def _first_instance(row: dict[str, Any], where: str) -> dict[str, Any]:
    instances = row["instances"]
    if not isinstance(instances, list) or not instances or not isinstance(instances[0], dict):
        raise ValueError(f"{where}: the instances are {instances!r:.60}, not a list of an input and an output each")
    first: dict[str, Any] = instances[0]
    return first


def _before_the_answer(value: Any, where: str) -> str | list[dict[str, str]]:
    """Return the prompt in a row's value: a text, the first of several turns, or the messages before an answer."""
    if isinstance(value, list) and value and isinstance(value[0], dict):
        messages = check_messages(value, where)
        roles = [message["role"] for message in messages]
        return messages[: roles.index("assistant") if "assistant" in roles else len(messages)]
    first = value[0] if isinstance(value, list) and value else value
    if not isinstance(first, str):
        raise ValueError(f"{where}: the prompt is {type(first).__name__}, not text")
    return first


def messages_of(turns: Any, where: str) -> list[dict[str, str]]:
    """Convert the ``conversations`` of a ShareGPT row to the messages that chat templates take."""
    if not isinstance(turns, list) or not turns:
        raise ValueError(f"{where}: the conversations are {turns!r:.60}, not a list of turns")
    if isinstance(turns[0], dict) and "role" in turns[0]:  # ShareGPT's field with messages in it
        return check_messages(turns, where)
    return [_message(turn, where) for turn in turns]


def _message(turn: Any, where: str) -> dict[str, str]:
    if not isinstance(turn, dict) or not all(isinstance(turn.get(key), str) for key in ("from", "value")):
        raise ValueError(f"{where}: a turn is {turn!r:.60}, without a 'from' and a 'value' that are texts")
    if turn["from"] not in _ROLES:
        raise ValueError(f"{where}: a turn is from {turn['from']!r}: ShareGPT has {', '.join(_ROLES)}")
    return {"role": _ROLES[turn["from"]], "content": turn["value"]}


def check_messages(value: Any, where: str) -> list[dict[str, str]]:
    """Return ``value`` if it is a list of messages, each with a role and a content; else raise ValueError."""
    if not isinstance(value, list) or not value:
        raise ValueError(f"{where}: the messages are {value!r:.60}, not a list of messages")
    for message in value:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise ValueError(f"{where}: a message is {message!r:.60}, without a role and a content that are texts")
    return value
