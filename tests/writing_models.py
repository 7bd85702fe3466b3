"""Targets on disk whose texts are known: they write the alphabet again and again, whatever the prompt."""

from pathlib import Path
from typing import Any

import torch
from tiny_models import counting_model
from tiny_tokenizer import byte_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
AFTER = {ord("z"): ord("\n"), ord("\n"): 0x1B}
"""Tokens that follow tokens other than letters; ``a`` follows all remaining tokens."""
LINE = "abcdefghijklmnopqrstuvwxyz\n"
"""A line of the text, without the escape character that follows each line end."""


def write_alphabet(folder: Path, template: str | None = TEMPLATE, positions: int = 1 << 16) -> Path:
    """Save a target that writes the letters, a line end and an escape character, again and again without an end."""
    model = counting_model(vocab=128)
    model.config.max_position_embeddings = positions
    lm_head: Any = model.get_output_embeddings()
    with torch.no_grad():
        lm_head.weight.zero_()
        for token in range(128):
            is_letter = ord("a") <= token < ord("z")
            lm_head.weight[token + 1 if is_letter else AFTER.get(token, ord("a")), token] = 1
    model.save_pretrained(folder)
    byte_tokenizer(template).save_pretrained(folder)
    return folder
