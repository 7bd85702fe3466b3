"""Rows to columns of sequences, with an account of every row; in other processes too, where there are many rows."""

import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing import get_context

from transformers import PreTrainedTokenizerBase

from trainer.data.batch import Example, cut
from trainer.data.chat import Encoded, TranscriptEncoder
from trainer.data.conversations import transcript_of
from trainer.data.rows import Row, RowSource
from trainer.data.sequences import Columns
from trainer.recipe.common import DataSection

_NAMED_ROWS = 5  # bad rows that are named; all are counted
_ROWS_AT_ONCE = 64
COUNTERS = ("formats", "fields", "mask_sources", "ignored")
"""Fields of an account that count rows by name."""
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
        for name in COUNTERS:
            getattr(self, name).update(getattr(later, name))
        for name in ("sequences", "tokens", "trained_tokens", "truncated", "skipped", "bad_rows"):
            setattr(self, name, getattr(self, name) + getattr(later, name))
        self.named = [*self.named, *later.named][:_NAMED_ROWS]


def encoded_rows(
    source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase
) -> Iterator[tuple[Row, Encoded | ValueError]]:
    """Yield up to ``max_rows`` rows with their sequences; raise the ValueError of a bad row, or yield it as well.

    The section's ``bad_rows`` decides: ``stop`` raises, ``skip`` yields.
    """
    encoder = TranscriptEncoder(section, tokenizer)
    for row in islice(source.read(), section.max_rows):
        yield row, _encoded(row, section, encoder)


def encoded_columns(
    source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase, processes: int
) -> Iterator[tuple[Columns, Account]]:
    """Yield the sequences of up to ``max_rows`` rows, cut to ``max_length``, with an account of these rows.

    They are the same whatever the number of processes that encode, and come in the same order. There are no more of
    these than cores: all start at once, each with libraries of its own. ValueError for a bad row unless the section
    skips these.
    """
    processes = min(processes, os.cpu_count() or 1)
    rows = islice(source.read(), section.max_rows)
    tasks = iter(lambda: list(islice(rows, _ROWS_AT_ONCE)), [])
    if processes == 1:
        encoder = TranscriptEncoder(section, tokenizer)
        yield from (_columns(task, section, encoder) for task in tasks)
    else:
        yield from _encoded_by_others(tasks, section, tokenizer, processes)


def _encoded_by_others(
    tasks: Iterable[list[Row]], section: DataSection, tokenizer: PreTrainedTokenizerBase, processes: int
) -> Iterator[tuple[Columns, Account]]:
    """Encode in new processes, which know nothing of this one's threads and devices; twice as many tasks wait."""
    waiting: deque[Future[tuple[Columns, Account]]] = deque()
    given = ProcessPoolExecutor(processes, get_context(_START), _begin, (section, tokenizer))
    with given as pool:
        try:
            for rows in tasks:
                waiting.append(pool.submit(_columns_elsewhere, rows))
                if len(waiting) > 2 * processes:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()
        except BrokenProcessPool as error:
            raise ValueError(
                f"one of the {processes} processes that tokenize was ended from outside, for want of memory perhaps: "
                "lower data.num_proc"
            ) from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


_HERE: list[tuple[DataSection, TranscriptEncoder]] = []
"""In a process that encodes for another: the section and its encoder."""


def _begin(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> None:
    _HERE.append((section, TranscriptEncoder(section, tokenizer)))


def _columns_elsewhere(rows: Sequence[Row]) -> tuple[Columns, Account]:
    ((section, encoder),) = _HERE
    return _columns(rows, section, encoder)


def _columns(rows: Iterable[Row], section: DataSection, encoder: TranscriptEncoder) -> tuple[Columns, Account]:
    account, found = Account(), []
    for row in rows:
        encoded = _encoded(row, section, encoder)
        if isinstance(encoded, ValueError):
            account.count_bad(encoded)
            continue
        kept = [cut(whole, section.max_length) for whole in encoded.examples]
        account.count(encoded, kept)
        found.append([short for short in kept if short is not None])
    return Columns.of(found), account


def _encoded(row: Row, section: DataSection, encoder: TranscriptEncoder) -> Encoded | ValueError:
    try:
        return encoder.encode(transcript_of(row, section))
    except ValueError as error:
        if section.bad_rows == "stop":
            raise ValueError(f"{error}; data.bad_rows=skip (--bad-rows skip) leaves such rows out") from error
        return error
