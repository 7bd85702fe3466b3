"""Rows to sequences of token ids with a loss mask, and the order they are trained in.

The order is a function of the seed and the step alone, so a run resumes exactly and does not depend on how many
processes share a batch.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jinja2 import TemplateError
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.prompts import check_messages, read_rows
from trainer.recipe import DataSection


class Example(NamedTuple):
    """One sequence. ``trained[i]`` says whether predicting token i is part of the loss.

    ``prompt_length`` is how many tokens stand before the first answer (0 for plain text).
    """

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    prompt_length: int


class Batch(NamedTuple):
    """Right-padded sequences, each (batch, positions). ``trained`` is false on padding."""

    tokens: Tensor
    attention_mask: Tensor
    trained: Tensor

    def to(self, device: torch.device) -> "Batch":
        return Batch(*(tensor.to(device) for tensor in self))


@dataclass(frozen=True)
class Dataset:
    """Examples with where they came from: what provenance records."""

    examples: tuple[Example, ...]
    firsts: tuple[Example, ...]
    """The first of each row: a long text gives several."""
    path: str
    sha256: str
    rows: int
    truncated: int


def load_dataset(path: str, section: DataSection, tokenizer: PreTrainedTokenizerBase) -> Dataset:
    """Read, template, tokenize and mask every row of a file."""
    examples: list[Example] = []
    firsts: list[Example] = []
    rows = truncated = 0
    for number, row in read_rows(path):
        if section.max_rows is not None and rows >= section.max_rows:
            break
        rows += 1
        before = len(examples)
        where = f"{path}, line {number}"
        if _format_of(row, section, where) == "text":
            examples += _text_examples(row, section, tokenizer, where)
        else:
            example = _chat_example(row, section, tokenizer, where)
            if len(example.tokens) > section.max_length:
                truncated += 1
                cut = slice(section.max_length)
                example = example._replace(tokens=example.tokens[cut], trained=example.trained[cut])
            if any(example.trained):  # an answer that starts behind the cut leaves nothing to learn
                examples.append(example)
        if len(examples) > before:
            firsts.append(examples[before])
    if not examples:
        raise ValueError(f"{path} holds nothing to train on: no row is left with a trained token in it")
    digest = hashlib.sha256(Path(path).read_bytes()).hexdigest()
    return Dataset(tuple(examples), tuple(firsts), path, digest, rows, truncated)


def _format_of(row: dict[str, Any], section: DataSection, where: str) -> str:
    needed = {
        "messages": ["messages"],
        "prompt_answer": [section.prompt_field, section.answer_field],
        "text": [section.text_field],
    }
    if section.format == "auto":
        for name, fields in needed.items():
            if all(field in row for field in fields):
                return name
        raise ValueError(
            f"{where}: the row has the fields {sorted(row)} but training needs 'messages', "
            f"{section.prompt_field!r} with {section.answer_field!r}, or {section.text_field!r}: "
            "set data.prompt_field, data.answer_field or data.text_field"
        )
    for field in needed[section.format]:
        if field not in row:
            raise ValueError(
                f"{where}: the row has no field {field!r} (it has {sorted(row)}): "
                "name the right field in the recipe's data section, or set data.format"
            )
    return section.format


def _text(row: dict[str, Any], field: str, where: str) -> str:
    value = row[field]
    if not isinstance(value, str):
        raise ValueError(f"{where}: field {field!r} holds {type(value).__name__}, not text")
    return value


def _text_examples(
    row: dict[str, Any], section: DataSection, tokenizer: PreTrainedTokenizerBase, where: str
) -> list[Example]:
    """A plain text as consecutive sequences, every token trained; a last scrap of a few tokens is left out."""
    tokens: list[int] = tokenizer(_text(row, section.text_field, where))["input_ids"]
    pieces = [tokens[i : i + section.max_length] for i in range(0, len(tokens), section.max_length)]
    return [Example(tuple(piece), (True,) * len(piece), 0) for piece in pieces if len(piece) >= 8]


def _chat_example(row: dict[str, Any], section: DataSection, tokenizer: PreTrainedTokenizerBase, where: str) -> Example:
    """A conversation, trained on the assistant's tokens alone."""
    if "messages" in row and section.format != "prompt_answer":
        messages = check_messages(row["messages"], where)
    else:
        prompt = _text(row, section.prompt_field, where)
        answer = _text(row, section.answer_field, where)
        if tokenizer.chat_template is None:
            return _prompt_answer_example(prompt, answer, tokenizer)
        messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    if tokenizer.chat_template is None:
        raise ValueError(f"{where}: the tokenizer has no chat template, which 'messages' need: use prompt and answer")
    try:
        encoded: Any = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    except TemplateError as error:
        raise ValueError(f"{where}: the chat template cannot hold this conversation: {error}") from error
    tokens, mask = encoded["input_ids"], [bool(trained) for trained in encoded["assistant_masks"]]
    if not any(mask):
        raise ValueError(
            f"{where}: the chat template marks none of the {len(mask)} tokens as the assistant's, so nothing would be "
            "trained: put {% generation %} ... {% endgeneration %} around the assistant's content in the template"
        )
    if all(mask):
        raise ValueError(
            f"{where}: the chat template marks all {len(mask)} tokens as the assistant's, so the prompt would be "
            "trained too: put {% generation %} ... {% endgeneration %} around the assistant's content alone"
        )
    return Example(tuple(tokens), tuple(mask), mask.index(True))


