"""Rows in the formats of other tools: every column and field is read with its original meaning, or reported."""

import io
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from test_chat import FUNCTION, MARKED, SHOWN, load, text
from test_questions import text as spelled
from test_questions import user
from tiny_models import counting_model
from tiny_tokenizer import TOOL_TEMPLATE, byte_tokenizer
from tiny_training import write_rows

from decoding.fields import prompt_of
from decoding.measure.questions import Asker, read_prompts, read_questions
from trainer.commands.evaluate import chosen_questions
from trainer.commands.inspection import marked_text, run_inspect
from trainer.commands.options import EvaluateOptions, InspectOptions, RegenerateOptions
from trainer.commands.regenerate import run_regenerate
from trainer.data.batch import Example
from trainer.data.conversations import RowNotes, check_prompts, read_conversations
from trainer.data.dataset import load_heldout_data
from trainer.processes import Process
from trainer.recipe.common import DataSection
from trainer.terminal.console import standard_output

BARE = "{% for m in messages if m.role != 'system' %}{{ m.role }}:{{ m.content }};{% endfor %}"
BARE += "{% if add_generation_prompt %}assistant:{% endif %}"
ASKED = {"role": "user", "content": "Hi"}
YES, NO = ({"role": "assistant", "content": content} for content in ("Yes", "No"))
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
CALL = '{"name": "f", "arguments": {"x": 1}}'
OBJECT, RESULT = {"name": "f", "arguments": {"x": 1}}, {"role": "tool", "tool_call_id": "1", "content": "9"}
CALLED = [ASKED, {"role": "function", "name": "f", "content": "9"}, YES]
CALLING = {"role": "assistant", "content": None, "function_call": {"name": "f", "arguments": '{"x": 1}'}}


def shown(example: Example) -> str:
    """Return the text of a sequence, with brackets around the trained tokens."""
    return str(marked_text(example, byte_tokenizer(), colour=False))


