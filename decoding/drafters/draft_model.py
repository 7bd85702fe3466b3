"""A small causal language model as a drafter of chains, token by token."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.drafters.base import Drafter, DraftRequest
from decoding.drafters.draft_state import DraftState, StateSession
from decoding.drafters.growth import ChildLogits, Growth, StaticTree
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal, ProposalKind


class DraftModelDrafter(Drafter):
    """Drafter of a chain of ``tokens`` with a model that uses the target's tokenizer.

    At temperature 0 it drafts the model's best tokens. Above 0 it draws from the model's distribution unless
    ``sampled`` is False; the chain ends early if processors forbid every token that the model knows.
    """

    name = "draft model"
    artefact = "draft"

    def __init__(self, draft: CausalLM, tokens: int = 4, sampled: bool = True) -> None:
        if tokens < 1:
            raise UserError(f"tokens is {tokens}: use at least 1")
        self.draft = draft
        self.tokens = tokens
        self.growth = Growth(StaticTree.chain(tokens), sampled)
        self.budgets = self.growth.tree.budgets
        self.max_positions = draft.max_positions
        self.label_with_size = f"{self.name}, {tokens} {'tokens' if sampled else 'likeliest tokens'}"
        self.rough_cost = 0.05 * tokens

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return frozenset({self.growth.kind(sampling)})

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "DraftModelSession":
        state = DraftState(self.draft, target, sampling, rows, max_length, self.max_nodes)
        return DraftModelSession(self.growth, state)


class DraftModelSession(StateSession):
    """A session of the draft on a batch: one pass per depth, for all rows."""

    def __init__(self, growth: Growth, state: DraftState) -> None:
        super().__init__(state)
        self._growth = growth

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        depths = [self._growth.tree.cut(request)[0].max_depth for request in requests]
        if not any(depths):
            return [Proposal.root_only(request.tokens[-1], self._state.draft.device) for request in requests]
        root = self._state.catch_up([request.tokens for request in requests])

        def after(depth: int, rows: Tensor, tokens: Tensor) -> ChildLogits:
            if depth == 0:
                return ChildLogits(root, rows)
            every = tokens.new_zeros(len(requests))  # a chain that has ended runs a dummy token
            every[rows] = tokens
            return ChildLogits(self._state.step(every), rows)

        proposals = self._growth.propose(requests, after, self._state.rows)
        trees = [proposal.tree for proposal in proposals]
        ran = [max(0, min(len(tree) - 1, depth - 1)) for tree, depth in zip(trees, depths, strict=True)]
        self._state.remember(trees, ran)
        return proposals
