"""A small causal language model as a drafter: a chain, or a tree of fixed shape drawn level by level."""

from collections.abc import Sequence
from itertools import accumulate
from operator import mul

import torch
from torch import Tensor

from decoding.drafters.base import Drafter, DraftRequest, TextStart
from decoding.drafters.chains import ChainGrowth
from decoding.drafters.draft_state import DraftState, shared_tokens
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.drawing import draw_without_replacement
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import HistoryRows, SamplingConfig, adjusted_logits, probabilities
from decoding.rules.tree import TokenTree, TreeShape


class DraftModelDrafter(Drafter):
    """Drafter by a model with the target's tokenizer.

    ``branching[d]`` is the number of children of each node at depth d: ``(1, 1, 1, 1)`` is a chain of four tokens. At
    temperature 0 the children are the draft's best tokens; above it they are drawn from the draft's distribution,
    without replacement unless ``with_replacement`` (for the single children of a chain this makes no difference).
    Without ``sampled`` they are the best tokens at any temperature, a deterministic proposal. A draft ends where
    processors forbid every token that the model knows.

    ``stop_below`` ends a chain after a token to which the draft gave a probability below it. The token stays in the
    chain: dropping a sampled token for its value would not be lossless, stopping after it is.
    """

    name = "draft model"
    artefact = "draft"

    def __init__(
        self,
        draft: CausalLM,
        branching: Sequence[int] = (1, 1, 1, 1),
        with_replacement: bool = False,
        stop_below: float = 0.0,
        sampled: bool = True,
    ) -> None:
        if with_replacement and not sampled:
            raise ValueError("with_replacement is a way to draw, and sampled is false: give one or the other")
        if not branching or min(branching) < 1:
            raise ValueError(f"branching is {list(branching)}: give at least one level, each with at least one child")
        if not 0 <= stop_below < 1:
            raise ValueError(f"stop_below is {stop_below}: give a probability in [0, 1), 0 to never stop early")
        if stop_below and max(branching) > 1:
            raise ValueError(
                f"stop_below ends chains, and branching {list(branching)} is a tree: give one or the other"
            )
        self.draft = draft
        self.branching = tuple(branching)
        self.with_replacement = with_replacement
        self.stop_below = stop_below
        self.sampled = sampled
        self.rough_cost = 0.05 * len(branching)

    @property
    def label(self) -> str:
        if self.is_chain:
            return f"{self.name}, {len(self.branching)} {'tokens' if self.sampled else 'likeliest tokens'}"
        return f"{self.name}, {'' if self.sampled else 'deterministic '}{'x'.join(map(str, self.branching))} tree"

    @property
    def max_positions(self) -> int | None:
        return self.draft.max_text

    @property
    def budgets(self) -> tuple[Budget, ...]:
        level_sizes = accumulate(self.branching, mul)
        return tuple(Budget(depth, 1 + nodes) for depth, nodes in enumerate(accumulate(level_sizes), start=1))

    @property
    def is_chain(self) -> bool:
        return max(self.branching) == 1

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "DraftModelSession":
        known = shared_tokens(self.draft, target)
        if max(self.branching) > known:
            raise ValueError(f"branching is {list(self.branching)} but target and draft share {known} tokens")
        state = DraftState(self.draft, target, sampling, rows, max_length, self.max_nodes)
        return DraftModelSession(self, state, sampling)

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return frozenset({self.kind(sampling)})

    def kind(self, sampling: SamplingConfig) -> ProposalKind:
        """Return the kind of all its proposals under these controls."""
        if sampling.greedy or not self.sampled:
            return ProposalKind.DETERMINISTIC
        if self.is_chain or self.with_replacement:
            return ProposalKind.SAMPLED
        return ProposalKind.SAMPLED_WITHOUT_REPLACEMENT

    def depth_within(self, request: DraftRequest) -> int:
        """Return the depth of its deepest tree that fits a request."""
        fitting = [b.depth for b in self.budgets if b.depth <= request.max_depth and b.nodes <= request.max_nodes]
        return max(fitting, default=0)


