"""Heads as a drafter: they predict a tree of tokens from the hidden state from which the target wrote the root."""

from collections.abc import Sequence

import torch
from torch import Tensor

from decoding.drafters.base import DraftRequest, RowsSession, TextRows
from decoding.drafters.growth import ConditionalLogits, GrownDrafter, StaticTree
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaHeads, StackedHeads
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal


class MedusaDrafter(GrownDrafter):
    """Drafter that drafts the tree in the heads' config, or the tree ``tree``, whose paths are ranks among each head's
    best tokens.

    A node at depth d (from 1) is one of the best tokens of head d-1; with a Markov bias it is one of the best tokens
    after its parent. ``sampled``: above temperature 0 the tree is drawn from the heads' distributions after every
    sampling control, and siblings are drawn without replacement.
    """

    artefact = "heads"

    def __init__(self, heads: MedusaHeads, tree: Sequence[Sequence[int]] | None = None, sampled: bool = True) -> None:
        config = heads.config
        shape = StaticTree(config.tree if tree is None else tree)
        if shape.max_depth > config.num_heads:
            raise UserError(
                f"the tree has depth {shape.max_depth}, but there are {config.num_heads} heads: "
                "shorten the paths of the tree"
            )
        if shape.ranks > config.outputs:
            raise UserError(f"the tree has rank {shape.ranks - 1}: use ranks below {config.outputs}")
        self.heads = heads
        self.name = "medusa" if heads.markov is None else "markov"
        self._grow(shape, sampled, "chain" if shape.is_chain else "tree")
        self.stacked = StackedHeads(heads)
        self.output_tokens = heads.output_tokens

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "MedusaSession":
        self.heads.config.check_fits(target.hidden_size, target.vocab_size)
        return MedusaSession(self, target, TextRows(sampling, target.vocab_size, target.device))


class MedusaSession(RowsSession):
    """A session that drafts with heads.

    The heads have no state; the session keeps only the history and the random source of each text.
    """

    def __init__(self, drafter: MedusaDrafter, target: CausalLM, texts: TextRows) -> None:
        super().__init__(texts)
        self._drafter, self._texts = drafter, texts
        shared = drafter.heads.config.shared_lm_head
        self._lm_head = target.model.get_output_embeddings() if shared else None

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        growth = self._drafter.growth
        deepest = max(growth.tree.cut(request)[0].max_depth for request in requests)
        if not deepest:
            return [Proposal.root_only(request.tokens[-1], self._texts.device) for request in requests]
        hidden = torch.stack([request.hidden for request in requests])
        base: Tensor = self._drafter.stacked(hidden, deepest, self._lm_head)
        markov, written = self._drafter.heads.markov, self._drafter.output_tokens
        nodes = ConditionalLogits(base, markov, written)
        return growth.propose(requests, nodes, self._texts)
