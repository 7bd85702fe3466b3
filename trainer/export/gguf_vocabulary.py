"""Writes a tokenizer as GGUF metadata, so that llama.cpp splits texts as the model's tokenizer does.

llama.cpp splits texts with its own code. For a byte-level BPE, llama.cpp chooses the code by the name of the
pre-tokenizer; for a sentencepiece-like BPE, llama.cpp merges by scores. A tokenizer that llama.cpp would not reproduce
is rejected, because the file would load but texts would be split in ways that the model never saw in training.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from gguf import TokenType
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from trainer.data.marks import replace_marks

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
"""The pattern of ``ByteLevel`` with ``use_regex`` in the package tokenizers."""
_DIGIT = r"\p{N}"
_CASELESS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CASELESS}|{_WORDS}|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CASELESS}|{_WORDS}|\p{{N}}|{_REST}"

_NAMES: dict[tuple[tuple[str, ...], bool], str] = {
    ((_GPT2,), False): "gpt-2",
    ((_DIGIT, _GPT2), False): "smollm",
    ((_LLAMA3,), True): "llama-bpe",
    ((_LLAMA3,), False): "smaug-bpe",
    ((_QWEN2,), False): "qwen2",
}
"""Maps (splitting patterns in order, ``ignore_merges``) to llama.cpp's name of the pre-tokenizer (llama-vocab.cpp)."""

