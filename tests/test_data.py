"""Rows to sequences: what is trained on, what is refused, and in which order it is seen."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_training import CHAT_TEMPLATE, tiny_tokenizer, write_rows

from trainer.data import Example, batch_indices, collate, heldout_prompts, load_dataset
from trainer.recipe import DataSection


def section(**changes: Any) -> DataSection:
    return DataSection(**{"train": "t", "heldout": "h", "max_length": 16, **changes})


def load(tmp_path: Path, rows: list[Any], template: str | None = None, **changes: Any) -> tuple[Example, ...]:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    return load_dataset(path, section(**changes), tiny_tokenizer(template)).examples


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def test_a_conversation_is_trained_on_exactly_the_assistants_tokens(tmp_path: Path) -> None:
    (example,) = load(tmp_path, [chat("a b", "c d", "e", "f")], CHAT_TEMPLATE)
    #                        <user> a  b <asst> c  d <eos> <user> e <asst> f <eos>
    assert example.tokens == (2, 4, 5, 3, 6, 7, 1, 2, 8, 3, 9, 1)
    assert [i for i, trained in enumerate(example.trained) if trained] == [4, 5, 6, 10, 11]
    assert example.prompt_length == 4


def test_prompt_and_answer_are_a_conversation_where_there_is_a_chat_template(tmp_path: Path) -> None:
    rows = [{"question": "a b", "reply": "c"}]
    (example,) = load(tmp_path, rows, CHAT_TEMPLATE, prompt_field="question", answer_field="reply")
    assert example == Example((2, 4, 5, 3, 6, 1), (False,) * 4 + (True,) * 2, 4)


def test_without_a_chat_template_the_answer_and_the_end_of_text_are_trained(tmp_path: Path) -> None:
    (example,) = load(tmp_path, [{"prompt": "a b", "answer": "c d"}])
    assert example == Example((4, 5, 6, 7, 1), (False, False, True, True, True), 2)


def test_a_template_without_generation_marks_is_refused_naming_the_line(tmp_path: Path) -> None:
    unmarked = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: the chat template marks none of the 5 tokens .*put {%"):
        load(tmp_path, [chat("a", "b")], unmarked)


def test_a_template_that_marks_everything_is_refused_naming_the_line(tmp_path: Path) -> None:
    everything = "{% for message in messages %}{% generation %}{{ message['content'] }} {% endgeneration %}{% endfor %}"
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 1: the chat template marks all 3 tokens .*alone"):
        load(tmp_path, [chat("a b", "c")], everything)


def test_the_line_named_is_that_of_the_wrong_row(tmp_path: Path) -> None:
    rows = [chat("a", "b"), chat("a", "b"), chat("a")]
    with pytest.raises(ValueError, match=r"line 3: the chat template marks none of the 2 tokens"):
        load(tmp_path, rows, CHAT_TEMPLATE)


def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"line 1: the tokenizer has no chat template, which 'messages' need"):
        load(tmp_path, [chat("a", "b")])


def test_a_conversation_that_the_template_refuses_is_named_by_its_line(tmp_path: Path) -> None:
    strict = "{% if messages[0]['role'] != 'user' %}{{ raise_exception('a user speaks first') }}{% endif %}"
    wrong = {"messages": [{"role": "assistant", "content": "a"}]}
    with pytest.raises(
        ValueError, match="line 2: the chat template cannot hold this conversation: a user speaks first"
    ):
        load(tmp_path, [chat("a", "b"), wrong], strict + CHAT_TEMPLATE)


def test_a_plain_text_is_trained_on_whole_and_cut_into_pieces(tmp_path: Path) -> None:
    text = " ".join("abcdefghijkl" * 2)  # 24 tokens
    (first, second) = load(tmp_path, [{"text": text}], max_length=16)
    assert first == Example((*range(4, 16), 4, 5, 6, 7), (True,) * 16, 0)
    assert second == Example(tuple(range(8, 16)), (True,) * 8, 0)


def test_a_last_scrap_of_a_text_is_left_out(tmp_path: Path) -> None:
    (only,) = load(tmp_path, [{"text": " ".join("abcdefghijkl" + "abcdefghijk")}], max_length=16)
    assert len(only.tokens) == 16  # the 7 tokens left make no sequence


def test_a_bare_string_is_a_text(tmp_path: Path) -> None:
    (example,) = load(tmp_path, ["a b c d e f g h"])
    assert example.tokens == tuple(range(4, 12))


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ({"body": "x", "id": 1}, {}, r"line 2: the row has the fields \['body', 'id'\] but training needs 'messages'"),
        ({"prompt": "a"}, {}, r"line 2: the row has the fields \['prompt'\] but .* 'prompt' with 'answer', or 'text'"),
        ({"prompt": "a"}, {"format": "prompt_answer"}, r"line 2: the row has no field 'answer' \(it has \['prompt'\]"),
        ({"x": 1}, {"format": "text"}, r"line 2: the row has no field 'text' \(it has \['x'\]"),
        ({"text": 5}, {}, "line 2: field 'text' holds int, not text"),
        ({"prompt": "a", "answer": None}, {}, "line 2: field 'answer' holds NoneType, not text"),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_its_line(
    tmp_path: Path, row: Any, changes: dict[str, Any], message: str
) -> None:
    good = {"text": "a b c d e f g h", "prompt": "a", "answer": "b"}
    with pytest.raises(ValueError, match=message):
        load(tmp_path, [good, row], **changes)


def test_a_line_that_is_not_json_is_named_with_blank_lines_counted(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a b c d e f g h"}\n\n{"text": \n')
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 3: not JSON"):
        load_dataset(str(path), section(), tiny_tokenizer())


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no data file .*none\.jsonl"):
        load_dataset(str(tmp_path / "none.jsonl"), section(), tiny_tokenizer())


def test_a_long_answer_is_cut_and_counted_and_one_wholly_behind_the_cut_is_dropped(tmp_path: Path) -> None:
    short = {"prompt": "a", "answer": "b c"}
    cut = {"prompt": "a b c d", "answer": "e f g h i j"}  # 4 + 6 + <eos>, cut to 8
    behind = {"prompt": "a b c d e f g h", "answer": "i"}
    path = write_rows(tmp_path / "rows.jsonl", [short, cut, behind])
    dataset = load_dataset(path, section(max_length=8), tiny_tokenizer())
    assert (dataset.rows, dataset.truncated, len(dataset.examples)) == (3, 2, 2)
    assert dataset.examples[1] == Example((4, 5, 6, 7, 8, 9, 10, 11), (False,) * 4 + (True,) * 4, 4)


def test_a_file_in_which_nothing_is_left_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl holds nothing to train on"):
        load(tmp_path, [{"prompt": "a b c d e f g h", "answer": "i"}], max_length=8)
    with pytest.raises(ValueError, match=r"rows\.jsonl holds nothing to train on"):
        load(tmp_path, [])


def test_only_max_rows_are_read(tmp_path: Path) -> None:
    rows = [{"text": "a b c d e f g h"}] * 5 + [{"wrong": 1}]
    assert len(load(tmp_path, rows, max_rows=5)) == 5


def test_a_dataset_says_what_it_was_read_from(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", ["a b c d e f g h"])
    dataset = load_dataset(path, section(), tiny_tokenizer())
    assert dataset.path == path and dataset.rows == 1
    again = load_dataset(path, section(max_length=8), tiny_tokenizer())
    assert again.sha256 == dataset.sha256 and len(dataset.sha256) == 64
    write_rows(tmp_path / "rows.jsonl", ["a b c d e f g h i"])
    assert load_dataset(path, section(), tiny_tokenizer()).sha256 != dataset.sha256


def test_padding_is_neither_seen_nor_trained() -> None:
    batch = collate([Example((5, 6, 7), (False, True, True), 1), Example((8,), (True,), 0)])
    assert batch.tokens.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.trained.tolist() == [[False, True, True], [True, False, False]]


@pytest.mark.parametrize(("batch_size", "size"), [(4, 10), (3, 3), (1, 5), (8, 3)])
def test_every_epoch_visits_every_example_once(batch_size: int, size: int) -> None:
    epochs = batch_size  # so many epochs are a whole number of steps: size * batch_size / batch_size
    visited = [i for step in range(size) for i in batch_indices(step, batch_size, size, seed=3)]
    for epoch in range(epochs):
        assert Counter(visited[epoch * size : (epoch + 1) * size]) == Counter(range(size))


@pytest.mark.parametrize("size", [5, 7, 24])
def test_the_order_does_not_depend_on_how_it_is_cut_into_steps(size: int) -> None:
    whole = batch_indices(0, 24, size, seed=1)
    for batch_size in (1, 2, 3, 4, 6, 8, 12):
        cut = [i for step in range(24 // batch_size) for i in batch_indices(step, batch_size, size, seed=1)]
        assert cut == whole


def test_the_order_is_a_function_of_seed_and_step_alone() -> None:
    expected = batch_indices(7, 4, 100, seed=0)
    torch.manual_seed(123)
    assert batch_indices(7, 4, 100, seed=0) == expected
    assert batch_indices(7, 4, 100, seed=1) != expected
    first_epoch, second_epoch = batch_indices(0, 100, 100, seed=0), batch_indices(1, 100, 100, seed=0)
    assert first_epoch != second_epoch


def test_a_heldout_prompt_is_what_stands_before_the_answer_or_the_first_tokens() -> None:
    examples = [
        Example((1, 2, 3, 4), (False, False, True, True), 2),
        Example((5, 6, 7, 8), (True,) * 4, 0),
        Example((9, 10), (True,) * 2, 0),
        Example((11, 12, 13), (True,) * 3, 0),
    ]
    assert heldout_prompts(examples, 3, prompt_tokens=3, longest=100) == [(1, 2), (5, 6, 7), (9,)]


def test_a_heldout_prompt_too_long_for_the_context_is_passed_over() -> None:
    examples = [Example((1, 2, 3, 4), (False, False, False, True), 3), Example((5, 6), (False, True), 1)]
    assert heldout_prompts(examples, 2, prompt_tokens=8, longest=2) == [(5,)]
    with pytest.raises(ValueError, match="no held-out prompt has at most 0 tokens: give shorter prompts or fewer new"):
        heldout_prompts(examples, 2, prompt_tokens=8, longest=0)
