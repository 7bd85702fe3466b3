"""A cascade: a cheaper drafter speculates for the draft model, so that a chain takes fewer passes of the draft model.

Staged speculation (Spector and Re 2308.04623; Chen et al. 2312.11462): the inner drafter proposes a tree to the draft
model, which verifies it in one pass. This repeats after the kept tokens until the chain has its length.

Each token of the chain is drawn from the draft's own q in its context, whether the inner drafter guessed it or not:
this is the sampled-verify rule with the draft in the target's place. So the chain's distribution and the recorded q are
those of the draft alone. Each token takes one draw, so with the same seed the chain is the same as well.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.drafters.base import (
    DraftRequest,
    TextDrafter,
    TextSession,
    TextStart,
    chain_budgets,
)
from decoding.drafters.draft_state import DraftState, check_draft
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.drawing import GeneratorSource
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig, adjusted_logits, probabilities
from decoding.rules.tree import TokenTree, TreeShape
from decoding.rules.verify import Verdict, sampled_verify

_APART = 16
"""Greatest number of tokens missing in the draft's cache that run together with the tree; more get their own pass."""


class CascadeDrafter(TextDrafter):
    """Drafter of a chain of ``num_draft_tokens`` by a model with the target's tokenizer, sped up by ``inner``.

    ``inner`` should cost almost nothing, as prompt lookup does. Every text has its own draft cache, and the texts of a
    batch are drafted one after the other: several texts at a time without steps of fixed shapes, which have one cache.
    The chain ends where processors forbid every token that the draft knows.
    """

    name = "cascade"
    artefact = "draft"

    def __init__(self, draft: CausalLM, inner: TextDrafter, num_draft_tokens: int = 8) -> None:
        if num_draft_tokens < 1:
            raise ValueError(f"num_draft_tokens is {num_draft_tokens}: give at least 1")
        if not isinstance(inner, TextDrafter):
            raise ValueError(
                f"the inner {inner.name} drafts for batches: give one that takes text by text, as a lookup"
            )
        self.draft = draft
        self.inner = inner
        self.num_draft_tokens = num_draft_tokens

    @property
    def label(self) -> str:
        return f"{self.name}, {self.num_draft_tokens} tokens"

    @property
    def max_positions(self) -> int | None:
        return self.draft.max_text

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return chain_budgets(self.num_draft_tokens)

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return frozenset({ProposalKind.DETERMINISTIC if sampling.greedy else ProposalKind.SAMPLED})

    def check(self, target: CausalLM, rows: int, max_length: int) -> None:
        check_draft(self.draft, target, max_length)
        self.inner.check(self.draft, rows, max_length)

    def for_rows(self, rows: int) -> "CascadeDrafter":
        if rows == 1:
            return self
        return CascadeDrafter(self.draft.with_static(None), self.inner.for_rows(rows), self.num_draft_tokens)

    def open_text(
        self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int
    ) -> "CascadeSession":
        state = DraftState(self.draft, target, sampling, 1, max_length, self.inner.max_nodes)
        state.admit(0, start)
        inner = self.inner.open_text(self.draft, sampling, start, max_length)
        return CascadeSession(self, state, inner, sampling, start.source)


