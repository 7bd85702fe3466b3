"""Blocks of slots after positions of texts: the tensors that train a DSpark draft.

Each row has A positions, its anchors. A block follows each: the anchor's token, then masks. Slot j of anchor t is at
position t + j; it attends to the target's states before t and to its whole block. Blocks do not see each other, so one
forward equals A forwards of single blocks.
"""

import hashlib
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from trainer.data.batch import Batch
from trainer.learning.losses import Places

_BLOCKED = float(
    torch.finfo(torch.bfloat16).min
)  # finite in bf16 and fp32, -inf in fp16; safe, because every slot sees itself


class Blocks(NamedTuple):
    """Anchors of a batch, and labels of the tokens that each block predicts."""

    anchors: Int[Tensor, "batch anchors"]
    """Positions t, increasing; padded with 0."""
    given: Bool[Tensor, "batch anchors"]
    """False for padding."""
    labelled: tuple[Int[Tensor, " labels"], ...]
    """For each depth (from 0), the blocks whose token t + 1 + depth is trained: indices into the flat ``anchors``."""


def sample_blocks(batch: Batch, anchors: int, depth: int, seed: int, step: int) -> Blocks:
    """Draw up to ``anchors`` positions per row whose next token is trained, and label the next ``depth`` tokens.

    A block's labels stop at the first token that is not trained or in another document. Call this with the batch on the
    host; otherwise it waits for the GPU. The draw depends only on the seed, the step and the row's tokens, so other
    rows, the number of processes and interruptions do not change it.
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
    """Return the blocks at these anchors; only ``given`` anchors get labels."""
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
    """Return ``values``, (batch, positions), at some positions of each row."""
    return values.gather(1, index.flatten(1)).view(index.shape)


class Labels(NamedTuple):
    """The labels of a batch. Blocks that predict the same token of a text share a place."""

    text: Int[Tensor, " places"]
    """Index of the previous token in the flattened batch; the target's state there predicts the label too."""
    places: Places
    slots: Int[Tensor, " rows"]
    """Index of the predicting slot in the flattened blocks."""
    depths: Int[Tensor, " rows"]
    """Each row's depth, from 0."""


def labels_of(batch: Batch, blocks: Blocks, slots: int) -> Labels:
    """Return the labels of blocks of ``slots``; the last slots predict the depths. Call this on the host."""
    counts = torch.tensor([len(of_depth) for of_depth in blocks.labelled])
    block, depth = torch.cat(blocks.labelled), torch.arange(len(counts)).repeat_interleave(counts)
    row = block.div(blocks.anchors.shape[1], rounding_mode="floor")
    text = row * batch.tokens.shape[1] + blocks.anchors.flatten()[block] + depth
    order, distinct, places = Places.of(text)
    return Labels(distinct, places, (block * slots + slots - len(counts) + depth)[order], depth[order])


class BlockInputs(NamedTuple):
    """The arguments of `decoding.model.dspark.DSparkDraft` for all blocks of a batch."""

    tokens: Int[Tensor, "batch slots"]
    text_positions: Int[Tensor, "batch positions"]
    positions: Int[Tensor, "batch slots"]
    mask: Float[Tensor, "batch 1 slots keys"]
    """Additive; keys are the text's positions, then the slots of all blocks."""


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
