"""A cascade: a cheaper drafter speculates for the draft model, which saves passes of the draft model.

Staged speculation (Spector and Re 2308.04623; Chen et al. 2312.11462): a lookup proposes a tree to the draft model,
which verifies it in one pass. This repeats after the kept tokens until the chain is complete.

Each token of the chain is drawn from the draft's own q in its context, whether the lookup guessed it or not: the
sampled-verify rule with the draft as target. The chain's distribution and the recorded q are therefore the same as
without the lookup. Each token takes one draw, so with the same seed the chain itself is the same.
"""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.drafters.base import DraftRequest, TextDrafter, TextSession, TextStart, chain_budgets
from decoding.drafters.draft_state import DraftState, check_draft
from decoding.drafters.prompt_lookup import PromptLookupDrafter
from decoding.model.causal_lm import CausalLM
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig, adjusted_logits, probabilities
from decoding.rules.tree import TokenTree, TreeShape, common_length
from decoding.rules.verify import Verdict, sampled_verify


class CascadeDrafter(TextDrafter):
    """Drafter of a chain of ``tokens`` by a model with the target's tokenizer, sped up by ``lookup``.

    Every text has its own draft cache, and the texts of a batch are drafted in turn. The chain ends early if processors
    forbid every token that the draft knows.
    """

    name = "cascade"
    artefact = "draft"

    def __init__(self, draft: CausalLM, lookup: PromptLookupDrafter, tokens: int = 8) -> None:
        if tokens < 1:
            raise ValueError(f"tokens is {tokens}: give at least 1")
        self.draft = draft.with_static(None)  # a static model has one cache
        self.lookup = lookup
        self.tokens = tokens
        self.budgets = chain_budgets(tokens)
        self.max_positions = draft.max_text
        self.label_with_size = f"{self.name}, {tokens} tokens"

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return frozenset({ProposalKind.DETERMINISTIC if sampling.greedy else ProposalKind.SAMPLED})

    def check(self, target: CausalLM, max_length: int) -> None:
        check_draft(self.draft, target, max_length)

    def open_text(
        self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int
    ) -> "CascadeSession":
        state = DraftState(self.draft, target, sampling, 1, max_length, self.lookup.max_nodes)
        state.admit(0, start)
        return CascadeSession(self, state, start)


class CascadeSession(TextSession):
    def __init__(self, drafter: CascadeDrafter, state: DraftState, start: TextStart) -> None:
        self._drafter, self._state, self._start = drafter, state, start
        self._lookup = self._new_lookup()
        self._text: list[int] = []  # tokens of the last request, followed by the chain drafted for it
        self._cached = 0  # number of its leading tokens with keys in the draft's cache

    def _new_lookup(self) -> TextSession:
        sampling, length = self._state.rows.sampling, 0
        return self._drafter.lookup.open_text(self._drafter.draft, sampling, self._start, length)

    @torch.inference_mode()
    def propose(self, request: DraftRequest) -> Proposal:
        device = self._drafter.draft.device
        depth = min(request.max_depth, request.max_nodes - 1, self._drafter.tokens)
        if depth < 1:
            return Proposal.root_only(request.tokens[-1], device)
        length, q_rows = len(request.tokens), list[Tensor]()
        common = common_length(request.tokens, self._text)
        if common < len(self._text):  # rejected tokens; a lookup reads texts that only grow
            self._lookup = self._new_lookup()
        self._text = list(request.tokens)
        self._cached = min(self._cached, common, length - 1)
        self._state.cache.truncate(0, self._cached)
        while (missing := length + depth - len(self._text)) > 0:
            guess = Proposal.root_only(self._text[-1], device)
            if missing > 1:
                most = self._drafter.lookup.max_nodes
                guess = self._lookup.propose(DraftRequest(self._text, torch.empty(0), missing - 1, most))
            logits = self._run(guess.tree)
            verdict, q = self._judge(request.tokens, self._text[length:], guess, logits)
            self._state.cache.commit(0, self._cached, (0, *verdict.path))
            self._text += [guess.tree.token_list[node] for node in verdict.path]
            self._cached = len(self._text)
            q_rows += q
            if verdict.token == logits.shape[1]:
                break
            self._text.append(verdict.token)
        tree = TokenTree.chain(self._text[length - 1 :], device)
        if self._state.rows.sampling.greedy:
            return Proposal(tree, ProposalKind.DETERMINISTIC)
        return Proposal(tree, ProposalKind.SAMPLED, torch.cat(q_rows)[: len(tree) - 1])

    def _run(self, tree: TokenTree) -> Float[Tensor, "nodes vocab"]:
        """Run the text's tokens that the cache lacks, then the tree; return the logits at its nodes."""
        draft, last = self._drafter.draft, self._drafter.draft.vocab_size - 1
        if lacking := self._text[self._cached : -1]:
            # A token unknown to the draft is read as the draft's last token, as in `DraftState`.
            draft.append([[min(token, last) for token in lacking]], self._state.cache)
            self._cached = len(self._text) - 1
        known = TokenTree.of_list([min(token, last) for token in tree.token_list], tree.shape, draft.device)
        return self._state.over_target_vocabulary(draft.verify([known], self._state.cache).logits[0])

    def _judge(
        self, tokens: Sequence[int], chain: Sequence[int], guess: Proposal, logits: Float[Tensor, "nodes vocab"]
    ) -> tuple[Verdict, list[Float[Tensor, "emitted vocab"]]]:
        """Return the guesses that the draft confirms, with its own next token, and the q of each of these tokens.

        The next token is ``vocab``, which is not an id, if processors forbid every token that the draft knows.
        """
        rows = self._state.rows
        history = None
        if rows.sampling.needs_history:
            line = [tokens[-1], *chain][:-1]
            parents = (*range(-1, len(line)), *(parent + len(line) for parent in guess.tree.shape.parents[1:]))
            whole = TokenTree.of_list([*line, *guess.tree.token_list], TreeShape(parents))
            history = rows.history_at(0, tokens, whole, range(len(line), len(whole)))
        if rows.sampling.greedy:
            best: list[int] = adjusted_logits(logits, rows.sampling, history).argmax(-1).tolist()
            return Verdict(*guess.tree.descend(best)), []
        q = probabilities(logits, rows.sampling, history)
        # An extra last token means none: it has all the mass if no token is allowed.
        massless = q.isnan().any(-1, keepdim=True)
        verdict = sampled_verify(guess, torch.cat([q.masked_fill(massless, 0), massless.to(q)], -1), self._start.source)
        return verdict, [q[[0, *verdict.path]]]
