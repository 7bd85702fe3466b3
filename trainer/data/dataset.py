"""A data set: all rows of a source as token ids with a loss mask, plus counts of the rows.

Each row passes through four modules: `rows` reads it, `conversations` interprets it, `chat` encodes it, and `batch`
defines the examples.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from trainer.data.batch import Example
from trainer.data.chat import TranscriptEncoder
from trainer.data.conversations import report_unread
from trainer.data.encoding import Account
from trainer.data.rows import open_source
from trainer.data.sequences import chosen, pack
from trainer.data.token_cache import load_sequences
from trainer.files.shards import digest_of
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
    """Digest of the whole source, and of the chat template's file, if any."""
    account: Account
    max_length: int
    packed: bool
    commit: str | None = None
    """The commit of a streamed hub data set."""

    @property
    def fill(self) -> float:
        """Share of the sequences' capacity (``max_length`` tokens each) that holds tokens."""
        return self.account.tokens / (len(self.examples) * self.max_length)

    def describe(self) -> str:
        """Return one sentence with all counts."""
        account = self.account
        formats = " and ".join(f"{count:,} {name}" for name, count in account.formats.items())
        found = f": {' and '.join(account.fields)}" if account.fields else ""
        parts = [
            f"{account.num_rows:,} rows ({formats}{found})",
            f"{len(self.examples):,} sequences",
            f"{account.trained_tokens:,} of {account.tokens:,} tokens trained",
        ]
        if account.truncated:
            parts.append(f"{account.truncated:,} cut at {self.max_length} tokens")
        if account.skipped:
            parts.append(f"{account.skipped:,} skipped with nothing to train in {self.max_length} tokens")
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
        remedy = "set data.chat_template to a template that does not"
        _LOGGER.warning("%s rows have %s, which the chat template ignores: %s", f"{count:,}", field, remedy)
    if account.unread:
        _LOGGER.warning("%s", report_unread(path, account.unread))
    if not sequences:
        why = f"; the first of {account.bad_rows} bad rows: {account.named[0]}" if account.named else ""
        raise UserError(f"{path} contains nothing to train on: no row has a trained token{why}")
    digest = source.sha256
    if section.chat_template is not None:
        digest = hashlib.sha256(digest.encode() + Path(section.chat_template).read_bytes()).hexdigest()
    if section.chat_template_kwargs:
        digest = digest_of([digest, section.chat_template_kwargs])
    return Dataset(
        examples=pack(sequences, section.max_length) if section.packing else sequences,
        firsts=chosen(sequences, firsts),
        path=path,
        sha256=digest,
        account=account,
        max_length=section.max_length,
        packed=section.packing,
        commit=source.commit,
    )


def load_splits(
    section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()
) -> tuple[Dataset, Dataset]:
    """Load the training data and the held-out data (never packed), as in `load_dataset`."""
    heldout = load_heldout_data(section, tokenizer, ends)
    return load_training_data(section, tokenizer, ends), heldout


def load_heldout_data(section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()) -> Dataset:
    """Load only the held-out data, never packed. Prompts alone will do: evaluations decode from the prompts."""
    apart = section.model_copy(update={"split": section.heldout_split, "packing": False})
    try:
        return load_dataset(section.heldout, apart, tokenizer, ends)
    except UserError as error:
        try:
            return _load_prompts(section.heldout, apart, tokenizer)
        except UserError:
            raise UserError(f"data.heldout: {error}") from error


def _load_prompts(path: str, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Load a source of prompts alone; raise UserError if any row has an answer or is no prompt."""
    source, encoder = open_source(path, section), TranscriptEncoder(section, tokenizer)
    found = [encoder.encode_opening(row, section) for row in islice(source.read(), section.max_rows)]
    account = Account(Counter({"prompts": len(found)}), sequences=len(found), tokens=sum(len(e.tokens) for e in found))
    if not found:
        raise UserError(f"{path} contains no prompts: give a file with one prompt per line")
    return Dataset(found, found, path, source.sha256, account, section.max_length, False, source.commit)


def load_training_data(section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()) -> Dataset:
    """Load only the training data. Every process must call this, since one per machine may tokenize."""
    return agreed(lambda: load_dataset(section.train, section, tokenizer, ends), patient=True)


def not_held_out(heldout: str, train: str) -> str:
    """Return a warning that two settings name the same data."""
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
