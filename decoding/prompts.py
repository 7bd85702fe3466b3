"""Prompts as token ids."""

from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerBase

from decoding.fields import Tools


def encode_prompt(
    prompt: str | list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    chat: bool,
    thinking: bool | None = None,
    tools: Tools | None = None,
) -> tuple[int, ...]:
    """Return the token ids that ask for an answer to a user's message or to messages.

    Without ``chat`` or a chat template they are the tokens of the plain text, which a model continues. ``thinking`` is
    handed to the template as ``enable_thinking``; None leaves it to the template. ``tools`` are those of
    `decoding.fields.tools_of`. ValueError for text that is not UTF-8 and for messages that the template refuses.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    try:
        for message in messages:
            message["content"].encode()
        if chat and tokenizer.chat_template is not None:
            options: dict[str, Any] = {} if thinking is None else {"enable_thinking": thinking}
            encoded: Any = tokenizer.apply_chat_template(
                messages, tools=tools, add_generation_prompt=True, return_dict=True, **options
            )
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
