"""How training uses regenerated answers: the target's own tokens, and answers that were cut off."""

from pathlib import Path
from typing import Any

import pytest
from tiny_training import CHAT_TEMPLATE, tiny_tokenizer, write_rows
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from decoding.errors import UserError
from trainer.data.dataset import Dataset, load_dataset
from trainer.recipe.common import DataSection

UNMARKED = CHAT_TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", "")
COMPARED = UNMARKED.replace("{% endfor %}", "{% endfor %}{% if add_generation_prompt %}<assistant> {% endif %}")
"""Token ids here: <eos> is 1, <user> 2, <assistant> 3, a 4, b 5, ... l 15."""


def load(folder: Path, rows: list[Any], tokenizer: PreTrainedTokenizerBase, **changes: Any) -> Dataset:
    return load_dataset(
        write_rows(folder / "rows.jsonl", rows), DataSection(train="x", heldout="x", **changes), tokenizer
    )


def chat(*contents: str, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    return {"messages": [{"role": roles[i % 2], "content": text} for i, text in enumerate(contents)], **fields}


def trained(dataset: Dataset) -> list[list[int]]:
    return [
        [token for token, counts in zip(example.tokens, example.trained, strict=True) if counts]
        for example in dataset.examples
    ]


def bytes_tokenizer() -> PreTrainedTokenizerFast:
    """Make a tokenizer with one token per byte of UTF-8."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


# --- the target's own tokens ----------------------------------------------------------------------------------------


def test_an_answer_that_was_cut_off_inside_a_character_is_trained_with_the_half_of_it(tmp_path: Path) -> None:
    tokenizer = bytes_tokenizer()
    half: list[int] = tokenizer("aé")["input_ids"][:2]  # é is two bytes
    assert tokenizer.decode(half) == "a\N{REPLACEMENT CHARACTER}"
    row = {"prompt": "b", "answer": "a", "answer_tokens": [half], "truncated": True}
    assert trained(load(tmp_path, [row], tokenizer)) == [half]
    with pytest.raises(ValueError, match="does not spell each answer"):
        load(tmp_path, [{**row, "truncated": False}], tokenizer)


@pytest.mark.parametrize("tokens", ["a", None, ["a"], [-1], [True], {}, [2**70], [4, 16], [5]], ids=str)
def test_what_is_no_list_of_the_tokenizers_tokens_is_refused_naming_the_row(tmp_path: Path, tokens: Any) -> None:
    good, bad = ({"prompt": "c", "answer": "a", "answer_tokens": [each]} for each in ([4, 1], tokens))
    with pytest.raises(ValueError, match=r"rows\.jsonl, line 2: .*answer_tokens does not spell"):
        load(tmp_path, [good, bad], tiny_tokenizer())
    several = {**good, "answer_tokens": [[4, 1], [4, 1]]}
    dataset = load(tmp_path, [good, bad, several], tiny_tokenizer(), bad_rows="skip")
    assert (len(dataset.examples), dataset.account.bad_rows) == (1, 2)


def test_an_answer_without_tokens_is_read_if_it_is_empty_and_refused_if_it_is_trained(tmp_path: Path) -> None:
    user, empty, answer = ({"role": role, "content": text} for role, text in (("user", "c"), *2 * [("assistant", "")]))
    answer["content"] = "a"
    row = {"messages": [user, empty, user, answer], "answer_tokens": [[], [4, 1]]}
    assert trained(load(tmp_path, [row], tiny_tokenizer(CHAT_TEMPLATE))) == [[4, 1]]
    called = {**empty, "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
    for bad in ({**row, "messages": [user, called, user, answer]}, {"messages": [user], "answer_tokens": 5}):
        with pytest.raises(UserError, match=r"line 1: with this tokenizer the field answer_tokens does not spell"):
            load(tmp_path, [bad], tiny_tokenizer(CHAT_TEMPLATE))


# --- a text that was cut off ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [CHAT_TEMPLATE, COMPARED], ids=["marked", "compared"])
@pytest.mark.parametrize(("truncated", "last"), [(True, [6, 7]), (False, [6, 7, 1])])
def test_no_end_is_trained_after_the_answer_that_was_cut_off(
    tmp_path: Path, template: str, truncated: bool, last: list[int]
) -> None:
    dataset = load(tmp_path, [chat("a", "b", "c", "c d", truncated=truncated)], tiny_tokenizer(template))
    assert trained(dataset) == [[5, 1, *last]]  # the previous answer was not cut off
    assert dataset.examples[0].tokens[-1] == 1


@pytest.mark.parametrize(("truncated", "tokens"), [(True, [6, 7]), (False, [6, 7, 1])])
def test_without_a_template_an_answer_that_was_cut_off_has_no_end(
    tmp_path: Path, truncated: bool, tokens: list[int]
) -> None:
    row = {"prompt": "a", "answer": "c d", "truncated": truncated}
    assert trained(load(tmp_path, [row], tiny_tokenizer())) == [tokens]
