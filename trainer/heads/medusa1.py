"""The Medusa-1 objective: heads on a frozen target's hidden states (2401.10774, section 2.2.1).

Heads may have a bias that depends on the previous token (`decoding.model.markov`); in training, the previous token
comes from the text. With soft targets a head learns the target's distribution for the token that it predicts.
"""

import copy
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.drafters import Drafter
from decoding.drafters.registry import named_drafter
from decoding.errors import UserError
from decoding.files.hub import local_folder
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import lm_head_input
from decoding.model.heads import MedusaConfig, MedusaHead, MedusaHeads, read_config
from decoding.model.vocabulary import over_vocabulary
from decoding.rules.best_tree import best_tree
from trainer.data.batch import Batch, flat_rows
from trainer.learning.fused import Bias, FusedLoss, fused_loss
from trainer.learning.losses import HiddenTeacher, LabelGroups, LossMix, Teacher
from trainer.learning.objective import EVERYWHERE_THE_SAME, GreedyTexts, TermSums, rank_shares
from trainer.recipe.heads import HeadsSection
from trainer.target.initial import Start, start_bias
from trainer.target.loading import Columns, HiddenStates, LogitTransform


class HeadLabels(NamedTuple):
    """The labels of all heads. Heads that predict the same token of a text share its label."""

    states: tuple[Int[Tensor, " labels"], ...]
    """For each head, the indices (in the flattened batch) of the states from which the head predicts: see
    `head_positions`.
    """
    text: Int[Tensor, " groups"]
    """Indices of the previous tokens, from whose states the target predicts the labels."""
    groups: LabelGroups
    order: Int[Tensor, " rows"]
    """The order that sorts the rows by label: indices into the rows of all heads, which follow one another head by
    head.
    """
    heads: Int[Tensor, " rows"]
    """The head of each row, in the order of ``order``."""

    @staticmethod
    def of(batch: Batch, num_heads: int) -> "HeadLabels":
        """Return the labels of a batch. Call this on the host.

        A state and its label are in the same row, so the label of head k is k + 2 places further in the flattened
        batch.
        """
        states = head_positions(batch, num_heads)
        text = torch.cat([positions + k + 1 for k, positions in enumerate(states)])
        head = torch.arange(num_heads).repeat_interleave(torch.tensor([len(positions) for positions in states]))
        order, distinct, groups = LabelGroups.of(text)
        return HeadLabels(states, distinct, groups, order, head[order])


@dataclass(frozen=True)
class HeadInputs:
    """Inputs of a step of the heads: a batch, the target's states on this batch, and the target's lm_head if it is
    needed.
    """

    batch: Batch
    hidden: Float[Tensor, "batch positions hidden"]
    labels: HeadLabels
    lm_head: Float[Tensor, "vocab hidden"] | None = None
    """The target's lm_head, for heads that share it and for soft targets."""
    transform: LogitTransform | None = None


class HeadsPrefetch(NamedTuple):
    """The parts of `HeadInputs` that are prepared without running the target."""

    labels: HeadLabels
    stored: Columns | None
    """The target's states from disk, if they are stored."""


