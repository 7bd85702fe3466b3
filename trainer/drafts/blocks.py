"""Blocks of mask tokens behind the positions of a batch's texts: the tensors that a parallel draft is trained by.

A row of S tokens is extended by D masks behind each of A positions, its anchors. Mask j (from 1) behind anchor t reads
as position t + j, sees the text up to t and the masks of its own block up to j, and predicts token t + j + 1. The text
sees no mask. So one forward computes what A forwards of [x_0 … x_t, M × D] would (PARD, 2504.18583, section 3).
"""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from trainer.data.batch import Batch

_BLOCKED = float(torch.finfo(torch.bfloat16).min)  # finite in every dtype that attention computes in


class Blocks(NamedTuple):
    """The anchors of a batch, and the labels of the masks behind them."""

    anchors: Int[Tensor, "batch anchors"]
    """Positions t, increasing; 0 where a row has fewer."""
    given: Bool[Tensor, "batch anchors"]
    """False where a row has fewer anchors."""
    places: Int[Tensor, "batch anchors depth"]
    """Positions t + j, whose next token mask j predicts; the row's last one for masks behind its end."""
    trained: Bool[Tensor, "batch anchors depth"]
    """True where that next token is trained, and in the anchor's document."""
    masks: Int[Tensor, " masks"]
    """Where ``trained`` is True, as places in it, flattened."""


def sample_blocks(batch: Batch, anchors: int, depth: int, seed: int, step: int) -> Blocks:
    """Draw up to ``anchors`` of each row's positions whose next token is trained, with ``depth`` masks behind each.

    To be called on the host, before the batch is moved: a GPU would be waited for.

    The draw depends on the seed, the step and the row's own tokens alone: neither on the rows beside it, nor on the
    number of processes, nor on an interruption.
    """
    labelled = batch.labelled(1)
    drawn = [
        _drawn(possible.nonzero()[:, 0], anchors, f"{seed} {step} {text[: int(length)].tolist()}")
        for possible, text, length in zip(
            labelled.cpu(), batch.tokens.cpu(), batch.attention_mask.sum(1).cpu(), strict=True
        )
    ]
    widest = max(1, *map(len, drawn))
    found = torch.stack([F.pad(row, (0, widest - len(row)), value=-1) for row in drawn]).to(batch.tokens.device)
    given = found >= 0
    found = found.clamp(min=0)
    ahead = torch.arange(1, depth + 1, device=found.device)
    places = (found[..., None] + ahead).clamp(max=batch.tokens.shape[1] - 1)
    same = _at(batch.documents, places) == _at(batch.documents, found)[..., None]
    trained = given[..., None] & _at(labelled, places) & same
    return Blocks(found, given, places, trained, trained.flatten().nonzero()[:, 0])