GREETED = "the assistant's greeting before the first question"
SYSTEM = "system:S;user:Hi;assistant:⟦Yes;⟧"
HISTORY = "user:A;assistant:⟦B;⟧user:Hi;assistant:⟦Yes;⟧"
ABOUT = "user:Hi\n\nC;assistant:⟦Yes;⟧"
PLAIN = "user:Hi;assistant:⟦Yes;⟧"
SECOND = "user:Hi;assistant:No;user:Hi;assistant:⟦Yes;⟧"
CALLS = 'user:Hi;assistant:⟦!f{"x": 1};⟧tool:9;assistant:⟦Yes;⟧'


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, MARKED], ids=["compared", "marked"])
@pytest.mark.parametrize(
    ("row", "read"),
    [
        ({"system": "S", "messages": [ASKED, YES]}, SYSTEM),
        ({"system": "S", "conversations": SHAREGPT}, SYSTEM),
        ({"system_prompt": "S", "question": "Hi", "response": "Yes"}, SYSTEM),
        ({"messages": [{"role": "developer", "content": "S"}, ASKED, YES], "system": "S"}, SYSTEM),
        ({"instruction": "Hi", "input": "", "output": "Yes", "history": [["A", "B"]]}, HISTORY),
        ({"system": "S", "messages": [ASKED, YES], "history": [["A", "B"]]}, f"system:S;{HISTORY}"),
        ({"conversations": SHAREGPT, "history": [user("A")[0], {"role": "assistant", "content": "B"}]}, HISTORY),
        ({"question": "Hi", "context": "C", "answer": "Yes"}, ABOUT),
        ({"prompt": "Hi", "input": "C", "completion": "Yes"}, ABOUT),
        ({"instruction": "", "input": "Hi", "output": "Yes"}, PLAIN),
        ({"prompt": [ASKED], "completion": [YES]}, PLAIN),
        ({"prompt": [ASKED], "completion": "Yes"}, PLAIN),
        ({"prompt": "Hi", "completion": [YES]}, PLAIN),
        ({"prompt": [ASKED, NO, ASKED], "completion": [YES]}, SECOND),
        ({"input": [ASKED], "output": "Yes", "system_prompt": "S", "category": "chat"}, SYSTEM),
        ({"prompt": "Hi", "chosen": "Yes", "rejected": "No"}, PLAIN),
        ({"prompt": [ASKED], "chosen": [YES], "rejected": [NO]}, PLAIN),
        ({"chosen": [ASKED, YES], "rejected": [ASKED, NO]}, PLAIN),
        ({"prompt": "Hi", **{name: [ASKED, YES] for name in ("messages", "chosen")}, "rejected": [ASKED, NO]}, PLAIN),
        ({"prompt": "Hi", "chosen": [ASKED, NO, ASKED, YES], "rejected": [ASKED, NO, ASKED, NO]}, SECOND),
        ({"conversations": SHAREGPT[:1], "chosen": SHAREGPT[1], "rejected": {"from": "gpt", "value": "No"}}, PLAIN),
        ({"messages": [{"from": "Human", "value": "Hi"}, {"from": "model", "value": "Yes"}]}, PLAIN),
        ({"messages": [ASKED, {"role": "gpt", "content": "Yes", "tool_calls": [], "refusal": None}]}, PLAIN),
        ({"messages": [ASKED, {"role": "assistant", "content": None, "refusal": "Yes"}]}, PLAIN),
        ({"messages": [ASKED, {"role": "assistant", "content": "", "refusal": "Yes"}]}, PLAIN),
        ({"messages": [ASKED, NO | {"weight": 0}, ASKED, YES | {"weight": 1}]}, SECOND),
        ({"messages": [ASKED, NO | {"loss_mask": 0}, ASKED, YES], "parallel_tool_calls": False}, SECOND),
        ({"messages": [ASKED, NO | {"train": False}, ASKED, YES | {"loss": True}]}, SECOND),
        ({"conversations": [*SHAREGPT[:1], NO | {"loss_weight": 0.0}, *SHAREGPT]}, SECOND),
        ({"messages": [ASKED, {"role": "assistant", "content": ""}, ASKED, YES]}, SECOND.replace("No", "")),
        ({"messages": [ASKED, CALLING, *CALLED[1:]]}, CALLS),
        ({"messages": [ASKED, CALLING, *CALLED[1:]], "functions": [FUNCTION]}, f"{SHOWN}{CALLS}"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": OBJECT}]}, *CALLED[1:]]}, CALLS),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": [{"function": OBJECT}]}, RESULT, YES]}, CALLS),
        ({"conversations": [ASKED, {"from": "function_call", "value": CALL}, *CALLED[1:]]}, CALLS),
        ({"messages": [ASKED, {"role": "tool-call", "content": f"[{CALL}]"}, *CALLED[1:]]}, CALLS),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": f"[{CALL}]"}, *CALLED[1:]]}, CALLS),
    ],
)
def test_rows_are_read_as_their_origin_means_them(
    tmp_path: Path, row: dict[str, Any], read: str, template: str, caplog: pytest.LogCaptureFixture
) -> None:
    (example,) = load(tmp_path, row, template=template).examples
    assert shown(example) == read and not caplog.messages


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, MARKED], ids=["compared", "marked"])
def test_a_greeting_before_the_first_question_is_left_out_and_reported(
    tmp_path: Path, template: str, caplog: pytest.LogCaptureFixture
) -> None:
    rows: list[Any] = [{"messages": [NO, ASKED, YES]}, {"prompt": [NO, ASKED], "completion": [YES]}]
    rows += [{"prompt": "Hi", "chosen": [NO, ASKED, YES]}, {"conversations": [NO, *SHAREGPT], "system": "S"}]
    examples = load(tmp_path, *rows, template=template).examples
    (message,) = caplog.messages
    assert [*map(shown, examples)] == [PLAIN, PLAIN, PLAIN, SYSTEM] and f"not read: {GREETED} (4 rows);" in message
    calls = prompt_of({"messages": [CALLING, RESULT, ASKED, YES]}, None, "here")
    assert (len(calls.messages), calls.unread) == (4, ()), "a call is no greeting"


