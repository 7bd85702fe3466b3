"""Rows to sequences, with an account of every row; in other processes too, for large sources."""

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
from trainer.data.rows import Row, RowSource
from trainer.recipe.common import DataSection

_NAMED_ROWS = 5  # bad rows that are named; all are counted
_ROWS_AT_ONCE = 64
_START = "spawn"  # a fork of this process would hold its threads' locks and its devices


@dataclass
class Account:
    """Counts of the rows of a source, and of the sequences that they became."""

    formats: Counter[str] = field(default_factory=Counter)
    """Format -> rows."""
    fields: Counter[str] = field(default_factory=Counter)
    """Fields of prompt and answer, such as "question with answer" -> rows."""
    mask_sources: Counter[str] = field(default_factory=Counter)
    """Way in which the trained tokens were found -> rows."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Field of a conversation that the chat template leaves out, such as "tools" -> rows."""
    sequences: int = 0
    """Before they are packed."""
    tokens: int = 0
    trained_tokens: int = 0
    truncated: int = 0
    """Sequences cut off at ``max_length``."""
    skipped: int = 0
    """Sequences left out: the first answer begins behind ``max_length``, or the text has fewer than 8 tokens."""
    bad_rows: int = 0
    """Rows left out because they cannot be used."""
    named: list[str] = field(default_factory=list)
    """The first bad rows, each with its error."""

    @property
    def num_rows(self) -> int:
        """Rows that were read, the bad ones included."""
        return sum(self.formats.values()) + self.bad_rows

    def count_bad(self, error: ValueError) -> None:
        """Count a row that cannot be used."""
        self.bad_rows += 1
        self.named = [*self.named, str(error)][:_NAMED_ROWS]

    def count(self, encoded: Encoded, kept: Sequence[Example | None]) -> None:
        """Count a row: its sequences, and for each the part that is kept."""
        self.formats[encoded.transcript.format] += 1
        self.mask_sources[encoded.mask_source] += 1
        self.ignored.update(encoded.ignored)
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
        """Count the rows of an account of later rows too."""
        for name, value in vars(later).items():
            setattr(self, name, getattr(self, name) + value)
        self.named = self.named[:_NAMED_ROWS]


class RowEncoder:
    """Encodes rows as a recipe's data section says."""

    def __init__(self, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> None:
        self._section = section
        self._encoder = TranscriptEncoder(section, tokenizer)

    def encode(self, row: Row) -> Encoded | ValueError:
        """Return a row's sequences; raise the ValueError of a bad row, or return it where the section skips these."""
        try:
            return self._encoder.encode(transcript_of(row, self._section))
        except ValueError as error:
            if self._section.bad_rows == "stop":
                raise ValueError(f"{error}; data.bad_rows=skip leaves such rows out") from error
            return error

    def encode_all(self, rows: Sequence[Row]) -> tuple[list[list[Example]], Account]:
        """Return the sequences of each row, cut to ``max_length``, and an account of the rows."""
        account, found = Account(), []
        for row in rows:
            encoded = self.encode(row)
            if isinstance(encoded, ValueError):
                account.count_bad(encoded)
                continue
            kept = [cut(whole, self._section.max_length) for whole in encoded.examples]
            account.count(encoded, kept)
            found.append([short for short in kept if short is not None])
        return found, account


def encoded_rows(
    source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase, processes: int
) -> Iterator[tuple[list[list[Example]], Account]]:
    """Yield `RowEncoder.encode_all` of up to ``max_rows`` rows, some rows at a time, in their order.

    No more processes are started than there are cores; their number changes no sequence.
    """
    rows = islice(source.read(), section.max_rows)
    tasks = iter(lambda: list(islice(rows, _ROWS_AT_ONCE)), [])
    processes = min(processes, os.cpu_count() or 1)
    if processes == 1:
        yield from map(RowEncoder(section, tokenizer).encode_all, tasks)
        return
    with ProcessPoolExecutor(processes, get_context(_START), _begin, (section, tokenizer)) as pool:
        try:
            while some := list(islice(tasks, 4 * processes)):
                yield from pool.map(_encode_here, some)
        except BrokenProcessPool as error:
            message = f"one of the {processes} processes that tokenize was ended from outside, perhaps for its memory"
            raise UserError(message, "lower data.num_proc") from error


_HERE: list[RowEncoder] = []
"""The encoder of a process that encodes for another one."""


def _begin(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> None:
    _HERE[:] = [RowEncoder(section, tokenizer)]


def _encode_here(rows: Sequence[Row]) -> tuple[list[list[Example]], Account]:
    return _HERE[0].encode_all(rows)
