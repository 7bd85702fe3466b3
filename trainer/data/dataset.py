"""A data set: all rows of a source as token ids with a loss mask, and counts of the rows.

Each row passes through four modules: `sources` reads it, `conversations` interprets it, `chat` encodes it, and `batch`
defines the examples.

On each machine one process tokenizes a source, and all processes map the result from a cache folder. The folder
contains the sequences (an Arrow file of the datasets library), the row counts, and checksums. The name of the folder is
a fingerprint of everything that determines the sequences, and the folder appears only when it is complete. The datasets
library's own cache would not notice a changed tokenizer, changed code or a damaged file, and would copy streamed rows.
"""

import hashlib
import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers
import transformers
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError, first_line
from decoding.fields import warn_of_unread
from decoding.files.stored import cache_root
from trainer.data.batch import Example, StoredExamples, chosen, pack
from trainer.data.chat import TranscriptEncoder
from trainer.data.encoding import Account, encoded_rows
from trainer.data.sources import RowSource, open_source
from trainer.files.folders import check_seal, fingerprint_of, hold_file, sha256_of, write_folder
from trainer.processes import agreed
from trainer.recipe.common import DataSection

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset:
    """The examples of a source, and counts of its rows."""

    examples: Sequence[Example]
    """The sequences to train on, packed if the section says so. Each access builds the example again."""
    firsts: Sequence[Example]
    """The first sequence of each row, never packed. A long text has several sequences."""
    path: str
    sha256: str
    """Fingerprint of the whole source, and of the file of the chat template if there is one."""
    account: Account
    max_length: int
    packed: bool
    commit: str | None = None
    """The commit of a streamed hub data set."""

    @property
    def fill(self) -> float:
        """Share of the capacity of the sequences (``max_length`` tokens each) that is filled with tokens."""
        return self.account.tokens / (len(self.examples) * self.max_length)

    def describe(self) -> str:
        """Return one sentence with all counts."""
        account = self.account
        formats = " and ".join(f"{count:,} {name}" for name, count in account.formats.items())
        columns = f": {' and '.join(account.fields)}" if account.fields else ""
        parts = [
            f"{account.num_rows:,} rows ({formats}{columns})",
            f"{len(self.examples):,} sequences",
            f"{account.trained_tokens:,} of {account.tokens:,} tokens trained",
        ]
        if account.truncated:
            parts.append(f"{account.truncated:,} cut at {self.max_length} tokens")
        if account.skipped:
            parts.append(f"{account.skipped:,} skipped: none of their first {self.max_length} tokens is trained on")
        if account.bad_rows:
            parts.append(f"{account.bad_rows:,} bad rows skipped")
        if self.packed:
            parts.append(f"packed, {self.fill:.0%} full")
        if self.commit is not None:
            parts.append(f"streamed from commit {self.commit}")
        return ", ".join(parts)


def load_dataset(
    path: str, section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()
) -> Dataset:
    """Load all rows of a source as sequences with a loss mask; a hub data set is read from ``section.split``.

    ``ends`` are as in `TranscriptEncoder`. Raises UserError for a source without a trained token, and for a bad row
    unless the section skips bad rows.
    """
    source = open_source(path, section)
    sequences, firsts, account = load_sequences(source, section, tokenizer, ends)
    for error in account.named:
        _LOGGER.warning("skipped: %s", error)
    for field, count in account.ignored.items():
        remedy = "set data.chat_template to a template that shows the field"
        _LOGGER.warning("%s rows have %s, which the chat template ignores: %s", f"{count:,}", field, remedy)
    warn_of_unread(path, account.unread)
    if not sequences:
        why = f"; the first of {account.bad_rows} bad rows: {account.named[0]}" if account.named else ""
        raise UserError(f"{path} contains nothing to train on: no row has a trained token{why}")
    content = source.sha256
    if section.chat_template is not None:
        content = hashlib.sha256(content.encode() + Path(section.chat_template).read_bytes()).hexdigest()
    if section.chat_template_kwargs:
        content = fingerprint_of([content, section.chat_template_kwargs])
    return Dataset(
        examples=pack(sequences, section.max_length) if section.packing else sequences,
        firsts=chosen(sequences, firsts),
        path=path,
        sha256=content,
        account=account,
        max_length=section.max_length,
        packed=section.packing,
        commit=source.commit,
    )


