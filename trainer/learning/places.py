"""Positions of texts that several rows predict: what depends only on the position is computed once for all of them."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor


class Places(NamedTuple):
    """Positions in texts whose next tokens are predicted, each by some consecutive rows of hidden states."""

    ends: Int[np.ndarray, " places"]
    """The number of rows up to each place's last one, on the host: sizes of chunks must not wait for a GPU."""
    of_rows: Int[Tensor, " rows"]
    """Each row's place, increasing."""

    @staticmethod
    def of(positions: Int[Tensor, " rows"]) -> "tuple[Int[Tensor, ' rows'], Int[Tensor, ' places'], Places]":
        """Return the order that brings rows of equal position together, the distinct positions, and their rows."""
        order = positions.argsort(stable=True)
        distinct, of_rows, repeats = positions[order].unique_consecutive(return_inverse=True, return_counts=True)
        return order, distinct, Places(repeats.cumsum(0).numpy(force=True), of_rows)


class PlacedRows:
    """The rows of a loss: each one's place and weight, and every place's label."""

    def __init__(
        self, labels: Int[Tensor, " places"], places: Places | None, weights: Float[Tensor, " rows"] | None
    ) -> None:
        self.labels, self.weights, self._places = labels, weights, places
        self.ends = np.arange(1, len(labels) + 1) if places is None else places.ends

    def spans(self, most: int, places: slice | None = None) -> Iterator[tuple[slice, slice]]:
        """Yield consecutive places and their rows: at most ``most`` rows, or those of one place."""
        first, stop = (0, len(self.ends)) if places is None else (places.start, places.stop)
        while first < stop:
            row = int(self.ends[first - 1]) if first else 0
            last = min(stop, max(first + 1, int(self.ends.searchsorted(row + most, "right"))))
            yield slice(first, last), slice(row, int(self.ends[last - 1]))
            first = last

    def each(self, of_places: Tensor, places: slice, rows: slice) -> Tensor:
        """Return what these places have for each of their rows."""
        if self._places is None:
            return of_places
        return of_places.index_select(0, self._places.of_rows[rows] - places.start)

    def summed(self, of_rows: Float[Tensor, "rows outputs"], places: slice, rows: slice) -> Tensor:
        """Return the sum over each place's rows, by a product: on a GPU, `index_add` adds in a random order."""
        if self._places is None:
            return of_rows
        place = torch.arange(places.start, places.stop, device=of_rows.device)
        return (place[:, None] == self._places.of_rows[rows]).to(of_rows) @ of_rows
