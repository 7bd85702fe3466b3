"""The objective of a DSpark draft: the draft learns the target's distribution of the next K tokens.

Each row has A positions called anchors, and a block at each anchor: the anchor's token, followed by masks. Slot j of
anchor t is at position t + j; it attends to the target's states before t and to the whole block. Blocks do not see each
other, so one forward pass equals A passes of single blocks. Each slot of a block learns the target's distribution of
the token that the slot predicts. The target has read all tokens before the predicted token. The draft has read only the
text up to the anchor, but its bias also reads the token before the predicted token.
"""

import copy
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter, DSparkDrafter
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import DSparkConfig
from decoding.model.dspark_draft import DSparkDraft, PairedDSpark
from decoding.model.forward import unscaled_embeddings
from decoding.model.vocabulary import over_vocabulary
from decoding.rules.best_tree import best_tree
from trainer.data.batch import Batch, Example, collate, flat_rows
from trainer.learning.fused import Bias, fused_loss
from trainer.learning.losses import HiddenTeacher, LabelGroups, LossMix
from trainer.learning.objective import EVERYWHERE_THE_SAME, GreedyTexts, TermSums, rank_shares
from trainer.recipe.draft import DraftSection, DSparkSection
from trainer.target.loading import Columns, OnlineTarget

# Finite in bf16 and fp32; in fp16 it is -inf, which is safe because every slot attends to itself.
_BLOCKED = float(torch.finfo(torch.bfloat16).min)


class Blocks(NamedTuple):
    """The anchors of a batch (positions after which blocks are trained), and the labels of the tokens that each block
    predicts.
    """

    anchors: Int[Tensor, "batch anchors"]
    """Positions t, in increasing order, padded with 0."""
    given: Bool[Tensor, "batch anchors"]
    """False for padding."""
    labelled: tuple[Int[Tensor, " labels"], ...]
    """For each depth (from 0), the blocks whose token t + 1 + depth is trained, as indices in the flattened
    ``anchors``.
    """


def sample_blocks(batch: Batch, anchors: int, depth: int, seed: int, step: int) -> Blocks:
    """In each row, draw up to ``anchors`` positions before trained tokens, and label the next ``depth`` tokens.

    A block's labels end before the first token that training does not use or that belongs to another document. Call
    this with the batch on the host, because otherwise this function would wait for the GPU. The draw depends only on
    the seed, the step and the row's tokens, so other rows, the number of processes and interruptions do not change it.
    """
    drawn = [
        _drawn(possible.nonzero()[:, 0], anchors, f"{seed} {step} {text[: int(length)].tolist()}")
        for possible, text, length in zip(
            batch.labelled(1).cpu(), batch.tokens.cpu(), batch.attention_mask.sum(1).cpu(), strict=True
        )
    ]
    widest = max(1, *map(len, drawn))
    positions = torch.stack([F.pad(row, (0, widest - len(row)), value=-1) for row in drawn]).to(batch.tokens.device)
    return blocks_at(batch, positions.clamp(min=0), positions >= 0, depth)


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
    """Return ``values``, of shape (batch, positions), at some positions of each row."""
    return values.gather(1, index.flatten(1)).view(index.shape)


class Labels(NamedTuple):
    """The labels of a batch. Blocks that predict the same token of a text share a label."""

    text: Int[Tensor, " groups"]
    """Index of the previous token in the flattened batch; from the state at this token the target predicts the label.
    """
    groups: LabelGroups
    slots: Int[Tensor, " rows"]
    """Index of the predicting slot in the flattened blocks."""
    depths: Int[Tensor, " rows"]
    """Each row's depth, from 0."""


def labels_of(batch: Batch, blocks: Blocks, slots: int) -> Labels:
    """Return the labels of blocks with ``slots`` slots each. The last slots of a block predict one depth each. Call
    this on the host.
    """
    counts = torch.tensor([len(of_depth) for of_depth in blocks.labelled])
    block, depth = torch.cat(blocks.labelled), torch.arange(len(counts)).repeat_interleave(counts)
    row = block.div(blocks.anchors.shape[1], rounding_mode="floor")
    text = row * batch.tokens.shape[1] + blocks.anchors.flatten()[block] + depth
    order, distinct, groups = LabelGroups.of(text)
    return Labels(distinct, groups, (block * slots + slots - len(counts) + depth)[order], depth[order])