class DraftModelSession:
    """A session of the draft on a batch."""

    def __init__(self, drafter: DraftModelDrafter, state: DraftState, sampling: SamplingConfig) -> None:
        self._drafter = drafter
        self._state = state
        self._sampling = sampling
        self._chains = ChainGrowth(state.rows, drafter.sampled, drafter.stop_below)

    def admit(self, slot: int, start: TextStart) -> None:
        self._state.admit(slot, start)

    def move(self, slot: int, to: int) -> None:
        self._state.move(slot, to)

    def observe(self, proposals: Sequence[Proposal], logits: Sequence[Tensor]) -> None:
        """Do nothing: the texts hold everything that the session needs."""

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        depths = [self._drafter.depth_within(request) for request in requests]
        if not any(depths):
            return [Proposal.root_only(request.tokens[-1], self._state.draft.device) for request in requests]
        texts = [request.tokens for request in requests]
        logits = self._state.catch_up(texts)
        if self._drafter.is_chain:
            return self._propose_chains(texts, logits, depths)
        return self._propose_trees(texts, logits, depths)

    def _propose_chains(self, texts: Sequence[Sequence[int]], root: Tensor, depths: Sequence[int]) -> list[Proposal]:
        """Draft a token per step in every row."""
        proposals, steps = self._chains.propose(
            texts, depths, lambda chains: self._state.step(chains[:, -1]) if chains.shape[1] > 1 else root
        )
        trees = [proposal.tree for proposal in proposals]
        self._state.remember(trees, [min(len(tree) - 1, steps - 1) for tree in trees])
        return proposals

    def _propose_trees(self, texts: Sequence[Sequence[int]], root: Tensor, depths: Sequence[int]) -> list[Proposal]:
        """Draft trees level by level; all nodes of a level, of all rows, run through the draft in one pass."""
        growing = [_GrowingTree(text[-1]) for text in texts]
        logits = list(root[:, None])
        run = [0] * len(texts)
        for depth in range(max(depths)):
            if depth:
                if not any(tree.level for tree in growing):
                    break
                run = [len(tree.tokens) - 1 for tree in growing]
                logits = self._state.run_level([t.tree() for t in growing], [t.level.start for t in growing])
            for row, tree in enumerate(growing):
                if depth >= depths[row]:
                    tree.level = range(len(tree.tokens), len(tree.tokens))
                    continue
                history = None
                if self._sampling.needs_history:
                    history = self._state.rows.history_at(row, texts[row], tree.tree(), tree.level)
                children, q = self._children(row, logits[row], history, self._drafter.branching[depth])
                tree.add_level(children, q)
        trees = [tree.tree(self._state.draft.device) for tree in growing]
        self._state.remember(trees, run)
        kind = self._drafter.kind(self._sampling)
        if kind is ProposalKind.DETERMINISTIC:
            return [Proposal(tree, kind) for tree in trees]
        return [
            Proposal(tree, kind, torch.cat(rows)) if (rows := growing[row].q) else Proposal.root_only(texts[row][-1])
            for row, tree in enumerate(trees)
        ]

    def _children(
        self, row: int, logits: Tensor, history: HistoryRows | None, count: int
    ) -> tuple[list[list[int]], Tensor]:
        """Choose the children of each node of a level, in draw order, none where q has no mass; return them and q."""
        if self._sampling.greedy or not self._drafter.sampled:
            return adjusted_logits(logits, self._sampling, history).topk(count).indices.tolist(), logits
        q = probabilities(logits, self._sampling, history)
        source = self._state.rows.sources[row]
        if self._drafter.with_replacement:
            return [[source.draw(weights) for _ in range(count if weights.sum() > 0 else 0)] for weights in q], q
        return [draw_without_replacement(weights, count, source).tolist() for weights in q], q


class _GrowingTree:
    """A tree under construction. The nodes of a level are consecutive, so row i of q belongs to node i."""

    def __init__(self, root: int) -> None:
        self.tokens = [root]
        self.parents = [-1]
        self.level = range(1)
        self.q: list[Tensor] = []

    def add_level(self, children: Sequence[Sequence[int]], q: Tensor) -> None:
        begin = len(self.tokens)
        for parent, drawn in zip(self.level, children, strict=True):
            self.parents += [parent] * len(drawn)
            self.tokens += drawn
        self.level = range(begin, len(self.tokens))
        self.q.append(q)

    def tree(self, device: torch.device | str = "cpu") -> TokenTree:
        return TokenTree(torch.tensor(self.tokens, device=device), TreeShape(tuple(self.parents)))
