"""Prompt lookup: the text itself is the draft. What followed the same few tokens before is proposed again.

The longest suffix of the text, of at most ``max_ngram`` tokens, that occurs earlier is looked up, and its most recent
earlier occurrence continued (`transformers`, with ``prompt_lookup_num_tokens``, continues the first one).
"""

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from decoding.drafters.base import DraftRequest, TextDrafter, TextStart, chain_budgets
from decoding.policy import Budget
from decoding.proposal import Proposal, ProposalKind
from decoding.sampling import SamplingConfig
from decoding.target import CausalLM
from decoding.tree import TokenTree


class PromptLookupDrafter(TextDrafter):
    """Drafts a chain of ``num_draft_tokens`` from the prompt and the output so far."""

    name = "prompt lookup"

    def __init__(self, num_draft_tokens: int = 10, max_ngram: int = 3) -> None:
        if num_draft_tokens < 1 or max_ngram < 1:
            raise ValueError(f"num_draft_tokens ({num_draft_tokens}) and max_ngram ({max_ngram}) are at least 1")
        self.num_draft_tokens = num_draft_tokens
        self.max_ngram = max_ngram

    @property
    def budgets(self) -> tuple[Budget, ...]:
        return chain_budgets(self.num_draft_tokens)

    def open_text(
        self, target: CausalLM, sampling: SamplingConfig, start: TextStart, max_length: int
    ) -> "PromptLookupSession":
        return PromptLookupSession(self, target)


class PromptLookupSession:
    """Keeps, for every n-gram, where its last occurrence ended: each token is indexed once."""

    def __init__(self, drafter: PromptLookupDrafter, target: CausalLM) -> None:
        self._drafter = drafter
        self._device = target.device
        self._end_of: dict[tuple[int, ...], int] = {}
        self._indexed = 0

    def observe(self, proposal: Proposal, logits: Float[Tensor, "nodes vocab"]) -> None:
        """The text says all it needs to know."""

    def propose(self, request: DraftRequest) -> Proposal:
        tokens = request.tokens
        # The suffix itself is left out of the index until there is a token behind it.
        self._index(tokens, up_to=len(tokens) - 1)
        depth = min(request.max_depth, request.max_nodes - 1, self._drafter.num_draft_tokens)
        for size in range(min(self._drafter.max_ngram, len(tokens)), 0, -1):
            end = self._end_of.get(tuple(tokens[len(tokens) - size :]))
            if end is not None:
                continuation = list(tokens[end : end + depth])
                return Proposal(TokenTree.chain([tokens[-1], *continuation], self._device), ProposalKind.DETERMINISTIC)
        return Proposal.root_only(tokens[-1], self._device)

    def _index(self, tokens: Sequence[int], up_to: int) -> None:
        for end in range(self._indexed + 1, up_to + 1):
            for size in range(1, min(self._drafter.max_ngram, end) + 1):
                self._end_of[tuple(tokens[end - size : end])] = end
        self._indexed = max(self._indexed, up_to)
