"""A drafter that is never right: the least a policy must do is to leave it alone."""

from typing import Any

from decoding.drafters.base import DraftRequest, TextDrafter, TextSession, TextStart, chain_budgets
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree


class WrongDrafter(TextDrafter):
    """Drafts chains of eight times the same token."""

    name = "wrong tokens"

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return chain_budgets(8)

    def open_text(self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int) -> TextSession:
        return self

    def observe(self, *_: Any) -> None:
        """Learn nothing."""

    def propose(self, request: DraftRequest) -> Proposal:
        depth = min(request.max_depth, request.max_nodes - 1)
        return Proposal(TokenTree.chain([request.tokens[-1], *[7] * depth]), ProposalKind.DETERMINISTIC)
