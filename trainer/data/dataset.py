"""A data set: every row of a source as sequences of token ids with a loss mask, and an account of all rows.

A row goes down once: `rows` reads it, `conversations` understands it, `chat` encodes it, `batch` holds the examples.
"""

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from trainer.data.batch import Example
from trainer.data.encoding import Account
from trainer.data.rows import open_source
from trainer.data.sequences import chosen, pack
from trainer.data.token_cache import load_sequences
from trainer.files.shards import digest_of
from trainer.processes import agreed
from trainer.quickstart import resolve
from trainer.recipe.common import DataSection

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class Dataset:
    """The examples of a source, and an account of its rows."""

    examples: Sequence[Example]
    """The sequences to train on, packed if the section asks for it; each is made anew when it is asked for."""
    firsts: Sequence[Example]
    """The first sequence of each row, never packed; a long text gives several sequences."""
    path: str
    sha256: str
    """Digest of the whole source, and of the chat template's file if there is one."""
    account: Account
    max_length: int
    packed: bool
    commit: str | None = None
    """The commit of a streamed hub data set."""

    @property
    def fill(self) -> float:
        """Share of the sequences' room, ``max_length`` tokens each, that holds tokens."""
        return self.account.tokens / (len(self.examples) * self.max_length)

    def describe(self) -> str:
        """Return one sentence with every count."""
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
            parts.append(f"{account.skipped:,} left out with nothing to train in {self.max_length} tokens")
        if account.bad_rows:
            parts.append(f"{account.bad_rows:,} bad rows skipped")
        if self.packed:
            parts.append(f"packed, {self.fill:.0%} full")
        if self.commit is not None:
            parts.append(f"streamed from commit {self.commit}")
        return ", ".join(parts)


def load_dataset(path: str, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Load every row of a source, of a hub data set those of ``section.split``, as sequences with a loss mask.

    ValueError for a source without a trained token, and for a bad row unless the section skips these.
    """
    source = open_source(path, section)
    sequences, firsts, account = load_sequences(source, section, tokenizer)
    for error in account.named:
        _LOGGER.warning("skipped: %s", error)
    for field, count in account.ignored.items():
        remedy = "name a template that writes this field in data.chat_template"
        _LOGGER.warning("%s rows have %s, which the chat template leaves out: %s", f"{count:,}", field, remedy)
    if not sequences:
        why = f"; the first of {account.bad_rows} bad ones: {account.named[0]}" if account.named else ""
        raise ValueError(f"{path} holds nothing to train on: no row is left with a trained token in it{why}")
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


def load_splits(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> tuple[Dataset, Dataset]:
    """Load the training data and the held-out data, which is never packed. ValueError for rows that cannot be used."""
    heldout = load_heldout_data(section, tokenizer)
    return load_training_data(section, tokenizer), heldout


def load_heldout_data(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Load the held-out data alone, never packed."""
    apart = section.model_copy(update={"split": section.heldout_split, "packing": False})
    try:
        return load_dataset(resolve(section.heldout), apart, tokenizer)
    except ValueError as error:
        raise ValueError(f"data.heldout: {error}") from error


def load_training_data(section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Load the training data alone. Every process calls this: one machine may have to tokenize it."""
    return agreed(lambda: load_dataset(resolve(section.train), section, tokenizer), patient=True)


def not_held_out(heldout: str, train: str) -> str:
    """Return a warning that two settings name the same rows."""
    return f"warning: {heldout} is the same data as {train}, so held-out figures are of texts that were learnt"


def heldout_prompts(examples: Sequence[Example], count: int, prompt_tokens: int, longest: int) -> list[tuple[int, ...]]:
    """Return up to ``count`` prompts to decode from: the tokens before the answer, or a plain text's first tokens.

    A plain text gives ``prompt_tokens`` tokens. Prompts of more than ``longest`` tokens are passed over; ValueError if
    none is left.
    """
    prompts = []
    for example in examples:
        length = example.prompt_length or min(prompt_tokens, len(example.tokens) - 1)
        if 0 < length <= longest:
            prompts.append(tuple(example.tokens[:length].tolist()))
        if len(prompts) == count:
            break
    if not prompts:
        raise ValueError(f"no held-out prompt has at most {longest} tokens: give shorter prompts or fewer new tokens")
    return prompts