def load_splits(
    section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int], answers: bool
) -> tuple[Dataset, Dataset]:
    """Load the training data and the held-out data (never packed), as in `load_dataset`. Every process calls this.

    If training uses no answers from the training data (``answers`` is False), rows without answers suffice.
    """
    heldout, load = load_heldout_data(section, tokenizer, ends), load_dataset if answers else _load_decoded
    # Every process waits here, because one process per machine may have to tokenize the data.
    return agreed(lambda: load(section.train, section, tokenizer, ends), patient=True), heldout


def load_heldout_data(section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()) -> Dataset:
    """Load only the held-out data, which is never packed.

    Rows without answers suffice, because evaluations decode from prompts.
    """
    apart = section.model_copy(update={"split": section.heldout_split, "packing": False})
    try:
        return _load_decoded(section.heldout, apart, tokenizer, ends)
    except UserError as error:
        raise UserError(f"data.heldout: {error}") from error


def _load_decoded(
    path: str, section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()
) -> Dataset:
    """Load rows with answers, or prompts without answers. Other rows are rejected with the error for rows that need
    answers.
    """
    try:
        return load_dataset(path, section, tokenizer, ends)
    except UserError as error:
        try:
            prompts = _load_prompts(path, section, tokenizer)
        except UserError:
            raise error from None
    if not prompts.examples:
        raise UserError(f"{path}: no prompt has less than {section.max_length} tokens: raise data.max_length")
    return prompts


