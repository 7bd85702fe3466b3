"""The protocol of training objectives: the loss sums of a batch, a drafter to evaluate, and weights to save."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from decoding.drafters import Drafter
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.rules.best_tree import FITTED_RANKS
from trainer.data.batch import Batch
from trainer.learning.fused import FusedLoss

GreedyTexts = Callable[[], Sequence[tuple[Sequence[int], int]]]
"""Function that returns the target's greedy answers to training prompts, as (tokens, prompt length) pairs."""


def rank_shares(
    by_depth: Iterable[tuple[int, Int[Tensor, " labels"], Float[Tensor, "labels vocab"]]], depths: int
) -> list[list[float]]:
    """Return a table of shares: ``[d][r]`` is the share of labels at depth d that have rank r in the logits (d and r
    count from 0).
    """
    counts, totals = torch.zeros(depths, FITTED_RANKS), torch.zeros(depths, 1)
    for depth, labels, logits in by_depth:
        values, best = logits.topk(min(FITTED_RANKS, logits.shape[-1]))
        best = best.where(values > -torch.inf, -1)  # a token that the draft cannot write has no rank
        counts[depth, : best.shape[1]] += (best == labels[:, None].to(best.device)).sum(0).cpu()
        totals[depth] += len(labels)
    shares: list[list[float]] = (counts / totals.clamp(min=1)).tolist()
    return shares


def checkpoint_layers(model: nn.Module) -> None:
    """Make a model's layers store only their inputs and run again in the backward pass. The gradients are equal."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]
    if not layers:
        raise UserError(f"layers of {type(model).__name__} cannot run again: set gradient_checkpointing=false")
    for layer in layers:  # transformers also sets this, but only in its own models
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


class TermSums(NamedTuple):
    """Sums over the labels of a batch, for each term of the loss."""

    losses: Float[Tensor, " terms"]
    hits: Float[Tensor, " terms"]
    """For each term, the number of correct argmaxes, or the sum of the overlap Σ min(p, q); NaN for a term without
    hits.
    """
    total: Float[Tensor, ""]
    """Σ scale * loss, the only differentiable part."""

    @staticmethod
    def of(losses: Tensor, hits: Tensor, scale: Float[Tensor, " terms"] | None) -> "TermSums":
        """Weight differentiable losses by ``scale``, or by 1 if ``scale`` is None."""
        return TermSums(losses.detach(), hits.detach(), (losses if scale is None else losses * scale).sum())

    @staticmethod
    def of_rows(loss: FusedLoss, terms: Int[Tensor, " rows"], count: int, soft: bool) -> "TermSums":
        """Add the figures of each row to the sums of its term; the rows are already weighted.

        Hits are acceptances if ``soft``. `index_add` on a GPU adds in random order, and autocast would round a matrix
        product to bf16.
        """
        belongs = (torch.arange(count, device=terms.device)[:, None] == terms).to(loss.losses.dtype)
        hits = loss.accepted if soft else loss.correct.to(loss.losses.dtype)
        return TermSums((belongs * loss.losses).sum(1), (belongs * hits).sum(1), loss.loss)


class Objective(Protocol):
    """A module to train, and its loss: Σ weight * sum / count over the terms of the loss; each count is over all
    processes.
    """

    terms: tuple[str, ...]
    hit_name: str

    @property
    def module(self) -> nn.Module:
        """The module to train. Call it with `inputs` and each term's factor in the total; it returns `TermSums`.

        The factors are known before the forward pass because a fused loss already computes its gradients there.
        """

    def weights(self, step: int) -> tuple[float, ...]:
        """Return the weight of each term at a step (from 0)."""

    def rates(self, step: int) -> Mapping[str, float]:
        """Return the factors of the learning rate at a step, by prefix of the parameters' names; ``""`` is for all
        other parameters.

        The keys are the optimizer's groups, so they are the same at every step.
        """

    def counts(self, batch: Batch, step: int) -> Float[Tensor, " terms"]:
        """Return the number of labels of each term in this batch, at a step (from 0)."""

    def prefetch(self, batch: Batch, step: int) -> Any:
        """Prepare, on the host, the inputs of a batch that need no model, such as rows from disk.

        This runs in a thread while another micro batch trains. Tensors in tuples and mappings are moved to the device.
        """

    def inputs(self, batch: Batch, step: int, prefetched: Any = None) -> tuple[Any, ...]:
        """Run the frozen models without gradients; return the arguments for the module.

        ``prefetched`` is the result of `prefetch` for the same batch, on the batch's device; if it is None, `prefetch`
        is called here.
        """

    def drafter(self) -> Drafter:
        """Return a drafter with the module's current weights."""

    def choose_tree(self, target: CausalLM, texts: GreedyTexts) -> None:
        """Fit the tree of finished heads or of a finished draft to texts by the target; without a tree, do nothing."""

    def save(self, folder: Path) -> None:
        """Write the trained weights in the format that decoding loads."""


EVERYWHERE_THE_SAME: Mapping[str, float] = {"": 1.0}
"""The result of `Objective.rates` if all parameters have the same learning rate."""