def test_every_reader_of_prompts_counts_the_greetings_that_it_leaves_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"messages": [NO, ASKED, YES]}] * 2 + [{"prompt": "Hi"}])
    chosen_questions(
        read_questions(path), EvaluateOptions(prompts=str(path), output=tmp_path), Process(0, 1, Console(quiet=True))
    )
    read_prompts(path, byte_tokenizer(TOOL_TEMPLATE), 3)  # verify and plan
    check_prompts(path, None, 3)  # diagnose and realign
    held = write_rows(tmp_path / "held.jsonl", [{"prompt": [NO, ASKED]}] * 2)
    section = DataSection(train=str(path), heldout=str(held), max_length=512)
    load_heldout_data(section, byte_tokenizer(TOOL_TEMPLATE))
    sentence = f"{path} has content that is not read: {GREETED} (2 rows); docs/how-to/data.md says what is read"
    assert caplog.messages == [sentence] * 3 + [sentence.replace(str(path), str(held))]


def test_bad_rows_of_a_stream_are_counted_and_only_the_first_errors_are_kept() -> None:
    notes, rows = RowNotes(), [*[dict[str, Any](prompt=1)] * 99, {"prompt": "Hi"}]
    found = [*read_conversations("stream", None, None, 1, chat=True, stream=rows, notes=notes)]
    assert (len(found), notes.bad, [*notes.errors]) == (1, 99, [*range(1, 21)])


def test_an_answer_that_is_not_to_be_trained_gives_no_sequence_of_its_own(tmp_path: Path) -> None:
    """A template that writes the last answer differently gives one sequence for each answer."""
    for template in (TOOL_TEMPLATE, MARKED):
        shifting = template.replace("{{ m.content }}{% for", "{{ m.content }}{{ '!' if loop.last }}{% for")
        row = {"messages": [ASKED, NO | {"weight": 0}, ASKED, YES]}
        (example,) = load(tmp_path, row, template=shifting).examples
        assert shown(example) == "user:Hi;assistant:No;user:Hi;assistant:⟦Yes!;⟧"


@pytest.mark.parametrize("flags", [{"label": False}, {"kto_tag": False}])
def test_bad_answers_and_empty_ones_leave_a_row_out(tmp_path: Path, flags: dict[str, Any]) -> None:
    good, bad = {"prompt": "Hi", "completion": "Yes"}, {"prompt": "Hi", "completion": "No", **flags}
    dataset = load(tmp_path, good, bad, {"messages": [ASKED, {"role": "assistant", "content": " "}]}, bad | {"x": 1})
    assert [text(each) for each in dataset.examples] == ["user:Hi;assistant:Yes;"] and dataset.account.skipped == 3


def test_without_a_template_an_empty_answer_is_left_out_although_its_history_has_answers(tmp_path: Path) -> None:
    rows = ({"prompt": "Hi", "completion": each, "history": [["A", "B"]]} for each in ("Yes", ""))
    dataset = load(tmp_path, *rows, template=None)
    assert [text(each) for each in dataset.examples] == ["A\nB\nHiYes\0"] and dataset.account.skipped == 1


@pytest.mark.parametrize("written", [TOOL_TEMPLATE, MARKED], ids=["compared", "marked"])
@pytest.mark.parametrize("own", ["reasoning_content", "thinking"])
@pytest.mark.parametrize(
    "given", [{"thinking": "Hm"}, {"reasoning": "Hm"}, {"reasoning_content": "", "thinking": "Hm"}, "both"], ids=str
)
def test_reasoning_reaches_a_template_whatever_its_name(
    tmp_path: Path, given: Any, own: str, written: str, caplog: pytest.LogCaptureFixture
) -> None:
    fields = {"thinking": "Hm", "reasoning_content": "Hm"} if given == "both" else given
    template = written.replace("reasoning_content", own)
    alone, answered = {"role": "assistant", "content": None, **fields}, {**YES, **fields}
    for truncated, end in ((False, "</think>Yes;⟧"), (True, "</think>Yes⟧;")):
        row = {"messages": [ASKED, alone, ASKED, answered], "truncated": truncated}
        (example,) = load(tmp_path, row, template=template).examples
        assert shown(example).endswith(f"⟦<think>Hm</think>;⟧user:Hi;assistant:⟦<think>Hm{end}")
    (cut,) = load(tmp_path, {"messages": [ASKED, alone], "truncated": True}, template=template).examples
    assert shown(cut) == "user:Hi;assistant:⟦<think>Hm⟧</think>;" and not caplog.messages


