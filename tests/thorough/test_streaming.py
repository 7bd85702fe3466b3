"""`data.streaming`: rows of a set on the hub are streamed over real HTTP, and only their tokens are kept."""

import io
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import pytest
import scripted_endpoint
from fake_hub import TOKEN, FakeHub, Repository
from fake_hub import hub as hub
from reference_data import reference_examples
from rich.console import Console
from test_token_cache import plain, tokenized
from tiny_training import tiny_tokenizer, write_rows

from trainer.commands.options import RegenerateOptions
from trainer.commands.regenerate import run_regenerate
from trainer.data.dataset import Dataset, load_dataset
from trainer.data.sources import PRESETS, Preset, stream_prompts
from trainer.recipe.common import DataSection

NAME, SHARDS, PER_SHARD = "zoe/chats", 4, 30
ROWS = [{"prompt": f"a b {'c ' * (place % 7)}", "answer": f"{'d e ' * (1 + place % 5)}f"} for place in range(120)]


@pytest.fixture(autouse=True)
def _libraries_that_know_this_hub(hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "home" / "headstart"))
    for name, value in {
        "HF_ENDPOINT": hub.address,
        "HF_HUB_OFFLINE": False,
        "HF_DATASETS_CACHE": tmp_path / "home" / "datasets",
        "STREAMING_READ_MAX_RETRIES": 2,
    }.items():
        monkeypatch.setattr(datasets.config, name, value)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "home" / "hub"))
    huggingface_hub = pytest.importorskip("huggingface_hub")
    huggingface_hub.HfFileSystem.clear_instance_cache()


def encoded(rows: list[dict[str, Any]], format: str) -> bytes:
    if format == "jsonl":
        return "".join(json.dumps(row) + "\n" for row in rows).encode()
    file = io.BytesIO()
    datasets.Dataset.from_list(rows).to_parquet(file)
    return file.getvalue()


def shards(rows: list[dict[str, Any]], format: str = "jsonl", split: str = "train") -> dict[str, bytes]:
    return {
        f"data/{split}-{place:05d}-of-{SHARDS:05d}.{format}": encoded(rows[place * PER_SHARD :][:PER_SHARD], format)
        for place in range(SHARDS)
    }


def publish(hub: FakeHub, files: dict[str, bytes], name: str = NAME) -> str:
    """Put the files of a data set on the hub; return the commit."""
    return hub.repositories.setdefault(f"datasets/{name}", Repository("public")).commit(files)


def section(**changes: Any) -> DataSection:
    return DataSection(**{"train": "t", "heldout": "h", "max_length": 16, "streaming": True, **changes})


def loaded(name: str = NAME, **changes: Any) -> Dataset:
    return load_dataset(name, section(**changes), tiny_tokenizer())


def fetched(hub: FakeHub) -> set[str]:
    """Return the shards whose content was requested."""
    return {path.rsplit("/", 1)[1] for path in hub.asked("/resolve/") if path.startswith("GET") and "/data/" in path}


def refused(action: Callable[[], object]) -> str:
    """Return the sentence of an error, after checking that neither it nor its cause shows the token."""
    with pytest.raises(ValueError, match=NAME) as raised:
        action()
    error: BaseException | None = raised.value
    assert "\n" not in str(error)
    while error is not None:
        assert TOKEN not in repr(error)
        error = error.__cause__ or error.__context__
    return str(raised.value)


@pytest.mark.parametrize(("format", "packing"), [("jsonl", True), ("parquet", False)])
def test_the_sequences_are_those_of_a_file_with_the_same_rows_and_no_copy_of_the_set_is_kept(
    hub: FakeHub, tmp_path: Path, format: str, packing: bool
) -> None:
    commit = publish(hub, shards(ROWS, format))
    streamed = loaded(packing=packing)
    assert streamed.commit == commit and f"streamed from commit {commit}" in streamed.describe()
    file = write_rows(tmp_path / "rows.jsonl", ROWS)
    expected, firsts = reference_examples(file, section(packing=packing), tiny_tokenizer())
    assert plain(streamed.examples) == expected and plain(streamed.firsts) == firsts
    assert streamed.account == load_dataset(file, section(packing=packing), tiny_tokenizer()).account
    assert len(fetched(hub)) == SHARDS
    kept = [path for path in (tmp_path / "home").rglob("*") if path.is_file() and path.stat().st_size]
    assert sorted(path.name for path in kept) == ["SHA256SUMS", "account.json", "sequences.arrow"]


