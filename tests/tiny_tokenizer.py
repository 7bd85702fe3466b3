"""Tokenizers that need no training: one token per ASCII byte, and the two kinds that most models have."""

from typing import Any

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

TOOL_TEMPLATE = (
    "{% if tools %}tools:{{ tools | tojson }};{% endif %}"
    "{% for m in messages %}{{ m.role }}:{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% for call in m.tool_calls or [] %}!{{ call.function.name }}{{ call.function.arguments | tojson }}{% endfor %};"
    "{% else %}{{ m.content }};{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)
"""A template that writes tools, reasoning and tool calls, as in families with thinking."""


def byte_tokenizer(chat_template: str | None = None, size: int = 128, shift: int = 0) -> PreTrainedTokenizerFast:
    """Make a tokenizer whose ids are ASCII codes plus ``shift``; 0 is ``<|end|>``, the EOS."""
    codes = {"<|end|>": 0} | {chr(code): code for code in range(1, size)}
    vocabulary = {token: (code + shift) % size for token, code in codes.items()}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", clean_up_tokenization_spaces=False)
    fast.chat_template = chat_template
    return fast


def byte_level(first: Any = None, **model: Any) -> PreTrainedTokenizerFast:
    """Make a tokenizer of 260 tokens: an end token, the 256 bytes, and the merges ``h e``, ``l l`` and ``he ll``."""
    tokens = ["<|end|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), "he", "ll", "hell"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, **model))
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=not isinstance(first, pre_tokenizers.Split))
    tokenizer.pre_tokenizer = last if first is None else pre_tokenizers.Sequence([first, last])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<|end|>", eos_token="<|end|>")


def sentencepiece_like(merges: list[tuple[str, str]], *more: str, letters: str = "abc") -> PreTrainedTokenizerFast:
    """Make a BPE with byte fallback that writes a space as ▁ and begins each text with a space."""
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *letters]
    tokens += list(dict.fromkeys(left + right for left, right in merges)) + list(more)
    vocabulary = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
