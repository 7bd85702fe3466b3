"""A draft model that drafts a new tree in each step, grown at its likeliest nodes (EAGLE-2, 2406.16858, section 4)."""

import heapq
import math
from collections.abc import Sequence
from itertools import islice

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.drafters.base import Drafter, DraftRequest
from decoding.drafters.draft_model import DraftState, StateSession, shared_tokens
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.sampling import HistoryRows, SamplingConfig, adjusted_logits, probabilities
from decoding.rules.tree import Proposal, ProposalKind, TokenTree, TreeShape


class DraftTreeDrafter(Drafter):
    """Drafter of a tree that consists of the likeliest nodes that a beam search of the draft finds; ``nodes`` is the
    number of nodes, including the root.

    A node's score is the draft's probability of the node's whole path. Each pass runs the best ``width`` nodes of a
    level, and each of these nodes gets its best ``width`` tokens as children. The best children of all levels form the
    tree. The tree depends only on the text, so proposals are deterministic at any temperature. Above temperature 0 the
    probabilities are taken after every sampling control.
    """

    name = "draft tree"
    artefact = "draft"

    def __init__(self, draft: CausalLM, depth: int = 5, width: int = 4, nodes: int = 24) -> None:
        if depth < 1 or width < 1:
            raise UserError(f"depth is {depth} and width is {width}: set both to at least 1")
        if nodes <= depth:
            raise UserError(f"nodes is {nodes}: a tree of depth {depth} needs at least {depth + 1}, including the root")
        self.draft = draft
        self.depth = depth
        self.width = width
        sizes = [(level, 1 + max(level, (nodes - 1) * level // depth)) for level in range(1, depth + 1)]
        # The beam finds the root, its children, and the children of the best nodes of each further level.
        self.budgets = tuple(Budget(level, min(size, 1 + width + (level - 1) * width**2)) for level, size in sizes)
        self.max_positions = draft.max_positions
        self.label_with_size = f"draft model, tree of {self.max_nodes - 1}"
        self.rough_cost = 0.05 * depth

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "DraftTreeSession":
        known = shared_tokens(self.draft, target)
        if self.width > known:
            raise UserError(f"width is {self.width}, but target and draft share {known} tokens: use at most {known}")
        state = DraftState(self.draft, target, sampling, rows, max_length, 1 + self.width * self.depth)
        return DraftTreeSession(self, state, sampling)


class DraftTreeSession(StateSession):
    """A session that drafts for a batch: one pass and one transfer to the host per level, for all trees."""

    def __init__(self, drafter: DraftTreeDrafter, state: DraftState, sampling: SamplingConfig) -> None:
        super().__init__(state)
        self._drafter = drafter
        self._sampling = sampling

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        device = self._state.draft.device
        most = self._drafter.budgets[-1]
        beams = [_Beam(request, most, self._drafter.width) for request in requests]
        if not any(beam.level for beam in beams):
            return [Proposal.root_only(request.tokens[-1], device) for request in requests]
        texts = [request.tokens for request in requests]
        logits = list(self._state.catch_up(texts)[:, None])
        while True:
            children = iter(self._children(texts, beams, logits))
            for beam in beams:
                beam.grow(list(islice(children, len(beam.level))))
            if not any(beam.level for beam in beams):
                break
            logits = self._state.run_level([beam.run_tree() for beam in beams], [beam.ran for beam in beams])
        run_trees = [beam.run_tree() for beam in beams]
        self._state.remember(run_trees, [len(tree) - 1 for tree in run_trees])
        return [Proposal(beam.best_tree(device), ProposalKind.DETERMINISTIC) for beam in beams]

    def _children(
        self, texts: Sequence[Sequence[int]], beams: Sequence["_Beam"], logits: Sequence[Float[Tensor, "level vocab"]]
    ) -> list[list[tuple[int, float]]]:
        """Return (token, log-probability) of the best children of each node that has just run. The nodes come row by
        row.
        """
        history = None
        if self._sampling.needs_history:
            history = HistoryRows.cat(
                [
                    self._state.rows.history_at(row, texts[row], beam.run_tree(), range(beam.ran, len(beam.run)))
                    for row, beam in enumerate(beams)
                ]
            )
        flat = torch.cat([row[: len(beam.level)] for row, beam in zip(logits, beams, strict=True)])
        if self._sampling.greedy:
            flat = adjusted_logits(flat, self._sampling, history).float()
            best, tokens = flat.topk(self._drafter.width)
            scores = best - flat.logsumexp(-1, keepdim=True)
        else:
            best, tokens = probabilities(flat, self._sampling, history).float().topk(self._drafter.width)
            scores = best.log()
        # fp32 represents every id below 2^24 exactly, so ids and scores can share one transfer to the host.
        token_lists, score_lists = torch.stack([tokens.float(), scores]).tolist()
        return [
            [(int(token), score) for token, score in zip(*node, strict=True) if score > -math.inf]
            for node in zip(token_lists, score_lists, strict=True)
        ]


class _Beam:
    """The tree of a row under construction: all nodes found so far, and the nodes that run through the draft."""

    def __init__(self, request: DraftRequest, most: Budget, width: int) -> None:
        nodes = max(1, min(most.nodes, request.max_nodes))
        self._bounds, self._width = Budget(min(most.depth, request.max_depth, nodes - 1), nodes), width
        self._tokens, self._parents, self._scores = [request.tokens[-1]], [-1], [0.0]
        self._depth = 0
        self.run = [0]
        """Nodes that have already run, followed by the nodes that run in this pass, in the order of their keys in the
        draft's cache.
        """
        self.level = [0] if self._bounds.depth > 0 else []
        """Nodes that run in this pass; they are at the end of ``run``."""

    @property
    def ran(self) -> int:
        """Number of nodes in ``run`` whose keys are already in the draft's cache."""
        return len(self.run) - len(self.level)

    def grow(self, children: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Give each node of the level its children, and choose the nodes that run next."""
        begin = len(self._tokens)
        for parent, of_parent in zip(self.level, children, strict=True):
            for token, log_probability in of_parent:
                self._tokens.append(token)
                self._parents.append(parent)
                self._scores.append(self._scores[parent] + min(log_probability, 0.0))
        self._depth += 1
        # Scores never rise along a path, so a node that is not among the best cannot have a child among the best.
        fresh = [node for node in self._best() if node >= begin] if self._depth < self._bounds.depth else []
        self.level = fresh[: self._width]
        self.run += self.level

    def _best(self) -> list[int]:
        """Return the best nodes so far, best first. On ties the older node comes first, so parents precede children."""
        return heapq.nlargest(self._bounds.nodes - 1, range(1, len(self._tokens)), key=self._scores.__getitem__)

    def run_tree(self) -> TokenTree:
        """Return the tree of the nodes in ``run``."""
        return self._tree_of(self.run)

    def best_tree(self, device: torch.device) -> TokenTree:
        """Return the tree to propose."""
        return self._tree_of([0, *sorted(self._best())], device)

    def _tree_of(self, nodes: Sequence[int], device: torch.device | str = "cpu") -> TokenTree:
        index_of = {node: index for index, node in enumerate(nodes)}
        shape = TreeShape(tuple(index_of.get(self._parents[node], -1) for node in nodes))
        return TokenTree.of_list([self._tokens[node] for node in nodes], shape, device)
