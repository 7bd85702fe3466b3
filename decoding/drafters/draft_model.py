"""A small causal language model as a drafter: a chain, or a tree drawn level by level."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from decoding.proposal import Proposal, ProposalKind
from decoding.sampling import (
    RandomSource,
    SamplingConfig,
    draw_without_replacement,
    penalised_logits,
    probabilities,
    seen_tokens,
)
from decoding.target import CausalLM, ModelOutput
from decoding.tree import TokenTree, TreeShape


class DraftModelDrafter:
    """Drafts with a model of the target's own tokenizer.

    ``branching[d]`` is how many children each node at depth d gets: ``(1, 1, 1, 1)`` is a chain of four. At
    temperature 0 the children are the draft's best tokens; above it they are drawn from the draft's distribution,
    for trees without replacement unless ``with_replacement``.
    """

    name = "draft model"

    def __init__(
        self, draft: CausalLM, branching: Sequence[int] = (1, 1, 1, 1), with_replacement: bool = False
    ) -> None:
        if not branching or min(branching) < 1:
            raise ValueError(f"branching is {list(branching)}: give at least one level, each with at least one child")
        self.draft = draft
        self.branching = tuple(branching)
        self.with_replacement = with_replacement
        self.max_depth = len(self.branching)
        widths = [1]
        for children in self.branching:
            widths.append(widths[-1] * children)
        self.max_nodes = sum(widths)

    @property
    def is_chain(self) -> bool:
        return max(self.branching) == 1

    def open(
        self, target: CausalLM, sampling: SamplingConfig, source: RandomSource, max_length: int
    ) -> "DraftModelSession":
        limit = self.draft.max_positions
        if limit is not None and max_length > limit:
            raise ValueError(
                f"the text may grow to {max_length} tokens but the draft's context holds {limit}: "
                "give a shorter prompt, a lower max_new_tokens, or another draft"
            )
        known = min(target.vocab_size, self.draft.vocab_size)
        if max(self.branching) > known:
            raise ValueError(f"branching is {list(self.branching)} but target and draft share {known} tokens")
        return DraftModelSession(self, target, sampling, source, max_length)


class DraftModelSession:
    """The draft at work on one text: its cache holds the committed text and, until the next call, the last tree."""

    def __init__(
        self,
        drafter: DraftModelDrafter,
        target: CausalLM,
        sampling: SamplingConfig,
        source: RandomSource,
        max_length: int,
    ) -> None:
        self._drafter = drafter
        self._draft = drafter.draft
        self._sampling = sampling
        self._source = source
        self._vocab_size = target.vocab_size
        self._seen = None
        if sampling.penalises:
            self._seen = torch.zeros(target.vocab_size, dtype=torch.bool, device=drafter.draft.device)
        self._cache = self._draft.new_cache(max_length + drafter.max_nodes)
        self._committed = 0  # tokens of the text whose keys are in the cache
        self._last: TokenTree | None = None  # the last proposal; its first `_fed` nodes' keys follow in the cache
        self._fed = 0

    def propose(self, tokens: Sequence[int], hidden: Tensor, max_depth: int) -> Proposal:
        self._keep_accepted(tokens)
        # A token only the target knows is read as the draft's last: a poorer q, and any q is lossless.
        fresh = torch.tensor(tokens[self._committed :]).clamp(max=self._draft.vocab_size - 1)
        if self._seen is not None:
            self._seen[list(tokens)] = True
        root = self._draft.append(fresh, self._cache)
        self._committed = len(tokens)
        branching = self._drafter.branching[: min(max_depth, self._drafter.max_depth)]
        if max(branching) == 1:
            return self._propose_chain(tokens[-1], root, len(branching))
        return self._propose_tree(tokens[-1], root, branching)

    def _keep_accepted(self, tokens: Sequence[int]) -> None:
        """Keep the keys of those nodes of the last tree that became text; drop the others."""
        if self._last is None:
            return
        # Not the last token, even where a lossy rule wrote one it had refused: the next draft starts by running it.
        path = self._last.follow(tokens[self._committed : -1])
        kept = [node - 1 for node in path if node <= self._fed]
        self._cache.commit(self._committed, kept)
        self._committed += len(kept)
        self._last, self._fed = None, 0

    def _propose_chain(self, root_token: int, root: ModelOutput, length: int) -> Proposal:
        chain = [root_token]
        rows: list[Tensor] = []
        output = root
        for step in range(length):
            if step:
                output = self._draft.append(torch.tensor(chain[-1:]), self._cache)
                self._fed = step
            chain.append(self._choose(output.logits, chain, rows))
        self._last = TokenTree.chain(chain, self._draft.device)
        if self._sampling.greedy:
            return Proposal(self._last, ProposalKind.DETERMINISTIC)
        return Proposal(self._last, ProposalKind.SAMPLED, torch.cat(rows))

    def _choose(self, logits: Tensor, chain: list[int], rows: list[Tensor]) -> int:
        """The next token of a chain: the argmax, or a draw from q, whose row is appended to ``rows``."""
        seen = None if self._seen is None else seen_tokens(self._seen, TokenTree.chain(chain))[-1:]
        logits = self._shared_vocabulary(logits)
        if self._sampling.greedy:
            return int(penalised_logits(logits, self._sampling, seen)[0].argmax())
        q = probabilities(logits, self._sampling, seen)
        rows.append(q)
        return self._source.draw(q[0])

    def _shared_vocabulary(self, logits: Tensor) -> Tensor:
        """Logits over the *target's* vocabulary, (rows, vocab).

        Padded vocabularies of one family differ in size: what the target does not know is never proposed, what the
        draft does not know has q = 0.
        """
        missing = self._vocab_size - logits.shape[1]
        return F.pad(logits, (0, missing), value=-torch.inf) if missing > 0 else logits[:, : self._vocab_size]

    def _propose_tree(self, root_token: int, root: ModelOutput, branching: Sequence[int]) -> Proposal:
        """Draw level by level; all nodes of a level run through the draft in one pass."""
        parents, tokens, rows = [-1], [root_token], []
        level = [0]
        logits = root.logits
        for depth, count in enumerate(branching):
            tree = TokenTree(torch.tensor(tokens), TreeShape(tuple(parents)))
            if depth:
                logits = self._draft.verify(tree, self._cache, first=level[0]).logits
                self._fed = len(tokens) - 1
            seen = None if self._seen is None else seen_tokens(self._seen, tree)[level]
            children, q = self._children(self._shared_vocabulary(logits), seen, count)
            rows.append(q)
            level = []
            for parent, drawn in zip(range(len(tokens) - len(children), len(tokens)), children, strict=True):
                parents += [parent] * len(drawn)
                level += drawn
            level, tokens = list(range(len(tokens), len(tokens) + len(level))), tokens + level
        self._last = TokenTree(torch.tensor(tokens, device=self._draft.device), TreeShape(tuple(parents)))
        if self._sampling.greedy:
            return Proposal(self._last, ProposalKind.DETERMINISTIC)
        kind = ProposalKind.SAMPLED if self._drafter.with_replacement else ProposalKind.SAMPLED_WITHOUT_REPLACEMENT
        # A level's nodes follow one another, so the rows of q line up with the nodes that have children.
        return Proposal(self._last, kind, torch.cat(rows))

    def _children(self, logits: Tensor, seen: Tensor | None, count: int) -> tuple[list[list[int]], Tensor]:
        """Each row's children in draw order, and the distributions they came from."""
        if self._sampling.greedy:
            return penalised_logits(logits, self._sampling, seen).topk(count).indices.tolist(), logits
        q = probabilities(logits, self._sampling, seen)
        if self._drafter.with_replacement:
            return [[self._source.draw(row) for _ in range(count)] for row in q], q
        return [draw_without_replacement(row, count, self._source).tolist() for row in q], q
