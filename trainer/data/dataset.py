"""Rows to sequences of token ids with a loss mask, and an account of what became of every row."""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.prompts import ANSWER_FIELDS, PROMPT_FIELDS, answer_of, encode_prompt, find_answer, find_prompt, prompt_of
from trainer.data.answers import read_answer
from trainer.data.batch import Example, pack
from trainer.data.chat import chat_template
from trainer.data.rows import Row, Source, conversation, open_source
from trainer.recipe.common import DataSection

ANSWER_TOKENS = "answer_tokens"
"""The field in which `headstart regenerate` keeps what the target wrote, a list of token ids for each answer."""
TRUNCATED = "truncated"
"""The field in which it says whether the last answer was cut off, so that it has no end."""
_ASKED = tuple(name for name in PROMPT_FIELDS if name not in ("messages", "conversations"))  # which hold their answers
_SHORTEST_TEXT = 8  # tokens; a last scrap of a text is left out
_NAMED_ROWS = 5  # so many bad ones are named, all are counted
_LOGGER = logging.getLogger(__name__)


class Encoded(NamedTuple):
    """What a row gives: its sequences, not yet cut; how it was understood, and how its trained tokens were found."""

    format: str
    mask_source: str
    examples: tuple[Example, ...]
    fields: tuple[str, str] | None = None
    """Where a prompt and its answer were found."""


