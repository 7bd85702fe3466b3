"""Heads as a drafter: a tree of the heads' tokens, from the hidden state that the root was written from."""

from collections.abc import Callable, Sequence
from functools import lru_cache, partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from decoding.drafters.base import Drafter, DraftRequest, TextStart
from decoding.drafters.draft_tree import tree_budgets
from decoding.drafters.growth import ConditionalLogits, DynamicGrowth, PathLogits, SampledGrowth, StaticGrowth
from decoding.drafters.static_tree import StaticTree
from decoding.drafters.text_rows import TextRows
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads, StackedHeads
from decoding.model.markov import DecodingBias
from decoding.policies import Budget
from decoding.rules.best_tree import best_tree
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree, TreeShape


class MedusaDrafter(Drafter):
    """Drafter of the tree in the heads' config, or of ``tree``: paths of ranks among each head's best tokens.

    A node at depth d (from 1) holds one of the best tokens of head d-1; for heads with a Markov bias, one of the best
    after its parent. With ``dynamic_nodes``
    every step has a tree of its own: the ``dynamic_nodes`` nodes, the root included, with the largest product of the
    heads' probabilities. All these trees depend on the context alone, so proposals are deterministic at any
    temperature.

    ``sampled``: above temperature 0 a tree of fixed shape is drawn from the heads' distributions after every sampling
    control, the children of a node without replacement. A dynamic tree is never drawn.
    """

    artefact = "heads"

    def __init__(
        self,
        heads: MedusaHeads,
        tree: Sequence[Sequence[int]] | None = None,
        dynamic_nodes: int | None = None,
        sampled: bool = True,
    ) -> None:
        if tree is not None and dynamic_nodes is not None:
            raise ValueError("tree and dynamic_nodes are both given: a tree of fixed shape, or one chosen at each step")
        if dynamic_nodes is not None and dynamic_nodes < 2:
            raise ValueError(f"dynamic_nodes is {dynamic_nodes}, the root included: give at least 2")
        self.heads = heads
        self.name = "medusa" if heads.markov is None else "markov"
        self.dynamic_nodes = dynamic_nodes
        self._static = None
        if dynamic_nodes is None:
            self._static = _static_tree(heads.config, tree if tree is not None else heads.config.tree)
        self._best = StaticGrowth(self._static) if self._static is not None else DynamicGrowth(self.budgets[-1])
        self._drawn = SampledGrowth(self._static) if self._static is not None and sampled else None
        self._stacked = StackedHeads(heads)
        self._bias = None if heads.markov is None else DecodingBias(heads.markov)
        self._places = lru_cache(maxsize=None)(_places)

    @property
    def label(self) -> str:
        kind = "dynamic " if self._static is None else "" if self._drawn is not None else "deterministic "
        nodes = self.max_nodes - 1
        shape = "chain" if self._static is not None and nodes == self.max_depth else "tree"
        return f"{self.name}, {kind}{shape} of {nodes}"

    @property
    def budgets(self) -> tuple[Budget, ...]:
        if self._static is not None:
            return self._static.budgets
        assert self.dynamic_nodes is not None
        return tree_budgets(min(self.heads.config.num_heads, self.dynamic_nodes - 1), self.dynamic_nodes)

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        drawn = self._drawn_at(sampling)
        return frozenset({ProposalKind.DETERMINISTIC if drawn is None else drawn.kind})

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "MedusaSession":
        self.heads.config.check_fits(target.hidden_size, target.vocab_size)
        texts = TextRows(sampling, target.vocab_size, target.device)
        propose: Callable[[Sequence[DraftRequest], PathLogits], list[Proposal]] = self._best.propose
        if (drawn := self._drawn_at(sampling)) is not None:
            propose = partial(drawn.propose, texts=texts)
        elif self._bias is None:  # no head's logits depend on a drafted token
            return MedusaSession(texts, partial(self._draft, lm_head=self._lm_head(target)))
        logits_of = self._logits_of(target)
        return MedusaSession(texts, lambda requests: propose(requests, logits_of(requests)))

    def _drawn_at(self, sampling: SamplingConfig) -> SampledGrowth | None:
        """Return the growth by draws if these controls ask for it."""
        return None if sampling.greedy else self._drawn

    def _lm_head(self, target: CausalLM) -> nn.Module | None:
        """Return the target's lm_head if the heads share it."""
        if not self.heads.config.shared_lm_head:
            return None
        lm_head: nn.Module = target.model.get_output_embeddings()
        return lm_head

    def _logits_of(self, target: CausalLM) -> Callable[[Sequence[DraftRequest]], PathLogits]:
        """Return the function from requests to the logits of their trees' nodes."""
        lm_head = self._lm_head(target)
        return lambda requests: ConditionalLogits(self._run(requests, lm_head), self._bias)

    def _run(self, requests: Sequence[DraftRequest], lm_head: nn.Module | None) -> Float[Tensor, "heads rows vocab"]:
        """Run all heads on the hidden states of all rows at once, without a Markov bias."""
        deepest = min(self.max_depth, max(request.max_depth for request in requests))
        return self._stacked(torch.stack([request.hidden for request in requests]), deepest, lm_head)

    def _draft(self, requests: Sequence[DraftRequest], lm_head: nn.Module | None) -> list[Proposal]:
        """Draft with heads whose logits depend on the hidden state alone: the best tokens of all at once."""
        logits = self._run(requests, lm_head)
        if self._static is not None:
            return self._propose_static(self._static, requests, logits)
        return self._propose_dynamic(requests, logits)

    def _propose_static(
        self, tree: StaticTree, requests: Sequence[DraftRequest], logits: Float[Tensor, "heads rows vocab"]
    ) -> list[Proposal]:
        best = logits.topk(tree.ranks).indices
        proposals = []
        for row, request in enumerate(requests):
            shape, ranks = tree.cut(request.max_depth, request.max_nodes)
            heads_of, ranks_of = self._places(shape, ranks, best.device)
            root = torch.tensor([request.tokens[-1]]).to(best.device, non_blocking=True)
            tokens = torch.cat([root, best[heads_of, row, ranks_of]])
            proposals.append(Proposal(TokenTree(tokens, shape), ProposalKind.DETERMINISTIC))
        return proposals

    def _propose_dynamic(
        self, requests: Sequence[DraftRequest], logits: Float[Tensor, "heads rows vocab"]
    ) -> list[Proposal]:
        assert self.dynamic_nodes is not None
        # A tree that holds the token of rank r also holds the r better ones: more ranks than nodes are never needed.
        ranks = min(self.dynamic_nodes - 1, logits.shape[-1])
        best, tokens = logits.float().topk(ranks)
        shares = (best - logits.float().logsumexp(-1, keepdim=True)).exp()
        # (2, rows, heads, ranks); fp32 holds every id below 2^24, so ids and shares come to the host in one transfer.
        token_lists, share_lists = torch.stack([tokens.float(), shares]).transpose(1, 2).tolist()
        proposals = []
        for request, row_tokens, row_shares in zip(requests, token_lists, share_lists, strict=True):
            nodes, root = min(self.dynamic_nodes, request.max_nodes), request.tokens[-1]
            if request.max_depth == 0 or nodes < 2:
                proposals.append(Proposal.root_only(root, logits.device))
                continue
            shape, rank_of = TreeShape.from_paths(best_tree(row_shares[: request.max_depth], nodes - 1))
            drafted = [int(row_tokens[depth - 1][rank]) for depth, rank in zip(shape.depths[1:], rank_of, strict=True)]
            tree = TokenTree.of_list([root, *drafted], shape, logits.device)
            proposals.append(Proposal(tree, ProposalKind.DETERMINISTIC))
        return proposals


