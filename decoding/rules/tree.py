"""Token trees, which a drafter proposes and one target pass verifies, and the proposals that contain them.

Node 0 is the root: the last emitted token, whose keys and values the target has not computed yet. Every other node is a
drafted token that follows its parent. A chain is a tree with one branch. A drafter passes a proposal to an acceptance
rule. A proposal consists of a tree, the way in which the tree's tokens were chosen, and q.
"""

import reprlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from decoding.errors import UserError

MOST_NODES = 4096
"""Largest number of nodes of a tree in a file or a recipe. The mask of such a tree takes 16 MiB."""


def checked_paths(paths: object, vocab_size: int) -> tuple[tuple[int, ...], ...]:
    """Return paths of child ranks, read from a file or a recipe, as tuples; raise UserError if they do not form a tree.

    Every prefix of a path must be listed, every path must be listed only once, and every rank must be below
    ``vocab_size``.
    """
    if not isinstance(paths, list | tuple):
        raise UserError(f"the tree is {reprlib.repr(paths)}: use paths of ranks, such as [[0], [1], [0, 0]]")
    if len(paths) > MOST_NODES:
        raise UserError(f"the tree has {len(paths)} nodes: use at most {MOST_NODES}")
    known: set[tuple[int, ...]] = {()}
    for path in sorted(map(_checked_path, paths), key=len):
        shown = reprlib.repr(list(path))
        if path in known:
            raise UserError(f"tree path {shown} is listed twice: list each path once")
        if path[:-1] not in known:
            raise UserError(f"tree path {shown} lacks its parent: add {reprlib.repr(list(path[:-1]))} to the paths")
        if path[-1] >= vocab_size:
            raise UserError(
                f"tree path {shown} has a rank of {path[-1]}: use ranks below {vocab_size}, the number of tokens"
            )
        known.add(path)
    return tuple(map(tuple, paths))


def _checked_path(path: object) -> tuple[int, ...]:
    """Return the path as a tuple; raise UserError unless it is a non-empty list of ranks."""
    if not isinstance(path, list | tuple) or not path:
        raise UserError(f"tree path {reprlib.repr(path)} is not a list of ranks: use a list such as [0, 1]")
    for rank in path:
        if type(rank) is not int or rank < 0:
            raise UserError(f"tree path {reprlib.repr(path)} contains {reprlib.repr(rank)}: use whole numbers from 0")
    return tuple(path)


