"""Encoding of prompts and messages as token ids, and variables of chat templates."""

import json
import re
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.fields import Tools


def with_variables(template: str, variables: Mapping[str, Any]) -> str:
    """Return a chat template with variables set, such as ``enable_thinking``.

    Requests to servers call these variables ``chat_template_kwargs``.

    The variables become part of the template's text, so they apply to every use of it and change its fingerprint.
    Raises UserError for a name that the template does not read.
    """
    for name in variables:
        if not name.isidentifier() or not re.search(rf"\b{name}\b", template):
            raise UserError(f"chat_template_kwargs has {name}, which the chat template does not read: omit it")
    values = {name: "none" if value is None else json.dumps(value) for name, value in variables.items()}
    return "".join(f"{{%- set {name} = {value} %}}" for name, value in values.items()) + template


def read_variables(given: str) -> dict[str, Any]:
    """Read the variables of a chat template from a JSON object; raise UserError for any other text."""
    try:
        variables = json.loads(given)
        if not isinstance(variables, dict):
            raise UserError("no object")
    except ValueError as error:
        raise UserError(f'chat_template_kwargs is {given}: pass a JSON object, {{"name": value}}') from error
    return variables


def set_variables(tokenizer: PreTrainedTokenizerBase, given: str | None) -> None:
    """Set variables of a tokenizer's chat template from a JSON object. Raises UserError as `with_variables` does."""
    if given is None:
        return
    variables = read_variables(given)
    template: Any = tokenizer.chat_template or ""
    if isinstance(template, dict):
        tokenizer.chat_template = {name: with_variables(text, variables) for name, text in template.items()}
    else:
        tokenizer.chat_template = with_variables(template, variables)


def encode_prompt(
    prompt: str | list[dict[str, Any]], tokenizer: PreTrainedTokenizerBase, chat: bool, tools: Tools | None = None
) -> tuple[int, ...]:
    """Return the token ids of the prompt for an answer to a user's message or to a list of messages.

    If ``chat`` is false or there is no chat template, the plain text is encoded, so the model continues that text.
    ``tools`` have the form that `decoding.fields.tools_of` returns. Raises UserError for text that is not UTF-8, or if
    the template rejects the messages.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        for message in messages:
            message["content"].encode()
        if chat and tokenizer.chat_template is not None:
            encoded: Any = tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, return_dict=True
            )
        else:
            encoded = tokenizer("\n".join(message["content"] for message in messages))
    except UnicodeEncodeError as error:
        raise UserError(f"the prompt is not UTF-8 text ({error.reason}): pass it in UTF-8") from error
    except (TemplateError, OverflowError, TypeError) as error:
        raise UserError(f"the chat template rejects this prompt: {error}") from error
    tokens: list[int] = encoded["input_ids"]
    if not tokens and tokenizer.bos_token_id is not None:
        tokens = [int(tokenizer.bos_token_id)]
    return tuple(tokens)


def encode_continuation(text: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the token ids of a text that continues another text.

    The text is encoded after a line break, because sentencepiece would put an extra space before a text that is encoded
    on its own.
    """
    line, whole, alone = (tokenizer(part, add_special_tokens=False)["input_ids"] for part in ("\n", f"\n{text}", text))
    tokens: list[int] = whole[len(line) :] if whole[: len(line)] == line else alone
    return tokens