def _load_prompts(path: str, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Load a source of prompts without answers; raise UserError if any row has an answer or is not a prompt."""
    source, encoder = open_source(path, section), TranscriptEncoder(section, tokenizer)
    encoded = [encoder.encode_opening(row, section) for row in islice(source.read(), section.max_rows)]
    prompts = [prompt for prompt, _ in encoded if len(prompt.tokens) < section.max_length]
    account = Account(
        Counter({"prompts": len(encoded)}), sequences=len(prompts), tokens=sum(len(e.tokens) for e in prompts)
    )
    account.skipped = len(encoded) - len(prompts)
    if not encoded:
        raise UserError(f"{path} contains no prompts: use a file with one prompt per line")
    warn_of_unread(path, Counter(part for _, unread in encoded for part in unread))
    return Dataset(prompts, prompts, path, source.sha256, account, section.max_length, False, source.commit)


def not_held_out(heldout: str, train: str) -> str:
    """Return a warning that the training data and the held-out data are the same, according to their settings."""
    return f"warning: {heldout} is the same data as {train}, so held-out figures are measured on training data"


def heldout_prompts(examples: Sequence[Example], count: int, prompt_tokens: int, longest: int) -> list[tuple[int, ...]]:
    """Return up to ``count`` prompts to decode from: the tokens before the answer, or the beginning of a plain text.

    The prompt of a plain text is its first ``prompt_tokens`` tokens. Prompts of more than ``longest`` tokens are
    skipped. Raises UserError if no prompt is left.
    """
    prompts = []
    for example in examples:
        length = example.prompt_length or min(prompt_tokens, len(example.tokens) - 1)
        if 0 < length <= longest:
            prompts.append(tuple(example.tokens[:length].tolist()))
        if len(prompts) == count:
            break
    if not prompts:
        raise UserError(f"no held-out prompt has at most {longest} tokens: use shorter prompts or fewer new tokens")
    return prompts


_SEQUENCES, _ACCOUNT = "sequences.arrow", "account.json"
_FEW_ROWS, _FEW_BYTES = 256, 1 << 20
"""For sources up to these sizes, tokenizing is as fast as looking up the cached file."""
_DECIDES = (
    *("format", "text_field", "prompt_field", "answer_field", "max_length", "max_rows", "bad_rows"),
    "chat_template_kwargs",
)
"""Fields of a data section that determine the sequences, in addition to the chat template's file and the source."""
_CODE = ("sources", "conversations", "chat", "marks", "encoding", "batch", "dataset")

Tokenized = tuple[Sequence[Example], Int[np.ndarray, " rows"], Account]
"""The sequences of a source, the index of each row's first sequence, and counts of all rows."""


def load_sequences(
    source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()
) -> Tokenized:
    """Return the sequences of a source from the cache, which is filled if needed.

    The sequences of small sources are kept only in memory. ``ends`` are as in `TranscriptEncoder`. The first process on
    a machine tokenizes while the others wait. Raises UserError for bad rows and for a cache that cannot be written.
    """
    if source.num_bytes is not None and (
        source.num_bytes <= _FEW_BYTES or (section.max_rows is not None and section.max_rows <= _FEW_ROWS)
    ):
        examples, numbers, account = list[Example](), list[int](), Account()
        for rows, part in encoded_rows(source, section, tokenizer, 1, ends):
            account.add(part)
            for row in rows:
                numbers += [len(examples)] if row else []
                examples += row
        return examples, np.array(numbers, np.int64), account
    folder = cache_folder() / fingerprint(source, section, tokenizer, ends)
    if (stored := _read(folder)) is not None:
        return stored
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_file(folder, _say_once):
            if (stored := _read(folder)) is None:
                write_folder(folder, lambda empty: _write(empty, source, section, tokenizer, ends), sealed=True)
                stored = _read(folder)
    except OSError as error:
        raise UserError(
            f"the tokens of {source.name} cannot be stored in {folder.parent} ({error})",
            "free some disk space, or set HEADSTART_CACHE to another folder",
        ) from error
    assert stored is not None, f"{folder} was written but cannot be read"
    return stored


def cache_folder() -> Path:
    """Return the folder of all token files. Files in it may be deleted; they are written again when needed."""
    return cache_root() / "tokens"


def fingerprint(
    source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()
) -> str:
    """Return a fingerprint of everything that determines the sequences and counts of a source, including the code."""
    decides: dict[str, Any] = {name: getattr(section, name) for name in _DECIDES}
    if section.chat_template is not None:
        decides["chat_template"] = sha256_of(Path(section.chat_template))
    with TemporaryDirectory() as folder:  # the saved files describe a tokenizer completely
        tokenizer.save_pretrained(folder)
        files = {path.name: sha256_of(path) for path in sorted(Path(folder).iterdir())}
    versions = [transformers.__version__, tokenizers.__version__]
    return fingerprint_of([source.name, source.sha256, decides, files, [*ends], _code_fingerprint(), versions])[:32]


@cache
def _code_fingerprint() -> str:
    """Return a fingerprint of the code that turns rows into sequences, so that a code change invalidates the cache."""
    names = [
        *(("trainer.data", name) for name in _CODE),
        *(("decoding", name) for name in ("fields", "jsonl", "prompts")),
    ]
    return fingerprint_of([resources.files(package).joinpath(f"{name}.py").read_text() for package, name in names])


def _say_once(sentence: str) -> None:
    """Log the sentence once per machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _LOGGER.warning("%s", sentence)


def _write(
    folder: Path, source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> None:
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    from trainer.terminal.console import (
        ProgressBar,
        standard_error,  # importing this module must not require rich
    )

    columns = {"tokens": List(Value("int32")), "trained": List(Value("bool"))}
    features = Features({**columns, "prompt_length": Value("int32"), "first": Value("bool")})
    account = Account()
    bar = ProgressBar(standard_error(), f"tokenizing {source.name}", section.max_rows)
    with bar, ArrowWriter(path=str(folder / _SEQUENCES), features=features) as writer:
        for rows, part in encoded_rows(source, section, tokenizer, section.num_proc, ends):
            account.add(part)
            bar.update(account.num_rows, note=f"{account.tokens / bar.seconds:,.0f} tokens/s")
            for row in rows:
                for example in row:
                    content = {name: getattr(example, name) for name in ("tokens", "trained", "prompt_length")}
                    writer.write({**content, "first": example is row[0]})
        writer.finalize()
    (folder / _ACCOUNT).write_text(json.dumps(vars(account)))


def _read(folder: Path) -> Tokenized | None:
    """Map the sequences in a folder; return None if the folder is missing or, with a warning, if it is damaged."""
    if not folder.is_dir():
        return None
    try:
        check_seal(folder)
        content: dict[str, Any] = json.loads((folder / _ACCOUNT).read_text())
        account = Account(**content)
        for name, held in content.items():
            if isinstance(held, dict):
                setattr(account, name, Counter(held))
        examples = StoredExamples(folder / _SEQUENCES)
        firsts = np.flatnonzero(examples.dataset.data.column("first").to_numpy())
    except (OSError, ValueError, KeyError, TypeError) as error:
        _say_once(f"the tokens in {folder} are damaged ({first_line(error)}); tokenizing the rows again")
        return None
    return examples, firsts, account
