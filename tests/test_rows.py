"""Sources of rows, and the name of a row in error messages."""

import hashlib
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from tiny_training import write_rows

from trainer.data.sources import Row, open_source
from trainer.recipe.common import DataSection

SECTION = DataSection(train="t", heldout="h")


def of_split(split: str) -> DataSection:
    return SECTION.model_copy(update={"split": split})


def fields_of(name: Path | str, split: str = "train") -> list[dict[str, Any]]:
    return [row.fields() for row in open_source(str(name), of_split(split)).read()]


@pytest.fixture
def datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import the datasets library with a separate cache."""
    import datasets as library

    monkeypatch.setattr(library.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    return library


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"text": ', r"not JSON \(Expecting value at column 10\)"),
        (b"[1, 2]", "the row is list, not an object: write one object per line"),
        (b'{"text": "\xff"}', r"not UTF-8 text \(invalid start byte\)"),
        (b'{"text": "\\ud83d"}', r"a \\u escape is half a character \(surrogates not allowed\)"),
    ],
)
def test_a_line_that_is_no_row_is_found_when_its_fields_are_asked_for(
    tmp_path: Path, line: bytes, message: str
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n" * 6 + line + b'\n{"text": "a"}\n')
    row, good = open_source(str(path), SECTION).read()
    with pytest.raises(ValueError, match=f"^{path}, line 7: {message}"):
        row.fields()
    assert good.fields() == {"text": "a"}


def test_conversations_come_out_of_parquet_as_they_went_in(tmp_path: Path) -> None:
    """In Parquet every message and every tool has the fields of all others, with null values."""
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]
    tools = [{"name": "f", "parameters": {"x": {"type": "string"}}}, {"name": "g", "parameters": {"y": {"enum": [1]}}}]
    row = {"messages": messages, "tools": tools}
    assert fields_of(write_parquet(tmp_path / "rows.parquet", [row])) == [row]


def test_a_folder_is_its_jsonl_and_parquet_files_in_the_order_of_their_names(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    write_rows(folder / "c.jsonl", [{"text": "3"}])
    write_parquet(folder / "b.parquet", [{"text": "2"}])
    write_rows(folder / "a.jsonl", [{"text": "1"}])
    for name in ("README.md", ".a.jsonl", "._b.parquet", "a.jsonl.failed.jsonl"):
        (folder / name).write_text("not data")
    assert fields_of(folder) == [{"text": "1"}, {"text": "2"}, {"text": "3"}]


def test_a_files_digest_is_its_sha256_and_a_folders_is_of_names_and_contents(tmp_path: Path) -> None:
    path = Path(write_rows(tmp_path / "a.jsonl", ["x"]))
    assert open_source(str(path), SECTION).sha256 == hashlib.sha256(b'"x"\n').hexdigest()
    seen = {open_source(str(tmp_path), SECTION).sha256}
    seen.add(open_source(str(path.rename(tmp_path / "b.jsonl").parent), SECTION).sha256)
    write_rows(tmp_path / "b.jsonl", ["y"])
    seen.add(open_source(str(tmp_path), SECTION).sha256)
    assert len(seen) == 3


def test_a_hub_data_set_is_read_by_its_id_configuration_and_split(
    datasets: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Any] = []

    def load_dataset(*arguments: Any, **options: Any) -> Any:
        asked.append((arguments, options))
        return datasets.Dataset.from_list([{"question": "a", "answer": "b"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (row,) = open_source("openai/gsm8k:main", of_split("test")).read()
    assert row == Row("openai/gsm8k:main, row 1", {"question": "a", "answer": "b"})
    open_source("ORG/NAME@refs/pr/1:small", SECTION)
    assert asked == [
        (("openai/gsm8k", "main"), {"split": "test", "revision": None}),
        (("ORG/NAME", "small"), {"split": "train", "revision": "refs/pr/1"}),
    ]
