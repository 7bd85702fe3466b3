"""A small causal language model as a drafter: it writes chains, token by token."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from decoding.drafters.base import DraftRequest, RowsSession, TextRows, TextStart
from decoding.drafters.growth import ChildLogits, GrownDrafter, Growth, StaticTree
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.vocabulary import over_vocabulary
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal, TokenTree, TreeShape

_FEW = 8
"""If a text has more new tokens than this number, the new tokens run in a separate pass before the chain."""


def check_draft(draft: CausalLM, target: CausalLM, max_length: int) -> None:
    """Raise UserError if the draft's context is too short, or if it can write tokens that the target lacks."""
    if draft.no_trees is not None:
        raise UserError(f"{draft.no_trees}, so it cannot draft: use a small model with full attention")
    if draft.max_positions is not None and max_length > draft.max_positions:
        raise UserError(
            f"the text may grow to {max_length} tokens, more than the draft's context of {draft.max_positions}: "
            "use a shorter prompt, or a lower max_new_tokens"
        )
    if draft.output_tokens is not None and (largest := int(draft.output_tokens.max())) >= target.vocab_size:
        raise UserError(
            f"the draft's trimmed lm_head writes token {largest}, but the target has tokens 0 to "
            f"{target.vocab_size - 1}: use a draft trimmed for this target"
        )


def shared_tokens(draft: CausalLM, target: CausalLM) -> int:
    """Return the number of the target's tokens that the draft can write."""
    return min(target.vocab_size, draft.vocab_size if draft.output_tokens is None else len(draft.output_tokens))


