"""An EAGLE-3 draft as a drafter of chains and trees: one pass of a single layer for each depth (2503.01840)."""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from decoding.drafters.base import DraftRequest, RowsSession, TextRows, TextStart
from decoding.drafters.draft_tree import DraftTreeDrafter, DraftTreeSession
from decoding.drafters.growth import ChildLogits, Cut, GrownDrafter, Growth, StaticTree
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.eagle3_draft import Eagle3Draft
from decoding.model.forward import unscaled_embeddings
from decoding.model.vocabulary import over_vocabulary
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal, TokenTree, TreeShape

_FEW = 16
"""Texts with at most this many new slots run together, padded to the same number of slots."""


class Eagle3Drafter(GrownDrafter):
    """Drafter that drafts a chain or a tree with an EAGLE-3 draft.

    ``tree`` lists the nodes as paths: rank r means the r-th best token (from 0) after the node above. ``tokens`` is the
    length of a chain. If neither is set, the draft writes a chain of 4 tokens. ``sampled``: above temperature 0 each
    token is drawn from q given the path to the token, and siblings are drawn without replacement. If ``sampled`` is
    False, the likeliest tokens are taken, as at temperature 0.
    """

    name = "eagle3"
    artefact = "draft"

    def __init__(
        self,
        draft: Eagle3Draft,
        tokens: int | None = None,
        tree: Sequence[Sequence[int]] | None = None,
        sampled: bool = True,
    ) -> None:
        if tree is not None and tokens is not None:
            raise UserError("tree and tokens are both given: use one of them")
        if tokens is not None and tokens < 1:
            raise UserError(f"tokens is {tokens}: use at least 1")
        shape = StaticTree.chain(tokens or 4) if tree is None else StaticTree(tree)
        if shape.ranks > (outputs := draft.config.draft_vocab_size):
            raise UserError(
                f"the tree has {shape.ranks} ranks, but the draft's vocabulary has {outputs} tokens: use fewer ranks"
            )
        self.draft = draft
        self._grow(shape, sampled, None if tree is None else "tree")
        self.taps = draft.config.target_layer_ids
        self.rough_cost = 0.03 * shape.max_depth

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "Eagle3Session":
        return Eagle3Session(self.growth, Eagle3State(self.draft, target, sampling, rows, max_length, self.max_nodes))


class Eagle3TreeDrafter(DraftTreeDrafter):
    """Drafter of a tree that consists of the likeliest nodes that a beam search of the draft finds; ``nodes`` is the
    number of nodes, including the root.
    """

    name = "eagle3 tree"

    def __init__(self, draft: Eagle3Draft, depth: int = 5, width: int = 4, nodes: int = 24) -> None:
        super().__init__(draft, depth, width, nodes)  # type: ignore[arg-type]  # only `open` below reads it
        if width > (outputs := draft.config.draft_vocab_size):
            raise UserError(f"width is {width}, but the draft's vocabulary has {outputs} tokens: use at most {outputs}")
        self._eagle3 = draft
        self.taps = draft.config.target_layer_ids
        self.label_with_size = f"eagle3, best tree of {self.max_nodes - 1}"
        self.rough_cost = 0.03 * depth

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "Eagle3TreeSession":
        most = 1 + self.width * self.depth
        return Eagle3TreeSession(self, Eagle3State(self._eagle3, target, sampling, rows, max_length, most), sampling)


class _Level(NamedTuple):
    """Nodes that run together after the texts of a batch: all nodes at one depth of all trees, with padding."""

    depth: int
    nodes: Int[Tensor, "rows width"]
    """Each node's number in its tree; padding has a number that no tree has."""
    parents: Int[Tensor, "rows width"]
    visible: Bool[Tensor, "rows width drafted"]
    """The drafted slots to which each node attends, by node number from 1: the slots of the node itself and of its
    ancestors.
    """
    flat: Int[Tensor, " some"]
    """Indices of the nodes in a flattened (rows, width) tensor, row by row and without padding."""
    sees_all: bool
    """True if every node attends to all slots of a text and of its tree."""


