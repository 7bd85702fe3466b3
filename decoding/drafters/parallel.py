"""A parallel draft as a drafter: one forward drafts all tokens of a step (PARD, 2504.18583; DSpark's Markov head)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from decoding.drafters.base import Drafter, DraftRequest, TextStart, chain_budgets
from decoding.drafters.chains import ChainGrowth
from decoding.drafters.draft_state import DraftState
from decoding.model.causal_lm import CausalLM
from decoding.model.parallel import ParallelDraft
from decoding.policies import Budget
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig


class ParallelDrafter(Drafter):
    """Drafter of a chain of ``tokens`` (None: all K) by a parallel draft with the target's tokenizer.

    A smaller budget is a shorter chain, for which the draft reads fewer masks. Above temperature 0 each token is drawn
    from q given the token before it, so that q is exact; with ``sampled`` False it is the likeliest, as at
    temperature 0. A draft ends where processors forbid every token that the model knows.
    """

    name = "parallel draft"
    artefact = "draft"

    def __init__(self, draft: ParallelDraft, tokens: int | None = None, sampled: bool = True) -> None:
        if draft.model.is_static:
            raise ValueError(
                "the parallel draft has static shapes, in which mask tokens would stay in the cache: leave static out"
            )
        if tokens is not None and not 1 <= tokens <= draft.tokens:
            raise ValueError(f"tokens is {tokens}, but the parallel draft has 1 to {draft.tokens}: give one of these")
        self.draft = draft
        self.tokens = draft.tokens if tokens is None else tokens
        self.sampled = sampled

    @property
    def label(self) -> str:
        return f"{self.name}, {self.tokens} tokens"

    @property
    def max_positions(self) -> int | None:
        return self.draft.model.max_positions

    @property
    def reads_states(self) -> bool:
        return self.draft.reads_target

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return chain_budgets(self.tokens)

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        drawn = self.sampled and not sampling.greedy
        return frozenset({ProposalKind.SAMPLED if drawn else ProposalKind.DETERMINISTIC})

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "ParallelSession":
        self.draft.check_fits(target)
        state = DraftState(self.draft.model, target, sampling, rows, max_length, self.max_depth)
        return ParallelSession(self, state, ChainGrowth(state, sampling, self.sampled))


class ParallelSession:
    """A session of the draft on a batch: one forward a step. Its cache holds the texts alone, and never a draft."""

    def __init__(self, drafter: ParallelDrafter, state: DraftState, chains: ChainGrowth) -> None:
        self._drafter = drafter
        self._parts = drafter.draft.parts
        self._state = state
        self._chains = chains
        self._unread: dict[int, list[Tensor]] = {}
        """The target's states of each row's tokens that the draft has yet to run."""

    def admit(self, slot: int, start: TextStart) -> None:
        self._state.admit(slot, start)
        self._unread[slot] = []

    def move(self, slot: int, to: int) -> None:
        self._state.move(slot, to)
        self._unread[to] = self._unread.pop(slot)

    def observe(self, proposals: Sequence[Proposal], logits: Sequence[Tensor]) -> None:
        """Do nothing: the texts and the requests' states hold everything that the session needs."""

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for slot, request in enumerate(requests):
            if self._drafter.reads_states and request.states is not None:
                self._unread[slot].append(request.states)
        depths = [max(0, min(self._drafter.tokens, request.max_depth, request.max_nodes - 1)) for request in requests]
        if not any(depths):
            return [Proposal.root_only(request.tokens[-1], self._state.draft.device) for request in requests]
        texts = [request.tokens for request in requests]
        masks = [self._parts.config.mask_token] * (max(depths) - 1)
        base = self._state.look_ahead(texts, masks, self._added(len(texts)))[..., : self._parts.config.outputs]
        proposals, _ = self._chains.propose(texts, depths, lambda depth, last: self._after(base[:, depth], last))
        return proposals

    def _added(self, rows: int) -> list[Float[Tensor, "tokens hidden"]] | None:
        """Return what is added to the embeddings of each row's new tokens; None if the draft does not read the target.

        All rows' states go through the reader at once.
        """
        if not self._drafter.reads_states:
            return None
        unread = [torch.cat(self._unread[slot]) for slot in range(rows)]
        self._unread.update({slot: [] for slot in range(rows)})
        return list(self._parts.read(torch.cat(unread)).split([len(states) for states in unread]))

    def _after(
        self, base: Float[Tensor, "nodes outputs"], before: Int[Tensor, " nodes"]
    ) -> Float[Tensor, "nodes vocab"]:
        """Return the logits of the tokens after ``before``, over the target's vocabulary, from those without bias."""
        if self._parts.markov is not None:
            known = before.to(base.device, non_blocking=True).clamp(max=self._parts.config.vocab_size - 1)
            base = base + self._parts.markov(known)
        return self._state.over_target_vocabulary(base)
