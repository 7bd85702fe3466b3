"""Work dealt over the processes of a run, whose results all of them get."""

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

import torch
from accelerate import Accelerator
from torch import Tensor

from trainer.processes import agreed

Row = tuple[int, ...]
Share = TypeVar("Share")


def dealt(
    accelerator: Accelerator | None, shares: Sequence[Share], work: Callable[[Share], Iterable[Row]], width: int
) -> list[Row]:
    """Do the work of each share on one process; return the rows of all shares on every process.

    The process of rank r takes the shares r, r + world, …; None is a process alone. A row is ``width`` integers, the
    first of them at least 0. The rows of one share keep their order. Every process must call this; an error of one
    process becomes an error on all.
    """
    rows: list[Row] = []
    rank, world = (accelerator.process_index, accelerator.num_processes) if accelerator else (0, 1)

    def do_mine() -> None:
        for share in shares[rank::world]:
            rows.extend(work(share))

    agreed(do_mine)
    return rows if accelerator is None or world == 1 else _gathered(accelerator, rows, width)


def _gathered(accelerator: Accelerator, rows: Sequence[Row], width: int) -> list[Row]:
    """Return the rows of all processes, in the order of their ranks."""
    table = torch.tensor(rows, dtype=torch.long, device=accelerator.device).reshape(-1, width)
    padded = accelerator.pad_across_processes(table, dim=0, pad_index=-1)
    everyone: Tensor = accelerator.gather(padded)
    return [tuple(row) for row in everyone.tolist() if row[0] >= 0]
