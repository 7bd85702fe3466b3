"""Token ids on disk: the rows of a source are tokenized once on a machine, and mapped by every process that trains.

A folder in the cache holds the sequences as an Arrow file, which `datasets.Dataset.from_file` reads too, and an account
of the rows. Its name is a digest of all that decides the sequences. It appears whole or not at all, with checksums.
"""

import json
import logging
import os
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from importlib import resources
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import tokenizers
import transformers
from transformers import PreTrainedTokenizerBase

from decoding.model.loading import first_line
from trainer.data.encoding import COUNTERS, Account, encoded_columns
from trainer.data.rows import RowSource
from trainer.data.sequences import Columns, Sequences
from trainer.files.folders import cache_root, check_seal, sha256_of, write_folder
from trainer.files.lock import hold_file
from trainer.files.shards import digest_of
from trainer.recipe.common import DataSection

try:
    import pyarrow as pa
except ImportError:  # the sequences are then kept in memory
    pa = None

_TOKENS, _ACCOUNT = "sequences.arrow", "account.json"
_FEW_ROWS, _FEW_BYTES = 256, 1 << 20
"""So few rows are tokenized as fast as a file of them is found."""
_TOKENS_AT_ONCE = 1 << 20
_DECIDES = ("format", "text_field", "prompt_field", "answer_field", "max_length", "max_rows", "bad_rows")
"""The fields of a data section that decide the sequences, beside the chat template's file and the source."""
_LOGGER = logging.getLogger(__name__)