class BlockInputs(NamedTuple):
    """The arguments of `decoding.model.dspark_draft.DSparkDraft` for all blocks of a batch."""

    tokens: Int[Tensor, "batch slots"]
    text_positions: Int[Tensor, "batch positions"]
    positions: Int[Tensor, "batch slots"]
    mask: Float[Tensor, "batch 1 slots keys"]
    """An additive mask. The keys are the positions of the text, followed by the slots of all blocks."""


def block_inputs(batch: Batch, blocks: Blocks, slots: int, mask_token: int) -> BlockInputs:
    """Return the tokens, positions and mask of blocks of ``slots`` slots."""
    rows, anchors = blocks.anchors.shape
    tokens = batch.tokens.new_full((rows, anchors, slots), mask_token)
    tokens[..., 0] = _at(batch.tokens, blocks.anchors)
    text = batch.positions()
    positions = _at(text, blocks.anchors)[..., None] + torch.arange(slots, device=text.device)
    position = torch.arange(text.shape[1], device=text.device)
    sees_text = (position < blocks.anchors[..., None]) & (
        batch.documents[:, None] == _at(batch.documents, blocks.anchors)[..., None]
    )
    block = torch.arange(anchors * slots, device=text.device).div(slots, rounding_mode="floor")
    sees_block = (block[:, None] == block).expand(rows, -1, -1)
    sees = torch.cat((sees_text.repeat_interleave(slots, 1), sees_block), 2)
    mask = torch.zeros(sees.shape, device=sees.device).masked_fill_(~sees, _BLOCKED)[:, None]
    return BlockInputs(tokens.flatten(1), text, positions.flatten(1), mask)


CONFIDENCE = "confidence"
_TOGETHER = 128
"""Largest number of blocks in one forward pass. It is limited because the mask grows with the square of the number of
slots.
"""


class DSparkInputs(NamedTuple):
    """Inputs of a step: the inputs of the draft's forward pass, and the labels with the target's distribution."""

    states: Float[Tensor, "batch positions taps"]
    embedded: Float[Tensor, "batch slots hidden"]
    blocks: BlockInputs
    labels: Labels
    tokens: Int[Tensor, "batch positions"]
    teacher: HiddenTeacher
    lm_head: Float[Tensor, "vocab hidden"]
    """The target's lm_head; a draft that writes only some tokens has a separate lm_head."""


