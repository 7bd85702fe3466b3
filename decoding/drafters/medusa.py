"""Medusa heads as a drafter: a static tree of the heads' best tokens, from the one hidden state that matters."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from decoding.drafters.base import Drafter, DraftRequest, TextStart
from decoding.heads import MedusaHeads
from decoding.policy import Budget
from decoding.proposal import Proposal, ProposalKind
from decoding.sampling import SamplingConfig
from decoding.target import CausalLM
from decoding.tree import TokenTree, TreeShape


class MedusaDrafter(Drafter):
    """Drafts the tree in the heads' config, or the one given: paths of ranks within each head's best tokens.

    A node at depth d (from 1) holds one of head d-1's tokens. The set is a function of the context, so proposals are
    deterministic whatever the temperature.
    """

    name = "medusa"

    def __init__(self, heads: MedusaHeads, tree: Sequence[Sequence[int]] | None = None) -> None:
        self.heads = heads.eval()
        shape, ranks = TreeShape.from_paths(tree if tree is not None else heads.config.tree)
        if shape.max_depth > heads.config.num_heads:
            raise ValueError(
                f"the tree is {shape.max_depth} deep but there are {heads.config.num_heads} heads: shorten its paths"
            )
        if shape.max_depth < 1:
            raise ValueError("the tree is empty: give it at least the path [0]")
        if max(ranks) >= heads.config.vocab_size:
            raise ValueError(f"the tree asks for rank {max(ranks)} but the heads know {heads.config.vocab_size} tokens")
        self._shape = shape
        self._ranks = (0, *ranks)
        self._trees = lru_cache(maxsize=None)(self._tree_within)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        sizes = [len(self._shape.nodes_up_to(depth)) for depth in range(1, self._shape.max_depth + 1)]
        return tuple(Budget(depth, nodes) for depth, nodes in enumerate(sizes, start=1))

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "MedusaSession":
        self.heads.check_fits(target.hidden_size, target.vocab_size)
        return MedusaSession(self)

    def _tree_within(self, depth: int, nodes: int) -> tuple[TreeShape, Tensor, Tensor]:
        """The tree cut to bounds, and each drafted node's head and rank. Cutting never looks at values."""
        kept = self._shape.nodes_up_to(depth)[: max(nodes, 1)]
        device = next(self.heads.parameters()).device
        heads = torch.tensor([self._shape.depths[node] - 1 for node in kept[1:]], dtype=torch.long, device=device)
        ranks = torch.tensor([self._ranks[node] for node in kept[1:]], dtype=torch.long, device=device)
        return self._shape.keep(kept), heads, ranks

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        """All heads on all rows' hidden states at once."""
        width = max(self._ranks) + 1
        deepest = min(self._shape.max_depth, max(request.max_depth for request in requests))
        hidden = torch.stack([request.hidden for request in requests]).to(next(self.heads.parameters()).dtype)
        # (depth, rows, width)
        best = torch.stack([self.heads.heads[k](hidden).topk(width).indices for k in range(max(deepest, 1))])
        proposals = []
        for row, request in enumerate(requests):
            shape, heads, ranks = self._trees(request.max_depth, request.max_nodes)
            root = torch.tensor([request.tokens[-1]], device=best.device)
            tree = TokenTree(torch.cat([root, best[heads, row, ranks]]), shape)
            proposals.append(Proposal(tree, ProposalKind.DETERMINISTIC))
        return proposals


class MedusaSession:
    """The heads keep no state between steps."""

    def __init__(self, drafter: MedusaDrafter) -> None:
        self._drafter = drafter

    def admit(self, slot: int, start: TextStart) -> None:
        """Nothing to keep."""

    def move(self, slot: int, to: int) -> None:
        """Nothing to keep."""

    def observe(self, proposals: Sequence[Proposal], logits: Sequence[Tensor]) -> None:
        """Nothing to learn."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return self._drafter.draft(requests)
