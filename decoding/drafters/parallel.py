"""A parallel draft as a drafter: one forward drafts all tokens of a step (PARD, 2504.18583; DSpark's Markov head)."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.drafters.base import Drafter, DraftRequest, TextStart, chain_budgets
from decoding.drafters.chains import ChainGrowth
from decoding.drafters.draft_state import DraftState
from decoding.drafters.draft_tree import tree_budgets
from decoding.drafters.growth import ConditionalLogits, DynamicGrowth, SampledGrowth, StaticGrowth
from decoding.drafters.static_tree import StaticTree
from decoding.model.causal_lm import CausalLM
from decoding.model.markov import DecodingBias
from decoding.model.parallel import ParallelDraft
from decoding.policies import Budget
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig

Grow = Callable[[Sequence[DraftRequest], Sequence[int], ConditionalLogits], list[Proposal]]
"""Function from requests, the depths of their trees and the logits at every node to proposals."""


class ParallelDrafter(Drafter):
    """Drafter of a chain or a tree by a parallel draft with the target's tokenizer.

    ``tree``: paths of ranks among the best tokens after each node. ``tokens``: the length of a chain. With neither it
    drafts the tree in the draft's config, or a chain of all K tokens where that has none.
    ``dynamic_nodes``: at every step the tree of that many nodes, the root included, with the largest product of the
    draft's probabilities, at most ``tokens`` deep. A smaller budget takes fewer masks where it is less deep.

    ``sampled``: above temperature 0 the tokens of a chain or of a tree of fixed shape are drawn, each from q given the
    token before it, the children of a node without replacement; False takes the likeliest, as at temperature 0. A
    dynamic tree depends on the context alone at any temperature.
    """

    name = "parallel draft"
    artefact = "draft"

    def __init__(
        self,
        draft: ParallelDraft,
        tokens: int | None = None,
        tree: Sequence[Sequence[int]] | None = None,
        dynamic_nodes: int | None = None,
        sampled: bool = True,
    ) -> None:
        if tokens is not None and not 1 <= tokens <= draft.tokens:
            raise ValueError(f"tokens is {tokens}, but the parallel draft has 1 to {draft.tokens}: give one of these")
        if tree is not None and (tokens is not None or dynamic_nodes is not None):
            other = "tokens" if tokens is not None else "dynamic_nodes"
            raise ValueError(f"tree and {other} are both given: a tree of fixed shape has its own size")
        if dynamic_nodes is not None and dynamic_nodes < 2:
            raise ValueError(f"dynamic_nodes is {dynamic_nodes}, the root included: give at least 2")
        self.draft = draft
        self.bias = None if draft.parts.markov is None else DecodingBias(draft.parts.markov)
        self.tokens = draft.tokens if tokens is None else tokens
        self.dynamic_nodes = dynamic_nodes
        if tree is None and tokens is None and dynamic_nodes is None:
            tree = draft.parts.config.tree or None
        self._tree = None if tree is None else _static_tree(draft, tree)
        self.sampled = dynamic_nodes is None and sampled
        self._drawn = None if self._tree is None or not self.sampled else SampledGrowth(self._tree)
        self._best: StaticGrowth | DynamicGrowth | None = None if self._tree is None else StaticGrowth(self._tree)
        if dynamic_nodes is not None:
            self._best = DynamicGrowth(self.budgets[-1])

    @property
    def label(self) -> str:
        if self._best is None:
            return f"{self.name}, {self.tokens} {'tokens' if self.sampled else 'likeliest tokens'}"
        kind = "dynamic " if self.dynamic_nodes is not None else "" if self.sampled else "deterministic "
        return f"{self.name}, {kind}tree of {self.max_nodes - 1}"

    @property
    def max_positions(self) -> int | None:
        return self.draft.model.max_text

    @property
    def reads_states(self) -> bool:
        return self.draft.reads_target

    @property
    def budgets(self) -> tuple[Budget, ...]:
        if self._tree is not None:
            return self._tree.budgets
        if self.dynamic_nodes is not None:
            return tree_budgets(min(self.tokens, self.dynamic_nodes - 1), self.dynamic_nodes)
        return chain_budgets(self.tokens)

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        if not self.sampled or sampling.greedy:
            return frozenset({ProposalKind.DETERMINISTIC})
        return frozenset({ProposalKind.SAMPLED if self._drawn is None else self._drawn.kind})

    def depth_within(self, request: DraftRequest) -> int:
        """Return the depth of its tree for a request."""
        if self._tree is not None:
            return self._tree.cut(request.max_depth, request.max_nodes)[0].max_depth
        return max(0, min(self.max_depth, request.max_depth, request.max_nodes - 1))

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "ParallelSession":
        self.draft.check_fits(target)
        state = DraftState(self.draft.model, target, sampling, rows, max_length, self.max_depth)
        return ParallelSession(self, state, self._growth(state, sampling))

    def _growth(self, state: DraftState, sampling: SamplingConfig) -> Grow:
        drawn, best = self._drawn, self._best
        if drawn is not None and not sampling.greedy:
            return lambda requests, depths, nodes: drawn.propose(requests, nodes, state.rows)
        if best is not None:
            return lambda requests, depths, nodes: best.propose(requests, nodes)
        chains = ChainGrowth(state.rows, self.sampled)

        def grow(requests: Sequence[DraftRequest], depths: Sequence[int], nodes: ConditionalLogits) -> list[Proposal]:
            rows = torch.arange(len(requests), device=nodes.base.device)
            texts = [request.tokens for request in requests]
            return chains.propose(texts, depths, lambda paths: nodes.logits(rows, paths))[0]

        return grow


def _static_tree(draft: ParallelDraft, paths: Sequence[Sequence[int]]) -> StaticTree:
    """Return the tree of these paths; ValueError if it is deeper, or asks for more tokens, than the draft has."""
    tree = StaticTree(paths)
    if tree.max_depth > draft.tokens:
        raise ValueError(
            f"the tree is {tree.max_depth} deep but the parallel draft has {draft.tokens} tokens: shorten its paths"
        )
    if tree.ranks > draft.parts.config.outputs:
        raise ValueError(
            f"the tree asks for rank {tree.ranks - 1} but the parallel draft writes {draft.parts.config.outputs} tokens"
        )
    return tree


class ParallelSession:
    """A session of the draft on a batch: one forward a step. Its cache holds the texts alone, and never a draft."""

    def __init__(self, drafter: ParallelDrafter, state: DraftState, grow: Grow) -> None:
        self._drafter = drafter
        self._parts = drafter.draft.parts
        self._state = state
        self._grow = grow
        self._unread: dict[int, list[Tensor]] = {}
        """The target's states of each row's tokens that the draft has yet to run."""

    def admit(self, slot: int, start: TextStart) -> None:
        self._state.admit(slot, start)
        self._unread[slot] = []

    def move(self, slot: int, to: int) -> None:
        self._state.move(slot, to)
        self._unread[to] = self._unread.pop(slot)

    def observe(self, proposals: Sequence[Proposal], logits: Sequence[Tensor]) -> None:
        """Do nothing: the texts and the requests' states hold everything that the session needs."""

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for slot, request in enumerate(requests):
            if self._drafter.reads_states and request.states is not None:
                self._unread[slot].append(request.states)
        depths = [self._drafter.depth_within(request) for request in requests]
        if not any(depths):
            return [Proposal.root_only(request.tokens[-1], self._state.draft.device) for request in requests]
        config = self._parts.config
        masks = [config.mask_token] * (max(depths) - 1)
        logits = self._state.look_ahead([request.tokens for request in requests], masks, self._added(len(requests)))
        base = logits[..., : config.outputs].transpose(0, 1)
        nodes = ConditionalLogits(base, self._drafter.bias, self._state.over_target_vocabulary)
        return self._grow(requests, depths, nodes)

    def _added(self, rows: int) -> list[Float[Tensor, "tokens hidden"]] | None:
        """Return the additions to the embeddings of each row's new tokens; None if the draft does not read the target.

        All rows' states go through the reader at once.
        """
        if not self._drafter.reads_states:
            return None
        unread = [torch.cat(self._unread[slot]) for slot in range(rows)]
        self._unread.update({slot: [] for slot in range(rows)})
        return list(self._parts.read(torch.cat(unread)).split([len(states) for states in unread]))