def _level(shapes: Sequence[TreeShape], first: Sequence[int], device: torch.device) -> _Level:
    """Describe the level that consists of node ``first[row]`` of each tree and all nodes after it."""
    counts = [len(shape) - begin for shape, begin in zip(shapes, first, strict=True)]
    width = max(counts)
    last = max(map(len, shapes)) - (min(counts) == width)  # padding, if there is any, needs one more number
    nodes, parents = torch.full((len(shapes), width), last), torch.zeros(len(shapes), width, dtype=torch.long)
    visible = torch.zeros(len(shapes), width, last, dtype=torch.bool)
    for row, (shape, begin, count) in enumerate(zip(shapes, first, counts, strict=True)):
        nodes[row, :count] = torch.arange(begin, len(shape))
        parents[row, :count] = torch.tensor(shape.parents[begin:])
        visible[row, :count, : len(shape) - 1] = shape.ancestor_mask[begin:, 1:]
        visible[row, count:, -1] = True
    flat = torch.tensor([row * width + index for row, count in enumerate(counts) for index in range(count)])
    depth = max(shape.max_depth for shape in shapes)
    sees_all = bool(visible.all())
    nodes, parents, visible, flat = (part.to(device, non_blocking=True) for part in (nodes, parents, visible, flat))
    return _Level(depth, nodes, parents, visible, flat, sees_all)


@lru_cache(maxsize=256)
def _static_level(cuts: tuple[Cut, ...], depth: int, device: torch.device) -> _Level:
    """Describe the level of all nodes at ``depth`` in trees of known shapes; nodes without children do not run."""
    inner = [[node for node in shape.inner if shape.depths[node] <= depth] or [0] for shape, _ in cuts]
    first = [sum(shape.depths[node] < depth for node in nodes) for (shape, _), nodes in zip(cuts, inner, strict=True)]
    return _level([shape.keep(nodes) for (shape, _), nodes in zip(cuts, inner, strict=True)], first, device)


