"""Two drafters in one tree: a lookup costs almost nothing, so its branches are added to those of a model."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from decoding.drafters.base import Drafter, DraftRequest, DraftSession, TextStart
from decoding.drafters.token_trie import TokenTrie
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree, fetch_tokens


class HybridDrafter(Drafter):
    """Drafter that grafts the branches of ``lookup`` onto the tree of ``first``; equal children of a node become one.

    ``lookup`` is any drafter, best a deterministic one such as prompt lookup. Its k-th budget is paired with the first
    drafter's k-th; the last budget of the shorter list is paired with the rest of the longer one. So each drafter has
    its own share of the nodes. A request smaller than every pair goes to ``first`` alone.

    If both have drafted, the proposal is deterministic if both parts are, and else mixed, without q: the children of a
    node then come from different distributions. If only one has drafted, its proposal is used unchanged.
    """

    name = "hybrid"

    def __init__(self, first: Drafter, lookup: Drafter) -> None:
        if first is lookup:
            raise ValueError(f"both drafters of the hybrid are the same {first.name}: give two")
        self.first = first
        self.lookup = lookup
        self.name = f"{first.name} with {lookup.name}"
        self.artefact = first.artefact

    @property
    def label(self) -> str:
        return f"{self.first.label}, with {self.lookup.label}"

    @property
    def max_positions(self) -> int | None:
        limits = [drafter.max_positions for drafter in (self.first, self.lookup)]
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def reads_states(self) -> bool:
        return self.first.reads_states or self.lookup.reads_states

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return tuple(
            Budget(max(first.depth, lookup.depth), first.nodes + lookup.nodes - 1) for first, lookup in self._pairs()
        )

    def split(self, max_nodes: int) -> tuple[int, int]:
        """Split ``max_nodes`` between the trees of ``first`` and ``lookup``; each share counts its own root."""
        fitting = [first.nodes for first, lookup in self._pairs() if first.nodes + lookup.nodes - 1 <= max_nodes]
        first_nodes = fitting[-1] if fitting else max_nodes
        return first_nodes, max_nodes - first_nodes + 1

    def _pairs(self) -> list[tuple[Budget, Budget]]:
        first, lookup = self.first.budgets, self.lookup.budgets
        longer = max(len(first), len(lookup))
        return [(first[min(k, len(first) - 1)], lookup[min(k, len(lookup) - 1)]) for k in range(longer)]

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        either = self.first.kinds(sampling) | self.lookup.kinds(sampling)
        return either if either == {ProposalKind.DETERMINISTIC} else either | {ProposalKind.MIXED}

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "HybridSession":
        sessions = [drafter.open(target, sampling, rows, max_length) for drafter in (self.first, self.lookup)]
        return HybridSession(self, sessions)


class Grafted(NamedTuple):
    """A proposal, its two parts, and the numbers that the nodes of each part have in its tree."""

    proposal: Proposal
    parts: tuple[Proposal, Proposal]
    nodes: tuple[list[int], list[int]]


class HybridSession:
    """Sessions of both drafters. Each follows the texts by itself, whichever drafter's branch was accepted."""

    def __init__(self, drafter: HybridDrafter, sessions: Sequence[DraftSession]) -> None:
        self._drafter = drafter
        self._sessions = sessions
        self._last: list[Grafted] = []

    def admit(self, slot: int, start: TextStart) -> None:
        for session in self._sessions:
            session.admit(slot, start)

    def move(self, slot: int, to: int) -> None:
        for session in self._sessions:
            session.move(slot, to)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        # Neither sees the other's tokens: they may be random draws, which a rule for its own kind does not allow for.
        splits = [self._drafter.split(request.max_nodes) for request in requests]
        parts = [
            session.propose(
                [replace(request, max_nodes=split[of]) for request, split in zip(requests, splits, strict=True)]
            )
            for of, session in enumerate(self._sessions)
        ]
        fetch_tokens([proposal.tree for proposals in parts for proposal in proposals])
        self._last = [graft(first, lookup) for first, lookup in zip(*parts, strict=True)]
        return [grafted.proposal for grafted in self._last]

    def observe(self, proposals: Sequence[Proposal], logits: Sequence[Tensor]) -> None:
        if [id(proposal) for proposal in proposals] != [id(grafted.proposal) for grafted in self._last]:
            return  # not the last proposals: this step had no room for a draft
        for of, session in enumerate(self._sessions):
            session.observe(
                [grafted.parts[of] for grafted in self._last],
                [row[grafted.nodes[of]] for row, grafted in zip(logits, self._last, strict=True)],
            )


def graft(first: Proposal, lookup: Proposal) -> Grafted:
    """Join two trees: the nodes of the first keep their numbers, and the nodes that only the second has follow."""
    if len(first.tree) == 1 or len(lookup.tree) == 1:
        whole, root = (first, [0]) if len(lookup.tree) == 1 else (lookup, [0])
        every = list(range(len(whole.tree)))
        return Grafted(whole, (first, lookup), (every, root) if whole is first else (root, every))
    # Mixed even if the second adds no node. That depends on the drawn tokens: a q kept for some draws and dropped for
    # others is not the distribution of those for which it was kept.
    deterministic = first.kind is lookup.kind is ProposalKind.DETERMINISTIC
    kind = ProposalKind.DETERMINISTIC if deterministic else ProposalKind.MIXED
    trie = TokenTrie(first.tree.token_list[0])
    own = [0, *(trie.grow(parent, token) for parent, token in _below_root(first.tree))]
    grafted = [0]
    for parent, token in _below_root(lookup.tree):
        grafted.append(trie.child(grafted[parent], token))
    return Grafted(Proposal(trie.tree(first.tree.tokens.device), kind), (first, lookup), (own, grafted))


def _below_root(tree: TokenTree) -> list[tuple[int, int]]:
    """Return parent and token of every node but the root."""
    return list(zip(tree.shape.parents[1:], tree.token_list[1:], strict=True))
