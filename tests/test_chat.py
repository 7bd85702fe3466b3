"""Which tokens of a conversation are the assistant's, in templates with generation marks and without them."""

import json
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import TOOL_TEMPLATE, byte_level, byte_tokenizer, sentencepiece_like
from tiny_training import write_rows
from tokenizers import AddedToken, pre_tokenizers, processors
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decoding.errors import UserError
from decoding.prompts import set_variables
from trainer.data.batch import Example
from trainer.data.chat import ChatTemplate
from trainer.data.dataset import Dataset, load_dataset
from trainer.data.marks import Marked
from trainer.recipe.common import DataSection

# Short versions of the families' templates, none of which has generation marks.
LLAMA = (
    "{{- bos_token }}"
    "{%- if messages[0].role == 'system' %}{%- set system = messages[0].content | trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{{- '<|header|>system<|end_header|>\n\nKnowledge until 2023\n\n' + system + '<|eot|>' }}"
    "{%- for message in messages %}"
    "{{- '<|header|>' + message.role + '<|end_header|>\n\n' + message.content | trim + '<|eot|>' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|header|>assistant<|end_header|>\n\n' }}{%- endif %}"
)
QWEN3 = (
    "{%- set last = namespace(question=0) %}"
    "{%- for message in messages if message.role == 'user' %}{%- set last.question = messages.index(message) %}"
    "{%- endfor %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'assistant' %}"
    "{%- set answer = message.content.split('</think>')[-1].lstrip('\n') %}"
    "{%- set thought = message.content.split('</think>')[0].split('<think>')[-1].strip('\n') "
    "if '</think>' in message.content else '' %}"
    "{{- '<|im_start|>assistant\n' }}"
    "{%- if loop.index0 > last.question and (loop.last or thought) %}"
    "{{- '<think>\n' + thought + '\n</think>\n\n' }}{%- endif %}"
    "{{- answer + '<|im_end|>\n' }}"
    "{%- else %}{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\n' }}{%- endif %}"
)
GEMMA3 = (
    "{{ bos_token }}"
    "{%- for message in messages %}"
    "{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{%- endif %}"
    "{{ '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\n' }}"
    "{{ message.content | trim + '<end_of_turn>\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{%- endif %}"
)
SPECIALS = {
    LLAMA: ["<|bos|>", "<|header|>", "<|end_header|>", "<|eot|>"],
    QWEN3: ["<|im_start|>", "<|im_end|>"],
    GEMMA3: ["<bos>", "<start_of_turn>", "<end_of_turn>"],
}