class CascadeSession:
    """A session on one text."""

    def __init__(
        self,
        drafter: CascadeDrafter,
        state: DraftState,
        inner: TextSession,
        sampling: SamplingConfig,
        source: GeneratorSource,
    ) -> None:
        self._drafter = drafter
        self._state = state
        self._inner = inner
        self._sampling = sampling
        self._source = source
        self._lease = state.cache.lease
        self._text: list[int] = []
        """Tokens of the last request and, behind them, the chain drafted then."""
        self._asked = 0
        """Number of its tokens that are the request's."""
        self._held = 0
        """Number of its leading tokens whose keys the draft's cache holds."""
        self._inner_shares = 0
        """Number of its leading tokens that are those of the inner drafter's last request."""

    def observe(self, proposal: Proposal, logits: Float[Tensor, "nodes vocab"]) -> None:
        """Do nothing: the text holds everything that the session needs."""

    @torch.inference_mode()
    def propose(self, request: DraftRequest) -> Proposal:
        device = self._drafter.draft.device
        depth = min(request.max_depth, request.max_nodes - 1, self._drafter.num_draft_tokens)
        if depth < 1:
            return Proposal.root_only(request.tokens[-1], device)
        self._state.cache.check(self._lease)
        self._follow(request)
        length, q_rows = len(request.tokens), list[Tensor]()
        while (missing := length + depth - len(self._text)) > 0:
            guess = self._guess(missing - 1)
            logits = self._run(guess.tree)
            verdict, q = self._judge(request.tokens, self._text[length:], guess, logits)
            self._keep(guess.tree, verdict.path)
            self._inner.observe(guess, logits)
            q_rows += q
            if verdict.token == logits.shape[1]:
                break
            self._text.append(verdict.token)
        tree = TokenTree.chain(self._text[length - 1 :], device)
        if self._sampling.greedy:
            return Proposal(tree, ProposalKind.DETERMINISTIC)
        return Proposal(tree, ProposalKind.SAMPLED, torch.cat(q_rows)[: len(tree) - 1])

    def _guess(self, room: int) -> Proposal:
        """Let the inner drafter propose up to ``room`` tokens after the chain so far."""
        if room < 1:
            return Proposal.root_only(self._text[-1], self._drafter.draft.device)
        shared, self._inner_shares = self._inner_shares, len(self._text)
        # Without a hidden state: the draft may not have written the text's last token, and its size may not fit.
        request = DraftRequest(self._text, torch.empty(0), room, self._drafter.inner.max_nodes, shared=shared)
        return self._inner.propose(request)

    def _follow(self, request: DraftRequest) -> None:
        """Replace the drafted tokens that were refused by what became text instead, and drop their keys.

        The text's last token runs again, as the root.
        """
        common = request.common_with(self._text, self._asked)
        self._asked = len(request.tokens)
        self._text[common:] = request.tokens[common:]
        self._held = min(self._held, common, len(self._text) - 1)
        self._inner_shares = min(self._inner_shares, common)
        self._state.cache.truncate(0, self._held)

    def _run(self, tree: TokenTree) -> Float[Tensor, "nodes vocab"]:
        """Run the text's tokens that the cache lacks, then the tree, in one pass; return the logits at its nodes."""
        draft, cache = self._drafter.draft, self._state.cache
        lacking = self._text[self._held : -1]
        # The prompt, or text of steps without a draft, gets its own pass, without a tree's mask.
        if len(lacking) > (_APART if self._held else 0):
            draft.append([self._known(lacking)], cache)
            self._held, lacking = len(self._text) - 1, []
        block = _behind(lacking, tree)
        known = TokenTree.of_list(self._known(block.token_list), block.shape, draft.device)
        return self._state.over_target_vocabulary(draft.verify([known], cache, read=len(tree)).logits[0])

    def _known(self, tokens: Sequence[int]) -> list[int]:
        # A token that only the target knows is read as the draft's last token, as in `DraftState`.
        return [min(token, self._drafter.draft.vocab_size - 1) for token in tokens]

    def _judge(
        self, tokens: Sequence[int], chain: Sequence[int], guess: Proposal, logits: Float[Tensor, "nodes vocab"]
    ) -> tuple[Verdict, list[Float[Tensor, "emitted vocab"]]]:
        """Return the guesses that the draft itself writes, with its own next token, and the q of each of these tokens.

        The next token is ``vocab``, which is no id, if processors forbid every token that the draft knows.
        """
        history = None
        if self._sampling.needs_history:
            whole = _behind([tokens[-1], *chain][:-1], guess.tree)
            history = self._state.rows.history_at(0, tokens, whole, range(len(chain), len(whole)))
        if self._sampling.greedy:
            best: list[int] = adjusted_logits(logits, self._sampling, history).argmax(-1).tolist()
            return Verdict(*guess.tree.descend(best)), []
        q = probabilities(logits, self._sampling, history)
        verdict = sampled_verify(guess, _or_none(q) if self._sampling.processors else q, self._source)
        return verdict, [q[[0, *verdict.path]]]

    def _keep(self, tree: TokenTree, path: Sequence[int]) -> None:
        """Append the path below the root to the text, and keep its keys, from the block that has just run."""
        lacking = len(self._text) - 1 - self._held
        self._state.cache.commit(0, self._held, [*range(lacking), *(lacking + node for node in (0, *path))])
        self._text += [tree.token_list[node] for node in path]
        self._held = len(self._text)


def _or_none(q: Float[Tensor, "nodes vocab"]) -> Float[Tensor, "nodes vocab_and_none"]:
    """Append to q a token that stands for none, with all the mass of the rows in which no token is allowed."""
    massless = q.isnan().any(-1, keepdim=True)
    return torch.cat([q.masked_fill(massless, 0), massless.to(q.dtype)], dim=-1)


def _behind(line: Sequence[int], tree: TokenTree) -> TokenTree:
    """Return the tree with a chain of tokens before its root."""
    parents = (*range(-1, len(line)), *(parent + len(line) for parent in tree.shape.parents[1:]))
    return TokenTree.of_list([*line, *tree.token_list], TreeShape(parents))