def _prompt_answer_example(prompt: str, answer: str, tokenizer: PreTrainedTokenizerBase) -> Example:
    """Without a chat template: the prompt, the answer, and the end of the text."""
    prompt_tokens: list[int] = tokenizer(prompt)["input_ids"]
    answer_tokens: list[int] = tokenizer(answer, add_special_tokens=False)["input_ids"]
    if tokenizer.eos_token_id is not None:
        answer_tokens = [*answer_tokens, tokenizer.eos_token_id]
    mask = [False] * len(prompt_tokens) + [True] * len(answer_tokens)
    return Example(tuple(prompt_tokens + answer_tokens), tuple(mask), len(prompt_tokens))


def collate(examples: Sequence[Example]) -> Batch:
    """Pad on the right to the longest."""
    longest = max(len(example.tokens) for example in examples)
    tokens = torch.zeros(len(examples), longest, dtype=torch.long)
    attention_mask = torch.zeros(len(examples), longest, dtype=torch.long)
    trained = torch.zeros(len(examples), longest, dtype=torch.bool)
    for row, example in enumerate(examples):
        length = len(example.tokens)
        tokens[row, :length] = torch.tensor(example.tokens)
        attention_mask[row, :length] = 1
        trained[row, :length] = torch.tensor(example.trained)
    return Batch(tokens, attention_mask, trained)


def batch_indices(step: int, batch_size: int, dataset_size: int, seed: int) -> list[int]:
    """Which examples step ``step`` (from 0) trains on: epoch after epoch, each in an order of its own."""
    chosen: list[int] = []
    position = step * batch_size
    while len(chosen) < batch_size:
        epoch, offset = divmod(position + len(chosen), dataset_size)
        order = _epoch_order(epoch, dataset_size, seed)
        chosen += order[offset : offset + batch_size - len(chosen)]
    return chosen


@lru_cache(maxsize=2)
def _epoch_order(epoch: int, size: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed * 1_000_003 + epoch)
    order: list[int] = torch.randperm(size, generator=generator).tolist()
    return order


def heldout_prompts(examples: Sequence[Example], count: int, prompt_tokens: int, longest: int) -> list[tuple[int, ...]]:
    """Prompts to decode from: what stands before the answer, or the first tokens of a plain text."""
    prompts = []
    for example in examples:
        length = example.prompt_length or min(prompt_tokens, len(example.tokens) - 1)
        if 0 < length <= longest:
            prompts.append(example.tokens[:length])
        if len(prompts) == count:
            break
    if not prompts:
        raise ValueError(f"no held-out prompt has at most {longest} tokens: give shorter prompts or fewer new tokens")
    return prompts
