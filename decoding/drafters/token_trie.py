"""A token tree that grows path by path, for drafters that put several continuations into one tree."""

from collections.abc import Sequence

import torch

from decoding.rules.tree import TokenTree, TreeShape


class TokenTrie:
    """Paths below one root token; the common beginning of two paths is stored, run and counted once."""

    def __init__(self, root: int) -> None:
        self._tokens = [root]
        self._parents = [-1]
        self._child: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        """Count the nodes, the root included."""
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
        """Return the first child of ``parent`` that holds ``token``; add one if there is none."""
        known = self._child.get((parent, token))
        return self.grow(parent, token) if known is None else known

    def grow(self, parent: int, token: int) -> int:
        """Add a last child to ``parent``, even if a sibling holds the same token, and return it."""
        child = len(self._tokens)
        self._tokens.append(token)
        self._parents.append(parent)
        self._child.setdefault((parent, token), child)
        return child

    def tree(self, device: torch.device | str = "cpu") -> TokenTree:
        """Return the tree so far, its nodes in the order of their addition."""
        return TokenTree.of_list(self._tokens, TreeShape(tuple(self._parents)), device)
