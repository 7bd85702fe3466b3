"""Cache of token ids: one process per machine tokenizes a source, all map the result.

A cache folder contains the sequences as an Arrow file of the datasets library, and counts of the rows. Its name is
a digest of everything that determines the sequences. It appears whole or not at all, with checksums. The library's own
cache would not notice a changed tokenizer, changed code or a damaged file, and would copy streamed rows.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers
import transformers
from jaxtyping import Int
from transformers import PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.model.loading import first_line
from decoding.model.stored import cache_root
from trainer.data.batch import Example
from trainer.data.encoding import Account, encoded_rows
from trainer.data.rows import RowSource
from trainer.data.sequences import StoredExamples
from trainer.files.folders import check_seal, sha256_of, write_folder
from trainer.files.lock import hold_file
from trainer.files.shards import digest_of
from trainer.recipe.common import DataSection

_SEQUENCES, _ACCOUNT = "sequences.arrow", "account.json"
_FEW_ROWS, _FEW_BYTES = 256, 1 << 20
"""Up to these sizes, tokenizing is as fast as finding the cached file."""
_DECIDES = (
    *("format", "text_field", "prompt_field", "answer_field", "max_length", "max_rows", "bad_rows"),
    "chat_template_kwargs",
)
"""Fields of a data section that determine the sequences, besides the chat template's file and the source."""
_CODE = ("rows", "conversations", "chat", "marks", "encoding", "sequences", "batch", "token_cache")
_LOGGER = logging.getLogger(__name__)

Tokenized = tuple[Sequence[Example], Int[np.ndarray, " rows"], Account]
"""The sequences of a source, the index of each row's first sequence, and counts of all rows."""


def load_sequences(
    source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()
) -> Tokenized:
    """Return the sequences of a source from the cache, filling it if needed; few rows are only kept in memory.

    ``ends`` are as in `TranscriptEncoder`. The first process on a machine tokenizes while the others wait. Raises
    UserError for bad rows and for a cache that cannot be written.
    """
    if source.num_bytes is not None and (
        source.num_bytes <= _FEW_BYTES or (section.max_rows is not None and section.max_rows <= _FEW_ROWS)
    ):
        return _in_memory(source, section, tokenizer, ends)
    folder = cache_folder() / fingerprint(source, section, tokenizer, ends)
    if (found := _read(folder)) is not None:
        return found
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_file(folder, _say_once):
            if (found := _read(folder)) is None:
                write_folder(folder, lambda empty: _write(empty, source, section, tokenizer, ends), sealed=True)
                found = _read(folder)
    except OSError as error:
        raise UserError(
            f"the tokens of {source.name} cannot be stored in {folder.parent} ({error})",
            "free some disk space, or set HEADSTART_CACHE to another folder",
        ) from error
    assert found is not None, f"{folder} was written and cannot be read"
    return found


def cache_folder() -> Path:
    """Return the folder of all token files. Its files may be deleted; they are then written again."""
    return cache_root() / "tokens"


def fingerprint(
    source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int] = ()
) -> str:
    """Return a digest of everything that determines the sequences and counts of a source, including the code."""
    decides: dict[str, Any] = {name: getattr(section, name) for name in _DECIDES}
    if section.chat_template is not None:
        decides["chat_template"] = sha256_of(Path(section.chat_template))
    with TemporaryDirectory() as folder:  # the saved files describe a tokenizer completely
        tokenizer.save_pretrained(folder)
        files = {path.name: sha256_of(path) for path in sorted(Path(folder).iterdir())}
    versions = [transformers.__version__, tokenizers.__version__]
    return digest_of([source.name, source.sha256, decides, files, [*ends], _digest_of_code(), versions])[:32]


@cache
def _digest_of_code() -> str:
    """Return a digest of the code that turns rows into sequences, so that a code change invalidates the cache."""
    names = [
        *(("trainer.data", name) for name in _CODE),
        *(("decoding", name) for name in ("fields", "jsonl", "prompts")),
    ]
    return digest_of([resources.files(package).joinpath(f"{name}.py").read_text() for package, name in names])


def _in_memory(
    source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> Tokenized:
    examples, firsts, account = list[Example](), list[int](), Account()
    for rows, part in encoded_rows(source, section, tokenizer, 1, ends):
        account.add(part)
        for row in rows:
            firsts += [len(examples)] if row else []
            examples += row
    return examples, np.array(firsts, np.int64), account


def _say_once(sentence: str) -> None:
    """Log the sentence once per machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _LOGGER.warning("%s", sentence)


def _write(
    folder: Path, source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase, ends: Sequence[int]
) -> None:
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    from trainer.terminal.console import standard_error  # importing this module must not require rich
    from trainer.terminal.progress import ProgressBar

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
    """Map the sequences in a folder; None if the folder is missing, or, with a warning, damaged."""
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