def load_sequences(
    source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase
) -> tuple[Sequences, Account]:
    """Return the sequences of a source and the account of its rows, from the cache or into it.

    Of the processes on a machine the first tokenizes, and the others wait for it. Few rows, and those of a machine
    without the pyarrow library, are kept in memory. ValueError for bad rows and for a cache that cannot be written.
    """
    few = source.num_bytes is not None and (
        source.num_bytes <= _FEW_BYTES or (section.max_rows is not None and section.max_rows <= _FEW_ROWS)
    )
    if few:
        return _in_memory(encoded_columns(source, section, tokenizer, 1))
    if pa is None:
        _LOGGER.warning("every process tokenizes %s and keeps it: pip install pyarrow, and one does", source.name)
        return _in_memory(encoded_columns(source, section, tokenizer, section.num_proc))
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
        raise ValueError(
            f"the tokens of {source.name} cannot be kept in {folder.parent} ({error}): make room there, or name "
            "another folder in HEADSTART_CACHE"
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
    versions = [transformers.__version__, tokenizers.__version__]
    return digest_of([source.name, source.sha256, decides, _digest_of(tokenizer), _digest_of_code(), versions])[:32]


def _digest_of(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Return the digests of the files that the tokenizer is saved as: all that it is."""
    with TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        return {path.name: sha256_of(path) for path in sorted(Path(folder).iterdir())}


@cache
def _digest_of_code() -> str:
    """Return a digest of the code that makes sequences of rows, so that no change of it is forgotten here."""
    names = [
        ("trainer.data", name)
        for name in ("rows", "hub_sets", "conversations", "chat", "encoding", "sequences", "batch")
    ]
    names += [("trainer.data", "token_cache"), *(("decoding", name) for name in ("fields", "jsonl", "prompts"))]
    return digest_of([resources.files(package).joinpath(f"{name}.py").read_text() for package, name in names])


def _in_memory(parts: Iterable[tuple[Columns, Account]]) -> tuple[Sequences, Account]:
    kept, account = [], Account()
    for columns, part in parts:
        kept.append(columns)
        account.add(part)
    return Sequences(kept), account


def _say_once(sentence: str) -> None:
    """Say it once on a machine."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _LOGGER.warning("%s", sentence)


def _write(folder: Path, source: RowSource, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> None:
    from trainer.terminal.console import standard_error  # few rows are read where rich is not installed
    from trainer.terminal.progress import ProgressBar

    account = Account()
    bar = ProgressBar(standard_error(), f"tokenizing {source.name}", section.max_rows)

    def parts() -> Iterator[Columns]:
        for columns, part in encoded_columns(source, section, tokenizer, section.num_proc):
            account.add(part)
            bar.update(account.num_rows, note=f"{account.tokens / bar.seconds:,.0f} tokens/s")
            yield columns

    with bar:
        _write_arrow(folder / _TOKENS, parts())
    (folder / _ACCOUNT).write_text(json.dumps(vars(account)))


def _write_arrow(path: Path, parts: Iterable[Columns]) -> None:
    """Write the columns as record batches of a million tokens or more."""
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, _schema()) as writer:
        waiting, tokens = [], 0
        for part in parts:
            waiting.append(_record_batch(part))
            tokens += len(part.tokens)
            if tokens >= _TOKENS_AT_ONCE:
                writer.write_table(pa.Table.from_batches(waiting).combine_chunks())
                waiting, tokens = [], 0
        if waiting:
            writer.write_table(pa.Table.from_batches(waiting).combine_chunks())


def _schema() -> Any:
    return pa.schema(
        {
            "tokens": pa.list_(pa.int32()),
            "trained": pa.list_(pa.bool_()),
            "prompt_length": pa.int32(),
            "first": pa.bool_(),
        }
    )


def _record_batch(part: Columns) -> Any:
    offsets = _array(pa.int32(), len(part.offsets), part.offsets)
    return pa.record_batch(
        [
            pa.ListArray.from_arrays(offsets, _array(pa.int32(), len(part.tokens), part.tokens)),
            pa.ListArray.from_arrays(offsets, _array(pa.bool_(), len(part.tokens), part.mask)),
            _array(pa.int32(), len(part), part.prompt_lengths),
            _array(pa.bool_(), len(part), np.packbits(part.firsts, bitorder="little")),
        ],
        schema=_schema(),
    )


def _array(kind: Any, length: int, values: np.ndarray[Any, Any]) -> Any:
    """Return an Arrow array of the values as they lie in memory; ``pa.array`` would import pandas, 40 MB of it."""
    return pa.Array.from_buffers(kind, length, [None, pa.py_buffer(values)])


def _read(folder: Path) -> tuple[Sequences, Account] | None:
    """Map a folder's sequences; None where there is none, or only a damaged one, of which a warning tells."""
    if not folder.is_dir():
        return None
    try:
        check_seal(folder)
        content: dict[str, Any] = json.loads((folder / _ACCOUNT).read_text())
        content |= {name: Counter(content[name]) for name in COUNTERS}
        account = Account(**content)
        table = pa.ipc.open_stream(pa.memory_map(str(folder / _TOKENS))).read_all()
        sequences = Sequences(map(_mapped, table.to_batches()))
    except (OSError, ValueError, KeyError, TypeError) as error:
        _say_once(f"the tokens in {folder} are damaged ({first_line(error)}): the rows are tokenized again")
        return None
    return sequences, account


def _mapped(batch: Any) -> Columns:
    """Return the columns of a record batch without a copy of its tokens."""
    tokens, trained, prompt_lengths, firsts = (batch[name] for name in _schema().names)
    assert not any(array.offset for array in (tokens, tokens.values, trained.values, firsts)), "a batch begins anew"
    bits = np.frombuffer(firsts.buffers()[1], np.uint8)
    return Columns(
        np.frombuffer(tokens.values.buffers()[1], np.int32, len(tokens.values)),
        np.frombuffer(trained.values.buffers()[1], np.uint8),
        np.frombuffer(tokens.buffers()[1], np.int32, len(batch) + 1),
        np.frombuffer(prompt_lengths.buffers()[1], np.int32, len(batch)),
        np.unpackbits(bits, count=len(batch), bitorder="little").view(np.bool_),
    )
