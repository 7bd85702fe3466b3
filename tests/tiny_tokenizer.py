"""A tokenizer without training: one token per byte of ASCII, its id the byte."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TOOL_TEMPLATE = (
    "{% if tools %}tools:{{ tools | tojson }};{% endif %}"
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}!{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %};"
    "{% else %}{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""Writes tools, reasoning and tool calls, as thinking families' templates do."""


def byte_tokenizer(chat_template: str | None = None, size: int = 128, shift: int = 0) -> PreTrainedTokenizerFast:
    """Ids are ASCII codes, ``shift`` added; 0 is ``<|end|>``, the EOS."""
    codes = {"<|end|>": 0} | {chr(code): code for code in range(1, size)}
    vocabulary = {token: (code + shift) % size for token, code in codes.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)
    fast.chat_template = chat_template
    return fast
