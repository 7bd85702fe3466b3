"""Tokens on disk equal the sequences of the readable reference, for any number of processes, and are written once per
machine.
"""

import multiprocessing
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis_profiles import few
from reference_data import Plain, reference_examples
from tiny_training import CHAT_TEMPLATE, WORDS, tiny_tokenizer, write_rows

from trainer.data import dataset, encoding
from trainer.data.batch import Example
from trainer.data.chat import TranscriptEncoder
from trainer.data.dataset import cache_folder, fingerprint, load_dataset
from trainer.data.sources import open_source
from trainer.files.folders import fingerprint_of_all
from trainer.recipe.common import DataSection

UNMARKED = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a separate cache, even for the few rows of a test."""
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dataset, "_FEW_BYTES", -1)
    monkeypatch.setattr(dataset, "_FEW_ROWS", -1)
    monkeypatch.setattr(encoding, "_START", "fork")


def section(**changes: Any) -> DataSection:
    return DataSection(**{"train": "t", "heldout": "h", "max_length": 16, "bad_rows": "skip", **changes})


def rows(count: int, chats: bool) -> list[Any]:
    """Make rows of every format, long and short, some of which are bad."""
    rng = random.Random(count)

    def text(most: int) -> str:
        return " ".join(rng.choices(WORDS[4:], k=rng.randint(1, most)))

    def one() -> Any:
        turns = [text(6) for _ in range(2 * rng.randint(1, 3))]
        kinds: list[Callable[[], Any]] = [
            lambda: {"prompt": text(9), "answer": text(12)},
            lambda: {"question": text(20), "answer": text(3), "truncated": True},
            lambda: {"instruction": text(3), "input": text(2), "output": rng.choice(["", text(4)])},
            lambda: {"text": text(60)},
            lambda: text(30),
            lambda: rng.choice([{"text": 5}, {"wrong": 1}, {"prompt": "a", "answer": 3}]),
        ]
        roles = ("user", "assistant")
        messages = [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]
        if chats:
            kinds += [lambda: {"messages": messages}] * 3
            names = {"user": "human", "assistant": "gpt"}
            said = [{"from": names[each["role"]], "value": each["content"]} for each in messages]
            kinds.append(lambda: {"conversations": said})
        return rng.choice(kinds)()

    return [one() for _ in range(count)]


def plain(examples: Any) -> list[Plain]:
    return [
        Plain(tuple(each.tokens.tolist()), tuple(each.trained.tolist()), each.prompt_length, each.lengths)
        for each in examples
    ]


def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the rows that are encoded from now on."""
    seen: list[str] = []
    encode = TranscriptEncoder.encode
    monkeypatch.setattr(TranscriptEncoder, "encode", lambda self, row: (seen.append(row.where), encode(self, row))[1])
    return seen


KINDS_OF_ROWS = [(CHAT_TEMPLATE, True), (UNMARKED, True), (None, False)]


@pytest.mark.parametrize(("template", "packing"), few(KINDS_OF_ROWS, KINDS_OF_ROWS[:1]))
def test_the_sequences_are_the_references_from_any_cache_and_any_number_of_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, template: str | None, packing: bool
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", rows(400, chats=template is not None))
    asked, tokenizer = section(packing=packing), tiny_tokenizer(template)
    expected, firsts = reference_examples(path, asked, tokenizer)
    assert len(expected) > 200 and any(each.lengths for each in expected) == packing
    written = load_dataset(path, asked, tokenizer)
    read = load_dataset(path, asked, tokenizer)
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "other"))
    shared = load_dataset(path, asked.model_copy(update={"num_proc": 2}), tokenizer)
    monkeypatch.setattr(dataset, "_FEW_BYTES", 1 << 20)
    monkeypatch.setenv("HEADSTART_CACHE", str(tmp_path / "none"))
    kept = load_dataset(path, asked, tokenizer)
    assert not (tmp_path / "none").exists(), "few rows leave no file"
    for each in (written, read, shared, kept):
        assert plain(each.examples) == expected and plain(each.firsts) == firsts
        assert each.account == written.account and each.describe() == written.describe()
        assert list(each.account.formats) == list(written.account.formats), "in the order of the rows"
    assert written.account.tokens == sum(len(each.tokens) for each in expected)
    assert written.account.trained_tokens == sum(sum(each.trained) for each in expected)
    assert written.account.bad_rows and written.account.truncated and written.account.skipped


def test_a_second_start_tokenizes_nothing_and_names_the_same_bad_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [*rows(50, chats=False), *[{"wrong": 1}] * 9])
    first = load_dataset(path, section(), tiny_tokenizer())
    said = list(caplog.messages)
    assert len(said) == 5 and all(message.startswith(f"skipped: {path}, line ") for message in said)
    caplog.clear()
    seen = tokenized(monkeypatch)
    again = load_dataset(path, section(packing=True, num_proc=2, license="mit"), tiny_tokenizer())
    assert not seen and caplog.messages == said
    assert again.account == first.account and again.sha256 == first.sha256


