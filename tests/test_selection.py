"""Which tokens of a sequence are learnt from: the same share of every sequence, those worth most."""

import pytest
import torch

from trainer.learning.selection import kept_of, kept_positions

LABELLED = torch.tensor([[True, True, False, True, True], [False, True, False, True, False]])
"""Four labels in the first row, two in the second."""


def test_the_best_of_each_row_stay_in_their_order() -> None:
    worth = torch.tensor([0.1, 0.9, 0.8, 0.2, -5.0, -4.0])
    assert kept_positions(worth, LABELLED, 0.5).tolist() == [1, 2, 5]


def test_a_row_of_bad_tokens_keeps_its_share_all_the_same() -> None:
    worth = torch.tensor([9.0, 9.0, 9.0, 9.0, -1.0, -2.0])
    assert kept_positions(worth, LABELLED, 0.5).tolist() == [0, 1, 4]


@pytest.mark.parametrize(("keep", "counts"), [(1.0, [4, 2, 0]), (0.75, [3, 2, 0]), (0.5, [2, 1, 0]), (0.01, [1, 1, 0])])
def test_shares_are_rounded_up_and_an_empty_row_keeps_nothing(keep: float, counts: list[int]) -> None:
    assert kept_of(torch.tensor([4, 2, 0]), keep).tolist() == counts


def test_as_many_are_kept_as_were_counted_before_anything_was_run() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        labelled = torch.rand(5, 9, generator=generator) < 0.6
        worth = torch.randn(int(labelled.sum()), generator=generator)
        for keep in (0.2, 0.5, 0.9):
            kept = kept_positions(worth, labelled, keep)
            rows = labelled.nonzero()[kept, 0]
            assert torch.bincount(rows, minlength=5).tolist() == kept_of(labelled.sum(1), keep).tolist()