class Eagle3State:
    """Keys, values and states of a draft on a batch, with the `TextRows` of the batch.

    A slot is one position that the draft reads: a token, and the state at the token before it. A text of n tokens has n
    - 1 slots, which are made from the target's states. They are followed by the slots of drafted nodes, which are made
    from the draft's own states and are overwritten once their tokens are accepted.
    """

    def __init__(
        self, draft: Eagle3Draft, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int, max_nodes: int
    ) -> None:
        """``max_nodes``: the largest number of nodes of a tree that run, including the root."""
        draft.config.for_target(target)
        self.draft, self._target = draft, target
        self.rows = TextRows(sampling, target.vocab_size, target.device)
        config, weight = draft.config, draft.fc.weight
        shape = (rows, config.num_key_value_heads, max_length + max(max_nodes, _FEW), config.head_dim)
        self._keys, self._values = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self._held_at = torch.zeros(rows, shape[2], dtype=torch.long, device=weight.device)
        """Positions of the slots whose keys are kept, for drafts with a sliding window."""
        self._states = weight.new_zeros(rows, max_nodes + 1, config.hidden_size)
        """States of the nodes that have run, for each row. The root has the state of the text's last slot, or zeros if
        there is no slot."""
        self._lengths = [0] * rows
        """Number of slots of each row's text."""
        self._unread: dict[int, list[Tensor]] = {}
        """For each row, the target's states at the tokens that the draft has not read yet."""

    @cached_property
    def output_tokens(self) -> Int[Tensor, " outputs"]:
        """`Eagle3Draft.output_tokens`, computed once."""
        return self.draft.output_tokens

    def admit(self, row: int, start: TextStart) -> None:
        self.rows.admit(row, start)
        self._states[row, 0] = 0
        self._lengths[row] = 0
        self._unread[row] = []

    def move(self, row: int, to: int) -> None:
        self.rows.move(row, to)
        length = self._lengths[to] = self._lengths[row]
        for buffer in (self._keys, self._values):
            buffer[to, :, :length] = buffer[row, :, :length]
        self._held_at[to] = self._held_at[row]
        self._states[to, 0] = self._states[row, 0]
        self._unread[to] = self._unread.pop(row)

    def receive(self, requests: Sequence[DraftRequest]) -> None:
        """Keep the target's states at the new tokens of each row."""
        for row, request in enumerate(requests):
            if request.states is not None and len(request.states):
                self._unread[row].append(request.states.to(self.draft.fc.weight))

    def read(self, texts: Sequence[Sequence[int]]) -> Float[Tensor, "rows outputs"]:
        """Run the new slots of each text; return the logits after the text's last token, over the draft's outputs."""
        empty = self.draft.fc.weight.new_zeros(0, self.draft.fc.in_features)
        unread = [self._unread[row] or [empty] for row in range(len(texts))]
        states = [parts[0] if len(parts) == 1 else torch.cat(parts) for parts in unread]
        self._unread.update({row: [] for row in range(len(texts))})
        for row, text in enumerate(texts):
            if len(states[row]) > _FEW:
                self._append(row, [text], [states[row]])
                states[row] = empty
        self._append(0, texts, states)
        return self.draft.logits(self._states[: len(texts), 0])

    def _append(self, first: int, texts: Sequence[Sequence[int]], states: Sequence[Tensor]) -> None:
        """Add the slots of the next tokens, made from the target's states, to the rows ``first``, ``first + 1``, …."""
        counts, device = list(map(len, states)), self.draft.device
        if not (width := max(counts)):
            return
        begins = self._lengths[first : first + len(texts)]
        new = [
            list(text[begin + 1 : begin + 1 + count]) for text, begin, count in zip(texts, begins, counts, strict=True)
        ]
        tokens = torch.tensor([[*own, *[0] * (width - len(own))] for own in new]).to(device, non_blocking=True)
        positions = torch.tensor(begins).to(device, non_blocking=True)[:, None] + torch.arange(width, device=device)
        visible, keys = None, max(begins) + width
        if any(begins) and (width > 1 or len(set(begins)) > 1):
            visible = torch.arange(keys, device=device) <= positions[..., None]
        read = states[0][None] if len(states) == 1 else pad_sequence(list(states), batch_first=True)
        fused = self.draft.fused(read)
        ran = self._run(first, tokens, fused, positions, positions, visible, keys)
        grown = [row for row, count in enumerate(counts) if count]
        index, ends = torch.tensor([(row, counts[row] - 1) for row in grown]).to(device, non_blocking=True).T
        self._states[first + index, 0] = ran[index, ends]
        self._lengths[first : first + len(texts)] = [begin + count for begin, count in zip(begins, counts, strict=True)]

    def run(self, level: _Level, tokens: Int[Tensor, " some"]) -> Float[Tensor, "some outputs"]:
        """Run a level's nodes with these tokens; return the logits of their children, over the draft's outputs."""
        (rows, width, drafted), device = level.visible.shape, self.draft.device
        padded = tokens.new_zeros(rows * width).index_copy_(0, level.flat, tokens).view(rows, width)
        index = torch.arange(rows, device=device)[:, None]
        begins = torch.tensor(self._lengths[:rows]).to(device, non_blocking=True)[:, None]
        keys, visible = max(self._lengths[:rows]) + drafted, None
        if not level.sees_all or len(set(self._lengths[:rows])) > 1:
            of_text = (torch.arange(keys, device=device) < begins)[:, None].expand(rows, width, keys)
            slots = (begins + torch.arange(drafted, device=device))[:, None].expand(rows, width, drafted)
            visible = of_text.scatter(2, slots, level.visible)
        states = self.draft.recycled(self._states[index, level.parents])
        positions = (begins + (level.depth - 1)).expand(rows, width)
        ran = self._run(0, padded, states, positions, begins + level.nodes - 1, visible, keys)
        self._states[index, level.nodes] = ran
        return self.draft.logits(ran.flatten(0, 1)[level.flat])

    def _run(
        self,
        first: int,
        tokens: Int[Tensor, "rows width"],
        states: Float[Tensor, "rows width hidden"],
        positions: Int[Tensor, "rows width"],
        slots: Int[Tensor, "rows width"],
        visible: Bool[Tensor, "rows width keys"] | None,
        keys: int,
    ) -> Float[Tensor, "rows width hidden"]:
        """Run new slots of the rows ``first``, ``first + 1``, …, and return the states of these slots.

        Their keys and values are stored at the indices ``slots``.
        """
        here = slice(first, first + len(tokens))
        index = torch.arange(here.start, here.stop, device=tokens.device)[:, None]

        def held(*fresh: Tensor) -> tuple[Tensor, Tensor]:
            for buffer, block in zip((self._keys, self._values), fresh, strict=True):
                buffer[index, :, slots] = block.transpose(1, 2)
            return self._keys[here, :, :keys], self._values[here, :, :keys]

        if (window := self.draft.config.sliding_window) is not None:
            self._held_at[index, slots] = positions
            if keys > window:
                held_at, at = self._held_at[here, None, :keys], positions[..., None]
                near = (held_at <= at) & (held_at > at - window)
                visible = near if visible is None else visible & near
        embedded = unscaled_embeddings(self._target.model, tokens)
        mask = None if visible is None else visible[:, None]
        ran: Tensor = self.draft(embedded, states, positions, held, mask)
        return ran

    # Methods that the session of a best-first tree calls.

    def catch_up(self, texts: Sequence[Sequence[int]]) -> Float[Tensor, "rows vocab"]:
        """Return the logits of `read` over the target's vocabulary."""
        return over_vocabulary(self.read(texts), self.output_tokens, self._target.vocab_size)

    def run_level(self, trees: Sequence[TokenTree], first: Sequence[int]) -> list[Tensor]:
        """Run the nodes of each tree, starting at node ``first[row]``; return their logits, of shape (nodes, vocab),
        for each row.
        """
        news = [tree.token_list[begin:] for tree, begin in zip(trees, first, strict=True)]
        device = self.draft.device
        tokens = torch.tensor([token for new in news for token in new]).to(device, non_blocking=True)
        logits = self.run(_level([tree.shape for tree in trees], first, device), tokens)
        whole = over_vocabulary(logits, self.output_tokens, self._target.vocab_size)
        return list(whole.split(list(map(len, news))))

    def remember(self, trees: Sequence[TokenTree], run: Sequence[int]) -> None:
        """Do nothing, because slots of drafted nodes are never kept."""


