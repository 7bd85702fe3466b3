"""Medusa heads as a drafter: a tree of the heads' best tokens, from the one hidden state that matters."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor, nn

from decoding.drafters.base import Drafter, DraftRequest, TextStart
from decoding.drafters.draft_tree import tree_budgets
from decoding.heads import MedusaHeads, StackedHeads
from decoding.plan import best_tree
from decoding.policy import Budget
from decoding.proposal import Proposal, ProposalKind
from decoding.sampling import SamplingConfig
from decoding.target import CausalLM
from decoding.tree import TokenTree, TreeShape


class MedusaDrafter(Drafter):
    """Drafts the tree in the heads' config, or the one given: paths of ranks within each head's best tokens.

    A node at depth d (from 1) holds one of head d-1's tokens. With ``dynamic_nodes`` the tree is another at every
    step: of so many nodes, the root included, those with the largest product of the heads' probabilities at this
    position. Both are functions of the context, so proposals are deterministic whatever the temperature.
    """

    name = "medusa"

    def __init__(
        self, heads: MedusaHeads, tree: Sequence[Sequence[int]] | None = None, dynamic_nodes: int | None = None
    ) -> None:
        self.heads = heads.eval()
        self._stacked = StackedHeads(heads)
        if tree is not None and dynamic_nodes is not None:
            raise ValueError("tree and dynamic_nodes are both given: a tree of fixed shape, or one chosen at each step")
        if dynamic_nodes is not None and dynamic_nodes < 2:
            raise ValueError(f"dynamic_nodes is {dynamic_nodes}, the root included: give at least 2")
        self.dynamic_nodes = dynamic_nodes
        self._static = None
        if dynamic_nodes is None:
            self._static = _StaticTree(heads, tree if tree is not None else heads.config.tree)

    @property
    def budgets(self) -> tuple[Budget, ...]:
        if self._static is not None:
            return self._static.budgets
        assert self.dynamic_nodes is not None
        return tree_budgets(min(self.heads.config.num_heads, self.dynamic_nodes - 1), self.dynamic_nodes)

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "MedusaSession":
        self.heads.check_fits(target.hidden_size, target.vocab_size)
        lm_head: nn.Module | None = None
        if self.heads.config.shared_lm_head:
            lm_head = target.model.get_output_embeddings()
        return MedusaSession(self, lm_head)

    @torch.inference_mode()
    def draft(self, requests: Sequence[DraftRequest], lm_head: nn.Module | None) -> list[Proposal]:
        """All heads on all rows' hidden states at once."""
        deepest = min(self.max_depth, max(request.max_depth for request in requests))
        if deepest == 0:
            return [Proposal.root_only(request.tokens[-1], request.hidden.device) for request in requests]
        hidden = torch.stack([request.hidden for request in requests])
        logits = self._stacked(hidden, deepest, lm_head)
        if self._static is not None:
            return self._static.propose(requests, logits)
        return self._propose_dynamic(requests, logits)

    def _propose_dynamic(
        self, requests: Sequence[DraftRequest], logits: Float[Tensor, "heads rows vocab"]
    ) -> list[Proposal]:
        assert self.dynamic_nodes is not None
        # The token of rank r stands in a tree only behind the r better ones.
        ranks = min(self.dynamic_nodes - 1, logits.shape[-1])
        best, tokens = logits.float().topk(ranks)
        shares = (best - logits.float().logsumexp(-1, keepdim=True)).exp()
        # (2, rows, heads, ranks); fp32 holds every id below 2^24, so that both come to the host together.
        token_lists, share_lists = torch.stack([tokens.float(), shares]).transpose(1, 2).tolist()
        proposals = []
        for request, row_tokens, row_shares in zip(requests, token_lists, share_lists, strict=True):
            nodes, root = min(self.dynamic_nodes, request.max_nodes), request.tokens[-1]
            if request.max_depth == 0 or nodes < 2:
                proposals.append(Proposal.root_only(root, logits.device))
                continue
            shape, rank_of = TreeShape.from_paths(best_tree(row_shares[: request.max_depth], nodes - 1))
            drafted = [int(row_tokens[depth - 1][rank]) for depth, rank in zip(shape.depths[1:], rank_of, strict=True)]
            tree = TokenTree(torch.tensor([root, *drafted], device=logits.device), shape)
            tree.__dict__["token_list"] = [root, *drafted]
            proposals.append(Proposal(tree, ProposalKind.DETERMINISTIC))
        return proposals


