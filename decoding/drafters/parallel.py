"""A parallel draft as a drafter: one forward drafts all tokens of a step (PARD, 2504.18583; DSpark's Markov head)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.drafters.base import Drafter, DraftRequest, TextStart
from decoding.drafters.draft_state import DraftState, StateSession
from decoding.drafters.growth import ConditionalLogits, Growth, StaticTree
from decoding.model.causal_lm import CausalLM
from decoding.model.markov import DecodingBias
from decoding.model.parallel import ParallelDraft
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import SamplingConfig


class ParallelDrafter(Drafter):
    """Drafter of a chain or a tree by a parallel draft with the target's tokenizer.

    ``tree``: paths of ranks among the best tokens after each node. ``tokens``: the length of a chain. With neither it
    drafts the tree in the draft's config, or a chain of all K tokens if that has none. A smaller budget takes fewer
    masks if it is less deep.

    ``sampled``: above temperature 0 the tokens are drawn, each from q given the token before it, the children of a node
    without replacement; False takes the likeliest, as at temperature 0.
    """

    name = "parallel draft"
    artefact = "draft"

    def __init__(
        self,
        draft: ParallelDraft,
        tokens: int | None = None,
        tree: Sequence[Sequence[int]] | None = None,
        sampled: bool = True,
    ) -> None:
        if tokens is not None and not 1 <= tokens <= draft.tokens:
            raise ValueError(f"tokens is {tokens}, but the parallel draft has 1 to {draft.tokens}: give one of these")
        if tree is not None and tokens is not None:
            raise ValueError("tree and tokens are both given: a tree of fixed shape has its own size")
        if tree is None and tokens is None:
            tree = draft.parts.config.tree or None
        shape = StaticTree.chain(tokens or draft.tokens) if tree is None else StaticTree(tree)
        if shape.max_depth > draft.tokens:
            raise ValueError(
                f"the tree is {shape.max_depth} deep but the parallel draft has {draft.tokens} tokens: "
                "shorten its paths"
            )
        outputs = draft.parts.config.outputs
        if shape.ranks > outputs:
            raise ValueError(f"the tree asks for rank {shape.ranks - 1} but the parallel draft writes {outputs} tokens")
        self.draft = draft
        self.bias = None if draft.parts.markov is None else DecodingBias(draft.parts.markov)
        self.growth = Growth(shape, sampled)
        self.budgets = shape.budgets
        self.max_positions = draft.model.max_text
        self.reads_states = draft.reads_target
        size = f"{shape.max_depth} {'tokens' if sampled else 'likeliest tokens'}"
        if tree is not None:
            size = f"{'' if sampled else 'deterministic '}tree of {self.max_nodes - 1}"
        self.label_with_size = f"{self.name}, {size}"

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return frozenset({self.growth.kind(sampling)})

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "ParallelSession":
        self.draft.check_fits(target)
        state = DraftState(self.draft.model, target, sampling, rows, max_length, self.max_depth)
        return ParallelSession(self, state)


class ParallelSession(StateSession):
    """A session of the draft on a batch: one forward a step. Its cache holds the texts alone, and never a draft."""

    def __init__(self, drafter: ParallelDrafter, state: DraftState) -> None:
        super().__init__(state)
        self._drafter = drafter
        self._unread: dict[int, list[Tensor]] = {}
        """The target's states of each row's tokens that the draft has yet to run."""

    def admit(self, slot: int, start: TextStart) -> None:
        super().admit(slot, start)
        self._unread[slot] = []

    def move(self, slot: int, to: int) -> None:
        super().move(slot, to)
        self._unread[to] = self._unread.pop(slot)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for slot, request in enumerate(requests):
            if self._drafter.reads_states and request.states is not None:
                self._unread[slot].append(request.states)
        growth, state = self._drafter.growth, self._state
        deepest = max(growth.tree.cut(request)[0].max_depth for request in requests)
        if not deepest:
            return [Proposal.root_only(request.tokens[-1], state.draft.device) for request in requests]
        config = self._drafter.draft.parts.config
        masks = [config.mask_token] * (deepest - 1)
        logits = state.look_ahead([request.tokens for request in requests], masks, self._added(len(requests)))
        base = logits[..., : config.outputs].transpose(0, 1)
        nodes = ConditionalLogits(base, self._drafter.bias, state.over_target_vocabulary)
        return growth.propose(requests, nodes, state.rows)

    def _added(self, rows: int) -> list[Float[Tensor, "tokens hidden"]] | None:
        """Return the additions to the embeddings of each row's new tokens; None if the draft does not read the target.

        All rows' states go through the reader at once.
        """
        if not self._drafter.reads_states:
            return None
        unread = [torch.cat(self._unread[slot]) for slot in range(rows)]
        self._unread.update({slot: [] for slot in range(rows)})
        return list(self._drafter.draft.parts.read(torch.cat(unread)).split([len(states) for states in unread]))