class DraftState:
    """The cache of a draft model for the texts of a batch, and the `TextRows` of these texts.

    Between two steps the cache contains the text of each row, followed by those nodes of the row's last tree that the
    draft has run.
    """

    def __init__(
        self, draft: CausalLM, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int, max_nodes: int
    ) -> None:
        """``max_nodes``: the largest number of nodes of a tree that the cache keeps after a text."""
        check_draft(draft, target, max_length)
        self.draft = draft
        self._vocab_size = target.vocab_size
        self.rows = TextRows(sampling, target.vocab_size, draft.device)
        self._longest = max_length
        # One more position takes the padding of shorter rows: see `PreallocatedCache.begin`.
        self.cache = draft.new_cache(max_length + max_nodes + 1, rows)
        self._lease = self.cache.take()
        self._committed = [0] * rows
        self._run_trees: dict[int, tuple[TokenTree, int]] = {}
        """Last tree of each row, and how many of its nodes below the root follow the text in the cache."""

    def admit(self, row: int, start: TextStart) -> None:
        self.cache.clear(row)
        self._committed[row] = 0
        self._run_trees.pop(row, None)
        self.rows.admit(row, start)

    def move(self, row: int, to: int) -> None:
        self.cache.move(row, to)
        self._committed[to], self._committed[row] = self._committed[row], 0
        self.rows.move(row, to)
        self._run_trees.pop(to, None)
        if row in self._run_trees:
            self._run_trees[to] = self._run_trees.pop(row)

    def catch_up(self, texts: Sequence[Sequence[int]]) -> Float[Tensor, "rows vocab"]:
        """Run the new tokens of each text; return the logits after the last token, over the target's vocabulary."""
        return self.over_target_vocabulary(self.draft.append(self._lacking(texts), self.cache).logits)

    def verify(self, texts: Sequence[Sequence[int]], chains: Sequence[TokenTree]) -> list[Float[Tensor, "nodes vocab"]]:
        """Run the new tokens of each text and the chain drafted after it, in one pass; return the chain's logits.

        Texts that grew by many tokens since the last call take one more pass, because this pass computes logits at all
        nodes.
        """
        blocks = self._lacking(texts)
        if max(map(len, blocks)) > _FEW:
            self.draft.append(blocks, self.cache)
            for index, text in enumerate(texts):
                self.cache.truncate(index, len(text) - 1)
            blocks = [block[-1:] for block in blocks]
        trees = []
        for block, chain in zip(blocks, chains, strict=True):
            begin = torch.tensor(block).to(self.draft.device, non_blocking=True)
            drafted = chain.tokens[1:].to(self.draft.device, non_blocking=True).clamp(max=self.draft.vocab_size - 1)
            trees.append(TokenTree(torch.cat([begin, drafted]), TreeShape.chain(len(block) + len(drafted) - 1)))
        logits = self.over_target_vocabulary(self.draft.verify(trees, self.cache).logits)
        self.remember(chains, [len(chain) - 1 for chain in chains])
        return [logits[row, len(block) - 1 : len(trees[row])] for row, block in enumerate(blocks)]

    def rewind(self, row: int, length: int) -> None:
        """Forget all but the first ``length`` tokens of a row's text."""
        if length < self._committed[row]:
            self._run_trees.pop(row, None)
            self.cache.truncate(row, length)
            self._committed[row] = length

    def _lacking(self, texts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Return, for each text, the tokens that are not in the cache yet; the caller runs these tokens. The prompts of
        new rows are run here, except their last token.
        """
        self.cache.check(self._lease)
        for row, text in enumerate(texts):
            self._keep_accepted(row, text)
        # Prompts of new rows run separately, so that old rows are not padded.
        if fresh := [row for row, text in enumerate(texts) if self._committed[row] == 0 and len(text) > 1]:
            self.draft.prefill([self._known(texts[row][:-1]) for row in fresh], self.cache, fresh)
            for row in fresh:
                self._committed[row] = len(texts[row]) - 1
            self.draft.prepare(self.cache, len(texts), (), self._longest)
        blocks = [self._known(text[self._committed[row] :]) for row, text in enumerate(texts)]
        self._committed[: len(texts)] = [len(text) for text in texts]
        return blocks

    def _known(self, tokens: Sequence[int]) -> list[int]:
        # A token that the draft does not know is replaced by the draft's last token. This makes q worse, but decoding
        # is lossless with any q.
        last = self.draft.vocab_size - 1
        return [min(token, last) for token in tokens]

    def _keep_accepted(self, row: int, text: Sequence[int]) -> None:
        """Keep the keys of those nodes of the last tree that became text; drop the keys of the other nodes."""
        if row not in self._run_trees:
            return
        tree, run = self._run_trees.pop(row)
        # The text's last token is left out, because the next draft runs this token first.
        # Besides, a lossy rule may write a token that it has just rejected.
        path = tree.follow(text[self._committed[row] : -1])
        kept = [node - 1 for node in path if node <= run]
        self.cache.commit(row, self._committed[row], kept)
        self._committed[row] += len(kept)

    def remember(self, trees: Sequence[TokenTree], run: Sequence[int]) -> None:
        """Record that the cache contains, after each row's text, the first ``run[row]`` nodes below its tree's root."""
        for row, (tree, count) in enumerate(zip(trees, run, strict=True)):
            self._run_trees[row] = (tree, count)

    def step(self, tokens: Int[Tensor, " rows"]) -> Float[Tensor, "rows vocab"]:
        """Run one more token in each row, and return the logits after it."""
        if self.draft.vocab_size < self._vocab_size:
            tokens = tokens.clamp(max=self.draft.vocab_size - 1)
        return self.over_target_vocabulary(self.draft.step(tokens, self.cache).logits)

    def run_level(self, trees: Sequence[TokenTree], first: Sequence[int]) -> list[Tensor]:
        """Run the nodes of each tree, starting at node ``first[row]``; return their logits, of shape (nodes, vocab),
        for each row.
        """
        logits = self.over_target_vocabulary(self.draft.verify(trees, self.cache, first).logits)
        return [logits[row, : len(tree) - left] for row, (tree, left) in enumerate(zip(trees, first, strict=True))]

    def over_target_vocabulary(self, logits: Float[Tensor, "*rows draft_vocab"]) -> Float[Tensor, "*rows vocab"]:
        """Map the draft's logits to the *target's* vocabulary.

        Models of one family may pad their vocabularies to different sizes. Tokens that only the draft has are never
        proposed, and tokens that only the target has get q = 0.
        """
        return over_vocabulary(logits, self.draft.output_tokens, self._vocab_size)


class StateSession(RowsSession):
    """A session of a draft on a batch; a `DraftState` keeps what the draft has computed for each text."""

    def __init__(self, state: DraftState) -> None:
        super().__init__(state)
        self._state = state


class DraftModelDrafter(GrownDrafter):
    """Drafter of a chain of ``tokens`` tokens, written by a model that uses the target's tokenizer.

    At temperature 0 the chain consists of the model's best tokens. At higher temperatures each token is drawn from the
    model's distribution, unless ``sampled`` is False; the chain ends early if processors forbid every token that the
    model knows.
    """

    name = "draft model"
    artefact = "draft"

    def __init__(self, draft: CausalLM, tokens: int = 4, sampled: bool = True) -> None:
        if tokens < 1:
            raise UserError(f"tokens is {tokens}: use at least 1")
        self.draft = draft
        self.tokens = tokens
        self._grow(StaticTree.chain(tokens), sampled)
        self.max_positions = draft.max_positions
        self.rough_cost = 0.05 * tokens

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "DraftModelSession":
        state = DraftState(self.draft, target, sampling, rows, max_length, self.max_nodes)
        return DraftModelSession(self.growth, state)


class DraftModelSession(StateSession):
    """A session that drafts for a batch: one pass of the draft per depth, for all rows."""

    def __init__(self, growth: Growth, state: DraftState) -> None:
        super().__init__(state)
        self._growth = growth

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        depths = [self._growth.tree.cut(request)[0].max_depth for request in requests]
        if not any(depths):
            return [Proposal.root_only(request.tokens[-1], self._state.draft.device) for request in requests]
        root = self._state.catch_up([request.tokens for request in requests])

        def after(depth: int, rows: Tensor, tokens: Tensor) -> ChildLogits:
            if depth == 0:
                return ChildLogits(root, rows)
            if len(rows) < len(requests):  # a chain that has ended runs a dummy token
                tokens = tokens.new_zeros(len(requests)).index_copy(0, rows, tokens)
            return ChildLogits(self._state.step(tokens), rows)

        proposals = self._growth.propose(requests, after, self._state.rows)
        trees = [proposal.tree for proposal in proposals]
        ran = [max(0, min(len(tree) - 1, depth - 1)) for tree, depth in zip(trees, depths, strict=True)]
        self._state.remember(trees, ran)
        return proposals