def test_a_cached_file_is_found_again_only_for_what_gives_the_same_sequences(tmp_path: Path) -> None:
    content = rows(20, chats=True)
    path = Path(write_rows(tmp_path / "rows.jsonl", content))
    template = tmp_path / "own.jinja"
    template.write_text(CHAT_TEMPLATE)

    def of(tokenizer: Any = None, **changes: Any) -> str:
        return fingerprint(open_source(str(path), section()), section(**changes), tokenizer or tiny_tokenizer())

    changes_none = {"train", "heldout", "split", "heldout_split", "packing", "num_proc", "source", "license"}
    elsewhere = {"chat_template", "streaming"}  # in the digest of the file, and in the digest of the source
    assert {*dataset._DECIDES} | changes_none | elsewhere == {*DataSection.model_fields}, "a new field: which?"
    base = of()
    assert base == of(packing=True, num_proc=4, license="mit", split="other"), "none of them decides a sequence"
    changed: dict[str, Any] = {
        "max_length": 17,
        "max_rows": 19,
        "bad_rows": "stop",
        "format": "text",
        "text_field": "body",
    }
    changed |= {"prompt_field": "question", "answer_field": "answer", "chat_template_kwargs": {"effort": 1}}
    assert changed.keys() == {*dataset._DECIDES}
    other_words = (*WORDS[:4], *WORDS[5:], WORDS[4])
    found = [
        base,
        *(of(**{name: value}) for name, value in changed.items()),
        of(chat_template=str(template)),
        of(tiny_tokenizer(CHAT_TEMPLATE)),
        of(tiny_tokenizer(words=other_words)),
    ]
    template.write_text(UNMARKED)
    found.append(of(chat_template=str(template)))
    write_rows(path, content[:-1])
    found.append(of())
    assert len(set(found)) == len(found)


def test_a_file_that_is_cut_off_or_damaged_is_named_and_written_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ["a b c d e f g h"] * 300)
    expected = plain(load_dataset(path, section(), tiny_tokenizer()).examples)
    (folder,) = cache_folder().iterdir()
    for name, rest in (("sequences.arrow", True), ("sequences.arrow", False), ("account.json", True)):
        whole = (folder / name).read_bytes()
        middle = len(whole) // 2
        (folder / name).unlink()
        (folder / name).write_bytes(whole[:middle] + (bytes([whole[middle] ^ 1]) + whole[middle + 1 :]) * rest)
        caplog.clear()
        assert plain(load_dataset(path, section(), tiny_tokenizer()).examples) == expected
        assert f"{name} is damaged" in caplog.text and "tokenizing the rows again" in caplog.text
        assert (folder / name).read_bytes() == whole
    caplog.clear()
    load_dataset(path, section(), tiny_tokenizer())
    assert not caplog.text


def _load_in_a_fork(path: str, seen: Path, ready: Any) -> None:
    encode = TranscriptEncoder.encode

    def noted(self: TranscriptEncoder, row: Any) -> Any:
        with seen.open("a") as file:
            file.write(f"{os.getpid()}\n")
        return encode(self, row)

    TranscriptEncoder.encode = noted  # type: ignore[method-assign]
    ready.wait()
    assert len(load_dataset(path, section(), tiny_tokenizer()).examples) == 300


def test_processes_that_start_at_once_tokenize_the_rows_once(tmp_path: Path) -> None:
    path, seen = write_rows(tmp_path / "rows.jsonl", ["a b c d e f g h"] * 300), tmp_path / "seen"
    fork = multiprocessing.get_context("fork")
    ready = fork.Barrier(3)
    processes = [fork.Process(target=_load_in_a_fork, args=(path, seen, ready)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0, 0, 0]
    lines = seen.read_text().splitlines()
    assert len(lines) == 300 and len(set(lines)) == 1


def test_the_digest_changes_with_every_token_mark_document_and_prompt() -> None:
    tokens, mask = (1, 2, 3, 4), (False, True, True, True)
    base = Example(tokens, mask, 1)
    others = [
        Example((1, 2, 3, 9), mask, 1),
        Example(tokens, (False, True, False, True), 1),
        Example(tokens, mask, 2),
        Example(tokens, mask, 1, (1, 3)),
        Example(tokens, mask, 1, (2, 2)),
    ]
    many = [[base], *([other] for other in others), [base, base], [base, others[0]], [others[0], base]]
    assert len({fingerprint_of_all(example.content() for example in examples) for examples in many}) == len(many)
    same = Example(np.array([1, 2, 3, 4]), np.array([0, 1, 1, 1]), 1)
    assert fingerprint_of_all([same.content()]) == fingerprint_of_all([base.content()])
