"""Medusa heads as a drafter: a static tree of the heads' best tokens, from the one hidden state that matters."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from decoding.heads import MedusaHeads
from decoding.proposal import Proposal, ProposalKind
from decoding.sampling import RandomSource, SamplingConfig
from decoding.target import CausalLM
from decoding.tree import TokenTree, TreeShape


class MedusaDrafter:
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
        self.max_depth = shape.max_depth
        self.max_nodes = len(shape)
        self._trees = lru_cache(maxsize=None)(self._tree_up_to)

    def open(
        self, target: CausalLM, sampling: SamplingConfig, source: RandomSource, max_length: int
    ) -> "MedusaDrafter":
        """The heads keep no state between steps: the drafter is its own session."""
        self.heads.check_fits(target.hidden_size, target.vocab_size)
        return self

    def _tree_up_to(self, depth: int) -> tuple[TreeShape, Tensor, Tensor]:
        """The tree cut at a depth, and each drafted node's head and rank. Cutting by depth never looks at values."""
        nodes = self._shape.nodes_up_to(depth)
        device = next(self.heads.parameters()).device
        heads = torch.tensor([self._shape.depths[node] - 1 for node in nodes[1:]], device=device)
        ranks = torch.tensor([self._ranks[node] for node in nodes[1:]], device=device)
        return self._shape.keep(nodes), heads, ranks

    @torch.inference_mode()
    def propose(self, tokens: Sequence[int], hidden: Tensor, max_depth: int) -> Proposal:
        shape, heads, ranks = self._trees(min(max_depth, self.max_depth))
        width = max(self._ranks) + 1
        hidden = hidden.to(next(self.heads.parameters()).dtype)
        best = torch.stack([self.heads.heads[k](hidden).topk(width).indices for k in range(shape.max_depth)])
        drafted = best[heads, ranks]
        root = torch.tensor([tokens[-1]], device=drafted.device)
        return Proposal(TokenTree(torch.cat([root, drafted]), shape), ProposalKind.DETERMINISTIC)
