"""The held-out prompts of a file, as tokens that leave room for an answer."""

from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decoding.prompts import encode_prompt
from trainer.data.conversations import OpenConversation, read_conversations


def read_heldout(
    path: str | Path,
    field: str | None,
    limit: int | None,
    tokenizer: PreTrainedTokenizerBase,
    holds: int,
    max_new_tokens: int,
) -> list[tuple[OpenConversation, tuple[int, ...]]]:
    """Return the first ``limit`` prompts of a file with their token ids, without those that are too long.

    ``holds``: the longest text, in tokens, that target and speculator can hold. ValueError if no prompt is left.
    """
    chat = tokenizer.chat_template is not None
    conversations = read_conversations(path, field, limit, 1, chat)
    encoded = [(each, encode_prompt(each.open_after(()), tokenizer, chat)) for each in conversations]
    fitting = [(each, prompt) for each, prompt in encoded if 0 < len(prompt) <= holds - max_new_tokens]
    if not fitting:
        raise ValueError(f"no held-out prompt leaves room for {max_new_tokens} new tokens: lower max_new_tokens")
    return fitting