@dataclass(frozen=True)
class TreeShape:
    """The shape of a token tree, without the tokens. A shape is computed once and shared by all steps that use it.

    ``parents[i]`` is the parent of node i; ``parents[0]`` is -1 and every parent comes before its children.
    Siblings are in draw order; recursive rejection depends on that order.
    """

    parents: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise ValueError(f"parents are {self.parents[:4]}: start with the root's parent, -1")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise ValueError(f"node {node} has parent {parent}: put parents before their children")

    def __len__(self) -> int:
        return len(self.parents)

    @staticmethod
    @lru_cache(maxsize=256)
    def chain(length: int) -> "TreeShape":
        """Make the shape of a root followed by ``length`` drafted tokens, each the child of the previous one."""
        return TreeShape(tuple(range(-1, length)))

    @staticmethod
    def from_paths(paths: Iterable[Sequence[int]]) -> tuple["TreeShape", tuple[int, ...]]:
        """Build a shape from paths of child ranks, as Medusa writes its trees (``medusa_choices``).

        ``(0, 2)`` is the third best child (rank 2) of the best child of the root. Every prefix of a path must be
        listed; otherwise UserError is raised. Returns the shape and, for each node except the root, the node's rank
        among its siblings. Nodes are ordered by depth, then by path, with the best sibling first.
        """
        ordered = sorted({tuple(path) for path in paths} - {()}, key=lambda path: (len(path), path))
        node_of: dict[tuple[int, ...], int] = {(): 0}
        parents = [-1]
        for path in ordered:
            if path[:-1] not in node_of:
                raise UserError(f"tree path {list(path)} lacks its parent: add {list(path[:-1])} to the paths")
            node_of[path] = len(parents)
            parents.append(node_of[path[:-1]])
        return TreeShape(tuple(parents)), tuple(path[-1] for path in ordered)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; the root has depth 0."""
        depths = [0]
        for parent in self.parents[1:]:
            depths.append(depths[parent] + 1)
        return tuple(depths)

    @cached_property
    def max_depth(self) -> int:
        return max(self.depths)

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in draw order."""
        children: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            children[parent].append(node)
        return tuple(tuple(nodes) for nodes in children)

    @cached_property
    def inner(self) -> dict[int, int]:
        """The nodes with children, in increasing order, each mapped to its index among these nodes."""
        return {node: number for number, node in enumerate(sorted({*self.parents[1:]}))}

    @cached_property
    def is_chain(self) -> bool:
        return self.max_depth == len(self) - 1

    @cached_property
    def ancestor_mask(self) -> Bool[Tensor, "nodes nodes"]:
        """Attention mask within the tree: ``mask[i, j]`` is true if node j is node i or one of its ancestors."""
        if self.is_chain:
            return torch.ones(len(self), len(self), dtype=torch.bool).tril()
        mask = torch.eye(len(self), dtype=torch.bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    @cached_property
    def depth_tensor(self) -> Int[Tensor, " nodes"]:
        return torch.tensor(self.depths)

    def path(self, node: int) -> tuple[int, ...]:
        """Return the nodes from below the root down to ``node``; empty for the root."""
        nodes = []
        while node != 0:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def keep(self, nodes: Sequence[int]) -> "TreeShape":
        """Return the tree that consists only of ``nodes``, in which each node must come after its parent."""
        new_index = {node: index for index, node in enumerate(nodes)}
        return TreeShape(tuple(-1 if node == 0 else new_index[self.parents[node]] for node in nodes))


class TokenTree:
    """A shape with a token at each node. ``tokens[0]`` is the token of the root, the last emitted token."""

    def __init__(self, tokens: Int[Tensor, " nodes"], shape: TreeShape) -> None:
        assert len(tokens) == len(shape), f"{len(tokens)} tokens for a tree of {len(shape)} nodes"
        self.tokens = tokens
        self.shape = shape
        self._token_list: list[int] | None = None

    @staticmethod
    def of_list(tokens: Sequence[int], shape: TreeShape, device: torch.device | str = "cpu") -> "TokenTree":
        """Make a tree from tokens on the host, so that the tokens need not be fetched from the device later."""
        on_device = torch.tensor(tokens).to(device, non_blocking=True)  # without waiting for queued work
        tree = TokenTree(on_device, shape)
        tree._token_list = list(tokens)
        return tree

    @staticmethod
    def chain(tokens: Sequence[int], device: torch.device | str = "cpu") -> "TokenTree":
        """Make a chain from tokens on the host; the first one is the root."""
        return TokenTree.of_list(tokens, TreeShape.chain(len(tokens) - 1), device)

    @property
    def on_host(self) -> bool:
        """True if `token_list` costs no transfer from the device."""
        return self._token_list is not None

    @property
    def token_list(self) -> list[int]:
        """The tokens on the host, fetched in one transfer and kept."""
        if self._token_list is None:
            self._token_list = self.tokens.tolist()
        return self._token_list

    def __len__(self) -> int:
        return len(self.shape)

    def child_with_token(self, node: int, token: int) -> int | None:
        """Return the first child of ``node`` with this token, or None."""
        tokens = self.token_list
        for child in self.shape.children[node]:
            if tokens[child] == token:
                return child
        return None

    def follow(self, tokens: Sequence[int]) -> tuple[int, ...]:
        """Return the nodes below the root that match ``tokens``, up to the first token for which there is no child."""
        node, path = 0, []
        for token in tokens:
            child = self.child_with_token(node, token)
            if child is None:
                break
            path.append(child)
            node = child
        return tuple(path)

    def descend(self, best: Sequence[int]) -> tuple[tuple[int, ...], int]:
        """Walk down from the root: at each node, move to the child with the token ``best[node]``, until there is no
        such child. Returns the nodes on the way, without the root, and ``best`` of the last node.
        """
        node, path = 0, []
        while (child := self.child_with_token(node, best[node])) is not None:
            path.append(child)
            node = child
        return tuple(path), best[node]


class TokenTrie:
    """Paths below one root token. The common beginning of two paths is stored, run and counted only once."""

    def __init__(self, root: int) -> None:
        self._tokens = [root]
        self._parents = [-1]
        self._child: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        """Count the nodes, including the root."""
        return len(self._tokens)

    def add(self, path: Sequence[int], max_nodes: int | None = None) -> int:
        """Add the path below the root, as far as ``max_nodes`` allows; return its last node."""
        node = 0
        for token in path:
            if len(self) == max_nodes and (node, token) not in self._child:
                break
            node = self.child(node, token)
        return node

    def child(self, parent: int, token: int) -> int:
        """Return the first child of ``parent`` with this token; add one if there is none."""
        known = self._child.get((parent, token))
        return self.grow(parent, token) if known is None else known

    def grow(self, parent: int, token: int) -> int:
        """Add a last child to ``parent``, even if a sibling has the same token, and return it."""
        child = len(self._tokens)
        self._tokens.append(token)
        self._parents.append(parent)
        self._child.setdefault((parent, token), child)
        return child

    def tree(self, device: torch.device | str = "cpu") -> TokenTree:
        """Return the tree so far, with nodes in the order in which they were added."""
        return TokenTree.of_list(self._tokens, TreeShape(tuple(self._parents)), device)


def fetch_tokens(trees: Sequence[TokenTree], also: Sequence[Tensor] = ()) -> list[list[int]]:
    """Fetch the tokens of all trees to the host, together with the integers of ``also``, in one transfer.

    The trees keep their tokens; the integers of ``also`` are returned as lists.
    """
    missing = [tree for tree in trees if not tree.on_host]
    parts = [*(tree.tokens for tree in missing), *also]
    if not parts:
        return []
    device = also[0].device if also else parts[0].device
    joined: list[int] = torch.cat([part.to(device) for part in parts]).tolist()
    lists, begin = [], 0
    for part in parts:
        lists.append(joined[begin : begin + len(part)])
        begin += len(part)
    for tree, tokens in zip(missing, lists, strict=False):
        tree._token_list = tokens
    return lists[len(missing) :]


def common_length(first: Sequence[int], second: Sequence[int]) -> int:
    """Return the length of the longest common prefix of two texts, in tokens."""
    shorter = min(len(first), len(second))
    first, second = list(first[:shorter]), list(second[:shorter])
    if first == second:  # the usual case; it takes two nanoseconds per token
        return shorter
    return next(index for index in range(shorter) if first[index] != second[index])


class ProposalKind(Enum):
    """The ways in which a drafter may choose the children of a node. A lossless rule is lossless only for the kinds for
    which it was derived.
    """

    SAMPLED = "sampled"
    """Each child is drawn independently from q (with replacement)."""
    SAMPLED_WITHOUT_REPLACEMENT = "sampled without replacement"
    """Children are drawn one by one; for each draw, q is renormalised without the tokens drawn before."""
    DETERMINISTIC = "deterministic"
    """The set of children depends only on the context, as with top-k, argmax or a lookup."""
    GRAFTED = "grafted"
    """Children drawn in one of the two ways above are followed by children that depend only on the context."""

    @property
    def has_q(self) -> bool:
        """True if proposals of this kind carry the q that their tokens were drawn from."""
        return self is not ProposalKind.DETERMINISTIC


class DrawnPart(NamedTuple):
    """The drawn part of a grafted proposal: the first ``nodes`` nodes, including the root, drawn as ``kind``."""

    nodes: int
    kind: ProposalKind


@dataclass(frozen=True)
class Proposal:
    """A drafted tree and how its tokens were chosen.

    ``q`` (parents, vocab) has a row for each node with drawn children, in the order of the nodes. The row is the
    distribution, after every sampling control, from which the first child of the node was drawn. In a chain, row i
    belongs to node i. Deterministic proposals have ``q`` None.

    ``drawn`` is the drawn part of a grafted proposal, and None for any other proposal. ``matched`` is the length of the
    suffix of the text that a lookup found earlier in the text; without a lookup it is 0.
    """

    tree: TokenTree
    kind: ProposalKind
    q: Float[Tensor, "parents vocab"] | None = None
    drawn: DrawnPart | None = None
    matched: int = 0

    def __post_init__(self) -> None:
        if (self.q is None) == self.kind.has_q:
            raise ValueError(f"a {self.kind.value} proposal {'needs q' if self.q is None else 'must not carry q'}")
        assert (self.drawn is not None) == (self.kind is ProposalKind.GRAFTED), (
            f"drawn part of a {self.kind.value} proposal"
        )
        if self.q is not None and len(self.q) != len(self.q_rows):
            raise ValueError(f"q has {len(self.q)} rows, but {len(self.q_rows)} nodes have drawn children")

    @cached_property
    def q_rows(self) -> dict[int, int]:
        """Return, for each node with drawn children, the index of its row in ``q``."""
        shape = self.tree.shape
        return (shape if self.drawn is None else shape.keep(range(self.drawn.nodes))).inner

    @staticmethod
    def root_only(token: int, device: torch.device | str = "cpu") -> "Proposal":
        """Make a proposal without drafted tokens: its target pass decodes one token, as in plain decoding."""
        return Proposal(TokenTree.chain([token], device), ProposalKind.DETERMINISTIC)