def _drawn(possible: Int[Tensor, " possible"], count: int, key: str) -> Int[Tensor, " drawn"]:
    digest = hashlib.blake2b(key.encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    order = torch.randperm(len(possible), generator=generator)[:count]
    return possible[order].sort().values


def _at(values: Tensor, places: Int[Tensor, "batch *places"]) -> Tensor:
    """Return a batch's values, (batch, positions), at some places of each row."""
    return values.gather(1, places.flatten(1)).view(places.shape)


class Labels(NamedTuple):
    """Positions of a forward that predict trained tokens, row by row: those of one term of the loss."""

    places: Int[Tensor, " labels"]
    """Places in the flattened forward, whose rows may be longer than the batch's."""
    labels: Int[Tensor, " labels"]
    before: Int[Tensor, " labels"]
    """The tokens before the labels."""


def text_labels(batch: Batch, places: Int[Tensor, " labels"], blocks: Blocks | None = None) -> Labels:
    """Return the labels of the text's own positions; ``places`` are those of the batch's labels one token ahead."""
    masks = 0 if blocks is None else blocks.places[0].numel()
    row = places.div(batch.tokens.shape[1], rounding_mode="floor")
    tokens = batch.tokens.flatten()
    return Labels(places + row * masks, tokens[places + 1], tokens[places])


def mask_labels(batch: Batch, blocks: Blocks) -> Labels:
    """Return the labels of the masks, whose tokens before are the text's true ones."""
    positions, masks = batch.tokens.shape[1], blocks.places[0].numel()
    row = blocks.masks.div(masks, rounding_mode="floor")
    text, tokens = _places_of_masks(batch, blocks), batch.tokens.flatten()
    return Labels(blocks.masks + (row + 1) * positions, tokens[text + 1], tokens[text])


def rows_of_masks(batch: Batch, blocks: Blocks) -> Int[Tensor, " labels"]:
    """Return the row of `text_labels` that predicts the same token, for each of `mask_labels`."""
    rows = batch.labelled(1).flatten().cumsum(0) - 1
    return rows[_places_of_masks(batch, blocks)]


def _places_of_masks(batch: Batch, blocks: Blocks) -> Int[Tensor, " labels"]:
    """Return the place in the flattened batch that predicts the same token as each trained mask."""
    row = blocks.masks.div(blocks.places[0].numel(), rounding_mode="floor")
    return row * batch.tokens.shape[1] + blocks.places.flatten()[blocks.masks]


def written_from(
    batch: Batch, hidden: Float[Tensor, "batch positions hidden"]
) -> Float[Tensor, "batch positions hidden"]:
    """Return the target's state that each token was written from, the one before it; zeros for a document's first."""
    return F.pad(hidden[:, :-1], (0, 0, 1, 0)).masked_fill(batch.begins()[..., None], 0)


def model_inputs(
    batch: Batch, blocks: Blocks, mask_token: int, windows: Mapping[str, int | None], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the arguments for a transformers model that reads the texts and the masks behind them.

    ``windows``: the sliding window of each type of layer that takes a mask, by `decoding.model.architecture.windows`.
    Masks are additive, in the model's ``dtype``: boolean ones are silently wrong under eager attention.
    """
    text, ahead = batch.positions(), blocks.places - blocks.anchors[..., None]
    masks = (_at(text, blocks.anchors)[..., None] + ahead).flatten(1)
    positions = torch.cat((text, masks), 1)
    tokens = torch.cat((batch.tokens, torch.full_like(masks, mask_token)), 1)
    sees = _sees(batch, blocks)
    attention = {kind: _additive(sees, positions, window, dtype) for kind, window in windows.items()}
    return {
        "input_ids": tokens,
        "position_ids": positions,
        "attention_mask": attention if len(attention) > 1 else attention["full_attention"],
    }


def _sees(batch: Batch, blocks: Blocks) -> Bool[Tensor, "batch queries keys"]:
    """Mark the keys that each query sees: the text before it in its document, and the masks before it in its block."""
    length, (rows, anchors, depth) = batch.tokens.shape[1], blocks.places.shape
    place = torch.arange(length, device=batch.tokens.device)
    last = blocks.anchors.where(blocks.given, -1).repeat_interleave(depth, 1)
    lasts = torch.cat((place.expand(rows, -1), last), 1)
    documents = torch.cat((batch.documents, _at(batch.documents, blocks.anchors).repeat_interleave(depth, 1)), 1)
    text = (place <= lasts[..., None]) & (batch.documents[:, None] == documents[..., None])
    mask = torch.arange(anchors * depth, device=place.device)
    block = (mask[:, None] // depth == mask // depth) & (mask <= mask[:, None])
    return torch.cat((text, F.pad(block, (0, 0, length, 0)).expand(rows, -1, -1)), 2)


def _additive(
    sees: Bool[Tensor, "batch queries keys"],
    positions: Int[Tensor, "batch keys"],
    window: int | None,
    dtype: torch.dtype,
) -> Float[Tensor, "batch 1 queries keys"]:
    if window is not None:
        sees = sees & (positions[:, :, None] - positions[:, None] < window)
    return torch.zeros(sees.shape, dtype=dtype, device=sees.device).masked_fill_(~sees, _BLOCKED)[:, None]
