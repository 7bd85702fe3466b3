"""From sequences to batches: padding, packing, and the order of examples."""

from collections import Counter

import pytest
import torch
from hypothesis_profiles import few
from tiny_models import FAMILIES, full_forward, tiny_model

from trainer.data.batch import Batch, Example, batch_indices, check_documents_are_apart, collate, pack


def example(*tokens: int) -> Example:
    """Make an example in which all tokens except the first are trained."""
    return Example(tokens, (False, *(True,) * (len(tokens) - 1)), 1)


def test_padding_is_neither_seen_nor_trained() -> None:
    batch = collate([Example((5, 6, 7), (False, True, True), 1), Example((8,), (True,), 0)])
    assert batch.tokens.tolist() == [[5, 6, 7], [8, 0, 0]]
    assert batch.attention_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch.trained.tolist() == [[False, True, True], [True, False, False]]


@pytest.mark.parametrize(("batch_size", "size"), [(4, 10), (3, 3), (1, 5), (8, 3)])
def test_every_epoch_visits_every_example_once(batch_size: int, size: int) -> None:
    epochs = batch_size  # this many epochs are a whole number of steps: size * batch_size / batch_size
    visited = [i for step in range(size) for i in batch_indices(step, batch_size, size, seed=3)]
    for epoch in range(epochs):
        assert Counter(visited[epoch * size : (epoch + 1) * size]) == Counter(range(size))


def test_the_order_is_a_function_of_seed_and_step_alone() -> None:
    for size in (5, 24):
        whole = batch_indices(0, 24, size, seed=1)
        for batch_size in (1, 3, 8):
            cut = [i for step in range(24 // batch_size) for i in batch_indices(step, batch_size, size, seed=1)]
            assert cut == whole
    expected = batch_indices(7, 4, 100, seed=0)
    torch.manual_seed(123)
    assert batch_indices(7, 4, 100, seed=0) == expected
    assert batch_indices(7, 4, 100, seed=1) != expected
    first_epoch, second_epoch = batch_indices(0, 100, 100, seed=0), batch_indices(1, 100, 100, seed=0)
    assert first_epoch != second_epoch


def test_every_example_is_packed_once_and_none_is_cut() -> None:
    generator = torch.Generator().manual_seed(1)
    lengths = torch.randint(1, 17, (300,), generator=generator).tolist()
    examples = [example(*range(place, place + length)) for place, length in enumerate(lengths)]
    packed = pack(examples, max_length=16)
    assert all(len(each.tokens) == sum(each.lengths or (len(each.tokens),)) <= 16 for each in packed)
    assert Counter(token for each in packed for token in each.tokens) == Counter(
        token for each in examples for token in each.tokens
    )
    assert len(packed) < 1.05 * sum(lengths) / 16  # hardly any room is left


def test_no_label_is_of_another_document() -> None:
    batch = collate([Example((1, 2, 3, 4, 5), (True,) * 5, 0, (2, 3)), Example((6,), (True,), 0)])
    assert batch.documents.tolist() == [[0, 0, 1, 1, 1], [0, -1, -1, -1, -1]]
    assert batch.labelled(1).tolist() == [[True, False, True, True, False], [False] * 5]
    assert batch.labelled(2).tolist() == [[False, False, True, False, False], [False] * 5]
    assert not batch.labelled(3).any() and not batch.labelled(5).any() and not batch.labelled(9).any()
    assert batch.tokens.roll(-2, 1)[batch.labelled(2)].tolist() == [5]


DOCUMENTS = ((1, 2, 3, 4, 5, 6, 7, 8, 9), (4, 4, 3, 2, 1, 7, 8), (5, 6, 7, 8, 9, 10, 11, 12, 13, 14))
"""Each document is longer than 5, the window of the families with a window."""


def packed_batch() -> Batch:
    """Make a batch with all documents in one row and a shorter row of two documents, so that there is padding."""
    row = tuple(token for document in DOCUMENTS for token in document)
    whole = Example(row, (True,) * len(row), 0, tuple(len(document) for document in DOCUMENTS))
    return collate([whole, Example(tuple(range(15)), (True,) * 15, 0, (7, 8))])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize(
    "family", ["llama", "mistral", "qwen2-mixed", "qwen3", "qwen3-moe", "gemma2", "gemma3", "gpt2"]
)
def test_a_packed_document_is_seen_as_if_it_were_alone(family: str, attention: str) -> None:
    if (family, attention) == ("gemma2", "sdpa"):
        attention = "eager"  # the only example it has
    model = tiny_model(family, attention=attention)
    with torch.no_grad():
        logits = model(**packed_batch().model_inputs(), use_cache=False).logits
    begin = 0
    for document in DOCUMENTS:
        alone = full_forward(model, document)
        torch.testing.assert_close(logits[0, begin : begin + len(document)], alone, rtol=0, atol=1e-4)
        begin += len(document)
    torch.testing.assert_close(logits[1, 7:15], full_forward(model, range(7, 15)), rtol=0, atol=1e-4)


@pytest.mark.parametrize("family", few(FAMILIES, ["llama", "opt"]))
def test_models_whose_packed_documents_see_one_another_are_refused(family: str) -> None:
    model = tiny_model(family)
    if family not in ("opt", "falcon"):
        check_documents_are_apart(model)
        return
    with pytest.raises(ValueError, match=f"{family} models let packed texts see one another: set data.packing=false"):
        check_documents_are_apart(model)
