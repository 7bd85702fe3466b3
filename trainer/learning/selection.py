"""Which of a sequence's trained tokens are learnt from (AdaSPEC, 2510.19779): the same share of every sequence.

By sequence and not by batch, so that a step does not depend on how its sequences are divided among passes and
processes.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


def kept_of(counts: Int[Tensor, " rows"], keep: float) -> Int[Tensor, " rows"]:
    """How many of so many tokens are kept: the share ``keep``, rounded up."""
    return (counts.float() * keep - 1e-3).ceil().long() if keep < 1 else counts  # in fp32, which every device has


def kept_positions(
    worth: Float[Tensor, " labels"], labelled: Bool[Tensor, "rows positions"], keep: float
) -> Int[Tensor, " kept"]:
    """Which labels stay, in their order: those of each row that are worth most, of two alike the earlier.

    ``worth`` goes through the labelled positions row by row.
    """
    counts = labelled.sum(1)
    row_of = torch.repeat_interleave(torch.arange(len(counts), device=worth.device), counts)
    best_first = worth.argsort(descending=True, stable=True)
    by_row = best_first[row_of[best_first].argsort(stable=True)]  # row by row, the best of each first
    place = torch.arange(len(worth), device=worth.device) - (counts.cumsum(0) - counts)[row_of]
    kept: Tensor = by_row[place < kept_of(counts, keep)[row_of]].sort().values
    return kept
