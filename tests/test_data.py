"""From rows to sequences: what is trained, what is rejected, and what is counted."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import byte_level, sentencepiece_like
from tiny_training import CHAT_TEMPLATE, WORDS, tiny_tokenizer, write_rows

from decoding.errors import UserError
from trainer.data.batch import Example, collate
from trainer.data.dataset import Dataset, heldout_prompts, load_dataset, load_heldout_data
from trainer.recipe.common import DataSection


def section(**changes: Any) -> DataSection:
    return DataSection(**{"train": "t", "heldout": "h", "max_length": 16, **changes})


def load(tmp_path: Path, rows: list[Any], template: str | None = None, **changes: Any) -> Sequence[Example]:
    return load_all(tmp_path, rows, template, **changes).examples


def load_all(tmp_path: Path, rows: list[Any], template: str | None = None, **changes: Any) -> Dataset:
    path = write_rows(tmp_path / "rows.jsonl", rows)
    return load_dataset(path, section(**changes), tiny_tokenizer(template))


def chat(*contents: str) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]}


def test_a_conversation_is_trained_on_exactly_the_assistants_tokens(tmp_path: Path) -> None:
    (example,) = load(tmp_path, [chat("a b", "c d", "e", "f")], CHAT_TEMPLATE)
    #                        <user> a  b <asst> c  d <eos> <user> e <asst> f <eos>
    assert example.tokens.tolist() == [2, 4, 5, 3, 6, 7, 1, 2, 8, 3, 9, 1]
    assert [i for i, trained in enumerate(example.trained) if trained] == [4, 5, 6, 10, 11]
    assert example.prompt_length == 4


def test_prompt_and_answer_are_a_conversation_where_there_is_a_chat_template(tmp_path: Path) -> None:
    rows = [{"question": "a b", "reply": "c"}]
    (example,) = load(tmp_path, rows, CHAT_TEMPLATE, prompt_field="question", answer_field="reply")
    assert example == Example((2, 4, 5, 3, 6, 1), (False,) * 4 + (True,) * 2, 4)


def test_without_a_chat_template_the_answer_and_the_end_of_text_are_trained(tmp_path: Path) -> None:
    (example,) = load(tmp_path, [{"prompt": "a b", "answer": "c d"}])
    assert example == Example((4, 5, 6, 7, 1), (False, False, True, True, True), 2)


def test_an_answer_ends_in_a_token_that_ends_it_in_decoding(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a", "answer": "b"}])
    for ends, last in (((), 1), ((3, 1), 1), ((3, 2), 3)):
        dataset = load_dataset(path, section(), tiny_tokenizer(), ends)
        assert dataset.examples[0] == Example((4, 5, last), (False, True, True), 1), ends


@pytest.mark.parametrize("answer", [" a b", "a b", "\n b", "  a"])
@pytest.mark.parametrize("made", [byte_level, lambda: sentencepiece_like([("▁", "a")])], ids=["bytes", "sentencepiece"])
def test_prompt_and_answer_are_tokenized_as_one_text(tmp_path: Path, made: Any, answer: str) -> None:
    """sentencepiece begins each text with a space; an answer that begins with a space must not get a second one."""
    tokenizer = made()
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "c b", "answer": answer}])
    (example,) = load_dataset(path, section(), tokenizer).examples
    assert example.tokens.tolist() == [*tokenizer("c b" + answer)["input_ids"], tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("row", "fields"),
    [
        ({"question": "a b", "answer": "c"}, "question with answer"),
        ({"instruction": "a b", "input": "", "output": "c"}, "instruction with output"),
        ({"instruction": "a", "instances": [{"input": "b", "output": "c"}], "id": "1"}, "instruction with instances"),
        ({"prompt": "a b", "completion": "c", "test": "d"}, "prompt with completion"),
        ({"text": "a b", "code": "c", "task_id": 1}, "text with code"),
    ],
)
def test_the_usual_fields_of_prompts_and_answers_are_found_by_their_names(
    tmp_path: Path, row: dict[str, Any], fields: str
) -> None:
    dataset = load_all(tmp_path, [row], CHAT_TEMPLATE)
    assert list(dataset.examples) == [Example((2, 4, 5, 3, 6, 1), (False,) * 4 + (True,) * 2, 4)]
    assert dataset.account.fields == {fields: 1} and f"(1 prompt_answer: {fields})" in dataset.describe()


def test_a_template_that_marks_everything_is_refused_naming_the_line(tmp_path: Path) -> None:
    everything = "{% for message in messages %}{% generation %}{{ message['content'] }} {% endgeneration %}{% endfor %}"
    with pytest.raises(
        ValueError, match=r"rows\.jsonl, line 1: the chat template marks all of 3 tokens .*nothing else"
    ):
        load(tmp_path, [chat("a b", "c")], everything)


def test_messages_without_a_chat_template_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1: 'messages' rows need a chat template, which the tokenizer lacks"):
        load(tmp_path, [chat("a", "b")])


def test_a_plain_text_is_trained_on_whole_and_cut_into_pieces(tmp_path: Path) -> None:
    rows = [{"text": " ".join("abcdefghijkl" * 2)}, " ".join("abcdefghijkl" + "abcdefghijk"), "a b c d e f g"]
    dataset = load_all(tmp_path, [*rows, {"wrong": 1}], max_rows=3)
    first, second, third = dataset.examples
    assert first == third == Example((*range(4, 16), 4, 5, 6, 7), (True,) * 16, 0)
    assert second == Example(tuple(range(8, 16)), (True,) * 8, 0)
    assert list(dataset.firsts) == [first, third] and dataset.account.skipped == 1, "7 tokens make no sequence"


@pytest.mark.parametrize(
    ("row", "changes", "message"),
    [
        ({"body": "x", "id": 1}, {}, r"line 2: the row has the fields \['body', 'id'\], but training needs 'messages'"),
        ({"prompt": "a"}, {}, r"line 2: the row has the fields \['prompt'\], but .* an answer \(answer, .*or 'text'"),
        ({"question": "a", "answer": "b"}, {"prompt_field": "prompt"}, r"\['answer', 'question'\], but .* \(prompt\)"),
        ({"instruction": "a", "instances": []}, {}, "line 2: the instances are .*, not a list of inputs"),
        ({"text": 5}, {}, "line 2: field 'text' contains int, not text"),
        (
            {"q": "a", "a": None},
            {"prompt_field": "q", "answer_field": "a"},
            r"line 2: field 'a' is empty \(null\), not",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named_by_its_line(
    tmp_path: Path, row: Any, changes: dict[str, Any], message: str
) -> None:
    good = {"text": "a b c d e f g h", "prompt": "a", "answer": "b"}
    with pytest.raises(ValueError, match=message) as error:
        load(tmp_path, [{**good, "q": "a", "a": "b"}, row], **changes)
    assert str(error.value).endswith("; set data.bad_rows=skip to skip such rows")


def test_a_file_in_which_nothing_is_left_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rows\.jsonl contains nothing to train on"):
        load(tmp_path, [{"prompt": "a b c d e f g h", "answer": "i"}], max_length=8)
    with pytest.raises(
        ValueError, match=r"contains nothing to train on: .*; the first of 2 bad rows: .*line 1: the row"
    ):
        load(tmp_path, [{"x": 1}, {"y": 1}], bad_rows="skip")


def test_a_prompt_is_never_a_label(tmp_path: Path) -> None:
    """A published trainer never applied its mask, so it also trained on prompts."""
    dataset = load_all(tmp_path, [chat("a b", "c", "d", "e")], CHAT_TEMPLATE)
    batch = collate(dataset.examples)
    labels = [batch.tokens.roll(-ahead, 1)[batch.labelled(ahead)].tolist() for ahead in (1, 2)]
    assert labels == [[6, 1, 8, 1], [6, 1, 8, 1]]  # c <eos> e <eos>, without a, b, d and the user's marks


def test_a_bad_row_stops_the_run_unless_it_is_to_be_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "rows.jsonl"
    good, bad = '{"text": "a b c d e f g h"}\n', '{"text": 1}\n{"text": \n'
    path.write_text(bad + good + bad + bad + good)
    with pytest.raises(ValueError, match="line 1: field 'text' contains int"):
        load_dataset(str(path), section(), tiny_tokenizer())
    assert not caplog.messages
    dataset = load_dataset(str(path), section(bad_rows="skip"), tiny_tokenizer())
    assert (dataset.account.num_rows, dataset.account.bad_rows, len(dataset.examples)) == (8, 6, 2)
    assert [message.split(": ")[:2] for message in caplog.messages] == [
        ["skipped", f"{path}, line {line}"] for line in (1, 2, 4, 5, 6)
    ]


def test_a_template_file_replaces_the_tokenizers_and_is_part_of_the_digest(tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    file.write_text(CHAT_TEMPLATE)
    own = load_all(tmp_path, [chat("a", "b")], None, chat_template=str(file))
    assert list(own.examples) == list(load(tmp_path, [chat("a", "b")], CHAT_TEMPLATE))
    file.write_text(CHAT_TEMPLATE.replace("<user> ", ""))
    other = load_all(tmp_path, [chat("a", "b")], None, chat_template=str(file))
    assert len(other.examples[0].tokens) == len(own.examples[0].tokens) - 1
    assert other.sha256 != own.sha256


def test_a_heldout_prompt_is_what_stands_before_the_answer_or_the_first_tokens() -> None:
    examples = [
        Example((1, 2, 3, 4), (False, False, True, True), 2),
        Example((5, 6, 7, 8), (True,) * 4, 0),
        Example((9, 10), (True,) * 2, 0),
        Example((11, 12, 13), (True,) * 3, 0),
    ]
    assert heldout_prompts(examples, 3, prompt_tokens=3, longest=100) == [(1, 2), (5, 6, 7), (9,)]
    assert heldout_prompts(examples, 3, prompt_tokens=3, longest=2) == [(1, 2), (9,), (11, 12)]
    with pytest.raises(ValueError, match="no held-out prompt has at most 0 tokens: use shorter prompts or fewer new"):
        heldout_prompts(examples, 2, prompt_tokens=8, longest=0)


@pytest.mark.parametrize("template", [None, CHAT_TEMPLATE + "{% if add_generation_prompt %}<assistant> {% endif %}"])
@pytest.mark.parametrize("alone", [{"prompt": "a b"}, {"turns": ["a b", "c"]}, chat("a b")])
def test_heldout_prompts_need_no_answers(tmp_path: Path, alone: dict[str, Any], template: str | None) -> None:
    """Such prompts are decoded like prompts with known answers."""
    path, tokenizer = write_rows(tmp_path / "rows.jsonl", [alone, {"prompt": "c"}]), tiny_tokenizer(template)
    found = load_heldout_data(section(heldout=str(path)), tokenizer)
    answered = load(tmp_path, [{"prompt": "a b", "answer": "d"}, {"prompt": "c", "answer": "d"}], template)
    texts = [heldout_prompts(firsts, 2, prompt_tokens=3, longest=100) for firsts in (found.firsts, answered)]
    assert texts[0] == texts[1] and found.describe().startswith("2 rows (2 prompts)")


def test_heldout_rows_of_which_some_have_answers_are_refused_as_before(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "c", "answer": "d"}])
    with pytest.raises(
        UserError, match=r"data.heldout: .*line 1: the row has the fields \['prompt'\], but training needs"
    ):
        load_heldout_data(section(heldout=str(path)), tiny_tokenizer())


@pytest.mark.parametrize(
    ("given", "truncated", "trained"), [([20], True, [20]), ([20], False, [20, 1]), ([20, 1], False, [20, 1])]
)
def test_answers_that_the_target_wrote_are_trained_by_the_tokens_it_wrote(
    tmp_path: Path, given: list[int], truncated: bool, trained: list[int]
) -> None:
    """Token 20 spells the same as 4 and 5; tokenized again, the text would become 4 and 5.

    Servers may leave out the end.
    """
    words = (*WORDS, "m", "n", "o", "p", "a b")
    tokenizer = tiny_tokenizer(CHAT_TEMPLATE, words)
    row = {
        "messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "a b"}],
        "answer_tokens": [given],
        "truncated": truncated,
    }
    section = DataSection(train="x", heldout="x")
    (example,) = load_dataset(write_rows(tmp_path / "rows.jsonl", [row]), section, tokenizer).examples
    assert example.tokens[example.trained].tolist() == trained
    del row["answer_tokens"], row["truncated"]
    (again,) = load_dataset(write_rows(tmp_path / "rows.jsonl", [row]), section, tokenizer).examples
    assert again.tokens[-3:].tolist() == [4, 5, 1]


def test_recorded_tokens_are_trained_even_if_the_template_rejects_the_conversation(tmp_path: Path) -> None:
    """Llama 3.1's template rejects two calls of tools in one message, which a server may write."""
    row = {
        "messages": [{"role": "user", "content": "c"}, {"role": "assistant", "content": "a"}],
        "prompt_tokens": [[6]],
        "answer_tokens": [[4]],
    }
    tokenizer = tiny_tokenizer("{{ raise_exception('one call only') }}")
    section = DataSection(train="x", heldout="x")
    (example,) = load_dataset(write_rows(tmp_path / "rows.jsonl", [row]), section, tokenizer).examples
    assert example.tokens.tolist() == [6, 4, 1]