_ENDS = frozenset(
    {
        *("<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "</s>"),
        *("<eos>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>", "<end_of_utterance>"),
    }
)
"""Tokens that always end a text in llama.cpp, even if the file does not say so (llama-vocab.cpp, end-of-generation)."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
_SPACE = "▁"
_REMEDY = "serve it with a program that reads tokenizer.json, such as vLLM"


def vocabulary_of(
    tokenizer: PreTrainedTokenizerBase, size: int, ends: Sequence[int]
) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return a tokenizer's metadata and remarks for the user.

    ``size``: number of rows of the model's embeddings. ``ends``: ids of the tokens that end a text. Raises UserError
    for a tokenizer that llama.cpp would not reproduce.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise _refused(f"the tokenizer is a {type(tokenizer).__name__} without tokenizer.json")
    stored: dict[str, Any] = json.loads(backend.to_str())
    model = stored["model"]
    if model["type"] != "BPE":
        raise _refused(f"the tokenizer's model is {model['type']}, not BPE")
    if other := [key for key in ("dropout", "continuing_subword_prefix", "end_of_word_suffix") if model.get(key)]:
        raise _refused(f"the tokenizer has {other[0]} {model[other[0]]!r}")
    describe = _sentencepiece if model.get("byte_fallback") else _byte_level
    own, remarks = describe(stored)
    tokens, types = _tokens(tokenizer, stored, size)
    ggml: dict[str, Any] = {"tokens": tokens, "token_type": types, **own}
    if "scores" in own:
        ggml["scores"] = [own["scores"].get(token, 0.0) for token in tokens]
    ggml |= _special_tokens(tokenizer, ends, size)
    remarks += _remarks_on_ends(tokens, ends) + _remarks_on_added(stored)
    metadata = {f"tokenizer.ggml.{key}": value for key, value in ggml.items() if value is not None}
    return {**metadata, **_chat_templates(tokenizer.chat_template)}, remarks


def _chat_templates(own: str | Mapping[str, str] | None) -> dict[str, Any]:
    """Return the keys of a tokenizer's chat templates, with the names that llama.cpp's converter uses.

    Plain readers of Jinja do not know generation marks, so the marks are replaced by `if` statements that do nothing.
    """
    templates = {"default": own} if isinstance(own, str) else own or {}
    names = {name: re.sub(r"[^a-zA-Z0-9]", "_", name) for name in templates if name != "default"}
    keys = {"default": "tokenizer.chat_template"}
    keys |= {name: f"tokenizer.chat_template.{plain}" for name, plain in names.items()}
    marked: dict[str, Any] = {keys[name]: replace_marks(text, "if true", "endif") for name, text in templates.items()}
    return marked | ({"tokenizer.chat_templates": [*names.values()]} if names else {})


def _refused(reason: str) -> UserError:
    return UserError(f"llama.cpp would split texts differently from this tokenizer because {reason}: {_REMEDY}")


def _tokens(
    tokenizer: PreTrainedTokenizerBase, stored: Mapping[str, Any], size: int
) -> tuple[list[str], list[TokenType]]:
    """Return the text and type of the token of each embedding row; rows without a token have the type UNUSED."""
    texts = {index: text for text, index in tokenizer.get_vocab().items()}
    if (highest := max(texts)) >= size:
        raise UserError(
            f"the tokenizer has token {highest} ({texts[highest]!r}), but the model has {size} embeddings, and GGUF "
            "needs an embedding for each token: resize the model's embeddings, or remove the token"
        )
    added = {token["id"]: token for token in stored["added_tokens"]}
    byte_fallback = stored["model"].get("byte_fallback")
    types = []
    for index in range(size):
        text = texts.setdefault(index, f"[PAD{index}]")
        if text == stored["model"].get("unk_token") and byte_fallback:
            types.append(TokenType.UNKNOWN)
        elif index in added:
            types.append(TokenType.CONTROL if added[index]["special"] else TokenType.USER_DEFINED)
        elif byte_fallback and _BYTE.fullmatch(text):
            types.append(TokenType.BYTE)
        else:
            types.append(TokenType.NORMAL)
        if text == f"[PAD{index}]":
            types[-1] = TokenType.UNUSED
    return [texts[index] for index in range(size)], types


def _byte_level(stored: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys of a byte-level BPE, including its merges and pre-tokenizer, and remarks."""
    patterns = tuple(_patterns(stored["pre_tokenizer"]))
    key = (patterns, bool(stored["model"].get("ignore_merges")))
    if key not in _NAMES:
        raise _refused(f"llama.cpp has no pre-tokenizer that splits by {' then '.join(patterns) or 'bytes alone'}")
    remarks: tuple[str, ...] = ()
    normalizer = stored["normalizer"]
    if normalizer is not None and normalizer["type"] == "NFC":
        remarks = ("llama.cpp does not normalise texts to NFC, so it splits texts that are not in NFC differently",)
    elif normalizer is not None:
        raise _refused(f"the tokenizer first changes texts by {normalizer['type']}")
    return {"model": "gpt2", "pre": _NAMES[key], "merges": [" ".join(pair) for pair in _merges(stored)]}, remarks


def _patterns(pre_tokenizer: Mapping[str, Any] | None) -> list[str]:
    """Return the splitting patterns of a byte-level pre-tokenizer, in order."""
    parts = [] if pre_tokenizer is None else pre_tokenizer.get("pretokenizers", [pre_tokenizer])
    if not parts or parts[-1]["type"] != "ByteLevel" or parts[-1]["add_prefix_space"]:
        raise _refused("the pre-tokenizer does not end with ByteLevel, or adds a space to texts")
    patterns = []
    for part in parts[:-1]:
        if part["type"] == "Digits" and part["individual_digits"]:
            patterns.append(_DIGIT)
        elif part["type"] == "Split" and part["behavior"] == "Isolated" and not part["invert"]:
            patterns.append(part["pattern"].get("Regex") or re.escape(part["pattern"]["String"]))
        else:
            raise _refused(f"the pre-tokenizer has a part {part['type']}")
    return patterns + [_GPT2] * bool(parts[-1].get("use_regex", True))


def _merges(stored: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the pairs that the tokenizer merges, in order."""
    merges = stored["model"]["merges"]
    pairs = [tuple(merge.split(" ") if isinstance(merge, str) else merge) for merge in merges]
    if odd := [pair for pair in pairs if len(pair) != 2 or any(" " in part for part in pair)]:
        raise _refused(f"the tokenizer merges {odd[0]}, which contains a space")
    return pairs


def _sentencepiece(stored: Mapping[str, Any]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Return the keys of a BPE with byte fallback, for the sentencepiece code of llama.cpp, and remarks.

    llama.cpp's code merges any two neighbours that together spell a token, and begins with the highest score. So every
    such pair must be among the tokenizer's merges, and all pairs that spell the same token must be consecutive.
    """
    prefix, remarks = _space_prefix(stored)
    scores: dict[str, float] = {}
    pairs, previous = _merges(stored), ""
    for rank, (left, right) in enumerate(pairs):
        token = left + right
        if token in scores and token != previous:
            raise _refused(f"the merges into {token!r} are not consecutive")
        scores.setdefault(token, -float(rank))
        previous = token
    vocabulary, merged, special = stored["model"]["vocab"], set(pairs), {t["content"] for t in stored["added_tokens"]}
    for token in vocabulary.keys() - special:
        if _BYTE.fullmatch(token):
            continue
        for cut in range(1, len(token)):
            pair = (token[:cut], token[cut:])
            if pair not in merged and pair[0] in vocabulary and pair[1] in vocabulary:
                raise _refused(f"the tokenizer does not merge {pair[0]!r} and {pair[1]!r}, though {token!r} is a token")
    return {"model": "llama", "pre": "default", "scores": scores, "add_space_prefix": prefix}, remarks


def _space_prefix(stored: Mapping[str, Any]) -> tuple[bool, tuple[str, ...]]:
    """Return True if texts get a leading space, and remarks on texts that llama.cpp splits differently."""
    normalizer, pre_tokenizer = stored["normalizer"], stored["pre_tokenizer"]
    steps = [] if normalizer is None else normalizer.get("normalizers", [normalizer])
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}
    if pre_tokenizer is None and steps == [{"type": "Prepend", "prepend": _SPACE}, replace]:
        return True, ()
    if pre_tokenizer is None and steps == [replace]:
        return False, ()
    if not steps and pre_tokenizer is not None and pre_tokenizer["type"] == "Metaspace":
        if pre_tokenizer["replacement"] != _SPACE or pre_tokenizer.get("split", True):
            raise _refused("Metaspace splits texts at spaces or replaces spaces by an unusual character")
        if pre_tokenizer["prepend_scheme"] == "never":
            return False, ()
        remark = "llama.cpp puts a space before every text, even if a space or a special token is already there"
        return True, (remark,)
    raise _refused("the normalizer and the pre-tokenizer differ from those of sentencepiece")


def _special_tokens(tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], size: int) -> dict[str, Any]:
    """Return the ids of special tokens, and whether texts start with the BOS and end with the EOS."""
    plain = tokenizer("a b", add_special_tokens=False)["input_ids"]
    whole = tokenizer("a b")["input_ids"]
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    begins, finishes = whole[:1] == [bos] != plain[:1], whole[-1:] == [eos] != plain[-1:]
    if whole != [bos] * begins + plain + [eos] * finishes:
        raise _refused(f"the tokenizer adds more than BOS and EOS: {plain} becomes {whole}")
    others = [end for end in ends if end != eos]
    first = eos if eos in ends or not others else others.pop(0)
    ids = {
        "bos": bos,
        "eos": first,
        "eot": others[0] if others else None,
        "eom": others[1] if len(others) > 1 else None,
        "unknown": tokenizer.unk_token_id,
        "padding": tokenizer.pad_token_id,
    }
    named = {f"{name}_token_id": index for name, index in ids.items() if index is not None and index < size}
    return {**named, "add_bos_token": begins, "add_eos_token": finishes}


def _remarks_on_ends(tokens: Sequence[str], ends: Sequence[int]) -> tuple[str, ...]:
    """Return remarks on tokens that end a text only in llama.cpp or only in the model."""
    remarks = []
    if only_there := [token for index, token in enumerate(tokens) if token in _ENDS and index not in ends]:
        remarks.append(f"llama.cpp also ends texts at {', '.join(only_there)} because it recognises the token's name")
    if only_here := [tokens[index] for index in ends[3:] if tokens[index] not in _ENDS]:
        remarks.append(f"llama.cpp does not end texts at {', '.join(only_here)}: a file can name only three tokens")
    return tuple(remarks)


def _remarks_on_added(stored: Mapping[str, Any]) -> tuple[str, ...]:
    """Return a remark on special tokens that strip adjacent spaces; llama.cpp does not strip these spaces."""
    wide = [token["content"] for token in stored["added_tokens"] if token["lstrip"] or token["rstrip"]]
    return (f"llama.cpp keeps the spaces next to {', '.join(wide)}; this tokenizer strips them",) if wide else ()
