"""Forms of a drafter that a plan may choose from (chains to a depth, any tree, its own size), and trees' acceptance."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from decoding.drafters.base import Drafter
from decoding.drafters.draft_model import DraftModelDrafter
from decoding.drafters.dspark import DSparkDrafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.drafters.prompt_lookup import PromptLookupDrafter
from decoding.drafters.spec import DrafterSpec
from decoding.rules.best_tree import FITTED_RANKS, Paths, best_tree
from decoding.rules.tree import TokenTree

Load = Callable[[DrafterSpec], Drafter]
"""Function that makes a drafter of a spec; `decoding.drafters.registry.DrafterLoader.load` is one."""

_PRIOR_TRIALS = 2.0
_FALL = 0.5
"""Prior of a rank's share, relative to the rank before it; it counts for `_PRIOR_TRIALS` trials."""
DEEPEST_CHAIN = 10
"""Tokens of the longest chain that is tried of a draft model which was given none."""
_TOP_SHARE, _SHARE_FALL, _DEPTH_FALL = 0.6, 0.5, 0.85
"""Shares of a typical head, for the first tree: the top token's, and their falls by rank and by depth."""


@dataclass(frozen=True)
class Family:
    """A drafter that was asked for, and the largest of its forms, by which all of them are measured."""

    spec: DrafterSpec
    kind: Literal["tree", "chain", "fixed"]
    drafter: Drafter

    @property
    def depth(self) -> int:
        return self.drafter.max_depth

    def chain(self, depth: int) -> DrafterSpec:
        """Return the spec of a chain of ``depth`` tokens."""
        if self.kind == "tree":
            return self.of_tree(tuple((0,) * length for length in range(1, depth + 1)))
        return replace(self.spec, options={**self.spec.options, "tokens": depth})

    def of_tree(self, paths: Paths) -> DrafterSpec:
        """Return the spec of a tree of these paths."""
        return replace(self.spec, options={**self.spec.options, "tree": paths})


def family_of(spec: DrafterSpec, load: Load, most_nodes: int, most_depth: int) -> Family:
    """Return the family of a spec. Its trees have up to ``most_nodes`` nodes, the root included.

    ``most_depth`` bounds the chains of a draft model whose length is not given.

    Heads and DSpark drafts are free in their trees unless the spec gives a tree or tokens; draft models, lookups and
    the other drafters of one chain are free in its length, up to the tokens that are given. A hybrid, and any
    tree that is given, is measured with its own size only.
    """
    drafter, given = load(spec), set(spec.options)
    if isinstance(drafter, MedusaDrafter | DSparkDrafter) and not given & {"tree", "tokens"}:
        if isinstance(drafter, MedusaDrafter):
            depth, vocab = drafter.heads.config.num_heads, drafter.heads.config.vocab_size
        else:
            depth, vocab = drafter.draft.config.block_size, drafter.draft.config.vocab_size
        paths = first_tree(depth, min(FITTED_RANKS, vocab), most_nodes - 1)
        measured = replace(spec, options={**spec.options, "tree": paths})
        return Family(spec, "tree", load(measured))
    if isinstance(drafter, DraftModelDrafter) and "tokens" not in given:
        return Family(spec, "chain", load(replace(spec, options={**spec.options, "tokens": most_depth})))
    if isinstance(drafter, PromptLookupDrafter):
        is_chain = drafter.branches == 1
    else:
        is_chain = drafter.chains_only and (spec.name == "other-tokenizer" or "tokens" in spec.options)
    return Family(spec, "chain" if is_chain else "fixed", drafter)


def first_tree(depth: int, ranks: int, nodes: int) -> Paths:
    """Return the tree by which acceptance is measured before anything is known of it: that of typical heads.

    The whole chain is in it, so that a chain better than typical is measured to its end.
    """
    shares = [[_TOP_SHARE * _DEPTH_FALL**level * _SHARE_FALL**rank for rank in range(ranks)] for level in range(depth)]
    chain = {(0,) * length for length in range(1, min(depth, nodes) + 1)}
    trees = (chain.union(best_tree(shares, likely)) for likely in range(nodes, 0, -1))
    largest = next(tree for tree in trees if len(tree) <= nodes)
    return tuple(sorted(largest, key=lambda path: (len(path), path)))


class RankCounts:
    """Accepted children of a drafter's trees by their rank among their siblings (from 0), over all passes."""

    def __init__(self) -> None:
        self.trials: Counter[tuple[int, int]] = Counter()
        """Reached nodes by their depth (the root's is 0) and by the rank of a child that they have."""
        self.hits: Counter[tuple[int, int]] = Counter()
        """Reached nodes whose child of this rank was accepted, by the same keys."""

    def add(self, tree: TokenTree, accepted: Sequence[int]) -> None:
        """Count one pass over ``tree`` whose nodes ``accepted``, from the root down, were accepted."""
        path = (0, *accepted)
        for depth, node in enumerate(path):
            for rank, child in enumerate(tree.shape.children[node]):
                self.trials[depth, rank] += 1
                self.hits[depth, rank] += child in path[depth + 1 : depth + 2]

    def shares(self) -> list[list[float]]:
        """Return at ``[d][b]`` the share of reached nodes at depth d whose child b was the accepted one.

        A rank with few trials leans on half the share of the one before it.
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
