"""Finds the characters between the generation marks of a chat template, and the tokens that spell these characters."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError

ADVICE = (
    "put {% generation %} ... {% endgeneration %} around the assistant's content and the token that ends its turn, and "
    "around nothing else"
)
_MARK = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_BEGIN, _END = "\ue000(", ")\ue000"  # private-use characters, which texts do not contain
_MACRO = f"{{% macro generation_span() %}}{_BEGIN}{{{{ caller() }}}}{_END}{{% endmacro %}}\n"

Spans = Sequence[tuple[int, int]]
"""Start and end positions of parts of a text, counted in characters."""


class Marked(NamedTuple):
    """A sequence of token ids. ``trained`` marks the assistant's tokens, including the end of its turn."""

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]

    @property
    def end(self) -> int:
        """Number of tokens up to and including the last marked token."""
        return max((index + 1 for index, mark in enumerate(self.trained) if mark), default=0)


def has_marks(template: str) -> bool:
    """Return True if a chat template contains ``{% generation %}``."""
    return _MARK.search(template) is not None


def replace_marks(template: str, begin: str, end: str) -> str:
    """Return a chat template whose marks are replaced by other statements that control white space in the same way."""
    return _MARK.sub(lambda mark: f"{mark[1]}{end if mark[2] else begin}{mark[3]}", template)


def with_spans(template: str) -> str:
    """Return a chat template that writes its marks into the text, where `read_spans` finds them."""
    return _MACRO + replace_marks(template, "call generation_span()", "endcall")


def read_spans(rendered: str) -> tuple[str, Spans]:
    """Take a text that a template from `with_spans` wrote; return this text without the marks, and the spans that the
    marks enclosed.
    """
    text, *others = rendered.split(_BEGIN)
    spans = []
    for inside, _, outside in (other.partition(_END) for other in others):
        spans.append((len(text), len(text) + len(inside)))
        text += inside + outside
    return text, spans


class TokenMarker:
    """A tokenizer that marks the tokens in given parts of a text.

    The mask that transformers computes compares only the first and the last character of a part with the offsets of the
    tokens. So this mask misses tokens that spell only a byte of a character, and spaces that the offsets leave out.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        added: Any = tokenizer.added_tokens_decoder
        self._wide = {index: token.content for index, token in added.items() if token.lstrip or token.rstrip}

    def mark(self, text: str, spans: Spans, where: str | None = None) -> Marked:
        """Tokenize the text, and mark every token that contains at least one character of ``spans``.

        If ``where`` names the row, raise a UserError for a token with characters both inside and outside ``spans``.
        """
        tokens, offsets = self.spell(text)
        inside = np.zeros(len(text) + 2, np.int64)
        for begin, end in spans:
            inside[begin + 1 : end + 1] = 1
        begins, ends = offsets[:, 0], np.maximum(offsets[:, 1], offsets[:, 0] + 1)  # tokens may have no characters
        counts = inside.cumsum()[ends] - inside.cumsum()[begins]
        if where is not None and (torn := np.flatnonzero((counts > 0) & (counts < ends - begins))).size:
            begin, end = offsets[torn[0]]
            around = text[max(0, begin - 20) : end + 20]
            raise UserError(
                f"{where}: the token {text[begin:end]!r} in {around!r} is only partly inside the chat template's marks",
                ADVICE,
            )
        return Marked(tuple(tokens), tuple((counts > 0).tolist()))

    def spell(self, text: str) -> tuple[list[int], Int[np.ndarray, "tokens 2"]]:
        """Return the text's tokens, each with the start and end of its characters.

        A tokenizer's own offsets leave out spaces that a byte-level post-processor trims, and include spaces that a
        special token swallows.
        """
        encoded: Any = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        tokens, offsets = encoded["input_ids"], np.array(encoded["offset_mapping"], np.int64).reshape(-1, 2)
        known = np.maximum.accumulate(np.concatenate(([0], offsets[:, 1])))[:-1]
        for index in np.flatnonzero(offsets[:, 0] > known):
            if str(self._tokenizer.convert_ids_to_tokens(tokens[index])).startswith("Ġ"):  # trimmed spaces
                offsets[index, 0] = known[index]
        for index in np.flatnonzero(np.isin(tokens, [*self._wide])):
            begin = text.index(self._wide[tokens[index]], *offsets[index])
            offsets[index] = begin, begin + len(self._wide[tokens[index]])
        return tokens, offsets