def run_blocks(
    draft: DSparkDraft,
    states: Float[Tensor, "batch positions taps"],
    embedded: Float[Tensor, "batch slots hidden"],
    blocks: BlockInputs,
) -> Float[Tensor, "batch slots hidden"]:
    """Run all blocks of a batch; return the input of the target's lm_head."""
    text = draft.text_keys(states, blocks.text_positions)

    def held(layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat((text[layer][0], keys), 2), torch.cat((text[layer][1], values), 2)

    keys_at = torch.cat((blocks.text_positions, blocks.positions), 1)
    hidden: Tensor = draft(embedded, blocks.positions, held, blocks.mask.to(text[0][1].dtype), keys_at)
    return hidden


class DSparkTraining(nn.Module):
    """The module that is trained: the draft, and its loss with a term for each depth and a term for the confidence
    head.
    """

    def __init__(self, draft: DSparkDraft, mix: LossMix) -> None:
        super().__init__()
        self.draft = draft.train()
        self._mix = mix

    def forward(self, inputs: DSparkInputs, scale: Float[Tensor, " terms"] | None = None) -> TermSums:
        """Return the losses and the hits, each of shape (terms,), and the total.

        Hits of soft terms are Σ min(p, q), the per-position acceptance; if cross entropy is the only term, hits are
        correct argmaxes.
        """
        hidden = flat_rows(run_blocks(self.draft, inputs.states, inputs.embedded, inputs.blocks), inputs.labels.slots)
        if self.draft.lm_head is None:
            return self._biased(inputs, scale, hidden, inputs.lm_head)
        sums: TermSums = self.draft.lm_head(hidden, partial(self._biased, inputs, scale))
        return sums

    def _biased(
        self, inputs: DSparkInputs, scale: Tensor | None, hidden: Float[Tensor, "rows hidden"], lm_head: Tensor
    ) -> TermSums:
        """Return the loss sums; if the draft has a bias, the bias is added to the logits."""
        compared = partial(self._compared, inputs, scale, hidden, lm_head)
        if self.draft.markov is None:
            return compared(None, None)
        sums: TermSums = self.draft.markov.output(self.draft.markov.embedding(self._before(inputs)), compared)
        return sums

    @staticmethod
    def _before(inputs: DSparkInputs) -> Int[Tensor, " groups"]:
        return inputs.tokens.flatten()[inputs.labels.text]

    def _compared(
        self,
        inputs: DSparkInputs,
        scale: Tensor | None,
        hidden: Float[Tensor, "rows hidden"],
        lm_head: Float[Tensor, "outputs hidden"],
        embedded: Tensor | None,
        output: Tensor | None,
    ) -> TermSums:
        """Return the loss sums; ``embedded`` and ``output`` are the factors of the bias.

        This runs inside the forward pass of the bias's layer.
        """
        labels, depths = inputs.labels, self.draft.config.block_size
        loss = fused_loss(
            hidden,
            lm_head,
            inputs.tokens.flatten()[labels.text + 1],
            self._mix,
            inputs.teacher,
            groups=labels.groups,
            row_weights=None if scale is None else scale[labels.depths],
            bias=None if embedded is None or output is None else Bias(embedded, output),
            tokens=self.draft.output_tokens,
        )
        sums = TermSums.of_rows(loss, labels.depths, depths, self._mix.soft)
        if self.draft.confidence is None:
            return sums
        # The cross entropy between confidence and acceptance; its gradient reaches only the confidence head.
        sure = self.draft.sure(hidden.detach(), self._before(inputs)[labels.groups.of_rows]).float()
        accepted = loss.accepted.float().clamp(0, 1)
        unsure: Tensor = F.binary_cross_entropy_with_logits(sure, accepted, reduction="sum")
        return TermSums(
            torch.cat((sums.losses, unsure.detach()[None])),
            torch.cat((sums.hits, sums.hits.new_full((1,), torch.nan))),
            sums.total + (unsure if scale is None else unsure * scale[depths]),
        )


class BlocksPrefetch(NamedTuple):
    """The parts of a training step that are prepared without running the target."""

    blocks: Blocks
    labels: Labels
    stored: Columns | None
    """The target's states from disk, if they are stored."""


class DSparkObjective:
    """A DSpark draft, its target, and the loss between them."""

    def __init__(
        self,
        target: CausalLM,
        tokenizer: PreTrainedTokenizerBase,
        draft: DSparkDraft,
        section: DraftSection,
        seed: int,
        states: OnlineTarget | None = None,
    ) -> None:
        """The anchors are drawn with ``seed``.

        If ``states`` is None, ``target`` runs at every step. The finished draft has the target's dtype.
        """
        assert section.dspark is not None, "the recipe asks for a DSpark draft"
        self._target, self._tokenizer, self._seed = target, tokenizer, seed
        self._states = states or OnlineTarget(target)
        self._section: DSparkSection = section.dspark
        mix = LossMix.of(section.loss)
        self.module: DSparkTraining = DSparkTraining(draft, mix)
        self.hit_name = "acceptance" if mix.soft else "top1"
        depths = tuple(f"token_{depth}" for depth in range(1, draft.config.block_size + 1))
        self.terms = (*depths, *([CONFIDENCE] if draft.confidence is not None else []))

    @property
    def _config(self) -> DSparkConfig:
        return self.module.draft.config

    def weights(self, step: int) -> tuple[float, ...]:
        falling = [self._section.decay**depth for depth in range(self._config.block_size)]
        return (*(weight / sum(falling) for weight in falling), 1.0)[: len(self.terms)]

    def rates(self, step: int) -> Mapping[str, float]:
        return EVERYWHERE_THE_SAME

    def counts(self, batch: Batch, step: int = 0) -> Float[Tensor, " terms"]:
        counts = list(map(len, self._blocks(batch, step).labelled))
        return torch.tensor([*counts, sum(counts)][: len(self.terms)], dtype=torch.float32)

    def prefetch(self, batch: Batch, step: int) -> BlocksPrefetch:
        blocks = self._blocks(batch, step)
        return BlocksPrefetch(blocks, labels_of(batch, blocks, self._config.slots), self._states.read(batch))

    def _blocks(self, batch: Batch, step: int) -> Blocks:
        return sample_blocks(batch, self._section.anchors, self._config.block_size, self._seed, step)

    def inputs(self, batch: Batch, step: int, prefetched: BlocksPrefetch | None = None) -> tuple[Any, ...]:
        self.module.train()  # decoding leaves the module in evaluation mode
        (blocks, labels, stored), config = prefetched or self.prefetch(batch, step), self._config
        hidden, states = self._states.tapped(batch, config.target_layer_ids, stored)
        given = block_inputs(batch, blocks, config.slots, config.mask_token_id)
        lm_head = self._states.lm_head.to(batch.tokens.device)  # the target may keep its lm_head on another device
        teacher = HiddenTeacher(flat_rows(hidden, labels.text), lm_head, self._states.transform)
        embedded = unscaled_embeddings(self._target.model, given.tokens)
        return (DSparkInputs(states, embedded, given, labels, batch.tokens, teacher, lm_head),)

    def decoding_copy(self) -> DSparkDraft:
        """Return a copy of the draft with its current weights, in the target's dtype."""
        return copy.deepcopy(self.module.draft).to(self._target.device, self._target.dtype).requires_grad_(False).eval()

    def drafter(self) -> Drafter:
        """Return a drafter that drafts the fitted tree or, before a tree is fitted, a chain of K tokens."""
        return DSparkDrafter(self.decoding_copy())

    def choose_tree(self, target: CausalLM, texts: GreedyTexts) -> None:
        """Set the draft's tree to the paths that are most often right on greedy texts of the target."""
        if self._section.tree_nodes:
            accuracies = rank_accuracies(PairedDSpark(self.decoding_copy(), target), texts())
            self.module.draft.config = replace(self._config, tree=best_tree(accuracies, self._section.tree_nodes))

    def save(self, folder: Path) -> None:
        self.decoding_copy().save_pretrained(folder)


@torch.inference_mode()
def rank_accuracies(dspark: PairedDSpark, texts: Sequence[tuple[Sequence[int], int]]) -> list[list[float]]:
    """Return a table of shares: ``[d][r]`` is the share of labels at depth d that are the draft's guess of rank r (d
    and r count from 0).

    ``texts`` are pairs of tokens and prompt length; each new token serves once as the root of a tree.
    """
    online = OnlineTarget(dspark.target)
    labelled = (at_depth for tokens, prompt in texts for at_depth in block_logits(dspark, online, tokens, prompt))
    return rank_shares(labelled, dspark.config.block_size)


@torch.inference_mode()
def block_logits(
    dspark: PairedDSpark, online: OnlineTarget, tokens: Sequence[int], prompt_length: int
) -> Iterator[tuple[int, Int[Tensor, " labels"], Float[Tensor, "labels vocab"]]]:
    """Yield each depth (from 0) with its labels and logits; a block starts at every new token of a text.

    ``online`` is the draft's target. The bias reads the previous token of the text.
    """
    draft, config = dspark.draft, dspark.config
    on_host, device = collate([Example(tokens, [True] * len(tokens), prompt_length)]), dspark.target.device
    batch, anchors = on_host.to(device), torch.arange(prompt_length, len(tokens) - 1)[None]
    if not anchors.numel():
        return
    _, states = online.tapped(batch, config.target_layer_ids)
    for part in anchors.split(_TOGETHER, 1):
        blocks = blocks_at(on_host, part, torch.ones_like(part, dtype=torch.bool), config.block_size)
        labels = labels_of(on_host, blocks, config.slots)
        given = block_inputs(batch, blocks._replace(anchors=part.to(device)), config.slots, config.mask_token_id)
        hidden = run_blocks(draft, states, unscaled_embeddings(dspark.target.model, given.tokens), given)
        bias = dspark.block_bias(hidden.unflatten(1, (-1, config.slots))[0], batch.tokens[0, part[0].to(device)])
        for depth in range(config.block_size):
            chosen = labels.depths == depth
            before, slots = labels.text[labels.groups.of_rows[chosen]].to(device), labels.slots[chosen].to(device)
            lm_head = online.lm_head if draft.lm_head is None else draft.lm_head.weight
            logits = F.linear(flat_rows(hidden, slots).to(lm_head), lm_head)
            if draft.markov is not None:
                tokens_before = batch.tokens[0, before]
                factor = None if bias is None else bias.factor(depth, slots // config.slots, tokens_before)
                logits = draft.markov.added_to(logits, tokens_before, factor=factor)
            yield depth, batch.tokens[0, before + 1], over_vocabulary(logits, dspark.output_tokens, config.vocab_size)