class RowEncoder:
    """Rows to sequences, as a recipe's data section says."""

    def __init__(self, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> None:
        self._section = section
        self._tokenizer = tokenizer
        self._template = chat_template(tokenizer, section.chat_template)
        self._vocabulary = frozenset(tokenizer.get_vocab().values())

    def encode(self, row: Row) -> Encoded:
        """ValueError, naming the row, for one that cannot be used."""
        fields, where = row.fields(), row.where
        format = self._format_of(fields, where)
        cut_off = fields.get(TRUNCATED) is True
        if format == "text":
            return Encoded(format, "the whole text", self._text_examples(fields, where))
        found: tuple[str, str] | None = None
        if format == "prompt_answer":
            found, prompt, answer = self._prompt_and_answer(fields, where)
            if not answer.strip():  # from which a model would learn to say nothing
                return Encoded(format, "nothing: the answer is empty", (), found)
            if self._template is None and ANSWER_TOKENS not in fields:
                example = self._prompt_answer_example(prompt, answer, cut_off)
                return Encoded(format, "the answer behind its prompt", (example,), found)
            messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
        else:
            messages = conversation(fields, format, where)
        if ANSWER_TOKENS in fields:
            return Encoded(format, "the target's own tokens", self._written_examples(messages, fields, where), found)
        if self._template is None:
            raise ValueError(
                f"{where}: the tokenizer has no chat template, which {format!r} rows need: name a file with one in "
                "data.chat_template, or use prompt and answer"
            )
        marked = self._template.encode(messages, where, cut_off)
        examples = tuple(Example(tokens, trained, trained.index(True)) for tokens, trained in marked)
        return Encoded(format, self._template.mask_source, examples, found)

    def _written_examples(
        self, messages: Sequence[dict[str, Any]], fields: dict[str, Any], where: str
    ) -> tuple[Example, ...]:
        """A sequence for each answer that the target wrote, by the very tokens it wrote.

        The same text may be other tokens when read again, and a text that was cut off has no end to learn.
        """
        places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
        written = fields[ANSWER_TOKENS]
        if not isinstance(written, list) or len(written) != len(places):
            raise ValueError(f"{where}: {ANSWER_TOKENS} holds no list for each of the {len(places)} answers: remove it")
        examples = []
        for place, tokens in zip(places, written, strict=True):
            if not isinstance(tokens, list) or not all(type(token) is int for token in tokens):
                raise ValueError(f"{where}: {ANSWER_TOKENS} holds {tokens!r:.60}, not a list of token ids: remove it")
            if unknown := set(tokens) - self._vocabulary:
                raise ValueError(
                    f"{where}: {ANSWER_TOKENS} holds {min(unknown)}, which is no token of this tokenizer: regenerate "
                    "the answers with this target, or remove the field"
                )
            cut_off = fields.get(TRUNCATED) is True and place == places[-1]
            read = read_answer(self._tokenizer, tokens, cut_off)
            if read.strip() != messages[place]["content"].strip():
                raise ValueError(
                    f"{where}: {ANSWER_TOKENS} are not the answer's text under this tokenizer: regenerate the answers "
                    "with this target, or remove the field"
                )
            prompt = self._prompt(messages[:place], where)
            trained = (False,) * len(prompt) + (True,) * len(tokens)
            examples.append(Example((*prompt, *tokens), trained, len(prompt)))
        return tuple(examples)

    def _prompt(self, messages: Sequence[dict[str, Any]], where: str) -> tuple[int, ...]:
        if self._template is None:
            return encode_prompt(list(messages), self._tokenizer, chat=False)
        return self._template.prompt(messages, where)

    def _format_of(self, fields: dict[str, Any], where: str) -> str:
        section = self._section
        missing = {
            "messages": _unless_there("messages", fields),
            "sharegpt": _unless_there("conversations", fields),
            "prompt_answer": self._missing(fields),
            "text": _unless_there(section.text_field, fields),
        }
        format: str = section.format
        if format == "auto":
            format = next((name for name, lack in missing.items() if lack is None), "")
            if section.prompt_field or section.answer_field:  # what was named must be there, not only a text
                format = {"text": "prompt_answer", "": "prompt_answer"}.get(format, format)
        if not format:
            raise ValueError(
                f"{where}: the row has the fields {sorted(fields)} but training needs 'messages', 'conversations', a "
                f"prompt ({', '.join(_ASKED)}) with an answer ({', '.join(ANSWER_FIELDS)}), or {section.text_field!r}: "
                "set data.prompt_field, data.answer_field or data.text_field"
            )
        if missing[format] is not None:
            raise ValueError(
                f"{where}: the row has no field {missing[format]} (it has {sorted(fields)}): "
                "name the right field in the recipe's data section, or set data.format"
            )
        return format

    def _missing(self, fields: dict[str, Any]) -> str | None:
        """What keeps a row from being a prompt with its answer."""
        for named, found, known in (
            (self._section.prompt_field, find_prompt(fields), _ASKED),
            (self._section.answer_field, find_answer(fields), ANSWER_FIELDS),
        ):
            if named is not None and named not in fields:
                return repr(named)
            if named is None and found not in known:
                return f"of {', '.join(known)}"
        return None

    def _prompt_and_answer(self, fields: dict[str, Any], where: str) -> tuple[tuple[str, str], str, str]:
        """Their fields, and their texts."""
        question, prompt = prompt_of(fields, self._section.prompt_field, where)
        reply = self._section.answer_field or find_answer(fields)
        assert reply is not None, "the format says that there is one"
        answer = answer_of(fields, reply, where)
        return (question, reply), _text(prompt, question, where), _text(answer, reply, where)

    def _text_examples(self, fields: dict[str, Any], where: str) -> tuple[Example, ...]:
        """A plain text as consecutive sequences, every token trained."""
        tokens: list[int] = self._tokenizer(_text(fields[self._section.text_field], self._section.text_field, where))[
            "input_ids"
        ]
        length = self._section.max_length
        pieces = [tokens[i : i + length] for i in range(0, len(tokens), length)]
        return tuple(Example(tuple(piece), (True,) * len(piece), 0) for piece in pieces if len(piece) >= _SHORTEST_TEXT)

    def _prompt_answer_example(self, prompt: str, answer: str, cut_off: bool) -> Example:
        """Without a chat template: the prompt, the answer, and the end of the text, unless the answer has none."""
        prompt_tokens: list[int] = self._tokenizer(prompt)["input_ids"]
        answer_tokens: list[int] = self._tokenizer(answer, add_special_tokens=False)["input_ids"]
        if self._tokenizer.eos_token_id is not None and not cut_off:
            answer_tokens = [*answer_tokens, self._tokenizer.eos_token_id]
        mask = [False] * len(prompt_tokens) + [True] * len(answer_tokens)
        return Example(tuple(prompt_tokens + answer_tokens), tuple(mask), len(prompt_tokens))


def _unless_there(field: str, fields: dict[str, Any]) -> str | None:
    return None if field in fields else repr(field)


def _text(value: Any, field: str, where: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {field!r} holds {type(value).__name__}, not text")
    return value


@dataclass(frozen=True)
class Dataset:
    """Examples with where they came from and what became of every row."""

    examples: tuple[Example, ...]
    """Packed, if that was asked for."""
    firsts: tuple[Example, ...]
    """The first of each row, never packed: a long text gives several."""
    path: str
    sha256: str
    """Of all the rows read from, and of the file of the chat template if there is one."""
    formats: dict[str, int]
    """Rows of each format."""
    fields: dict[str, int]
    """Rows of prompts and answers by the fields that hold them."""
    mask_sources: dict[str, int]
    """Rows by how their trained tokens were found."""
    truncated: int
    """Sequences cut off at ``max_length``."""
    skipped: int
    """Sequences left out: their first answer begins behind ``max_length``, or they are texts of a few tokens."""
    bad_rows: int
    """Rows left out because they cannot be used."""
    max_length: int
    packed: bool

    @property
    def rows(self) -> int:
        """Read, the bad ones among them."""
        return sum(self.formats.values()) + self.bad_rows

    @property
    def tokens(self) -> int:
        return sum(len(example.tokens) for example in self.examples)

    @property
    def trained_tokens(self) -> int:
        return sum(sum(example.trained) for example in self.examples)

    @property
    def fill(self) -> float:
        """Which share of the sequences' room, ``max_length`` tokens each, holds tokens."""
        return self.tokens / (len(self.examples) * self.max_length)

    def describe(self) -> str:
        """One sentence with every count."""
        formats = " and ".join(f"{count:,} {name}" for name, count in self.formats.items())
        found = f": {' and '.join(self.fields)}" if self.fields else ""
        parts = [
            f"{self.rows:,} rows ({formats}{found})",
            f"{len(self.examples):,} sequences",
            f"{self.trained_tokens:,} of {self.tokens:,} tokens trained",
        ]
        if self.truncated:
            parts.append(f"{self.truncated:,} cut at {self.max_length} tokens")
        if self.skipped:
            parts.append(f"{self.skipped:,} left out with nothing to train in {self.max_length} tokens")
        if self.bad_rows:
            parts.append(f"{self.bad_rows:,} bad rows skipped")
        if self.packed:
            parts.append(f"packed, {self.fill:.0%} full")
        return ", ".join(parts)


def encoded_rows(
    source: Source, section: DataSection, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Row, Encoded | ValueError]]:
    """Up to ``max_rows`` rows with what they give: with ``bad_rows: skip``, an error too."""
    encoder = RowEncoder(section, tokenizer)
    for row in islice(source.rows(), section.max_rows):
        try:
            encoded: Encoded | ValueError = encoder.encode(row)
        except ValueError as error:
            if section.bad_rows == "stop":
                raise
            encoded = error
        yield row, encoded


def load_dataset(path: str, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Read, template, tokenize and mask every row of a source; of a hub data set, ``section.split``."""
    source = open_source(path, section.split)
    examples: list[Example] = []
    firsts: list[Example] = []
    bad: list[ValueError] = []
    formats: Counter[str] = Counter()
    fields: Counter[str] = Counter()
    mask_sources: Counter[str] = Counter()
    truncated = skipped = 0
    for _, encoded in encoded_rows(source, section, tokenizer):
        if isinstance(encoded, ValueError):
            bad.append(encoded)
            continue
        formats[encoded.format] += 1
        mask_sources[encoded.mask_source] += 1
        if encoded.fields is not None:
            fields[" with ".join(encoded.fields)] += 1
        pairs = [(whole, cut(whole, section.max_length)) for whole in encoded.examples]
        kept = [short for _, short in pairs if short is not None]
        truncated += sum(short is not None and len(short.tokens) < len(whole.tokens) for whole, short in pairs)
        skipped += max(len(pairs), 1) - len(kept)
        examples += kept
        firsts += kept[:1]
    for error in bad[:_NAMED_ROWS]:
        _LOGGER.warning("skipped: %s", error)
    if not examples:
        why = f"; the first of {len(bad)} bad ones: {bad[0]}" if bad else ""
        raise ValueError(f"{path} holds nothing to train on: no row is left with a trained token in it{why}")
    return Dataset(
        examples=tuple(pack(examples, section.max_length) if section.packing else examples),
        firsts=tuple(firsts),
        path=path,
        sha256=_digest(source, section),
        formats=dict(formats),
        fields=dict(fields),
        mask_sources=dict(mask_sources),
        truncated=truncated,
        skipped=skipped,
        bad_rows=len(bad),
        max_length=section.max_length,
        packed=section.packing,
    )


def cut(example: Example, length: int) -> Example | None:
    """The first ``length`` tokens; None where no answer begins in them."""
    short = example._replace(tokens=example.tokens[:length], trained=example.trained[:length])
    return short if any(short.trained) else None


def _digest(source: Source, section: DataSection) -> str:
    """What decides the sequences beside the recipe: the rows, and the chat template's file if one is named."""
    if section.chat_template is None:
        return source.sha256
    return hashlib.sha256(source.sha256.encode() + Path(section.chat_template).read_bytes()).hexdigest()


def heldout_prompts(examples: Sequence[Example], count: int, prompt_tokens: int, longest: int) -> list[tuple[int, ...]]:
    """Prompts to decode from: what stands before the answer, or the first tokens of a plain text."""
    prompts = []
    for example in examples:
        length = example.prompt_length or min(prompt_tokens, len(example.tokens) - 1)
        if 0 < length <= longest:
            prompts.append(example.tokens[:length])
        if len(prompts) == count:
            break
    if not prompts:
        raise ValueError(f"no held-out prompt has at most {longest} tokens: give shorter prompts or fewer new tokens")
    return prompts
