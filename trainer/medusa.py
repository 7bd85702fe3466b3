"""The Medusa-1 objective: heads on the hidden states of a frozen target (2401.10774, section 2.2.1)."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from decoding.drafters import Drafter, MedusaDrafter
from decoding.heads import MedusaConfig, MedusaHead, MedusaHeads
from decoding.plan import best_tree
from decoding.target import CausalLM, capture_lm_head_input, last_position
from trainer.data import Batch
from trainer.losses import linear_cross_entropy
from trainer.objective import TermSums
from trainer.recipe import HeadsSection

_RANKS = 10  # of each head's best tokens, as in Medusa's published trees


class MedusaTraining(nn.Module):
    """The heads with their loss: one cross entropy per head, at the tokens the answer is made of."""

    def __init__(self, heads: MedusaHeads) -> None:
        super().__init__()
        self.heads = heads

    def forward(
        self,
        hidden: Float[Tensor, "batch positions hidden"],
        tokens: Int[Tensor, "batch positions"],
        trained: Int[Tensor, "batch positions"],
        lm_head: Float[Tensor, "vocab hidden"] | None = None,
    ) -> TermSums:
        """``lm_head`` is the target's, which heads without one of their own share."""
        losses, hits = [], []
        heads: Sequence[MedusaHead] = self.heads.heads  # type: ignore[assignment]  # ModuleList's items
        for k, head in enumerate(heads):
            ahead = k + 2  # head k at position t predicts token t+2+k
            labelled = trained[:, ahead:]
            x = hidden[:, :-ahead][labelled].to(head.blocks[0].linear.weight.dtype)  # type: ignore[union-attr,arg-type]
            for block in head.blocks:
                x = block(x)
            weight = lm_head if head.lm_head is None else head.lm_head.weight
            assert weight is not None, "heads without an lm_head are given the target's"
            loss, correct = linear_cross_entropy(x, weight, tokens[:, ahead:][labelled])
            losses.append(loss)
            hits.append(correct)
        return TermSums(torch.stack(losses), torch.stack(hits))


class MedusaObjective:
    """Heads, their frozen target, and the loss Σ decay^k * cross entropy of head k."""

    hit_name = "top1"

    def __init__(self, target: CausalLM, section: HeadsSection) -> None:
        self._target = target
        target.model.requires_grad_(False)
        chain = tuple((0,) * depth for depth in range(1, section.num_heads + 1))
        config = MedusaConfig(
            target.hidden_size,
            target.vocab_size,
            section.num_heads,
            section.num_layers,
            tree=chain,
            shared_lm_head=section.shared_lm_head,
        )
        heads = MedusaHeads.for_target(target.model, config).float().to(target.device)
        self.module: MedusaTraining = MedusaTraining(heads)
        self.terms = tuple(f"head_{k}" for k in range(section.num_heads))
        self.weights = tuple(section.decay**k for k in range(section.num_heads))
        self._tree_nodes = section.tree_nodes

    def counts(self, batch: Batch) -> Float[Tensor, " terms"]:
        return torch.stack([batch.trained[:, k + 2 :].sum() for k in range(len(self.terms))])

    def inputs(self, batch: Batch) -> tuple[Tensor, ...]:
        with torch.no_grad(), capture_lm_head_input(self._target.model, select=last_position) as captured:
            self._target.model(input_ids=batch.tokens, attention_mask=batch.attention_mask, use_cache=False)
        if not self.module.heads.config.shared_lm_head:
            return captured[0], batch.tokens, batch.trained
        lm_head: nn.Linear = self._target.model.get_output_embeddings()
        return captured[0], batch.tokens, batch.trained, lm_head.weight

    def _heads_for_decoding(self) -> MedusaHeads:
        return copy.deepcopy(self.module.heads).to(self._target.dtype)

    def drafter(self) -> Drafter:
        return MedusaDrafter(self._heads_for_decoding())

    def choose_tree(self, texts: Sequence[tuple[Sequence[int], int]]) -> None:
        """Fit the tree to the heads: the paths that are right most often on the target's own greedy texts.

        ``texts`` are (tokens, prompt length) pairs.
        """
        accuracies = rank_accuracies(self._target, self._heads_for_decoding(), texts)
        self.module.heads.config = replace(self.module.heads.config, tree=best_tree(accuracies, self._tree_nodes))

    def save(self, folder: Path) -> None:
        self._heads_for_decoding().save_pretrained(folder)


@torch.inference_mode()
def rank_accuracies(
    target: CausalLM, heads: MedusaHeads, texts: Sequence[tuple[Sequence[int], int]]
) -> list[list[float]]:
    """``[k][r]``: how often head k's rank-r token (both from 0) is the token of the text it predicts."""
    counts = torch.zeros(heads.config.num_heads, _RANKS)
    totals = torch.zeros(heads.config.num_heads, 1)
    for tokens, prompt_length in texts:
        ids = torch.tensor([list(tokens)], device=target.device)
        with capture_lm_head_input(target.model, select=last_position) as captured:
            target.model(input_ids=ids, use_cache=False)
        for k, head in enumerate(heads.heads):
            first = max(prompt_length - 1, 0)  # the position whose lm_head wrote the first new token
            labels = ids[0, first + k + 2 :]
            if not len(labels):
                continue
            logits = head(captured[0][0, first : first + len(labels)], target.model.get_output_embeddings())
            best = logits.topk(min(_RANKS, heads.config.vocab_size)).indices
            counts[k, : best.shape[1]] += (best == labels[:, None]).sum(0).cpu()
            totals[k] += len(labels)
    shares: list[list[float]] = (counts / totals.clamp(min=1)).tolist()
    return shares
