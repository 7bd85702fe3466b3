"""The forms of a drafter from which a plan chooses (chains, trees, or a fixed size), and the acceptance of trees."""

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
"""Function that makes a drafter from a spec, such as `decoding.drafters.registry.DrafterLoader.load`."""

_PRIOR_TRIALS = 2.0
_FALL = 0.5
"""Assumed ratio of a rank's share to the share of the previous rank; this assumption counts as `_PRIOR_TRIALS` trials.
"""
DEEPEST_CHAIN = 10
"""Length of the longest chain tried with a draft model if the spec does not give a length."""
_TOP_SHARE, _SHARE_FALL, _DEPTH_FALL = 0.6, 0.5, 0.85
"""Typical acceptance for the first tree: the share of top tokens that are accepted, and the factors by which this share
falls from rank to rank and from depth to depth."""


@dataclass(frozen=True)
class Family:
    """A requested drafter and its largest form, whose measurement covers all smaller forms."""

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
        """Return the spec of a tree with these paths."""
        return replace(self.spec, options={**self.spec.options, "tree": paths})


def family_of(spec: DrafterSpec, load: Load, most_nodes: int, most_depth: int) -> Family:
    """Return the family of a spec.

    ``most_nodes`` limits the nodes of trees, including the root. ``most_depth`` limits the chain of a draft model if
    the spec does not set its length.

    For heads and DSpark drafts the plan may choose any tree, unless the spec sets a tree or tokens. For draft models,
    lookups and other drafters of chains the plan chooses the length, up to the number of tokens in the spec. A hybrid
    has only one size, and so has a tree that the spec sets; each of them is measured in this size.
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
        is_chain = drafter.chains_only and (spec.name in ("cascade", "other-tokenizer") or "tokens" in spec.options)
    return Family(spec, "chain" if is_chain else "fixed", drafter)


def first_tree(depth: int, ranks: int, nodes: int) -> Paths:
    """Return the tree for the first measurement of acceptance, chosen for typical heads.

    The tree contains the whole chain, because a chain that is better than typical must be measured to its end.
    """
    shares = [[_TOP_SHARE * _DEPTH_FALL**level * _SHARE_FALL**rank for rank in range(ranks)] for level in range(depth)]
    chain = {(0,) * length for length in range(1, min(depth, nodes) + 1)}
    trees = (chain.union(best_tree(shares, likely)) for likely in range(nodes, 0, -1))
    largest = next(tree for tree in trees if len(tree) <= nodes)
    return tuple(sorted(largest, key=lambda path: (len(path), path)))


class RankCounts:
    """Counts of accepted nodes in a drafter's trees by depth and by rank among siblings (from 0), over all passes."""

    def __init__(self) -> None:
        self.trials: Counter[tuple[int, int]] = Counter()
        """Number of reached nodes at a depth (0 for the root) that have a child of this rank."""
        self.hits: Counter[tuple[int, int]] = Counter()
        """How often the child of this rank was accepted at these nodes."""

    def add(self, tree: TokenTree, accepted: Sequence[int]) -> None:
        """Count one pass over ``tree``. ``accepted`` lists the accepted nodes of the tree from the root down."""
        path = (0, *accepted)
        for depth, node in enumerate(path):
            for rank, child in enumerate(tree.shape.children[node]):
                self.trials[depth, rank] += 1
                self.hits[depth, rank] += child in path[depth + 1 : depth + 2]

    def shares(self) -> list[list[float]]:
        """Return a table of shares: ``[d][b]`` is the share of reached nodes at depth d whose child b was accepted.

        With few trials, the share of a rank is pulled towards half the share of the previous rank.
        """
        shares: list[list[float]] = []
        while (len(shares), 0) in self.trials:
            depth = len(shares)
            of_ranks: list[float] = []
            prior = shares[-1][0] if shares else 0.5
            while (depth, len(of_ranks)) in self.trials:
                key = depth, len(of_ranks)
                of_ranks.append((self.hits[key] + _PRIOR_TRIALS * prior) / (self.trials[key] + _PRIOR_TRIALS))
                prior = _FALL * of_ranks[-1]
            shares.append(of_ranks)
        return shares
