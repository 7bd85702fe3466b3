"""Families: the forms of a drafter that a plan may choose from: chains to a depth, any tree, or its own size alone."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

from decoding.drafters.base import Drafter
from decoding.drafters.draft_model import DraftModelDrafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.drafters.parallel import ParallelDrafter
from decoding.drafters.prompt_lookup import PromptLookupDrafter
from decoding.drafters.spec import DrafterSpec
from decoding.rules.best_tree import FITTED_RANKS, Paths, best_tree

Kind = Literal["tree", "chain", "fixed"]

Load = Callable[[DrafterSpec], Drafter]
"""Function that makes a drafter of a spec; `decoding.drafters.registry.DrafterLoader.load` is one."""

DEEPEST_CHAIN = 10
"""Tokens of the longest chain that is tried of a draft model which was given none."""
_TOP_SHARE, _SHARE_FALL, _DEPTH_FALL = 0.6, 0.5, 0.85
"""Shares of a typical head, for the first tree: the top token's, and their falls by rank and by depth."""


@dataclass(frozen=True)
class Family:
    """A drafter that was asked for, and the largest of its forms, by which all of them are measured."""

    spec: DrafterSpec
    kind: Kind
    drafter: Drafter
    tree: Paths = ()
    """The tree of ``drafter``, of a family of trees."""

    @property
    def depth(self) -> int:
        return self.drafter.max_depth

    @property
    def label(self) -> str:
        """Name in pictures, without a size where that is free."""
        return self.drafter.label if self.kind == "fixed" else self.drafter.name

    def chain(self, depth: int) -> DrafterSpec:
        """Return the spec of a chain of ``depth`` tokens."""
        if self.kind == "tree":
            return self.of_tree(tuple((0,) * length for length in range(1, depth + 1)))
        # The branching of a chain says the same as its tokens.
        others = {name: value for name, value in self.spec.options.items() if name != "branching"}
        return replace(self.spec, options={**others, "tokens": depth})

    def of_tree(self, paths: Paths) -> DrafterSpec:
        """Return the spec of a tree of these paths."""
        return replace(self.spec, options={**self.spec.options, "tree": paths})


def family_of(spec: DrafterSpec, load: Load, most_nodes: int, most_depth: int) -> Family:
    """Return the family of a spec. Its trees have up to ``most_nodes`` nodes, the root included.

    ``most_depth`` bounds the chains of a draft model whose length is not given.

    Heads and parallel drafts are free in their trees unless the spec gives a tree or tokens; draft models, lookups and
    the other drafters of one chain are free in its length, up to the tokens that are given. A hybrid, a dynamic tree,
    and any tree that is given, is measured with its own size only.
    """
    drafter, given = load(spec), set(spec.options)
    if isinstance(drafter, MedusaDrafter | ParallelDrafter) and not given & {"tree", "dynamic_nodes", "tokens"}:
        if isinstance(drafter, MedusaDrafter):
            depth, vocab = drafter.heads.config.num_heads, drafter.heads.config.vocab_size
        else:
            depth, vocab = drafter.draft.tokens, drafter.draft.parts.config.outputs
        paths = first_tree(depth, min(FITTED_RANKS, vocab), most_nodes - 1)
        measured = replace(spec, options={**spec.options, "tree": paths})
        return Family(spec, "tree", load(measured), paths)
    if isinstance(drafter, DraftModelDrafter) and not given & {"branching", "tokens", "stop_below"}:
        return Family(spec, "chain", load(replace(spec, options={**spec.options, "tokens": most_depth})))
    return Family(spec, "chain" if _is_one_chain(drafter, spec) else "fixed", drafter)


def first_tree(depth: int, ranks: int, nodes: int) -> Paths:
    """Return the tree by which acceptance is measured before anything is known of it: that of typical heads.

    The whole chain is in it, so that a chain better than typical is measured to its end.
    """
    shares = [[_TOP_SHARE * _DEPTH_FALL**place * _SHARE_FALL**rank for rank in range(ranks)] for place in range(depth)]
    chain = {(0,) * length for length in range(1, min(depth, nodes) + 1)}
    trees = (chain.union(best_tree(shares, likely)) for likely in range(nodes, 0, -1))
    largest = next(tree for tree in trees if len(tree) <= nodes)
    return tuple(sorted(largest, key=lambda path: (len(path), path)))


def _is_one_chain(drafter: Drafter, spec: DrafterSpec) -> bool:
    """Return True for a drafter whose chain the option ``tokens`` bounds, and that no draw ends early."""
    if isinstance(drafter, PromptLookupDrafter):
        return drafter.branches == 1
    if isinstance(drafter, DraftModelDrafter):
        return True
    return drafter.chains_only and (spec.name in ("cascade", "other-tokenizer") or "tokens" in spec.options)
