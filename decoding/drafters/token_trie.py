"""A token tree that grows path by path, for drafters that put several continuations into one tree."""

from collections.abc import Sequence

import torch

from decoding.rules.tree import TokenTree, TreeShape


class TokenTrie:
    """Paths below one root token; what two paths begin with in common is run, and counted, once."""

    def __init__(self, root: int) -> None:
        self._tokens = [root]
        self._parents = [-1]
        self._child: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        """Nodes, the root included."""
        return len(self._tokens)

    def add(self, path: Sequence[int], max_nodes: int | None = None) -> int:
        """Add the path from below the root, or as much of it as ``max_nodes`` allow; its last node."""
        node = 0
        for token in path:
            if len(self) == max_nodes and (node, token) not in self._child:
                break
            node = self.child(node, token)
        return node

    def child(self, parent: int, token: int) -> int:
        """The first child of a node that holds a token, grown if there is none."""
        known = self._child.get((parent, token))
        return self.grow(parent, token) if known is None else known

    def grow(self, parent: int, token: int) -> int:
        """A new last child, also where a sister of it holds the same token."""
        child = len(self._tokens)
        self._tokens.append(token)
        self._parents.append(parent)
        self._child.setdefault((parent, token), child)
        return child

    def tree(self, device: torch.device | str = "cpu") -> TokenTree:
        """The tree so far, its nodes in the order they were added."""
        return TokenTree.of_list(self._tokens, TreeShape(tuple(self._parents)), device)
