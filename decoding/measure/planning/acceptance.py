"""Acceptance that a plan is made from: passes of a short real decoding, and the paths accepted in a large tree."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from decoding.drafters.base import Drafter, DraftRequest, DraftSession, TextStart
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.metrics import StepCount
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree

_PRIOR_TRIALS = 2.0
_FALL = 0.5
"""Prior of a rank's share, relative to the rank before it; it counts for `_PRIOR_TRIALS` trials."""

Path = tuple[int, ...]


@dataclass
class PathRecord:
    """Accepted paths of a drafter's trees. A path holds, for each of its nodes, the place among its siblings (from 0).

    Only passes with room for the whole tree are recorded.
    """

    passes: int = 0
    paths: Counter[Path] = field(default_factory=Counter)
    trials: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Reached nodes by their depth (the root's is 0) and by the place of a child that they have."""
    hits: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Reached nodes whose child at this place was accepted, by the same keys."""
    drafted: set[Path] = field(default_factory=set)
    """Paths of all nodes that were drafted."""

    def add(self, tree: TokenTree, accepted: Sequence[int]) -> None:
        """Count one pass over ``tree`` whose nodes ``accepted``, from the root down, were accepted."""
        shape = tree.shape
        places = {child: place for children in shape.children for place, child in enumerate(children)}
        path = tuple(places[node] for node in accepted)
        self.passes += 1
        self.paths[path] += 1
        for depth, node in enumerate((0, *accepted)):
            for place, _ in enumerate(shape.children[node]):
                self.trials[depth, place] += 1
                self.hits[depth, place] += depth < len(path) and path[depth] == place
        if len(self.drafted) < len(shape) - 1:
            self.drafted |= {tuple(places[step] for step in shape.path(node)) for node in range(1, len(shape))}

    def shares(self) -> list[list[float]]:
        """Return at ``[d][b]`` the share of reached nodes at depth d whose child b was the accepted one.

        A place with few trials leans on half the share of the one before it.
        """
        shares: list[list[float]] = []
        while (len(shares), 0) in self.trials:
            depth = len(shares)
            found: list[float] = []
            prior = shares[-1][0] if shares else 0.5
            while (depth, len(found)) in self.trials:
                key = depth, len(found)
                found.append((self.hits[key] + _PRIOR_TRIALS * prior) / (self.trials[key] + _PRIOR_TRIALS))
                prior = _FALL * found[-1]
            shares.append(found)
        return shares

    def expected_accepted(self, tree: Sequence[Path]) -> float:
        """Return the accepted tokens per pass that a tree of these paths would have had on the recorded texts.

        A node that was drafted counts as often as it was accepted, which no independence of positions is assumed for;
        any other counts with its parent's value times the share of its depth and place.
        """
        reached: Counter[Path] = Counter()
        for path, count in self.paths.items():
            for length in range(1, len(path) + 1):
                reached[path[:length]] += count
        shares, values = self.shares(), dict[Path, float]({(): 1.0})
        for path in sorted(map(tuple, tree), key=len):
            if path in self.drafted:
                values[path] = reached[path] / max(self.passes, 1)
            else:
                depth, place = len(path) - 1, path[-1]
                known = depth < len(shares) and place < len(shares[depth])
                values[path] = values[path[:-1]] * shares[depth][place] if known else 0.0
        return sum(values.values()) - 1.0


class WatchedDrafter(Drafter):
    """Another drafter, unchanged, with a record of the paths that are accepted of its trees."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self.name, self.artefact, self.rough_cost = drafter.name, drafter.artefact, drafter.rough_cost
        self.record = PathRecord()

    @property
    def label(self) -> str:
        return self._drafter.label

    @property
    def max_positions(self) -> int | None:
        return self._drafter.max_positions

    @property
    def reads_states(self) -> bool:
        return self._drafter.reads_states

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return self._drafter.budgets

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return self._drafter.kinds(sampling)

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> DraftSession:
        return _WatchedSession(self, self._drafter.open(target, sampling, rows, max_length))


class _WatchedSession:
    """A session that reads from each text's growth the path that was accepted of its last tree."""

    def __init__(self, drafter: WatchedDrafter, session: DraftSession) -> None:
        self._drafter, self._session = drafter, session
        self._last: dict[int, tuple[int, TokenTree]] = {}
        """Length of each row's text at its last tree, and that tree."""

    def admit(self, slot: int, start: TextStart) -> None:
        self._last.pop(slot, None)
        self._session.admit(slot, start)

    def move(self, slot: int, to: int) -> None:
        self._last.pop(to, None)
        if slot in self._last:
            self._last[to] = self._last.pop(slot)
        self._session.move(slot, to)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for slot, request in enumerate(requests):
            if slot in self._last:
                length, tree = self._last.pop(slot)
                self._drafter.record.add(tree, tree.follow(request.tokens[length:]))
        proposals = self._session.propose(requests)
        for slot, (request, proposal) in enumerate(zip(requests, proposals, strict=True)):
            if request.max_depth >= self._drafter.max_depth:
                self._last[slot] = len(request.tokens), proposal.tree
        return proposals

    def observe(self, proposals: Sequence[Proposal], logits: Sequence[Tensor]) -> None:
        self._session.observe(proposals, logits)


@dataclass(frozen=True)
class Passes:
    """The passes of a decoding. ``texts``: the counts of each text's steps, its prefill left out."""

    texts: tuple[tuple[StepCount, ...], ...]

    @property
    def steps(self) -> list[StepCount]:
        return [step for text in self.texts for step in text]

    def tokens_per_pass(self, depth: int | None = None) -> float:
        """Return the tokens of a pass, the ends of texts included, as if chains had been cut to ``depth``.

        A pass that emits e tokens emits min(e, depth + 1) of the shorter chain.
        """
        emitted = [step.emitted if depth is None else min(step.emitted, depth + 1) for step in self.steps]
        return sum(emitted) / len(emitted)

    def reached(self) -> list[float]:
        """Return the share of all passes whose draft was accepted at least to position 1, 2, …"""
        steps = self.steps
        deepest = max((step.accepted for step in steps), default=0)
        return [sum(step.accepted >= place for step in steps) / len(steps) for place in range(1, deepest + 1)]


def decode_passes(
    target: CausalLM,
    drafter: Drafter,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    batch_size: int,
    on_text: Callable[[], Any] = lambda: None,
) -> Passes:
    """Decode the prompts and return their passes. ValueError where every text ended with its first token."""
    texts: list[list[StepCount]] = [[] for _ in prompts]
    for place, step in Engine(target, drafter).steps(prompts, config, batch_size=batch_size):
        if step.is_prefill:
            on_text()
        else:
            texts[place].append(step.counts)
    if not any(texts):
        raise ValueError("every text ended with its first token: give held-out prompts that are answered at length")
    return Passes(tuple(map(tuple, texts)))
