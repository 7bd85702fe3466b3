"""The readable reference of `load_dataset`: turns rows into sequences of Python numbers, one row after the other."""

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from trainer.data.batch import Example, pack
from trainer.data.encoding import RowEncoder
from trainer.data.sources import open_source
from trainer.recipe.common import DataSection


class Plain(NamedTuple):
    """An example of Python numbers."""

    tokens: tuple[int, ...]
    trained: tuple[bool, ...]
    prompt_length: int
    lengths: tuple[int, ...] = ()


def reference_examples(
    path: str, section: DataSection, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[Plain], list[Plain]]:
    """Return the examples, and the first example of each row; bad rows are left out."""
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
    return packed(examples, section.max_length) if section.packing else examples, firsts


def packed(examples: Sequence[Plain], max_length: int) -> list[Plain]:
    """Pack examples by `trainer.data.batch.pack`, which tests/test_data_batches.py tests."""
    joined = pack([Example(*example) for example in examples], max_length)
    return [Plain(tuple(e.tokens.tolist()), tuple(e.trained.tolist()), e.prompt_length, e.lengths) for e in joined]
