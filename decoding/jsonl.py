"""Rows of .jsonl files (one JSON object per line, UTF-8) and of Parquet files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from decoding.errors import UserError

_WANTED = "a .jsonl file has one JSON object per line, in UTF-8"
_FROM_CSV = "docs/how-to/data.md shows how to convert such a table"
_ROWS_AT_ONCE = 256


def read_rows(path: str | Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield each row of a .jsonl file, parsed by `parse_row`, or of a .parquet file, as (place for errors, row)."""
    for number, line in unparsed_rows(path):
        yield (where := location_of(path, number, line)), parse_row(line, where)


def unparsed_rows(path: str | Path) -> Iterator[tuple[int, bytes | dict[str, Any]]]:
    """Yield each row as (number from 1, row), but do not parse lines yet, so that a reader can skip bad lines."""
    return read_parquet(path) if Path(path).suffix == ".parquet" else read_lines(path)


def location_of(name: str | Path, number: int, row: bytes | dict[str, Any]) -> str:
    """Return the place of a row for error messages; only .jsonl files have lines."""
    return f"{name}, {'row' if isinstance(row, dict) else 'line'} {number}"


def read_parquet(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each row of a Parquet file as (number from 1, row), without the fields that `without_nulls` removes.

    Raises UserError if the file is not readable.
    """
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(_ROWS_AT_ONCE) for row in batch.to_pylist())
            yield from enumerate(map(without_nulls, rows), start=1)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{path} is not a readable Parquet file: {str(error).partition(chr(10))[0]}") from error


def without_nulls(value: Any) -> Any:
    """Return a value without the null fields of its objects, because Parquet writes every column in every row."""
    if isinstance(value, dict):
        return {name: without_nulls(held) for name, held in value.items() if held is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield each line of a .jsonl file that is not blank, as (number from 1, line)."""
    path = Path(path)
    if not path.is_file():
        missing = "is a folder" if path.is_dir() else "is not there"
        raise UserError(f"{path} {missing}: use a .jsonl file, with one JSON object per line")
    if path.suffix == ".parquet":
        raise UserError(f"{path} is Parquet, but rows are copied from .jsonl files only: convert it to JSON lines")
    if path.suffix.lower() in (".csv", ".tsv"):
        raise UserError(f"{path} is a text table, not a .jsonl file: {_FROM_CSV}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1 and not (encoding := json.detect_encoding(line)).startswith("utf-8"):
                raise UserError(f"{path} is {encoding.upper()} text: save it as UTF-8")
            if line.strip():
                yield number, line


def parse_row(line: bytes | dict[str, Any], where: str) -> dict[str, Any]:
    """Parse one line of a .jsonl file; a bare string becomes ``{"text": string}``, and a row is returned unchanged.

    Raises UserError, naming the line by ``where``, for other values, other encodings and half surrogate pairs.
    """
    if isinstance(line, dict):
        return line
    try:
        row = json.loads(line.rstrip(b"\r\n"))  # without the line end, so that errors are reported in this line
        if b"\\u" in line:  # an escape may be half of a surrogate pair, which tokenizers reject
            json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not JSON ({error.msg.removesuffix(' at')} at column {error.colno}): {_WANTED}"
        ) from error
    except UnicodeEncodeError as error:
        raise UserError(f"{where}: a \\u escape is half a character ({error.reason}): write both halves") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: not UTF-8 text ({error.reason}): {_WANTED}") from error
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, dict):
        raise UserError(f"{where}: the row is {type(row).__name__}, not an object: write one object per line")
    return row
