"""Rows are tokenized by other processes, of which a machine gets no more than it has cores."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tiny_training import tiny_tokenizer, write_rows

from trainer.data import encoding
from trainer.data.encoding import encoded_columns
from trainer.data.rows import open_source
from trainer.recipe.common import DataSection


def test_no_more_processes_are_started_than_there_are_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A spawned process has libraries of its own: thousands of them, asked for by mistake, would take the machine."""
    asked_for = []

    def pool(processes: int, context: Any, begin: Any, arguments: Any) -> ThreadPoolExecutor:
        asked_for.append(processes)
        return ThreadPoolExecutor(1, initializer=begin, initargs=arguments)

    monkeypatch.setattr(encoding, "_HERE", [])
    monkeypatch.setattr(encoding, "ProcessPoolExecutor", pool)
    monkeypatch.setattr("os.cpu_count", lambda: 3)
    section = DataSection(train="t", heldout="h", max_length=16)
    source = open_source(write_rows(tmp_path / "rows.jsonl", [{"text": "a b c d"}] * 300), section)
    parts = list(encoded_columns(source, section, tiny_tokenizer(), 9999))
    assert asked_for == [3] and sum(account.num_rows for _, account in parts) == 300
