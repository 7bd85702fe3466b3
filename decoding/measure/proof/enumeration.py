"""Exact proofs of acceptance rules, by enumerating every outcome of a random program.

`prove_rule` checks any rule, such as your own; the tests use it for the rules in `decoding.rules.verify`.

A program takes a `RandomSource` and runs once for each path of choices. The source replays a script. After the end of
the script, the source takes the first option of each choice and records the other options as new scripts.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import product
from typing import Literal, NamedTuple, TypeVar

import jaxtyping
import torch
from torch import Tensor

from decoding.drafters.hybrid import graft
from decoding.rules.drawing import RandomSource
from decoding.rules.tree import Proposal, ProposalKind, TokenTree, TreeShape
from decoding.rules.verify import Decide, Rule, Verdict

Result = TypeVar("Result")
Draft = Callable[[RandomSource], Proposal]
Context = tuple[int, ...]
"""The tokens on the path to a node, without the root, which is always the same."""

ROOT_TOKEN = 0

LOSSLESS = 1e-12
"""For a lossless rule, float64 rounding causes a distance from the target of at most this size."""


class EnumeratingSource:
    """A random source that replays a script, takes the first option of each choice after the end of the script, and
    computes the probability of the path.
    """

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        self._script = script
        self._taken: list[int] = []
        self.probability = 1.0
        self.unexplored: list[tuple[int, ...]] = []

    def accept(self, probability: float) -> bool:
        assert probability == probability, "accept got NaN"
        chance = min(1.0, max(0.0, probability))
        return self._choose([1.0 - chance, chance]) == 1

    def draw(self, weights: Tensor) -> int:
        listed: list[float] = weights.tolist()
        total = sum(listed)
        assert total > 0 and min(listed) >= 0, f"cannot draw from {listed}"
        return self._choose([weight / total for weight in listed])

    def _choose(self, chances: Sequence[float]) -> int:
        if len(self._taken) < len(self._script):
            option = self._script[len(self._taken)]
        else:
            option, *others = [option for option, chance in enumerate(chances) if chance > 0]
            self.unexplored += [(*self._taken, other) for other in others]
        self._taken.append(option)
        self.probability *= chances[option]
        return option


def outcomes(program: Callable[[RandomSource], Result]) -> Iterator[tuple[Result, float]]:
    """Yield the result and probability of every path of choices; the probabilities sum to 1."""
    scripts: list[tuple[int, ...]] = [()]
    while scripts:
        source = EnumeratingSource(scripts.pop())
        result = program(source)
        scripts += source.unexplored
        yield result, source.probability


RowKind = Literal["dense", "zeros", "one-hot", "mixed"]


class ContextModel:
    """A language model as a table of float64 next-token probabilities, for every context of up to ``depth`` tokens."""

    def __init__(self, rows: dict[Context, Tensor]) -> None:
        self._rows = rows
        self.vocab = len(rows[()])

    @staticmethod
    def random(vocab: int, depth: int, kind: RowKind, generator: torch.Generator) -> "ContextModel":
        """Draw a different row for each context, to catch rules that confuse contexts."""
        rows: dict[Context, Tensor] = {}
        level: list[Context] = [()]
        for _ in range(depth + 1):
            for context in level:
                rows[context] = _random_row(vocab, kind, generator)
            level = [(*context, token) for context in level for token in range(vocab)]
        return ContextModel(rows)

    def __call__(self, context: Context) -> Tensor:
        return self._rows[context]

    def after(self, begin: Context) -> "ContextModel":
        """Return the model of the texts that follow these first tokens."""
        known = len(begin)
        return ContextModel({context[known:]: row for context, row in self._rows.items() if context[:known] == begin})

    def joint(self, length: int) -> dict[Context, float]:
        """Return the probability of each sequence of ``length`` tokens."""
        level: dict[Context, float] = {(): 1.0}
        for _ in range(length):
            level = {
                (*context, token): probability * chance
                for context, probability in level.items()
                for token, chance in enumerate(self(context).tolist())
            }
        return level

    def completed(self, emitted: dict[Context, float], length: int) -> dict[Context, float]:
        """Return the joint distribution of ``length`` tokens that begin with the ``emitted`` tokens and are continued
        by this model.
        """
        total: dict[Context, float] = defaultdict(float)
        unfinished = list(emitted.items())
        while unfinished:
            context, probability = unfinished.pop()
            assert len(context) <= length, f"{context} is longer than the {length} tokens compared"
            if len(context) == length:
                total[context] += probability
                continue
            chances = self(context).tolist()
            unfinished += [((*context, token), probability * chance) for token, chance in enumerate(chances)]
        return dict(total)


def _random_row(vocab: int, kind: RowKind, generator: torch.Generator) -> Tensor:
    if kind == "mixed":
        kinds: tuple[RowKind, ...] = ("dense", "zeros", "one-hot")
        kind = kinds[int(torch.randint(3, (), generator=generator))]
    row = torch.rand(vocab, generator=generator, dtype=torch.float64) ** 2 + 1e-3
    certain = int(torch.randint(vocab, (), generator=generator))
    if kind == "zeros":
        dropped = torch.rand(vocab, generator=generator) < 0.5
        dropped[certain] = False
        row[dropped] = 0
    if kind == "one-hot":
        row = torch.zeros_like(row)
        row[certain] = 1
    return row / row.sum()


def contexts(tree: TokenTree) -> list[Context]:
    """Return the context of each node: the tokens on the path to the node."""
    return [tuple(tree.token_list[ancestor] for ancestor in tree.shape.path(node)) for node in range(len(tree))]


def target_rows(tree: TokenTree, p: ContextModel) -> Tensor:
    """Return p at every node, of shape (nodes, vocab), as a target pass does."""
    return torch.stack([p(context) for context in contexts(tree)])


def sampled_draft(shape: TreeShape, q: ContextModel, kind: ProposalKind) -> Draft:
    """Make a draft that draws a tree of this shape from q, node by node, until q is exhausted."""

    def draft(source: RandomSource) -> Proposal:
        context_of: dict[int, Context] = {0: ()}
        for node in range(len(shape)):
            if node not in context_of or not shape.children[node]:
                continue
            left = q(context_of[node]).clone()
            for child in shape.children[node]:
                if not bool((left > 0).any()):
                    break
                token = source.draw(left)
                context_of[child] = (*context_of[node], token)
                if kind is ProposalKind.SAMPLED_WITHOUT_REPLACEMENT:
                    left[token] = 0
        kept = sorted(context_of)
        kept_shape = shape.keep(kept)
        tokens = torch.tensor([ROOT_TOKEN, *(context_of[node][-1] for node in kept[1:])])
        rows = [q(context_of[node]) for node, below in zip(kept, kept_shape.children, strict=True) if below]
        return Proposal(TokenTree(tokens, kept_shape), kind, torch.stack(rows) if rows else torch.empty(0, q.vocab))

    return draft


def deterministic_draft(shape: TreeShape, children_of: Callable[[Context, int], Sequence[int]]) -> Draft:
    """Make a draft of a tree in which the children of each node are ``children_of(context, count)``."""
    context_of: dict[int, Context] = {0: ()}
    for node, children in enumerate(shape.children):
        for child, token in zip(children, children_of(context_of[node], len(children)), strict=True):
            context_of[child] = (*context_of[node], token)
    tokens = torch.tensor([ROOT_TOKEN, *(context_of[node][-1] for node in range(1, len(shape)))])
    proposal = Proposal(TokenTree(tokens, shape), ProposalKind.DETERMINISTIC)
    return lambda source: proposal


def grafted_draft(drawn: Draft, looked_up: Sequence[int]) -> Draft:
    """Make a draft that draws tokens and then adds a looked-up chain, as the hybrid drafter does."""
    chain = Proposal(TokenTree.chain([ROOT_TOKEN, *looked_up]), ProposalKind.DETERMINISTIC)
    return lambda source: graft(drawn(source), chain)


def draft_of(kind: ProposalKind, shape: TreeShape, q: ContextModel) -> Draft:
    """Make a draft of this kind: tokens drawn from q, the best tokens of q, or both in one tree."""
    if kind is ProposalKind.GRAFTED:
        drawn = sampled_draft(shape, q, ProposalKind.SAMPLED_WITHOUT_REPLACEMENT)
        return grafted_draft(drawn, [1, 2, 1][: shape.max_depth])
    if kind is ProposalKind.DETERMINISTIC:
        return deterministic_draft(shape, top_tokens(q))
    return sampled_draft(shape, q, kind)


@contextmanager
def shapes_unchecked() -> Iterator[None]:
    """Switch off shape checks, which would take twenty times as long as the rule itself."""
    before = jaxtyping.config.jaxtyping_disable
    jaxtyping.config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping.config.update("jaxtyping_disable", before)


def verdicts(draft: Draft, decide: Decide, p: ContextModel) -> list[tuple[Proposal, Verdict, float]]:
    """Return every outcome of drafting and verifying with its probability; only the first run checks tensor shapes."""
    first = draft(EnumeratingSource())
    decide(first, target_rows(first.tree, p), EnumeratingSource())
    weighted: list[tuple[Proposal, Verdict, float]] = []
    with shapes_unchecked():
        for proposal, drafted in outcomes(draft):
            rows = target_rows(proposal.tree, p)
            verified = outcomes(partial(decide, proposal, rows))
            weighted += [(proposal, verdict, drafted * chance) for verdict, chance in verified]
    return weighted


class Enumerated(NamedTuple):
    """Figures over all outcomes of drafting and verifying once.

    ``distance``: the largest difference between the probability of a sequence and its probability under the target.
    ``accepted_length``: the expected number of accepted draft tokens.
    """

    distance: float
    accepted_length: float


def enumerate_turn(draft: Draft, decide: Decide, p: ContextModel, length: int) -> Enumerated:
    """Enumerate one turn, complete its texts by p to ``length`` tokens, and compare the probabilities of these texts
    with the texts' probabilities under p.
    """
    emitted: dict[Context, float] = defaultdict(float)
    accepted = 0.0
    for proposal, verdict, probability in verdicts(draft, decide, p):
        emitted[(*(proposal.tree.token_list[node] for node in verdict.path), verdict.token)] += probability
        accepted += len(verdict.path) * probability
    completed, wanted = p.completed(emitted, length), p.joint(length)
    distance = max(abs(completed.get(sequence, 0.0) - probability) for sequence, probability in wanted.items())
    return Enumerated(distance, accepted)


def distance_from_target(draft: Draft, decide: Decide, p: ContextModel, length: int) -> float:
    """Return the largest difference between the probability of ``length`` tokens and their probability under p."""
    return enumerate_turn(draft, decide, p, length).distance


MODELS: dict[str, tuple[RowKind, RowKind]] = {
    "dense": ("dense", "dense"),
    "zeros": ("zeros", "zeros"),
    "one-hot target": ("one-hot", "dense"),
    "one-hot draft": ("dense", "one-hot"),
    "mixed": ("mixed", "mixed"),
}


ALL_MODELS = [*MODELS, "p = q"]


def model_pair(name: str, vocab: int, depth: int, seed: int) -> tuple[ContextModel, ContextModel]:
    """Make p and q of the kinds that `MODELS` has under this name; for "p = q", they are the same model."""
    generator = torch.Generator().manual_seed(seed)
    if name == "p = q":
        p = ContextModel.random(vocab, depth, "mixed", generator)
        return p, p
    kind_p, kind_q = MODELS[name]
    return (ContextModel.random(vocab, depth, kind_p, generator), ContextModel.random(vocab, depth, kind_q, generator))


def top_tokens(q: ContextModel) -> Callable[[tuple[int, ...], int], list[int]]:
    return lambda context, count: q(context).topk(count).indices.tolist()


CHAINS = {"chain of 2": (-1, 0, 1), "chain of 3": (-1, 0, 1, 2)}
# The parent of each node. In "depth first", the subtree of a child comes before the next sibling.
TREES = {
    "two children": (-1, 0, 0),
    "depth first": (-1, 0, 1, 0, 3),
    "one long branch": (-1, 0, 0, 2, 3),
    "three children, one grown": (-1, 0, 0, 0, 1),
}
SHAPES = {name: TreeShape(parents) for name, parents in (CHAINS | TREES).items()}


class RuleProof(NamedTuple):
    """Result of `prove_rule`: the largest distance from the target in any turn, and the turn where it occurred."""

    distance: float
    turns: int
    worst: str

    @property
    def lossless(self) -> bool:
        """True if the probabilities differ from the target's probabilities only by rounding (`LOSSLESS`)."""
        return self.distance < LOSSLESS


def prove_rule(rule: Rule, seeds: Sequence[int] = (0, 1)) -> RuleProof:
    """Enumerate every outcome of drafting and verifying by a sampling rule, and compare with the target.

    The proof covers every proposal kind of the rule, on chains of 2 and 3 tokens, and on trees if the rule accepts
    trees. Target and draft are random tables over 3 tokens: dense, with zeros, one-hot, mixed, and identical. Errors
    that need longer drafts or more tokens are not detected.
    """
    shapes = CHAINS if rule.chains_only else SHAPES
    distances: dict[str, float] = {}
    for kind, shape, models, seed in product(
        sorted(rule.kinds, key=lambda kind: kind.value), shapes, ALL_MODELS, seeds
    ):
        depth = SHAPES[shape].max_depth
        p, q = model_pair(models, 3, depth, seed)
        distance = distance_from_target(draft_of(kind, SHAPES[shape], q), rule, p, depth + 1)
        distances[f"{kind.value} {shape}, {models}, seed {seed}"] = distance
    worst = max(distances, key=lambda turn: distances[turn])
    return RuleProof(distances[worst], len(distances), worst)