class MedusaTraining(nn.Module):
    """The module that is trained: the heads, and for each head a loss summed over the tokens of answers."""

    def __init__(self, heads: MedusaHeads, section: HeadsSection) -> None:
        super().__init__()
        self.heads = heads
        self._loss, self._mix = section.loss, LossMix.of(section.loss)
        self.hit_name = "acceptance" if section.loss.soft else "top1"

    def forward(self, inputs: HeadInputs, scale: Float[Tensor, " heads"] | None = None) -> TermSums:
        """Return the losses and the hits, each of shape (heads,), and the total.

        Hits of soft terms are Σ min(p, q), the per-position acceptance; if cross entropy is the only term, hits are
        correct argmaxes.
        """
        sums = partial(self._sums_together if self.heads.config.shared_lm_head else self._sums_apart, inputs, scale)
        markov = self.heads.markov
        if markov is None:
            return sums()
        # The sums are computed inside the layer's forward pass, because a sharded weight is whole only there.
        before = inputs.batch.tokens.flatten()[inputs.labels.text]
        biased: TermSums = markov.output(markov.embedding(before), lambda *factors: sums(Bias(*factors)))
        return biased

    def _sums_together(self, inputs: HeadInputs, scale: Tensor | None, bias: Bias | None = None) -> TermSums:
        """Return the sums of heads that share the target's lm_head, computed by one loss; ``bias`` has a row for each
        group.
        """
        labels, count, own = inputs.labels, len(self.heads.heads), self.heads.lm_head
        features = torch.cat([self._features(k, inputs) for k in range(count)]).index_select(0, labels.order)
        read = partial(
            fused_loss,
            labels=inputs.batch.tokens.flatten()[labels.text + 1],
            mix=self._mix,
            teacher=self._teacher(inputs, labels.text),
            groups=labels.groups,
            row_weights=None if scale is None else scale[labels.heads],
            bias=bias,
            tokens=self.heads.output_tokens,
        )
        if own is None:
            assert inputs.lm_head is not None, "heads without an lm_head need the lm_head of the target"
            loss: FusedLoss = read(features, inputs.lm_head)
        else:
            loss = own(features, read=read)
        return TermSums.of_rows(loss, labels.heads, count, self._loss.soft)

    def _sums_apart(self, inputs: HeadInputs, scale: Tensor | None, bias: Bias | None = None) -> TermSums:
        """Return the sums of heads that each have an lm_head; ``bias`` has a row for each group."""
        losses, hits = [], []
        for k, states in enumerate(inputs.labels.states):
            before = states + k + 1
            own = None
            if bias is not None:
                groups = torch.searchsorted(inputs.labels.text, before)
                own = Bias(bias.hidden.index_select(0, groups), bias.weight)
            read = partial(
                fused_loss,
                labels=inputs.batch.tokens.flatten()[before + 1],
                mix=self._mix,
                teacher=self._teacher(inputs, before),
                bias=own,
            )
            loss: FusedLoss = self.heads.heads[k].lm_head(self._features(k, inputs), read=read)  # type: ignore[operator]  # ModuleList's items
            losses.append(loss.loss)
            hits.append(loss.accepted.sum() if self._loss.soft else loss.correct.sum())
        return TermSums.of(torch.stack(losses), torch.stack(hits), scale)

    def _features(self, k: int, inputs: HeadInputs) -> Float[Tensor, "labels hidden"]:
        """Return the lm_head's inputs from head k (from 0), which predicts token t + k + 2 from the state at t."""
        head: MedusaHead = self.heads.heads[k]  # type: ignore[assignment]  # ModuleList's items
        dtype = head.blocks[0].linear.weight.dtype  # type: ignore[union-attr]
        return head.features(flat_rows(inputs.hidden, inputs.labels.states[k]).to(dtype))  # type: ignore[arg-type]

    def _teacher(self, inputs: HeadInputs, text: Int[Tensor, " labels"]) -> Teacher | None:
        """Return the target's distribution after these tokens, which predicts the same tokens as the heads."""
        if not self._loss.soft:
            return None
        assert inputs.lm_head is not None, "soft targets need the target's lm_head"
        return HiddenTeacher(flat_rows(inputs.hidden, text).detach(), inputs.lm_head, inputs.transform)


def head_weights(section: HeadsSection, step: int, steps: int) -> tuple[float, ...]:
    """Return each head's weight in the loss at a step (from 0) of ``steps``."""
    weights = tuple(section.decay**k for k in range(section.num_heads))
    rise = math.sin((step + 1) / steps * math.pi / 2) if section.schedule == "sine" else 1.0
    return tuple(rise * weight for weight in weights)


_LARGE = 0.5
"""Heads share the target's lm_head by default if separate lm_heads would take at least this share of the target's
bytes. Every draft would read these lm_heads, and training would keep them in fp32 with two moments. With 49,152 tokens
and a target of 135M parameters, four lm_heads have 0.84 of the target's size; with 4,096 tokens and 11M parameters,
they have 0.47 of it.
"""
_MANY = 10**9
"""By default, heads share the lm_head in one more case: if separate lm_heads would have at least this many parameters.
Training takes 16 bytes per parameter. Four lm_heads of an 8B target with 128k tokens have 2.1 billion parameters.
"""


def with_sharing(section: HeadsSection, model: PreTrainedModel) -> tuple[HeadsSection, str]:
    """If the section does not say whether heads on ``model`` share its lm_head, decide this and return a sentence about
    the decision. Heads from ``heads.init`` stay as they are.
    """
    weight: Tensor = model.get_output_embeddings().weight
    # Bytes are counted, because quantised weights are packed and some of them are not parameters.
    share, count = section.num_heads * weight.nbytes / model.get_memory_footprint(), section.num_heads * weight.numel()
    shared = section.shared_lm_head
    if shared is None:
        large = share >= _LARGE or count >= _MANY
        shared = large if section.init is None else read_config(local_folder(section.init)).shared_lm_head
    size = f"separate lm_heads {'would ' * shared}have {count / 1e6:,.0f}M parameters, {share:.0%} of the target's size"
    said = f"the heads {'share' if shared else 'do not share'} the target's lm_head: {size} (heads.shared_lm_head)"
    return section.model_copy(update={"shared_lm_head": shared}), said


