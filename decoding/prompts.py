"""Prompts from files, as token ids."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

_FIELDS = ("prompt", "question", "instruction", "turns", "messages", "text")


def read_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The JSON objects of a .jsonl file with their line numbers (from 1); a bare string is ``{"text": string}``."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no data file {path}: give a .jsonl file")
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number}: not JSON ({error.msg} at column {error.colno})") from error
            yield number, row if isinstance(row, dict) else {"text": row}


def encode_prompt(text: str, tokenizer: PreTrainedTokenizerBase, chat: bool) -> tuple[int, ...]:
    """A user's message in the tokenizer's chat template, or a plain text to continue."""
    if chat and tokenizer.chat_template is not None:
        encoded: Any = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], add_generation_prompt=True, return_dict=True
        )
    else:
        encoded = tokenizer(text)
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
    """The first ``limit`` prompts of a .jsonl file.

    ``field`` names where the prompt stands; by default the first of prompt, question, instruction, turns (the first
    one), messages (up to the first answer) or text. With ``prompt_tokens``, only so many first tokens are taken, which
    is how a plain text becomes a prompt.
    """
    prompts: list[tuple[int, ...]] = []
    for number, row in read_rows(path):
        if len(prompts) == limit:
            break
        name = field or next((name for name in _FIELDS if name in row), None)
        if name is None or name not in row:
            wanted = repr(field) if field else f"any of {', '.join(_FIELDS)}"
            raise ValueError(f"{path}, line {number}: no field {wanted}; the row has {', '.join(sorted(row))}")
        text = _first_message(row[name], f"{path}, line {number}")
        tokens = encode_prompt(text, tokenizer, chat and name != "text")
        prompts.append(tokens[:prompt_tokens] if prompt_tokens else tokens)
    if not prompts:
        raise ValueError(f"{path} holds no prompts: give a .jsonl file with one a line")
    return prompts


def _first_message(value: Any, where: str) -> str:
    first = value[0] if isinstance(value, list) and value else value
    if isinstance(first, dict):
        first = first.get("content")
    if not isinstance(first, str):
        raise ValueError(f"{where}: the prompt is {type(first).__name__}, not text")
    return first
