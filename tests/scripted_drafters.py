"""Drafters for tests: one that follows a script, and a hostile one that tries to break the loop,
with a similar policy.
"""

import random
from collections.abc import Sequence

import torch

from decoding.drafters.base import DraftRequest, TextDrafter, TextStart
from decoding.metrics import StepCount
from decoding.model.causal_lm import CausalLM
from decoding.policies import NO_DRAFT, Budget
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import DrawnPart, Proposal, ProposalKind, TokenTree, TreeShape


class ScriptedDrafter(TextDrafter):
    """Drafter that proposes the given trees one after the other, and then nothing.

    A tree is (parents without the root's parent, tokens).
    """

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

    def propose(self, request: DraftRequest) -> Proposal:
        tokens, max_depth = request.tokens, request.max_depth
        self.asked.append((list(tokens), max_depth))
        if len(self.asked) > len(self._script):
            return Proposal.root_only(tokens[-1])
        parents, drafted = self._script[len(self.asked) - 1]
        tree = TokenTree(torch.tensor([tokens[-1], *drafted]), TreeShape((-1, *parents)))
        return Proposal(tree, ProposalKind.DETERMINISTIC)


class HostileDrafter(TextDrafter):
    """Drafter of random trees with wrong tokens, duplicates and, often enough to be accepted, right tokens.

    ``text`` is the whole right text including the prompt; ``others`` are the right texts of the other rows of a batch.
    The draft depends only on the seed, the text so far and the bounds. The kinds of proposals vary, too, and nothing
    was sampled from their q: greedy decoding and sampled verification must not read this q.
    """

    name = "hostile"
    budgets = (Budget(1, 3), Budget(3, 6), Budget(6, 10))

    def __init__(
        self,
        seed: int,
        text: Sequence[int],
        vocab: int = 16,
        chains: bool = False,
        others: Sequence[Sequence[int]] = (),
    ) -> None:
        self._seed, self._vocab, self._chains = seed, vocab, chains
        self._texts = [list(right) for right in (text, *others)]

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return frozenset(ProposalKind)

    def open_text(
        self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int
    ) -> "HostileSession":
        return HostileSession(self._seed, self._texts, self._vocab, self._chains)


class HostileSession:
    def __init__(self, seed: int, texts: Sequence[list[int]], vocab: int, chains: bool) -> None:
        self._seed, self._texts, self._vocab, self._chains = seed, texts, vocab, chains

    def propose(self, request: DraftRequest) -> Proposal:
        tokens = list(request.tokens)
        assert request.max_depth >= 1, "nothing could be emitted of this draft"
        chance = random.Random(f"{self._seed} {tokens}")
        rightly = next((text for text in self._texts if text[: len(tokens)] == tokens), [])
        deepest, largest = HostileDrafter.budgets[-1]
        max_depth, max_nodes = min(request.max_depth, deepest), min(request.max_nodes, largest)
        parents, drafted, depths = [-1], [tokens[-1]], [0]
        for _ in range(chance.randrange(max_nodes)):
            if self._chains and depths[-1] == max_depth:
                break
            open_nodes = [node for node, depth in enumerate(depths) if depth < max_depth]
            parent = depths.index(max(depths)) if self._chains else chance.choice(open_nodes)
            place = len(tokens) + depths[parent]
            right = rightly[place] if place < len(rightly) else chance.randrange(self._vocab)
            parents.append(parent)
            depths.append(depths[parent] + 1)
            drafted.append(chance.choice([right, right, right, drafted[-1], chance.randrange(self._vocab)]))
        tree = TokenTree(torch.tensor(drafted), TreeShape(tuple(parents)))
        kind = chance.choice(list(ProposalKind))
        if not kind.has_q:
            return Proposal(tree, kind)
        drawn = DrawnPart(len(tree), ProposalKind.SAMPLED) if kind is ProposalKind.GRAFTED else None
        return Proposal(tree, kind, torch.full((len({*parents[1:]}), self._vocab), 1 / self._vocab), drawn)


class RandomPolicy:
    """Policy that chooses a random budget of the drafter, or none, at each step."""

    name = "random"

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)

    def choose(self, budgets: Sequence[Budget], rows: int) -> Budget:
        return self._chance.choice([NO_DRAFT, *budgets])

    def observe(self, budget: Budget, steps: Sequence[StepCount], draft: float, verify: float, total: float) -> None:
        assert steps and 0 <= draft + verify <= total
