"""Rows of .jsonl files, one JSON object a line in UTF-8, and of Parquet files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_WANTED = "a .jsonl file has one JSON object a line, in UTF-8"
_FROM_CSV = "the page on data of your own (docs/how-to/data.md) has the lines that turn it into one"
_ROWS_AT_ONCE = 256


def read_rows(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a .jsonl file, parsed by `parse_row`, or of a .parquet file, with their numbers (from 1)."""
    if Path(path).suffix == ".parquet":
        yield from read_parquet(path)
        return
    for number, line in read_lines(path):
        yield number, parse_row(line, f"{path}, line {number}")


def read_parquet(path: str | Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the rows of a Parquet file, `without_nulls`, with their numbers (from 1); ValueError for another file."""
    import pyarrow as pa
    from pyarrow.parquet import ParquetFile

    try:
        with ParquetFile(path) as file:
            rows = (row for batch in file.iter_batches(_ROWS_AT_ONCE) for row in batch.to_pylist())
            yield from enumerate(map(without_nulls, rows), start=1)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise ValueError(f"{path} is not a readable Parquet file: {str(error).partition(chr(10))[0]}") from error


def without_nulls(value: Any) -> Any:
    """Return a value without the null fields of its objects: columns have a field in every row or in none."""
    if isinstance(value, dict):
        return {name: without_nulls(held) for name, held in value.items() if held is not None}
    return [without_nulls(each) for each in value] if isinstance(value, list) else value


def read_lines(path: str | Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a .jsonl file that are not blank, with their numbers (from 1)."""
    path = Path(path)
    if not path.is_file():
        missing = "is a folder" if path.is_dir() else "is not there"
        raise ValueError(f"{path} {missing}: prompts are read from a .jsonl file, one JSON object a line")
    if path.suffix == ".parquet":
        raise ValueError(f"{path} is Parquet, but its rows are copied from a .jsonl file: write them as JSON lines")
    if path.suffix.lower() in (".csv", ".tsv"):
        raise ValueError(f"{path} is a table of text, but rows are read from a .jsonl file: {_FROM_CSV}")
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if number == 1 and not (encoding := json.detect_encoding(line)).startswith("utf-8"):
                raise ValueError(f"{path} is {encoding.upper()} text, but rows are read as UTF-8: save it as UTF-8")
            if line.strip():
                yield number, line


def parse_row(line: bytes, where: str) -> dict[str, Any]:
    """Parse one line of a .jsonl file; a bare string becomes ``{"text": string}``.

    ``where`` names the line in errors: ValueError for other values, other encodings and half characters.
    """
    try:
        row = json.loads(line.rstrip(b"\r\n"))  # an error at the end is in this line, not in the next
        if b"\\u" in line:  # an escape may be half a character, which tokenizers refuse
            json.dumps(row, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{where}: not JSON ({error.msg.removesuffix(' at')} at column {error.colno}): {_WANTED}"
        ) from error
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: a \\u escape is half a character ({error.reason}): write the whole one") from error
    except UnicodeDecodeError as error:
        raise ValueError(f"{where}: not UTF-8 text ({error.reason}): {_WANTED}") from error
    if isinstance(row, str):
        return {"text": row}
    if not isinstance(row, dict):
        raise ValueError(f"{where}: the row is {type(row).__name__}, not an object with fields: write one a line")
    return row