class Eagle3Session(RowsSession):
    """A session that drafts for a batch: one pass for the new slots of the texts, and one for each further depth."""

    def __init__(self, growth: Growth, state: Eagle3State) -> None:
        super().__init__(state)
        self._growth, self._state = growth, state

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        state, device = self._state, self._state.draft.device
        state.receive(requests)
        cuts = tuple(self._growth.tree.cut(request) for request in requests)
        if not any(shape.max_depth for shape, _ in cuts):
            return [Proposal.root_only(request.tokens[-1], device) for request in requests]
        root = state.read([request.tokens for request in requests])

        def after(depth: int, rows: Tensor, tokens: Tensor) -> ChildLogits:
            if depth == 0:
                return ChildLogits(root, rows, state.output_tokens)
            logits = state.run(_static_level(cuts, depth, device), tokens)
            return ChildLogits(logits, torch.arange(len(logits), device=device), state.output_tokens)

        return self._growth.propose(requests, after, state.rows)


class Eagle3TreeSession(DraftTreeSession):
    """A session that drafts best-first trees with a draft that also reads the target's states."""

    def __init__(self, drafter: Eagle3TreeDrafter, state: Eagle3State, sampling: SamplingConfig) -> None:
        super().__init__(drafter, state, sampling)  # type: ignore[arg-type]  # the state has the methods that the session calls
        self._eagle3 = state

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        self._eagle3.receive(requests)
        return super().propose(requests)
