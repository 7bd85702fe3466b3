"""Drafters for the tests: one that reads from a script, and one that drafts to break the loop."""

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.drafters.base import DraftRequest, TextDrafter, TextStart
from decoding.policy import Budget
from decoding.proposal import Proposal, ProposalKind
from decoding.sampling import SamplingConfig
from decoding.target import CausalLM
from decoding.tree import TokenTree, TreeShape


class ScriptedDrafter(TextDrafter):
    """Proposes the given trees one after the other, then nothing: (parents without the root's, tokens)."""

    name = "scripted"
    budgets = (Budget(8, 16),)

    def __init__(self, *script: tuple[Sequence[int], Sequence[int]]) -> None:
        self._script = script
        self.asked: list[tuple[list[int], int]] = []
        """The text and max_depth of each call."""

    def open_text(
        self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int
    ) -> "ScriptedDrafter":
        self.asked = []
        return self

    def observe(self, proposal: Proposal, logits: Tensor) -> None:
        pass

    def propose(self, request: DraftRequest) -> Proposal:
        tokens, max_depth = request.tokens, request.max_depth
        self.asked.append((list(tokens), max_depth))
        if len(self.asked) > len(self._script):
            return Proposal.root_only(tokens[-1])
        parents, drafted = self._script[len(self.asked) - 1]
        tree = TokenTree(torch.tensor([tokens[-1], *drafted]), TreeShape((-1, *parents)))
        return Proposal(tree, ProposalKind.DETERMINISTIC)


class HostileDrafter(TextDrafter):
    """Trees of random shape with wrong tokens, duplicates and, often enough to be accepted, the right ones.

    ``text`` is the whole right text, prompt included. Kinds vary too, with a q that was never sampled from: greedy
    decoding must not look at it.
    """

    name = "hostile"
    budgets = (Budget(6, 10),)

    def __init__(self, seed: int, text: Sequence[int], vocab: int = 16, chains: bool = False) -> None:
        self._seed, self._text, self._vocab, self._chains = seed, text, vocab, chains

    def open_text(
        self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int
    ) -> "HostileSession":
        return HostileSession(random.Random(self._seed), self._text, self._vocab, self._chains)


class HostileSession:
    def __init__(self, chance: random.Random, text: Sequence[int], vocab: int, chains: bool) -> None:
        self._chance, self._text, self._vocab, self._chains = chance, text, vocab, chains

    def observe(self, proposal: Proposal, logits: Tensor) -> None:
        pass

    def propose(self, request: DraftRequest) -> Proposal:
        tokens, max_depth = request.tokens, request.max_depth
        chance = self._chance
        assert max_depth >= 1, "nothing could be emitted of this draft"
        deepest, largest = HostileDrafter.budgets[-1]
        max_depth = min(max_depth, deepest)
        parents, drafted, depths = [-1], [tokens[-1]], [0]
        for _ in range(chance.randrange(largest)):
            if self._chains and depths[-1] == max_depth:
                break
            open_nodes = [node for node, depth in enumerate(depths) if depth < max_depth]
            parent = depths.index(max(depths)) if self._chains else chance.choice(open_nodes)
            place = len(tokens) + depths[parent]
            right = self._text[place] if place < len(self._text) else chance.randrange(self._vocab)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            drafted.append(chance.choice([right, right, right, drafted[-1], chance.randrange(self._vocab)]))
        tree = TokenTree(torch.tensor(drafted), TreeShape(tuple(parents)))
        kind = chance.choice(list(ProposalKind))
        if kind in (ProposalKind.DETERMINISTIC, ProposalKind.MIXED):
            return Proposal(tree, kind)
        return Proposal(tree, kind, torch.full((len(tree), self._vocab), 1 / self._vocab))
