"""A DSpark draft as a drafter: one small forward pass over masks drafts all tokens of a step (2607.05147)."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.drafters.base import Drafter, DraftRequest, RowsSession, TextRows, TextStart
from decoding.drafters.growth import ConditionalLogits, Growth, StaticTree
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark import DSpark, DSparkDraft, TextKeys
from decoding.policies import Budget
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal, ProposalKind


class DSparkDrafter(Drafter):
    """Drafter of a chain or a tree with a DSpark draft.

    ``tree`` lists the nodes as paths: rank r means the r-th best token (from 0) after the node above. ``tokens`` is the
    length of a chain. Without either, the tree in the draft's config is drafted, or a chain of all K tokens.
    ``sampled``: above temperature 0 each token is drawn from q given the token before it, and siblings are drawn
    without replacement. If it is False, the likeliest tokens are taken, as at temperature 0.
    """

    name = "dspark"
    artefact = "draft"

    def __init__(
        self,
        draft: DSparkDraft,
        tokens: int | None = None,
        tree: Sequence[Sequence[int]] | None = None,
        sampled: bool = True,
    ) -> None:
        config = draft.config
        if tokens is not None and not 1 <= tokens <= config.block_size:
            raise UserError(f"tokens is {tokens}: this draft allows 1 to {config.block_size}")
        if tree is not None and tokens is not None:
            raise UserError("both tree and tokens are set: set only one")
        if tree is None and tokens is None:
            tree = config.tree or None
        shape = StaticTree.chain(tokens or config.block_size) if tree is None else StaticTree(tree)
        if shape.max_depth > config.block_size:
            raise UserError(
                f"the tree is {shape.max_depth} deep, but the draft has {config.block_size} tokens: shorten its paths"
            )
        if shape.ranks > config.outputs:
            raise UserError(
                f"the tree has {shape.ranks} ranks, but the draft writes {config.outputs} tokens: use fewer"
            )
        if config.markov_head_type == "rnn" and not shape.is_chain:
            raise UserError(
                "this draft's bias remembers all tokens of a chain (markov_head_type rnn): set tokens, not a tree"
            )
        self.draft = draft
        self.name = "dspark" if config.markov_rank else "dflash"
        self.growth = Growth(shape, sampled)
        self.budgets = shape.budgets
        self.taps = config.target_layer_ids
        size = f"{shape.max_depth} {'tokens' if sampled else 'likeliest tokens'}"
        if tree is not None:
            size = f"{'' if sampled else 'deterministic '}tree of {self.max_nodes - 1}"
        self.label_with_size = f"{self.name}, {size}"

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return frozenset({self.growth.kind(sampling)})

    @property
    def chains(self) -> tuple[Budget, ...]:
        return self.growth.tree.chains

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "DSparkSession":
        texts = TextRows(sampling, target.vocab_size, target.device)
        return DSparkSession(self, DSpark(self.draft, target), TextKeys(self.draft, rows, max_length), texts)


class DSparkSession(RowsSession):
    """A session of the draft on a batch: one forward pass per step.

    The cache contains keys of the texts only, never of drafted tokens.
    """

    def __init__(self, drafter: DSparkDrafter, draft: DSpark, keys: TextKeys, texts: TextRows) -> None:
        super().__init__(texts)
        self._drafter, self._draft, self._keys, self._texts = drafter, draft, keys, texts
        self._unread: dict[int, list[Tensor]] = {}
        """For each row, the target's states at the tokens that the draft has not read yet."""

    def admit(self, slot: int, start: TextStart) -> None:
        super().admit(slot, start)
        self._keys.clear(slot)
        self._unread[slot] = []

    def move(self, slot: int, to: int) -> None:
        super().move(slot, to)
        self._keys.move(slot, to)
        self._unread[to] = self._unread.pop(slot)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for slot, request in enumerate(requests):
            if request.states is not None:
                self._unread[slot].append(request.states)
        growth, texts = self._drafter.growth, self._texts
        deepest = max(growth.tree.cut(request)[0].max_depth for request in requests)
        if not deepest:
            return [Proposal.root_only(request.tokens[-1], texts.device) for request in requests]
        unread = [self._unread[slot] for slot in range(len(requests))]
        self._keys.append([parts[0] if len(parts) == 1 else torch.cat(parts) for parts in unread])
        self._unread.update({slot: [] for slot in range(len(requests))})
        newest = torch.tensor([request.tokens[-1] for request in requests]).to(texts.device, non_blocking=True)
        hidden = self._keys.run(self._draft.embed(newest))
        base, bias = self._draft.logits(hidden, deepest).transpose(0, 1), self._draft.draft.markov
        block = self._draft.block_bias(hidden, newest)
        nodes = ConditionalLogits(base, bias, self._draft.output_tokens, block)
        return growth.propose(requests, nodes, texts)
