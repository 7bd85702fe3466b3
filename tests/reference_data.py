"""Rows to sequences as tuples of Python numbers, one row after the other: the readable reference of `load_dataset`."""

from bisect import bisect_left, insort
from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from trainer.data.encoding import RowEncoder
from trainer.data.rows import open_source
from trainer.recipe.common import DataSection


class Plain(NamedTuple):
    """An example whose numbers are Python's."""

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    prompt_length: int
    lengths: tuple[int, ...] = ()


def reference_examples(
    path: str, section: DataSection, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Plain], list[Plain]]:
    """Return the examples and the first of each row; bad rows are left out."""
    examples: list[Plain] = []
    firsts: list[Plain] = []
    encoder = RowEncoder(section, tokenizer)
    for row in open_source(path, section).read():
        encoded = encoder.encode(row)
        if isinstance(encoded, ValueError):
            continue
        kept = []
        for example in encoded.examples:
            tokens, trained = example.tokens.tolist(), example.trained.tolist()
            if any(trained[: section.max_length]):
                tokens, trained = tokens[: section.max_length], trained[: section.max_length]
                kept.append(Plain(tuple(tokens), tuple(trained), example.prompt_length))
        examples += kept
        firsts += kept[:1]
    return reference_pack(examples, section.max_length) if section.packing else examples, firsts


def reference_pack(examples: Sequence[Plain], max_length: int) -> list[Plain]:
    """Put each example, in order, into the sequence where it leaves the least room."""
    packed: list[list[Plain]] = []
    rooms: list[tuple[int, int]] = []  # (free tokens, index of the sequence), sorted
    for example in examples:
        fitting = bisect_left(rooms, (len(example.tokens), -1))
        if fitting == len(rooms):
            room, place = max_length, len(packed)
            packed.append([])
        else:
            room, place = rooms.pop(fitting)
        packed[place].append(example)
        insort(rooms, (room - len(example.tokens), place))
    return [_joined(documents) if len(documents) > 1 else documents[0] for documents in packed]


def _joined(documents: Sequence[Plain]) -> Plain:
    return Plain(
        tuple(token for document in documents for token in document.tokens),
        tuple(trained for document in documents for trained in document.trained),
        documents[0].prompt_length,
        tuple(len(document.tokens) for document in documents),
    )