def test_a_named_commit_whose_tokens_are_cached_needs_no_hub(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = publish(hub, shards(ROWS))
    first = loaded()
    seen = tokenized(monkeypatch)
    hub.requests.clear()
    loaded()
    assert not seen and hub.asked("zoe") == [f"GET /api/datasets/{NAME}"], "the commit alone is asked for"
    hub.requests.clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    again = loaded(f"{NAME}@{commit}")
    assert not hub.requests and again.sha256 == first.sha256 and plain(again.examples) == plain(first.examples)


def test_without_the_hub_the_remedy_is_a_named_commit(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(hub, shards(ROWS))
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    told = refused(loaded)
    assert "http://127.0.0.1:9 cannot be reached (ConnectError): check the connection, or pass the commit whose" in told
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    assert "HF_HUB_OFFLINE is set: unset it, or pass the commit whose tokens are cached on this machine" in refused(
        loaded
    )


def test_a_connection_that_breaks_is_tried_again_and_lost_ends_in_one_sentence(
    hub: FakeHub, caplog: pytest.LogCaptureFixture
) -> None:
    files = shards(ROWS)
    commit = publish(hub, files)
    third = f"/datasets/{NAME}/resolve/{commit}/{list(files)[2]}"
    hub.drops[third] = ["content", "answer"]
    whole = loaded(max_rows=119)
    assert whole.account.num_rows == 119, "datasets asks again"
    hub.failures[third] = (503, "busy")
    with caplog.at_level(logging.WARNING):
        told = refused(loaded)
    assert f"the stream of {NAME} broke off after 60 rows: " in told and "503" in told and "first row" in told
    assert TOKEN not in caplog.text
    del hub.failures[third]
    assert loaded().account.num_rows == len(ROWS)


# --- prompts for `headstart regenerate` -------------------------------------------------------------------------------


def test_prompts_by_name_are_streamed_and_a_row_without_one_is_left_out_and_said(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    rows: list[dict[str, Any]] = [{"asked": "one"}, {"asked": ""}, {"other": "x"}, {"asked": "two"}, {"asked": "three"}]
    commit = publish(hub, shards(rows, split="fine"))
    monkeypatch.setitem(PRESETS, "mine", Preset(f"{NAME}::fine", "asked", "mit"))
    said = io.StringIO()
    with scripted_endpoint.serve(lambda request: scripted_endpoint.chat("Yes")) as endpoint:
        given: dict[str, Any] = {"endpoint": [endpoint.address], "model": "tiny", "output": tmp_path / "out.jsonl"}
        summary = run_regenerate(RegenerateOptions(prompts="mine", limit=3, **given), Console(file=said, width=200))
    written = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["row"] for row in written] == [1, 2, 4] and summary.answered == 3
    assert f"mine: {NAME}::fine on the Hub, licence mit" in said.getvalue()
    told = f"left out: rows of {NAME}::fine that are not prompts: 1 (3); the first error"
    assert f"{told}: {NAME}::fine, row 3" in said.getvalue()
    digest = json.loads((tmp_path / "out.jsonl.meta.json").read_text())["settings"]["prompts_sha256"]
    assert digest == stream_prompts(f"{NAME}@{commit}::fine").sha256 != stream_prompts(f"{NAME}::other").sha256


def test_every_set_by_name_is_one_of_the_hubs_with_a_field_and_a_licence() -> None:
    assert PRESETS.keys() == {"perfectblend", "ultrachat", "sharegpt", "magpie", "gsm8k", "codealpaca"}
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "data.md").read_text()
    for name, preset in PRESETS.items():
        assert f"| `{name}` | `{preset.source}` | `{preset.field}` | {preset.licence} |" in page