@pytest.mark.parametrize(
    ("template", "read"),
    [(TOOL_TEMPLATE, "⟦<think>Hm⟧</think>;"), (MARKED, "⟦<think>Hm⟧</think>;"), (BARE, "⟦<think>Hm⟧;")],
    ids=["compared", "marked", "bare"],
)
def test_no_end_is_trained_of_thinking_that_was_cut_off_in_the_text(tmp_path: Path, template: str, read: str) -> None:
    """As in Qwen3, these templates write an empty thinking section before a text whose thinking does not end."""
    closing = template.replace(
        "{{ m.content }}{% for", "{{ m.content if m.reasoning_content else '<></>' ~ m.content }}{% for"
    )
    row = {"messages": [ASKED, {"role": "assistant", "content": "<think>Hm"}], "truncated": True}
    (example,) = load(tmp_path, row, template=closing).examples
    assert shown(example) == f"user:Hi;assistant:{read}"


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (CALLING, "tool_calls"),
        ({"role": "function_call", "content": CALL}, "tool_calls"),
        ({"role": "assistant", "content": None, "thinking": "Hm"}, "reasoning_content"),
    ],
)
def test_what_a_template_ignores_is_told_and_leaves_no_empty_answer_to_train(
    tmp_path: Path, message: dict[str, Any], field: str, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"messages": [ASKED, message, ASKED, {**YES, "audio": "base64", "source_id": "1"}], "system": "S"}
    example, _ = load(tmp_path, row, row | {"tools": [FUNCTION]}, template=BARE).examples
    assert shown(example) == "user:Hi;assistant:;user:Hi;assistant:⟦Yes;⟧"
    told = {each.split(", which")[0] for each in caplog.messages}
    assert told == {"1 rows have tools", *(f"2 rows have {each}" for each in ("audio", "system messages", field))}
    assert len(told) == len(caplog.messages) and all("data.chat_template" in each for each in caplog.messages)


@pytest.mark.parametrize(
    ("message", "complaint"),
    [
        ({"role": "critic", "content": "No"}, "line 1: a message is from 'critic': use one of user, human"),
        ({"from": "critic", "value": "No"}, "line 1: a message is from 'critic': use one of user, human"),
        ({**NO, "weight": 0.5}, "line 1: a message has 0.5 as its weight: use 0 or 1"),
        ({**NO, "thinking": "a", "reasoning": "b"}, "line 1: a message has two different reasoning texts"),
        ({"role": "assistant", "content": None, "tool_calls": []}, "line 1: a message is .*text: omit the row"),
    ],
)
def test_messages_that_cannot_be_read_are_refused_by_their_line(tmp_path: Path, message: Any, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        load(tmp_path, {"messages": [ASKED, message]})


def test_several_turns_with_one_answer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="line 1: field 'turns' has 2 turns, but 'answer' answers only one"):
        load(tmp_path, {"turns": ["Hi", "Hi"], "answer": "Yes"})


def test_calls_that_are_empty_are_none(tmp_path: Path) -> None:
    """Under this template a field without calls would hide the answer."""
    template = MARKED.replace("{{ m.content }}{% for", "{% if 'tool_calls' not in m %}{{ m.content }}{% endif %}{% for")
    nothing: tuple[Any, ...] = ([], None)
    for empty in nothing:
        (example,) = load(tmp_path, {"messages": [ASKED, {**YES, "tool_calls": empty}]}, template=template).examples
        assert shown(example) == PLAIN


LEFT: list[dict[str, Any]] = [
    {"prompt": "Hi", "answer": "Yes", "notes": "n", "hint": ["h"], "source": "s", "task_id": 1, "weight": 0},
    {"messages": [ASKED, YES], "prompt": "Hi", "notes": "m", "hint": "", "solution": "x", "history": "A: B"},
    {"text": "Once upon a time", "system": "S"},
    {"messages": [{"role": "system", "content": "T"}, ASKED, YES], "system": "S"},
]
REPORT = "content that is not read: notes (2 rows) and hint (1 rows) and weight (1 rows)"