class _StaticTree:
    """A tree of fixed shape and its cuts: to a depth, and to the nodes that only the best ``width`` ranks lead to."""

    def __init__(self, heads: MedusaHeads, paths: Sequence[Sequence[int]]) -> None:
        shape, ranks = TreeShape.from_paths(paths)
        if shape.max_depth > heads.config.num_heads:
            raise ValueError(
                f"the tree is {shape.max_depth} deep but there are {heads.config.num_heads} heads: shorten its paths"
            )
        if shape.max_depth < 1:
            raise ValueError("the tree is empty: give it at least the path [0]")
        if max(ranks) >= heads.config.vocab_size:
            raise ValueError(f"the tree asks for rank {max(ranks)} but the heads know {heads.config.vocab_size} tokens")
        self._device = next(heads.parameters()).device
        self._shape = shape
        self._ranks = (0, *ranks)
        widest = [0]  # of each node, the largest rank on the way to it
        for node, parent in enumerate(shape.parents[1:], start=1):
            widest.append(max(widest[parent], self._ranks[node]))
        self._widest = tuple(widest)
        self._cuts = lru_cache(maxsize=None)(self._cut)
        self.budgets = self._sizes()

    def _sizes(self) -> tuple[Budget, ...]:
        """The tree to every depth, its best chain to every depth, and the whole depth with 2, 4, 8, ... ranks."""
        deepest, widths = self._shape.max_depth, [1]
        while 2 * widths[-1] <= max(self._ranks):
            widths.append(2 * widths[-1])
        cuts = [self._nodes(depth, width) for depth in range(1, deepest + 1) for width in (1, max(self._ranks) + 1)]
        cuts += [self._nodes(deepest, width) for width in widths]
        # By size: a deeper draft costs one more head, a larger one a wider target pass.
        sizes = {(len(nodes), max(self._shape.depths[node] for node in nodes)) for nodes in cuts}
        return tuple(Budget(depth, nodes) for nodes, depth in sorted(sizes) if nodes > 1)

    def _nodes(self, depth: int, width: int) -> tuple[int, ...]:
        return tuple(node for node in self._shape.nodes_up_to(depth) if self._widest[node] < width)

    def _cut(self, depth: int, nodes: int) -> tuple[TreeShape, Tensor, Tensor]:
        """The widest cut within bounds, and each drafted node's head and rank. Cutting never looks at values."""
        fitting = [cut for width in range(1, max(self._ranks) + 2) if len(cut := self._nodes(depth, width)) <= nodes]
        kept = fitting[-1] if fitting else self._nodes(depth, 1)[: max(nodes, 1)]
        heads = torch.tensor([self._shape.depths[node] - 1 for node in kept[1:]], dtype=torch.long, device=self._device)
        ranks = torch.tensor([self._ranks[node] for node in kept[1:]], dtype=torch.long, device=self._device)
        return self._shape.keep(kept), heads, ranks

    def propose(self, requests: Sequence[DraftRequest], logits: Float[Tensor, "heads rows vocab"]) -> list[Proposal]:
        best = logits.topk(max(self._ranks) + 1).indices
        proposals = []
        for row, request in enumerate(requests):
            shape, heads, ranks = self._cuts(request.max_depth, request.max_nodes)
            root = torch.tensor([request.tokens[-1]]).to(best.device, non_blocking=True)
            tree = TokenTree(torch.cat([root, best[heads, row, ranks]]), shape)
            proposals.append(Proposal(tree, ProposalKind.DETERMINISTIC))
        return proposals


class MedusaSession:
    """The heads keep no state between steps."""

    def __init__(self, drafter: MedusaDrafter, lm_head: nn.Module | None) -> None:
        self._drafter = drafter
        self._lm_head = lm_head

    def admit(self, slot: int, start: TextStart) -> None:
        """Nothing to keep."""

    def move(self, slot: int, to: int) -> None:
        """Nothing to keep."""

    def observe(self, proposals: Sequence[Proposal], logits: Sequence[Tensor]) -> None:
        """Nothing to learn."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return self._drafter.draft(requests, self._lm_head)
