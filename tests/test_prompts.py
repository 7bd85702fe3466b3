"""Prompts from files."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from tiny_tokenizer import byte_tokenizer
from tiny_training import tiny_tokenizer

from decoding.fields import ANSWER_FIELDS, PROMPT_FIELDS, find_answer, prompt_of
from decoding.jsonl import read_lines, read_rows
from decoding.measure.questions import read_prompts
from decoding.prompts import encode_prompt
from trainer.data.conversations import check_prompts, read_conversations

CHAT = "{% for m in messages %}<{{ m['content'] }}>{% endfor %}{% if add_generation_prompt %}:{% endif %}"


def written(folder: Path, text: str) -> Path:
    path = folder / "prompts.jsonl"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    "row", ['{"prompt": "ab"}', '{"question": "ab", "answer": "c"}', '{"turns": ["ab", "c"]}', '{"text": "ab"}', '"ab"']
)
def test_the_prompt_is_found_by_its_fields_name(tmp_path: Path, row: str) -> None:
    assert read_prompts(written(tmp_path, row), byte_tokenizer(), 5) == [tuple(b"ab")]


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ('{"instruction": "ab", "input": "c d", "output": "e"}', b"ab\n\nc d"),
        ('{"instruction": "ab", "input": "", "output": "e"}', b"ab"),
        ('{"instruction": "ab", "instances": [{"input": "c", "output": "e"}]}', b"ab\n\nc"),
    ],
)
def test_what_an_instruction_is_about_stands_behind_it(tmp_path: Path, row: str, prompt: bytes) -> None:
    path = written(tmp_path, row)
    assert read_prompts(path, byte_tokenizer(), 5) == [tuple(prompt)]
    assert read_prompts(path, byte_tokenizer(), 5, field="instruction") == [tuple(prompt)]
    (conversation,) = read_conversations(path, None, None, 1, chat=True)
    assert conversation.text == prompt.decode()


def test_a_chat_template_is_used_for_questions_but_not_for_texts(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "a"}\n{"text": "b"}\n')
    assert read_prompts(path, byte_tokenizer(CHAT), 2) == [tuple(b"<a>:"), tuple(b"b")]
    assert read_prompts(written(tmp_path, '{"text": "b"}'), byte_tokenizer(CHAT), 1, field="text") == [tuple(b"<b>:")]
    assert encode_prompt("a", byte_tokenizer(CHAT), chat=False) == tuple(b"a")
    answered = written(tmp_path, '{"text": "a", "code": "b", "task_id": 1}')
    assert read_prompts(answered, byte_tokenizer(CHAT), 1) == [tuple(b"<a>:")], "it is asked, not continued"
    roles = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    messages = written(tmp_path, json.dumps({"messages": roles}))
    assert read_prompts(messages, byte_tokenizer(CHAT), 1) == [tuple(b"<s><u>:")], "up to the first answer"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"prompt": "a"}\n{"story": "b"}\n', "line 2: the row lacks one of the fields prompt"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ('{"prompt": 3}\n', "line 1: field 'prompt' contains int, not text or messages"),
        ("", "contains no prompts"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, content: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_prompts(written(tmp_path, content), byte_tokenizer(), 5)


def test_a_bad_row_of_a_parquet_file_is_called_a_row(tmp_path: Path) -> None:
    pyarrow.parquet.write_table(pyarrow.table({"prompt": [3]}), path := tmp_path / "rows.parquet")
    for read in (lambda: read_prompts(path, byte_tokenizer(), 5), lambda: check_prompts(path, None, None)):
        with pytest.raises(ValueError, match=r"rows\.parquet, row 1: field 'prompt' .*: correct or omit the row$"):
            read()


@pytest.mark.parametrize(
    ("row", "prompt", "answer"),
    [
        ({"instruction": "Sum up.", "context": "Once.", "response": "x"}, "Sum up.\n\nOnce.", "response"),
        ({"problem": "1+1", "solution": "2"}, "1+1", "solution"),
        ({"prompt": None, "question": "q", "answer": None, "output": "r"}, "q", "output"),
        ({"text": "a long text", "code": "b"}, "a long text", None),
        ({"text": "write f", "code": "def f(): ...", "task_id": 3}, "write f", "code"),
        ({"text": "q", "response": "r"}, "q", "response"),
    ],
)
def test_what_is_noted_beside_a_text_does_not_make_it_a_prompt(
    row: dict[str, Any], prompt: str, answer: str | None
) -> None:
    (message,) = prompt_of(row, None, "here").messages
    assert message == {"role": "user", "content": prompt} and find_answer(row) == answer


def test_rows_in_another_container_are_refused_with_the_one_that_is_read(tmp_path: Path) -> None:
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match=r"rows\.parquet is Parquet, but rows are copied from \.jsonl files only"):
        list(read_lines(tmp_path / "rows.parquet"))
    with pytest.raises(ValueError, match=r"is a folder: use a \.jsonl file, with one JSON object per line"):
        list(read_rows(tmp_path))
    with pytest.raises(ValueError, match=r"rows\.parquet is not a readable Parquet file"):
        read_prompts(tmp_path / "rows.parquet", tiny_tokenizer(), 5)
    for name, message in (
        ("rows.csv", r"rows\.csv is a text table, not a \.jsonl file"),
        ("rows.txt", r"line 1: not JSON \(.*\): a \.jsonl file has one JSON object per line"),
    ):
        (tmp_path / name).write_text("question,answer\n")
        with pytest.raises(ValueError, match=message):
            read_prompts(tmp_path / name, tiny_tokenizer(), 5)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_file_in_another_encoding_is_named_with_the_remedy(tmp_path: Path, encoding: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n{"text": "b"}\n', encoding=encoding)
    with pytest.raises(ValueError, match=rf"rows\.jsonl is {encoding.upper()} .*save it as UTF-8"):
        list(read_rows(tmp_path / "rows.jsonl"))


def test_a_prompt_that_is_no_text_is_refused() -> None:
    with pytest.raises(ValueError, match=r"the prompt is not UTF-8 text \(surrogates not allowed\)"):
        encode_prompt("caf\udce9", tiny_tokenizer(), chat=False)


def test_the_page_on_data_names_the_fields_in_the_order_in_which_they_are_looked_for() -> None:
    page = (Path(__file__).resolve().parents[1] / "docs" / "how-to" / "data.md").read_text()
    for kind, fields in (("prompt", PROMPT_FIELDS), ("answer", ANSWER_FIELDS)):
        assert f"| {kind} | {', '.join(f'`{name}`' for name in fields)}" in page
