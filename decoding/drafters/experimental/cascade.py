"""A cascade (Spector and Re 2308.04623; Chen et al. 2312.11462): a small draft writes guesses for a larger draft.

The small draft writes a chain, and one pass of the large draft verifies it with a lossless rule. These two steps repeat
after the kept tokens until the large draft's chain is complete; then the target verifies the chain. So the large draft
needs fewer passes than the chain has tokens.

Let q be the large draft's distribution of the next token. Because the rule is lossless, every token of the chain is a
draw from q, whatever the small draft guessed, and the chain's length does not depend on the draws. The target's rule
therefore gets what it would get from the large draft alone: a sampled chain with its q. At temperature 0 the chain is
the one that the large draft writes greedily.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from decoding.drafters.base import Drafter, DraftRequest, RowsSession, TextStart, chain_budgets
from decoding.drafters.draft_model import DraftModelSession, DraftState
from decoding.drafters.growth import Growth, StaticTree
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.rules.decide import decide
from decoding.rules.sampling import HistoryRows, SamplingConfig, adjusted_logits, probabilities
from decoding.rules.tree import Proposal, ProposalKind, TokenTree, common_length, fetch_tokens
from decoding.rules.verify import Verdict

_NO_TEXT = torch.empty(0)


class CascadeDrafter(Drafter):
    """Drafter of a chain of ``tokens`` tokens, written by the model ``draft``.

    The model ``small`` makes ``draft`` faster: it guesses up to ``small_tokens`` tokens at a time, which ``draft``
    verifies. Both models use the target's tokenizer. Above temperature 0 the chain is drawn from the distribution of
    ``draft``, unless ``sampled`` is False; the chain ends early if processors forbid every token that ``draft`` knows.
    """

    name = "cascade"
    artefact = "draft"

    def __init__(
        self, draft: CausalLM, small: CausalLM, tokens: int = 8, small_tokens: int = 3, sampled: bool = True
    ) -> None:
        if tokens < 1 or small_tokens < 1:
            raise UserError(f"tokens is {tokens} and small_tokens is {small_tokens}: set both to at least 1")
        if draft.model is small.model:
            raise UserError("both drafts of the cascade are the same model: pass a smaller model as small")
        self.draft = draft
        self.small = small
        self.tokens = tokens
        self.growth = Growth(StaticTree.chain(small_tokens), sampled)
        self.budgets = chain_budgets(tokens)
        limits = [model.max_positions for model in (draft, small) if model.max_positions is not None]
        self.max_positions = min(limits, default=None)
        self.label_with_size = f"{self.name}, {tokens} {'tokens' if sampled else 'likeliest tokens'}"
        self.rough_cost = 0.05 * tokens

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return frozenset({self.growth.kind(sampling)})

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "CascadeSession":
        # The large draft runs the tokens of the text that are not in its cache, and then the small draft's chain.
        large, small = (
            DraftState(draft, target, sampling, rows, max_length, 2 * self.max_nodes + self.growth.tree.max_depth)
            for draft in (self.draft, self.small)
        )
        return CascadeSession(self, large, small)


class _Judged(NamedTuple):
    """The large draft's verdict on a guess of the small draft. ``q`` has a row for each token of the verdict; it is
    None if nothing is drawn.
    """

    verdict: Verdict
    q: Float[Tensor, "written vocab"] | None


class CascadeSession(RowsSession):
    """A session of both drafts on a batch.

    The states cover the texts of the requests. Each text is followed by the chain that was drafted for it last.
    """

    def __init__(self, drafter: CascadeDrafter, large: DraftState, small: DraftState) -> None:
        super().__init__(large)
        self._drafter, self._large, self._small = drafter, large, small
        self._guesser = DraftModelSession(drafter.growth, small)
        self._starts: dict[int, TextStart] = {}
        self._texts: dict[int, list[int]] = {}

    def admit(self, row: int, start: TextStart) -> None:
        super().admit(row, start)
        self._guesser.admit(row, start)
        self._starts[row], self._texts[row] = start, []

    def move(self, row: int, to: int) -> None:
        super().move(row, to)
        self._guesser.move(row, to)
        self._starts[to], self._texts[to] = self._starts.pop(row), self._texts.pop(row)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        depths = [min(request.max_depth, request.max_nodes - 1, self._drafter.tokens) for request in requests]
        if any(depth > 0 for depth in depths):
            for row, request in enumerate(requests):
                # Drop those tokens of the last chain that the target rejected from the caches of both drafts.
                if (common := common_length(self._texts[row], request.tokens)) < len(self._texts[row]):
                    self._rewind(row, common)
                    for state in (self._large, self._small):
                        state.rows.admit(row, self._starts[row])  # because a history can only grow
                self._texts[row] = list(request.tokens)
            return self._draft(requests, depths)
        return [Proposal.root_only(request.tokens[-1], self._drafter.draft.device) for request in requests]

    def _rewind(self, row: int, length: int) -> None:
        for state in (self._large, self._small):
            state.rewind(row, length)

    def _draft(self, requests: Sequence[DraftRequest], depths: Sequence[int]) -> list[Proposal]:
        """Complete all chains; in each round every row whose chain is not complete gets at least one token."""
        texts = [self._texts[row] for row in range(len(requests))]
        missing = list(depths)
        q = [list[Tensor]() for _ in requests]
        while rows := [row for row, count in enumerate(missing) if count > 0]:
            for row, text in enumerate(texts):  # a finished row runs its last token again
                self._rewind(row, len(text) - 1)
            guesses = self._guesser.propose(
                [
                    DraftRequest(text, _NO_TEXT, max(count - 1, 0), self._drafter.max_nodes)
                    for text, count in zip(texts, missing, strict=True)
                ]
            )
            logits = self._large.verify(texts, [guess.tree for guess in guesses])
            judged = self._judge([texts[row] for row in rows], rows, [guesses[row] for row in rows], logits)
            for row, ((path, token), of_row) in zip(rows, judged, strict=True):
                chain = [*guesses[row].tree.token_list[1 : 1 + len(path)], token]
                ends = of_row is not None and token == of_row.shape[1]
                texts[row] += chain[:-1] if ends else chain
                missing[row] = 0 if ends else missing[row] - len(chain)
                q[row] += [] if of_row is None else [of_row]
        return [self._proposal(texts[row][len(request.tokens) - 1 :], q[row]) for row, request in enumerate(requests)]

    def _proposal(self, chain: Sequence[int], q: Sequence[Tensor]) -> Proposal:
        """Return a row's chain, the root first, with the q of each of its tokens."""
        tree = TokenTree.chain(chain, self._drafter.draft.device)
        if len(tree) == 1 or not q:
            return Proposal(tree, ProposalKind.DETERMINISTIC)
        return Proposal(tree, ProposalKind.SAMPLED, torch.cat(list(q))[: len(tree) - 1])

    def _judge(
        self,
        texts: Sequence[Sequence[int]],
        rows: Sequence[int],
        guesses: Sequence[Proposal],
        logits: Sequence[Float[Tensor, "nodes vocab"]],
    ) -> list[_Judged]:
        """Return the large draft's verdict on each guess; the verdict's token is ``vocab`` if q has no mass at all."""
        states, sampling = self._large.rows, self._large.rows.sampling
        history = None
        if sampling.needs_history:
            fetch_tokens([guess.tree for guess in guesses])
            history = HistoryRows.cat(
                [
                    states.history_at(row, text, guess.tree, range(len(guess.tree)))
                    for row, text, guess in zip(rows, texts, guesses, strict=True)
                ]
            )
        flat, sizes = torch.cat([logits[row] for row in rows]), [len(guess.tree) for guess in guesses]
        sources = [states.sources[row] for row in rows]
        if not self._drafter.growth.kind(sampling).has_q:
            scores = pad_sequence(adjusted_logits(flat, sampling, history).split(sizes), batch_first=True)
            return [
                _Judged(verdict, None) for verdict in decide(guesses, scores, SamplingConfig(), None, None, sources)
            ]
        q = probabilities(flat, sampling, history)
        # An extra last token, which means "none", has all the mass if no token is allowed.
        # The logarithms are logits of the same q.
        massless = q.isnan().any(-1, keepdim=True)
        scores = torch.cat([q.masked_fill(massless, 0), massless.to(q)], -1).log()
        padded = [guess if guess.q is None else replace(guess, q=F.pad(guess.q, (0, 1))) for guess in guesses]
        split = pad_sequence(scores.split(sizes), batch_first=True)
        verdicts = decide(padded, split, SamplingConfig(1.0), None, None, sources)
        return [
            _Judged(verdict, of_row[: 1 + len(verdict.path)])
            for verdict, of_row in zip(verdicts, q.split(sizes), strict=True)
        ]
