"""Encodes rows as sequences and counts them. For large sources, several processes share the work."""

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context

from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from trainer.data.batch import Example, cut
from trainer.data.chat import Encoded, TranscriptEncoder
from trainer.data.conversations import transcript_of
from trainer.data.sources import Row, RowSource
from trainer.recipe.common import DataSection

_NAMED_ROWS = 5  # number of bad rows that are named; the others are only counted
_ROWS_AT_ONCE = 64
_START = "spawn"  # a forked process would inherit the locks of this process's threads, and its open devices


@dataclass
class Account:
    """Counts of the rows of a source, and of the sequences made from them."""

    formats: Counter[str] = field(default_factory=Counter)
    """Number of rows by format."""
    fields: Counter[str] = field(default_factory=Counter)
    """Number of rows by the fields of prompt and answer, such as "question with answer"."""
    mask_sources: Counter[str] = field(default_factory=Counter)
    """Number of rows by how the trained tokens were found."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Number of rows by part of a conversation that the chat template ignores, such as "tools"."""
    unread: Counter[str] = field(default_factory=Counter)
    """Number of rows by what is ignored, as in `Transcript.unread`."""
    sequences: int = 0
    """Number of sequences before packing."""
    tokens: int = 0
    trained_tokens: int = 0
    truncated: int = 0
    """Number of sequences cut at ``max_length``."""
    skipped: int = 0
    """Number of sequences that were skipped because their first answer starts after ``max_length``, or because they
    are plain texts with fewer than 8 tokens."""
    bad_rows: int = 0
    """Number of unusable rows, all of which are skipped."""
    named: list[str] = field(default_factory=list)
    """The first bad rows with their errors."""

    @property
    def num_rows(self) -> int:
        """Number of rows read, including bad rows."""
        return sum(self.formats.values()) + self.bad_rows

    def count(self, encoded: Encoded, kept: Sequence[Example | None]) -> None:
        """Count a row with its sequences and the parts of these sequences that are kept."""
        self.formats[encoded.transcript.format] += 1
        self.mask_sources[encoded.mask_source] += 1
        self.ignored.update(encoded.ignored)
        self.unread.update(encoded.transcript.unread)
        if encoded.transcript.fields is not None:
            self.fields[" with ".join(encoded.transcript.fields)] += 1
        for whole, short in zip(encoded.examples, kept, strict=True):
            if short is None:
                self.skipped += 1
                continue
            self.sequences += 1
            self.tokens += len(short.tokens)
            self.trained_tokens += int(short.trained.sum())
            self.truncated += len(short.tokens) < len(whole.tokens)
        self.skipped += not kept

    def add(self, later: "Account") -> None:
        """Add the counts of later rows."""
        for name, value in vars(later).items():
            setattr(self, name, getattr(self, name) + value)
        self.named = self.named[:_NAMED_ROWS]


class RowEncoder:
    """Encoder of rows according to a recipe's data section."""

    def __init__(self, section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()) -> None:
        """``ends`` are as in `TranscriptEncoder`."""
        self._section = section
        self._encoder = TranscriptEncoder(section, tokenizer, ends)

    def encode(self, row: Row) -> Encoded | UserError:
        """Return a row's sequences.

        For a bad row, raise the UserError, or return the error if the section skips bad rows.
        """
        try:
            return self._encoder.encode(transcript_of(row, self._section))
        except UserError as error:
            if self._section.bad_rows == "stop":
                raise UserError(f"{error}; set data.bad_rows=skip to skip such rows") from error
            return error

    def encode_all(self, rows: Sequence[Row]) -> tuple[list[list[Example]], Account]:
        """Return the sequences of each row, cut to ``max_length``, and the counts of the rows."""
        account, sequences = Account(), []
        for row in rows:
            encoded = self.encode(row)
            if isinstance(encoded, UserError):
                account.bad_rows += 1
                account.named = [*account.named, str(encoded)][:_NAMED_ROWS]
                continue
            kept = [cut(whole, self._section.max_length) for whole in encoded.examples]
            account.count(encoded, kept)
            sequences.append([short for short in kept if short is not None])
        return sequences, account


def encoded_rows(
    source: RowSource,
    section: DataSection,
    tokenizer: PreTrainedTokenizerBase,
    processes: int,
    ends: Sequence[int] = (),
) -> Iterator[tuple[list[list[Example]], Account]]:
    """Encode up to ``max_rows`` rows in groups, and yield the result of `RowEncoder.encode_all` for each group in
    order.

    At most one process per core is started. The number of processes does not affect the sequences.
    """
    rows = islice(source.read(), section.max_rows)
    tasks = iter(lambda: list(islice(rows, _ROWS_AT_ONCE)), [])
    processes = min(processes, os.cpu_count() or 1)
    if processes == 1:
        yield from map(RowEncoder(section, tokenizer, ends).encode_all, tasks)
        return
    with ProcessPoolExecutor(processes, get_context(_START), _begin, (section, tokenizer, ends)) as pool:
        try:
            while some := list(islice(tasks, 4 * processes)):
                yield from pool.map(_encode_here, some)
        except BrokenProcessPool as error:
            message = f"one of the {processes} tokenizing processes was killed, perhaps for lack of memory"
            raise UserError(message, "lower data.num_proc") from error


_HERE: list[RowEncoder] = []
"""The encoder in a worker process."""


def _begin(section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]) -> None:
    _HERE[:] = [RowEncoder(section, tokenizer, ends)]


def _encode_here(rows: Sequence[Row]) -> tuple[list[list[Example]], Account]:
    return _HERE[0].encode_all(rows)
