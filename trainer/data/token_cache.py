"""Token ids on disk: the rows of a source are tokenized once on a machine, and mapped by every process that trains.

A folder in the cache holds the sequences as an Arrow file of the datasets library, and an account of the rows. Its name
is a digest of all that decides the sequences. It appears whole or not at all, with checksums. The library's own cache
would know neither that the tokenizer or this code changed, nor that a file is damaged, and would copy streamed rows.
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
from trainer.data.batch import Example
from trainer.data.encoding import Account, encoded_rows
from trainer.data.rows import RowSource
from trainer.data.sequences import StoredExamples
from trainer.files.folders import cache_root, check_seal, sha256_of, write_folder
from trainer.files.lock import hold_file
from trainer.files.shards import digest_of
from trainer.recipe.common import DataSection

_SEQUENCES, _ACCOUNT = "sequences.arrow", "account.json"
_FEW_ROWS, _FEW_BYTES = 256, 1 << 20
"""So few rows are tokenized as fast as a file of them is found."""
_DECIDES = (
    *("format", "text_field", "prompt_field", "answer_field", "max_length", "max_rows", "bad_rows"),
    "chat_template_kwargs",
)
"""The fields of a data section that decide the sequences, besides the chat template's file and the source."""
_CODE = ("rows", "conversations", "chat", "encoding", "sequences", "batch", "token_cache")
_LOGGER = logging.getLogger(__name__)

Tokenized = tuple[Sequence[Example], Int[np.ndarray, " rows"], Account]
"""The sequences of a source, the index of each row's first one, and the account of all rows."""


def load_sequences(source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Tokenized:
    """Return the sequences of a source, from the cache or into it; those of few rows are kept in memory.

    Of the processes on a machine the first tokenizes, and the others wait for it. ValueError for bad rows and for a
    cache that cannot be written.
    """
    if source.num_bytes is not None and (
        source.num_bytes <= _FEW_BYTES or (section.max_rows is not None and section.max_rows <= _FEW_ROWS)
    ):
        return _in_memory(source, section, tokenizer)
    folder = cache_folder() / fingerprint(source, section, tokenizer)
    if (found := _read(folder)) is not None:
        return found
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with hold_file(folder, _say_once):
            if (found := _read(folder)) is None:
                write_folder(folder, lambda empty: _write(empty, source, section, tokenizer), sealed=True)
                found = _read(folder)
    except OSError as error:
        raise UserError(
            f"the tokens of {source.name} cannot be kept in {folder.parent} ({error})",
            "make room there, or name another folder in HEADSTART_CACHE",
        ) from error
    assert found is not None, f"{folder} was written and cannot be read"
    return found


def cache_folder() -> Path:
    """Return the folder of all token files; whatever is in it may be deleted, and is then written again."""
    return cache_root() / "tokens"


def fingerprint(source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of all that decides the sequences and the account of a source's rows, the code included."""
    decides: dict[str, Any] = {name: getattr(section, name) for name in _DECIDES}
    if section.chat_template is not None:
        decides["chat_template"] = sha256_of(Path(section.chat_template))
    with TemporaryDirectory() as folder:  # the files that a tokenizer is saved as are all that it is
        tokenizer.save_pretrained(folder)
        files = {path.name: sha256_of(path) for path in sorted(Path(folder).iterdir())}
    versions = [transformers.__version__, tokenizers.__version__]
    return digest_of([source.name, source.sha256, decides, files, _digest_of_code(), versions])[:32]


@cache
def _digest_of_code() -> str:
    """Return a digest of the code that makes sequences of rows, so that no change of it is forgotten here."""
    names = [
        *(("trainer.data", name) for name in _CODE),
        *(("decoding", name) for name in ("fields", "jsonl", "prompts")),
    ]
    return digest_of([resources.files(package).joinpath(f"{name}.py").read_text() for package, name in names])


def _in_memory(source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Tokenized:
    examples, firsts, account = list[Example](), list[int](), Account()
    for rows, part in encoded_rows(source, section, tokenizer, processes=1):
        account.add(part)
        for row in rows:
            firsts += [len(examples)] if row else []
            examples += row
    return examples, np.array(firsts, np.int64), account


def _say_once(sentence: str) -> None:
    """Say it once on a machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _LOGGER.warning("%s", sentence)


def _write(folder: Path, source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> None:
    from datasets import Features, List, Value
    from datasets.arrow_writer import ArrowWriter

    from trainer.terminal.console import standard_error  # few rows are read where rich is not installed
    from trainer.terminal.progress import ProgressBar

    columns = {"tokens": List(Value("int32")), "trained": List(Value("bool"))}
    features = Features({**columns, "prompt_length": Value("int32"), "first": Value("bool")})
    account = Account()
    bar = ProgressBar(standard_error(), f"tokenizing {source.name}", section.max_rows)
    with bar, ArrowWriter(path=str(folder / _SEQUENCES), features=features) as writer:
        for rows, part in encoded_rows(source, section, tokenizer, section.num_proc):
            account.add(part)
            bar.update(account.num_rows, note=f"{account.tokens / bar.seconds:,.0f} tokens/s")
            for row in rows:
                for example in row:
                    content = {name: getattr(example, name) for name in ("tokens", "trained", "prompt_length")}
                    writer.write({**content, "first": example is row[0]})
        writer.finalize()
    (folder / _ACCOUNT).write_text(json.dumps(vars(account)))


def _read(folder: Path) -> Tokenized | None:
    """Map a folder's sequences; None without a folder, and, with a warning, for a damaged one."""
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
        _say_once(f"the tokens in {folder} are damaged ({first_line(error)}): the rows are tokenized again")
        return None
    return examples, firsts, account
