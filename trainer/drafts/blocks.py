"""Blocks behind the positions of a batch's texts: the tensors that a DSpark draft is trained by.

Behind each of A positions of a row, its anchors, stands a block of slots: the anchor's own token, then masks. Slot j
reads as position t + j of anchor t, sees the target's states at the tokens before t, and the whole of its block. No
text sees a block, and no block another. So one forward computes what A forwards of single blocks would.
"""

import hashlib
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from trainer.data.batch import Batch

_BLOCKED = float(
    torch.finfo(torch.bfloat16).min
)  # finite in bf16 and fp32; fp16 has -inf: no slot is blocked from itself


class Blocks(NamedTuple):
    """The anchors of a batch, and the labels of the ``depth`` tokens that each block predicts."""

    anchors: Int[Tensor, "batch anchors"]
    """Positions t, increasing; 0 where a row has fewer."""
    given: Bool[Tensor, "batch anchors"]
    """False where a row has fewer anchors."""
    labelled: tuple[Int[Tensor, " labels"], ...]
    """For each depth (from 0) the blocks whose token t + 1 + depth is trained, as indices in ``anchors``, flattened."""


def sample_blocks(batch: Batch, anchors: int, depth: int, seed: int, step: int) -> Blocks:
    """Draw up to ``anchors`` of each row's positions whose next token is trained, and label ``depth`` tokens behind.

    A block is labelled up to the first token that is not trained, or not in the anchor's document. To be called on the
    host, before the batch is moved: a GPU would be waited for.

    The draw depends on the seed, the step and the row's own tokens alone: neither on the rows beside it, nor on the
    number of processes, nor on an interruption.
    """
    drawn = [
        _drawn(possible.nonzero()[:, 0], anchors, f"{seed} {step} {text[: int(length)].tolist()}")
        for possible, text, length in zip(
            batch.labelled(1).cpu(), batch.tokens.cpu(), batch.attention_mask.sum(1).cpu(), strict=True
        )
    ]
    widest = max(1, *map(len, drawn))
    found = torch.stack([F.pad(row, (0, widest - len(row)), value=-1) for row in drawn]).to(batch.tokens.device)
    return blocks_at(batch, found.clamp(min=0), found >= 0, depth)


def blocks_at(
    batch: Batch, anchors: Int[Tensor, "batch anchors"], given: Bool[Tensor, "batch anchors"], depth: int
) -> Blocks:
    """Return the blocks behind these anchors, those that are not ``given`` without labels."""
    index = (anchors[..., None] + torch.arange(depth, device=anchors.device)).clamp(max=batch.tokens.shape[1] - 1)
    same = _at(batch.documents, index) == _at(batch.documents, anchors)[..., None]
    trained = (given[..., None] & _at(batch.labelled(1), index) & same).cummin(-1).values
    return Blocks(anchors, given, tuple(of_depth.flatten().nonzero()[:, 0] for of_depth in trained.unbind(-1)))


def _drawn(possible: Int[Tensor, " possible"], count: int, key: str) -> Int[Tensor, " drawn"]:
    digest = hashlib.blake2b(key.encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    order = torch.randperm(len(possible), generator=generator)[:count]
    return possible[order].sort().values


def _at(values: Tensor, index: Int[Tensor, "batch *index"]) -> Tensor:
    """Return a batch's values, (batch, positions), at some positions of each row."""
    return values.gather(1, index.flatten(1)).view(index.shape)


class Labels(NamedTuple):
    """The labels of one depth, row by row."""

    text: Int[Tensor, " labels"]
    """The position before the label, in the flattened batch: the target's state there predicts it too."""
    slots: Int[Tensor, " labels"]
    """The slot that predicts it, in the flattened blocks."""
    labels: Int[Tensor, " labels"]
    before: Int[Tensor, " labels"]
    """The tokens before the labels."""


def labels_of(batch: Batch, blocks: Blocks, depth: int, slots: int) -> Labels:
    """Return the labels of one depth (from 0), in blocks of ``slots`` whose last ones predict all depths."""
    block, tokens = blocks.labelled[depth], batch.tokens.flatten()
    row = block.div(blocks.anchors.shape[1], rounding_mode="floor")
    text = row * batch.tokens.shape[1] + blocks.anchors.flatten()[block] + depth
    return Labels(text, block * slots + slots - len(blocks.labelled) + depth, tokens[text + 1], tokens[text])


class BlockInputs(NamedTuple):
    """The arguments of `decoding.model.dspark.DSparkDraft` for all blocks of a batch."""

    tokens: Int[Tensor, "batch slots"]
    text_positions: Int[Tensor, "batch positions"]
    positions: Int[Tensor, "batch slots"]
    mask: Float[Tensor, "batch 1 slots keys"]
    """Additive, over the text's positions and then the slots of all blocks."""


def block_inputs(batch: Batch, blocks: Blocks, slots: int, mask_token: int) -> BlockInputs:
    """Return the tokens, positions and mask of blocks of ``slots``."""
    rows, anchors = blocks.anchors.shape
    tokens = batch.tokens.new_full((rows, anchors, slots), mask_token)
    tokens[..., 0] = _at(batch.tokens, blocks.anchors)
    text = batch.positions()
    positions = _at(text, blocks.anchors)[..., None] + torch.arange(slots, device=text.device)
    place = torch.arange(text.shape[1], device=text.device)
    sees_text = (place < blocks.anchors[..., None]) & (
        batch.documents[:, None] == _at(batch.documents, blocks.anchors)[..., None]
    )
    block = torch.arange(anchors * slots, device=text.device).div(slots, rounding_mode="floor")
    sees_block = (block[:, None] == block).expand(rows, -1, -1)
    sees = torch.cat((sees_text.repeat_interleave(slots, 1), sees_block), 2)
    mask = torch.zeros(sees.shape, device=sees.device).masked_fill_(~sees, _BLOCKED)[:, None]
    return BlockInputs(tokens.flatten(1), text, positions.flatten(1), mask)