def tokenizer_for(template: str) -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per character and the special tokens of the template."""
    tokenizer = byte_tokenizer(template)
    specials = SPECIALS.get(template, [])
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    if specials and "bos" in specials[0]:
        tokenizer.bos_token = specials[0]
        begin = (specials[0], tokenizer.convert_tokens_to_ids(specials[0]))
        # The tokenizers of these families begin a plain text with this token; here the template has already written it.
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=f"{begin[0]} $A", special_tokens=[begin])
    return tokenizer


def turns(*contents: str) -> list[dict[str, Any]]:
    """Return messages of user and assistant in turns."""
    return [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]


def encode(template: str, messages: list[dict[str, Any]]) -> tuple[PreTrainedTokenizerBase, list[Marked]]:
    tokenizer = tokenizer_for(template)
    return tokenizer, ChatTemplate(tokenizer, template).encode(messages, "row")


def trained_texts(tokenizer: PreTrainedTokenizerBase, sequence: Marked) -> list[str]:
    """Return each run of trained tokens as text; the decoder strips a space from the first token."""
    texts, end = [""], 0
    for _, run in groupby(sequence.trained):
        end += len(list(run))
        texts.append(str(tokenizer.decode(list(sequence.tokens[:end]))))
    runs = [text[len(before) :] for before, text in pairwise(texts)]
    return runs[1 - sequence.trained[0] :: 2]


@pytest.mark.parametrize(("template", "end"), [(LLAMA, "<|eot|>"), (GEMMA3, "<end_of_turn>")], ids=["llama", "gemma3"])
def test_every_answer_with_its_end_of_turn_is_found_in_one_sequence(template: str, end: str) -> None:
    """The system prompt and the line break after the end of a turn are not trained."""
    messages = turns("Why?", " Because. ", "So?", "Yes.")
    tokenizer, (sequence,) = encode(template, messages)
    assert trained_texts(tokenizer, sequence) == [f"Because.{end}", f"Yes.{end}"]
    whole: Any = tokenizer.apply_chat_template(messages, return_dict=True)
    assert list(sequence.tokens) == whole["input_ids"] and sequence.tokens.count(sequence.tokens[0]) == 1


def test_where_earlier_answers_are_rewritten_each_answer_is_a_sequence_as_the_target_sees_it() -> None:
    tokenizer, (first, second) = encode(QWEN3, turns("Why?", "<think>Hm.</think>No.", "So?", "Yes."))
    assert trained_texts(tokenizer, first) == ["<think>\nHm.\n</think>\n\nNo.<|im_end|>"]
    assert trained_texts(tokenizer, second) == ["<think>\n\n</think>\n\nYes.<|im_end|>"]
    asked = turns("Why?", "<think>Hm.</think>No.", "So?")
    prompt: Any = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)
    assert list(second.tokens[: second.trained.index(True)]) == prompt["input_ids"]
    assert "Hm." not in str(tokenizer.decode(second.tokens))


def test_marks_of_a_template_that_drops_earlier_thinking_give_a_sequence_for_each_answer() -> None:
    template = (
        "{%- for m in messages %}{{ m.role + ':' }}{% generation %}{% if m.role == 'assistant' %}"
        "{%- if loop.last %}{{ '<' + m.reasoning_content + '>' }}{% endif %}{{ m.content + ';' }}{% endif %}"
        "{% endgeneration %}{% if m.role != 'assistant' %}{{ m.content + ';' }}{% endif %}{% endfor %}"
    )
    messages = [{**each, "reasoning_content": "Hm."} for each in turns("Why?", "No.", "So?", "Yes.")]
    tokenizer, (first, second) = encode(template, messages)
    assert trained_texts(tokenizer, first) == ["<Hm.>No.;"]
    assert trained_texts(tokenizer, second) == ["<Hm.>Yes.;"]
    assert str(tokenizer.decode(second.tokens)) == "user:Why?;assistant:No.;user:So?;assistant:<Hm.>Yes.;"
    always = template.replace("loop.last", "true")
    tokenizer, (whole,) = encode(always, messages)
    assert trained_texts(tokenizer, whole) == ["<Hm.>No.;", "<Hm.>Yes.;"]
    shifting = template.replace(
        "m.content + ';' }}{% endif %}{% endg", "m.content ~ messages | length }}{% endif %}{% endg"
    )
    with pytest.raises(ValueError, match=r"row: the chat template rewrites an answer when a later answer follows"):
        encode(shifting, messages)


def test_variables_of_a_template_are_those_that_transformers_hands_it() -> None:
    template = (
        "{% macro t() %}{{ enable_thinking }}|{{ note | default('-') }}{% endmacro %}{{ t() }}{{ messages[0].content }}"
    )
    given = {"enable_thinking": False, "note": "a'\"%}"}
    tokenizer = byte_tokenizer(template)
    wanted = tokenizer.apply_chat_template(turns("a"), tokenize=False, **given)
    assert "False|a" in str(wanted)
    set_variables(tokenizer, json.dumps(given))
    assert tokenizer.apply_chat_template(turns("a"), tokenize=False) == wanted
    for text, message in (
        ("{", "pass a JSON object"),
        ("[]", "pass a JSON object"),
        ('{"effort": 1}', "has effort, which"),
    ):
        with pytest.raises(ValueError, match=f"^chat_template_kwargs .*{message}"):
            set_variables(tokenizer, text)


def test_a_prompt_that_the_template_rewrites_once_answered_is_refused() -> None:
    template = (
        "{% for m in messages %}{{ 'asked' if loop.last and m.role == 'user' else m.role }}:{{ m.content }}{% endfor %}"
    )
    with pytest.raises(ValueError, match=r"row: the chat template renders the text before .* data\.chat_template"):
        encode(template, turns("a", "b"))


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (GEMMA3, [*turns("a", "b"), {"role": "assistant", "content": "c"}], "rejects this .*: roles must alternate"),
        (LLAMA, [{"role": "assistant", "content": "a"}], "begins with the assistant; begin it with a user message"),
        (LLAMA, turns("a"), "lacks an assistant's answer to train on"),
        ("{% if %}", turns("a", "b"), "rejects this conversation: Expected an expression"),
    ],
)
def test_a_conversation_that_does_not_fit_is_named(template: str, messages: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ValueError, match=f"row: the .*{message}"):
        encode(template, messages)


# --- generation marks, compared with the text ------------------------------------------------------------------------

MARKS = (
    "{% macro said(text) %}\n  {%- generation -%}\n {{ text }}<|end|>\n  {%- endgeneration %}{% endmacro %}"
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{{ said(m.content) }}"
    "{% else %}{{ m.content }}{% endif %}\n{% endfor %}"
)


def tokenizers_by_kind() -> dict[str, PreTrainedTokenizerFast]:
    """Make tokenizers of each kind: offsets may leave out spaces, a special token may swallow spaces, and sentencepiece
    adds one.
    """
    made = {"stock": byte_level(), "trimmed": byte_level(), "swallowing": byte_level()}
    made["trimmed"].backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    made["swallowing"].add_tokens([AddedToken("<|end|>", special=True, rstrip=True)])
    made |= {"sentencepiece": sentencepiece_like([]), "metaspace": sentencepiece_like([])}
    made["metaspace"].backend_tokenizer.normalizer = None
    made["metaspace"].backend_tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    for kind in ("sentencepiece", "metaspace"):
        made[kind].add_tokens([AddedToken("<|end|>", special=True)])
    return made


@pytest.mark.parametrize("end", ["<|end|>", ""])
@pytest.mark.parametrize("kind", tokenizers_by_kind())
@pytest.mark.parametrize(
    "answers", [["caff\u00e9", "\U0001f642"], ["hell. ", "  a"], [" a ", "\n b\n"], ["   ", "c"]], ids=ascii
)
def test_generation_marks_train_exactly_the_assistants_characters(kind: str, answers: list[str], end: str) -> None:
    """Cases: bytes of one character, spaces at either end, and marks inside a macro, where transformers miscounts."""
    tokenizer, template = tokenizers_by_kind()[kind], MARKS.replace("<|end|>", end)
    messages = turns("a b", answers[0], "c", answers[1], "bc", "b")
    (sequence,) = ChatTemplate(tokenizer, template).encode(messages, "row")
    whole: Any = tokenizer.apply_chat_template(messages, chat_template=template, return_dict=True)
    assert list(sequence.tokens) == whole["input_ids"]
    assert trained_texts(tokenizer, sequence) == [answer + end for answer in (*answers, "b")]


def test_a_token_on_both_sides_of_a_mark_is_an_error_that_names_the_row() -> None:
    answer = "h{% generation %}{{ m.content if m.role == 'assistant' }}{% endgeneration %}"
    template = f"{{% for m in messages %}}{{{{ m.role }}}}:{answer}{{% endfor %}}"
    with pytest.raises(UserError, match=r"row: the token 'hell' in 'user:hassistant:hello' is only .*token that ends"):
        ChatTemplate(byte_level(), template).encode(turns("a", "ello"), "row")
    filtered = "{% filter trim %}{% generation %}{{ messages[1].content }}{% endgeneration %}{% endfilter %}"
    with pytest.raises(UserError, match=r"row: the generation marks of the chat template change its text: put"):
        ChatTemplate(byte_level(), filtered).encode(turns("a", " b"), "row")


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
