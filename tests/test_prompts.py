"""Prompts from files."""

from pathlib import Path

import pytest
from tiny_tokenizer import byte_tokenizer

from decoding.prompts import encode_prompt, read_prompts
from trainer.answers import read_conversations

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


def test_a_text_with_its_answer_beside_it_is_asked_not_continued(tmp_path: Path) -> None:
    path = written(tmp_path, '{"text": "a", "code": "b"}\n{"text": "a"}\n')
    assert read_prompts(path, byte_tokenizer(CHAT), 2) == [tuple(b"<a>:"), tuple(b"a")]


def test_messages_give_their_first_one(tmp_path: Path) -> None:
    row = '{"messages": [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "c"}]}'
    assert read_prompts(written(tmp_path, row), byte_tokenizer(), 5) == [tuple(b"ab")]


def test_a_named_field_wins_and_a_limit_holds(tmp_path: Path) -> None:
    path = written(
        tmp_path, '{"prompt": "a", "task": "x"}\n\n{"prompt": "b", "task": "y"}\n{"prompt": "c", "task": "z"}\n'
    )
    assert read_prompts(path, byte_tokenizer(), 2, field="task") == [tuple(b"x"), tuple(b"y")]


def test_a_chat_template_is_used_for_questions_but_not_for_texts(tmp_path: Path) -> None:
    path = written(tmp_path, '{"prompt": "a"}\n{"text": "b"}\n')
    assert read_prompts(path, byte_tokenizer(CHAT), 2) == [tuple(b"<a>:"), tuple(b"b")]
    assert encode_prompt("a", byte_tokenizer(CHAT), chat=False) == tuple(b"a")


def test_only_the_first_tokens_of_a_text_are_taken_if_asked(tmp_path: Path) -> None:
    assert read_prompts(written(tmp_path, '{"text": "abcdef"}'), byte_tokenizer(), 1, prompt_tokens=3) == [
        tuple(b"abc")
    ]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        ('{"prompt": "a"}\n{"story": "b"}\n', "line 2: the row lacks a field of prompt"),
        ('{"prompt": "a"}\n{"prompt": \n', "line 2: not JSON"),
        ('{"prompt": 3}\n', "line 1: the prompt is int, not text"),
        ("", "holds no prompts"),
    ],
)
def test_a_bad_row_is_named_by_its_line(tmp_path: Path, content: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        read_prompts(written(tmp_path, content), byte_tokenizer(), 5)


def test_messages_up_to_the_first_answer_go_through_the_template_whole(tmp_path: Path) -> None:
    row = (
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}, '
        '{"role": "assistant", "content": "a"}, {"role": "user", "content": "v"}]}'
    )
    assert read_prompts(written(tmp_path, row), byte_tokenizer(CHAT), 1) == [tuple(b"<s><u>:")]


def test_a_text_goes_through_the_template_if_its_field_is_named(tmp_path: Path) -> None:
    assert read_prompts(written(tmp_path, '{"text": "b"}'), byte_tokenizer(CHAT), 1, field="text") == [tuple(b"<b>:")]


@pytest.mark.parametrize("messages", ["5", "null", "[]", '[{"role": "user"}]', '[{"role": "user", "content": 3}]'])
def test_malformed_messages_are_named_by_their_line(tmp_path: Path, messages: str) -> None:
    with pytest.raises(ValueError, match="line 1: "):
        read_prompts(written(tmp_path, '{"messages": ' + messages + "}"), byte_tokenizer(CHAT), 1)
