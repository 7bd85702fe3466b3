"""Tools, tool calls and reasoning of rows: what training and a target in this process make of them."""

import json
from pathlib import Path
from typing import Any

import pytest
from test_regenerate import contents, options, regenerate, rows
from tiny_models import counting_model
from tiny_tokenizer import TOOL_TEMPLATE, byte_tokenizer
from tiny_training import CHAT_TEMPLATE, tiny_tokenizer, write_rows
from transformers import PreTrainedTokenizerBase

from trainer.data.batch import Example
from trainer.data.dataset import Dataset, load_dataset
from trainer.recipe.common import DataSection

FUNCTION = {"name": "f", "parameters": {"type": "object"}}
TOOL = {"type": "function", "function": FUNCTION}
SHOWN = f"tools:{json.dumps([TOOL])};"
ASKED = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}]
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"}]
MARKED = TOOL_TEMPLATE.replace("'assistant' %}", "'assistant' %}{% generation %}").replace(
    "{% endfor %};{% else %}", "{% endfor %};{% endgeneration %}{% else %}"
)


def load(folder: Path, *rows: Any, template: str | None = TOOL_TEMPLATE) -> Dataset:
    section = DataSection(train="t", heldout="h")
    return load_dataset(write_rows(folder / "rows.jsonl", rows), section, byte_tokenizer(template))


def text(example: Example) -> str:
    return "".join(map(chr, example.tokens))


def trained(example: Example) -> str:
    return "".join(chr(token) for token, counts in zip(example.tokens, example.trained, strict=True) if counts)


@pytest.mark.parametrize("template", [TOOL_TEMPLATE, MARKED], ids=["compared", "marked"])
@pytest.mark.parametrize(
    "row",
    [
        {"messages": ASKED, "tools": [TOOL]},
        {"conversations": SHAREGPT, "tools": json.dumps([FUNCTION])},
        {"prompt": "Hi", "answer": "Yes", "tools": [TOOL]},
        {"prompt": "Hi", "answer": "Yes", "tools": [TOOL], "answer_tokens": [[*b"Yes;"]]},
    ],
    ids=["messages", "sharegpt", "prompt", "own tokens"],
)
def test_the_tools_of_a_row_stand_in_its_prompt(
    tmp_path: Path, row: dict[str, Any], template: str, caplog: pytest.LogCaptureFixture
) -> None:
    if "answer_tokens" in row:
        row = {**row, "answer": "Yes;"}
    (example,) = load(tmp_path, row, template=template).examples
    assert text(example) == f"{SHOWN}user:Hi;assistant:Yes;" and trained(example) == "Yes;"
    assert not caplog.messages


@pytest.mark.parametrize("tools", ["a hammer", [3]])
def test_tools_that_are_no_functions_are_refused_naming_the_row(tmp_path: Path, tools: Any) -> None:
    with pytest.raises(ValueError, match=r"line 1: the tools are .*remove the field"):
        load(tmp_path, {"messages": ASKED, "tools": tools})


# --- answers by a target in this process ------------------------------------------------------------------------------


def counting_target(folder: Path, template: str) -> PreTrainedTokenizerBase:
    tokenizer = tiny_tokenizer(template)
    counting_model().save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    return tokenizer


def test_the_target_sees_the_tools_of_a_row_and_training_on_its_answer_does(tmp_path: Path) -> None:
    """A template that ends its question with the first tool's name: the target counts on from there."""
    first = "{{ tools[0].function.name if tools else '' }} "
    tokenizer = counting_target(tmp_path, f"{first}{CHAT_TEMPLATE}{{% if add_generation_prompt %}}{first}{{% endif %}}")
    row = {"prompt": "j", "tools": '[{"name": "h"}]'}
    regenerate(options(tmp_path, tmp_path / "target", [row, "j"]))
    having, without = rows(tmp_path / "answers.jsonl")
    assert contents(having) == ["j", "i j k l"] and contents(without) == ["j", "k l"]
    assert having["tools"] == [{"type": "function", "function": {"name": "h"}}] and "tools" not in without
    section = DataSection(train="", heldout="", max_length=32)
    examples = load_dataset(str(tmp_path / "answers.jsonl"), section, tokenizer).examples
    #                                                 h <user> j  h  i   j   k   l <unk> <eos>
    assert [each.tokens.tolist() for each in examples] == [[11, 2, 13, 11, 12, 13, 14, 15, 0, 1], [2, 13, 14, 15, 0, 1]]


@pytest.mark.parametrize(("function", "written"), [("l", ["k l", "i j k l"]), ("i", ["k l"])])
def test_a_result_follows_a_text_that_names_its_function_and_no_other(
    tmp_path: Path, function: str, written: list[str]
) -> None:
    call = {"id": "1", "type": "function", "function": {"name": function, "arguments": "{}"}}
    made = {"role": "assistant", "content": None, "tool_calls": [call]}
    talk = [{"role": "user", "content": "j"}, made, {"role": "tool", "tool_call_id": "1", "content": "h"}, ASKED[1]]
    counting_target(tmp_path, CHAT_TEMPLATE.replace("== 'user'", "!= 'assistant'"))
    regenerate(options(tmp_path, tmp_path / "target", [{"messages": talk}]))
    (row,) = rows(tmp_path / "answers.jsonl")
    assert [each["content"] for each in row["messages"] if each["role"] == "assistant"] == written