_SHAPE = ("num_heads", "num_layers", "shared_lm_head", "markov_rank")


def check_init(section: HeadsSection, **sizes: int) -> None:
    """Raise UserError if the heads in ``heads.init`` differ from the shape in the section, or from ``sizes``.

    A None in the section fits any value.
    """
    if section.init is None:
        return
    held = read_config(local_folder(section.init))
    if section.vocabulary is not None and held.outputs > section.vocabulary:
        raise UserError(
            f"the heads in heads.init, {section.init}, write {held.outputs} tokens, more than {section.vocabulary}: "
            "leave heads.vocabulary out to keep these tokens"
        )
    for name, wanted in ({name: getattr(section, name) for name in _SHAPE} | sizes).items():
        if wanted not in (None, getattr(held, name)):
            raise UserError(
                f"the heads in heads.init, {section.init}, have {name} {getattr(held, name)} and not {wanted}: change "
                "the recipe's heads section, or start from other heads"
            )


def initial_heads(
    lm_head: Float[Tensor, "vocab hidden"], section: HeadsSection, written: Sequence[int] | None = None
) -> MedusaHeads:
    """Return fp32 heads on the device of ``lm_head``: heads from ``heads.init``, or new heads that predict like
    ``lm_head``. ``written``: the tokens that new heads can write, in increasing order; None means all tokens.
    """
    config = MedusaConfig(
        hidden_size=lm_head.shape[1],
        vocab_size=lm_head.shape[0],
        num_heads=section.num_heads,
        num_layers=section.num_layers,
        tree=tuple((0,) * depth for depth in range(1, section.num_heads + 1)),
        shared_lm_head=bool(section.shared_lm_head),
        markov_rank=section.markov_rank,
        linear=section.markov_rank > 0 and section.fit_tokens > 0,
        draft_vocab_size=None if written is None else len(written),
    )
    if section.init is None:
        heads = MedusaHeads.for_lm_head(lm_head, config)
        if written is not None:
            heads.write_only(written, lm_head)
        return heads.float().to(lm_head.device)
    check_init(section, hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    heads = MedusaHeads.from_pretrained(local_folder(section.init), torch.float32, lm_head.device).train()
    if heads.lm_head is not None:
        heads.lm_head.requires_grad_(False)
    return heads


@torch.no_grad()
def start_heads(heads: MedusaHeads, start: Start, lm_head: Float[Tensor, "vocab hidden"]) -> None:
    """Set the linear maps of new heads, and their bias, to a regression's coefficients."""
    assert heads.markov is not None, "heads with a linear map have a bias"
    start_bias(heads.markov, start, lm_head if heads.lm_head is None else heads.lm_head.weight)
    for head, weight, bias in zip(heads.heads, start.maps, start.shifts, strict=True):
        head.linear.weight.copy_(weight)  # type: ignore[union-attr,operator]  # ModuleList's items
        head.linear.bias.copy_(bias)  # type: ignore[union-attr,operator]


OF_FITTED = 0.05
"""Learning rate of fitted linear maps, relative to the learning rate of other weights. A few components of a target's
states are very large, so equal steps on all weights of such a map would destroy its predictions."""


class MedusaObjective:
    """Heads on the hidden states of a frozen target, with the loss Σ weight_k * loss_k over the heads."""

    def __init__(
        self,
        states: HiddenStates,
        section: HeadsSection,
        steps: int,
        dtype: torch.dtype,
        written: Sequence[int] | None = None,
    ) -> None:
        """``dtype`` is the dtype of the target; finished heads are stored and used in this dtype.

        ``written``: see `initial_heads`.
        """
        self._states = states
        self._section = section
        self._steps = steps
        self._dtype = dtype
        self.terms = tuple(f"head_{k}" for k in range(section.num_heads))
        self._lm_head: Tensor | None = None
        self.module: MedusaTraining = MedusaTraining(initial_heads(states.lm_head, section, written), section)
        self.hit_name = self.module.hit_name

    @property
    def heads(self) -> MedusaHeads:
        return self.module.heads

    def weights(self, step: int) -> tuple[float, ...]:
        return head_weights(self._section, step, self._steps)

    def rates(self, step: int) -> Mapping[str, float]:
        if not self.heads.config.linear:
            return EVERYWHERE_THE_SAME
        return {"": 1.0, **{f"heads.heads.{k}.linear": OF_FITTED for k in range(self._section.num_heads)}}

    def counts(self, batch: Batch, step: int = 0) -> Float[Tensor, " terms"]:
        return head_counts(batch, len(self.terms))

    def prefetch(self, batch: Batch, step: int) -> HeadsPrefetch:
        return HeadsPrefetch(HeadLabels.of(batch, len(self.terms)), self._states.read(batch))

    def inputs(self, batch: Batch, step: int, prefetched: HeadsPrefetch | None = None) -> tuple[Any, ...]:
        states, section = self._states, self._section
        labels, stored = prefetched or self.prefetch(batch, step)
        hidden = states.hidden(batch, stored)
        uses_lm_head = section.shared_lm_head or section.loss.soft
        # A target that is spread over devices may keep its lm_head on another device.
        device, lm_head = batch.tokens.device, self._lm_head if uses_lm_head else None
        if uses_lm_head and (lm_head is None or lm_head.device != device):
            lm_head = self._lm_head = states.lm_head.to(device)
        return (HeadInputs(batch, hidden, labels, lm_head, states.transform),)

    def drafter(self) -> Drafter:
        return named_drafter("heads", decoding_copy(self.heads, self._dtype))

    def choose_tree(self, target: CausalLM, texts: GreedyTexts) -> None:
        """Fit the tree to the heads: choose the paths that are most often right on greedy texts of the target."""
        fit_tree(self.heads, target, texts(), self._section.tree_nodes)

    def save(self, folder: Path) -> None:
        decoding_copy(self.heads, self._dtype).save_pretrained(folder)


def head_counts(batch: Batch, num_heads: int) -> Float[Tensor, " heads"]:
    """Count the labels of each head."""
    return torch.stack([batch.labelled(k + 2).sum() for k in range(num_heads)])


def head_positions(batch: Batch, num_heads: int) -> tuple[Int[Tensor, " labels"], ...]:
    """Return, for each head, the indices in the flattened batch of the states that have a label."""
    return tuple(batch.label_positions(k + 2) for k in range(num_heads))


def decoding_copy(heads: MedusaHeads, dtype: torch.dtype) -> MedusaHeads:
    """Return a copy in ``dtype`` for decoding while training continues, without a second copy in fp32."""
    cast = {id(p): nn.Parameter(p.detach().to(dtype, copy=True), p.requires_grad) for p in heads.parameters()}
    return copy.deepcopy(heads, cast).eval()  # deepcopy does not copy objects that are in its memo


def fit_tree(heads: MedusaHeads, target: CausalLM, texts: Sequence[tuple[Sequence[int], int]], tree_nodes: int) -> None:
    """Set the heads' tree to the best tree with ``tree_nodes`` drafted nodes, according to the heads' accuracies on
    these texts.
    """
    accuracies = rank_accuracies(target, decoding_copy(heads, target.dtype), texts)
    heads.config = replace(heads.config, tree=best_tree(accuracies, tree_nodes))


@torch.inference_mode()
def rank_accuracies(
    target: CausalLM, heads: MedusaHeads, texts: Sequence[tuple[Sequence[int], int]]
) -> list[list[float]]:
    """Return a table of shares: ``[k][r]`` is the share of labels that are head k's guess of rank r (k and r count from
    0).

    A bias reads the previous token of the text.
    """
    return rank_shares(_new_tokens(target, heads, texts), heads.config.num_heads)


def _new_tokens(
    target: CausalLM, heads: MedusaHeads, texts: Sequence[tuple[Sequence[int], int]]
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield, for each head (from 0), the head's number, its labels among the new tokens of a text, and its logits for
    these labels.
    """
    lm_head = target.model.get_output_embeddings()
    device = next(heads.parameters()).device
    for tokens, prompt_length in texts:
        ids = torch.tensor([list(tokens)], device=target.device)
        hidden, text = lm_head_input(target.model, {"input_ids": ids})[0].to(device), ids[0].to(device)
        for k in range(heads.config.num_heads):
            first = max(prompt_length - 1, 0)  # the position that predicts the first new token
            labels = text[first + k + 2 :]
            if len(labels):
                before = None if heads.markov is None else text[first + k + 1 : -1]
                logits = heads.head_logits(k, hidden[first : first + len(labels)], lm_head, before)
                yield k, labels, over_vocabulary(logits, heads.output_tokens, heads.config.vocab_size)