def test_columns_that_nobody_reads_are_reported_once_with_their_rows(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    load(tmp_path, *LEFT)
    (message,) = caplog.messages
    more = " and solution (1 rows) and history (1 rows) and system (2 rows)"
    assert message.startswith(f"{tmp_path / 'rows.jsonl'} has {REPORT}{more}; docs/how-to/data.md says")
    byte_tokenizer(TOOL_TEMPLATE).save_pretrained(tmp_path / "target")
    run_inspect(InspectOptions(source=str(tmp_path / "rows.jsonl"), target=str(tmp_path / "target")))
    assert caplog.messages == [message] * 2


def test_regenerate_reports_columns_too_and_the_target_hears_the_system_message(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Answers are written again, so columns about the old answers are not reported."""
    counting_model(128).save_pretrained(tmp_path / "target")
    byte_tokenizer(TOOL_TEMPLATE).save_pretrained(tmp_path / "target")
    output = io.StringIO()
    rows = [LEFT[0], {**LEFT[1], "system": "S"}, {"chosen": [NO, ASKED, YES], "rejected": [ASKED, NO]}]
    path = write_rows(tmp_path / "prompts.jsonl", rows)
    options = RegenerateOptions(
        prompts=path, output=tmp_path / "out.jsonl", target=str(tmp_path / "target"), max_new_tokens=2, temperature=0.0
    )
    run_regenerate(options, standard_output(file=output, width=500))
    (message,) = caplog.messages
    assert f"{REPORT} and" in message and f" and {GREETED} (1 rows);" in message
    assert re.search(r"mean number of tokens per answer +│ +2\.0", output.getvalue())
    assert '{"role": "system", "content": "S"}' in options.output.read_text()


@pytest.mark.parametrize(
    ("row", "turns"),
    [
        ({"system": "S", "conversations": SHAREGPT}, ["SHi"]),
        ({"instruction": "Hi", "output": "Yes", "history": [["A", "B"]], "system": "S"}, ["SA", "Hi"]),
        ({"question": "Hi", "context": "C"}, ["Hi\n\nC"]),
        ({"prompt": [ASKED], "chosen": [YES], "rejected": [NO]}, ["Hi"]),
        ({"chosen": [ASKED, NO, ASKED, YES], "rejected": [ASKED, NO]}, ["Hi", "Hi"]),
        ({"turns": ["A", "Hi"], "system": "S"}, ["SA", "Hi"]),
        ({"messages": [ASKED, ASKED]}, ["Hi", "Hi"]),
        ({"system": "S", "messages": [NO, ASKED, YES]}, ["SHi"]),
    ],
)
def test_prompts_to_answer_are_read_in_the_same_way(tmp_path: Path, row: dict[str, Any], turns: list[str]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [row])
    (found,) = read_conversations(path, None, None, 1, chat=True)
    assert ["".join(message["content"] for message in turn) for turn in found.turns] == turns


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"system": "S", "messages": [ASKED, YES]}, "system:S;user:Hi;"),
        ({"system": "S", "messages": [NO, ASKED, YES]}, "system:S;user:Hi;"),
        ({"history": [NO], "prompt": [ASKED]}, "user:Hi;"),
        ({"instruction": "Hi", "history": [["A", "B"]]}, "user:A;assistant:B;user:Hi;"),
        ({"prompt": [ASKED, NO, ASKED], "completion": [YES]}, "user:Hi;assistant:No;user:Hi;"),
        ({"input": [ASKED], "output": "Yes", "system_prompt": "S"}, "system:S;user:Hi;"),
        ({"chosen": [ASKED, YES], "rejected": [ASKED, NO]}, "user:Hi;"),
    ],
)
def test_an_evaluation_asks_the_whole_prompt(tmp_path: Path, row: dict[str, Any], prompt: str) -> None:
    questions = read_questions(write_rows(tmp_path / "rows.jsonl", [row]))
    assert spelled(Asker(questions, byte_tokenizer(TOOL_TEMPLATE)).prompt(0)) == f"{prompt}assistant:"