def _static_tree(config: MedusaConfig, paths: Sequence[Sequence[int]]) -> StaticTree:
    """Return the tree of these paths; ValueError for one that is too deep or too wide for the heads, or empty."""
    tree = StaticTree(paths)
    if tree.max_depth > config.num_heads:
        raise ValueError(f"the tree is {tree.max_depth} deep but there are {config.num_heads} heads: shorten its paths")
    if tree.ranks > config.vocab_size:
        raise ValueError(f"the tree asks for rank {tree.ranks - 1} but the heads know {config.vocab_size} tokens")
    return tree


def _places(shape: TreeShape, ranks: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each drafted node's head and rank, (nodes - 1,) each."""
    heads = torch.tensor([depth - 1 for depth in shape.depths[1:]], dtype=torch.long, device=device)
    return heads, torch.tensor(ranks, dtype=torch.long, device=device)


class MedusaSession:
    """A session of heads. They keep no state between steps: it holds what drawing needs to know of the texts."""

    def __init__(self, texts: TextRows, draft: Callable[[Sequence[DraftRequest]], list[Proposal]]) -> None:
        self._texts = texts
        self._draft = draft

    def admit(self, slot: int, start: TextStart) -> None:
        self._texts.admit(slot, start)

    def move(self, slot: int, to: int) -> None:
        self._texts.move(slot, to)

    def observe(self, proposals: Sequence[Proposal], logits: Sequence[Tensor]) -> None:
        """Do nothing: the texts hold everything that the session needs."""

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        if not any(request.max_depth for request in requests):
            return [Proposal.root_only(request.tokens[-1], request.hidden.device) for request in requests]
        return self._draft(requests)
