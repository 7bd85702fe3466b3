"""A data set: every row of a source as sequences of token ids with a loss mask, and an account of all rows.

A row goes down once: `rows` reads it, `conversations` understands it, `chat` encodes it, `batch` holds the examples.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from trainer.data.batch import Example, cut, pack
from trainer.data.chat import Encoded, TranscriptEncoder
from trainer.data.conversations import transcript_of
from trainer.data.rows import Row, RowSource, open_source
from trainer.recipe.common import DataSection

_NAMED_ROWS = 5  # bad rows that are named; all are counted
_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset:
    """The examples of a source, and an account of its rows."""

    examples: tuple[Example, ...]
    """The sequences to train on, packed if the section asks for it."""
    firsts: tuple[Example, ...]
    """The first sequence of each row, never packed; a long text gives several sequences."""
    path: str
    sha256: str
    """Digest of the whole source, and of the chat template's file if there is one."""
    formats: dict[str, int]
    """Format -> rows."""
    fields: dict[str, int]
    """Fields of prompt and answer, such as "question with answer" -> rows."""
    mask_sources: dict[str, int]
    """Way in which the trained tokens were found -> rows."""
    truncated: int
    """Sequences cut off at ``max_length``."""
    skipped: int
    """Sequences left out: the first answer begins behind ``max_length``, or the text has fewer than 8 tokens."""
    bad_rows: int
    """Rows left out because they cannot be used."""
    max_length: int
    packed: bool

    @property
    def num_rows(self) -> int:
        """Rows that were read, the bad ones included."""
        return sum(self.formats.values()) + self.bad_rows

    @property
    def tokens(self) -> int:
        return sum(len(example.tokens) for example in self.examples)

    @property
    def trained_tokens(self) -> int:
        return sum(sum(example.trained) for example in self.examples)

    @property
    def fill(self) -> float:
        """Share of the sequences' room, ``max_length`` tokens each, that holds tokens."""
        return self.tokens / (len(self.examples) * self.max_length)

    def describe(self) -> str:
        """Return one sentence with every count."""
        formats = " and ".join(f"{count:,} {name}" for name, count in self.formats.items())
        found = f": {' and '.join(self.fields)}" if self.fields else ""
        parts = [
            f"{self.num_rows:,} rows ({formats}{found})",
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
    source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Row, Encoded | ValueError]]:
    """Yield up to ``max_rows`` rows with their sequences; raise the ValueError of a bad row, or yield it as well.

    The section's ``bad_rows`` decides: ``stop`` raises, ``skip`` yields.
    """
    encoder = TranscriptEncoder(section, tokenizer)
    for row in islice(source.read(), section.max_rows):
        try:
            encoded: Encoded | ValueError = encoder.encode(transcript_of(row, section))
        except ValueError as error:
            if section.bad_rows == "stop":
                raise
            encoded = error
        yield row, encoded


def load_dataset(path: str, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Load every row of a source, of a hub data set those of ``section.split``, as sequences with a loss mask.

    ValueError for a source without a trained token, and for a bad row unless the section skips these.
    """
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
        formats[encoded.transcript.format] += 1
        mask_sources[encoded.mask_source] += 1
        if encoded.transcript.fields is not None:
            fields[" with ".join(encoded.transcript.fields)] += 1
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


def _digest(source: RowSource, section: DataSection) -> str:
    """Return a digest of everything that decides the sequences beside the recipe: rows and chat template's file."""
    if section.chat_template is None:
        return source.sha256
    return hashlib.sha256(source.sha256.encode() + Path(section.chat_template).read_bytes()).hexdigest()


def heldout_prompts(examples: Sequence[Example], count: int, prompt_tokens: int, longest: int) -> list[tuple[int, ...]]:
    """Return up to ``count`` prompts to decode from: the tokens before the answer, or a plain text's first tokens.

    A plain text gives ``prompt_tokens`` tokens. Prompts of more than ``longest`` tokens are passed over; ValueError if
    none is left.
    """
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
