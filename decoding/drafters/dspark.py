"""A DSpark draft as a drafter: one small forward pass over mask tokens drafts all tokens of a step (2607.05147)."""

from collections.abc import Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from decoding.drafters.base import DraftRequest, RowsSession, TextRows, TextStart
from decoding.drafters.growth import ConditionalLogits, GrownDrafter, StaticTree
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_draft import DSparkDraft, PairedDSpark
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal

_TOGETHER = 1024  # up to this many tokens, the states of several texts share one matrix product


class DSparkDrafter(GrownDrafter):
    """Drafter that drafts a chain or a tree with a DSpark draft.

    ``tree`` lists the nodes as paths: rank r means the r-th best token (from 0) after the node above. ``tokens`` is the
    length of a chain. If neither is set, the draft writes the tree in its config, or, if the config has no tree, a
    chain of ``block_size`` tokens. ``sampled``: above temperature 0 each token is drawn from q given the token before
    it, and siblings are drawn without replacement. If ``sampled`` is False, the likeliest tokens are taken, as at
    temperature 0.
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
                f"the tree has depth {shape.max_depth}, but the draft writes at most {config.block_size} tokens: "
                "shorten the paths of the tree"
            )
        if shape.ranks > config.outputs:
            raise UserError(
                f"the tree has {shape.ranks} ranks, but the draft's vocabulary has {config.outputs} tokens: "
                "use fewer ranks"
            )
        if config.markov_head_type == "rnn" and not shape.is_chain:
            raise UserError(
                "this draft's bias remembers all tokens of a chain (markov_head_type rnn): set tokens, not a tree"
            )
        self.draft = draft
        self.name = "dflash" if config.is_dflash else "dspark"
        self._grow(shape, sampled, None if tree is None else "tree")
        self.taps = config.target_layer_ids

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> "DSparkSession":
        texts = TextRows(sampling, target.vocab_size, target.device)
        return DSparkSession(self, PairedDSpark(self.draft, target), TextKeys(self.draft, rows, max_length), texts)


class TextKeys:
    """Keys and values of the texts of a batch, and of the block after each text: (layers, rows, key heads, room, dim).

    Keys of a text come from the target's states at committed tokens, so they are never dropped. The keys of a block are
    always dropped as a whole.
    """

    def __init__(self, draft: DSparkDraft, rows: int, longest: int) -> None:
        """``longest``: the length, in positions, that the longest text will have when it ends."""
        config, weight = draft.config, draft.fc.weight
        room = longest + config.slots
        shape = (config.num_hidden_layers, rows, config.num_key_value_heads, room, config.head_dim)
        self._draft = draft
        self._keys, self._values = (torch.zeros(shape, dtype=weight.dtype, device=weight.device) for _ in range(2))
        self.lengths = [0] * rows

    def clear(self, row: int) -> None:
        """Forget the text in a row."""
        self.lengths[row] = 0

    def move(self, row: int, to: int) -> None:
        """Move the text in a row to row ``to``."""
        length = self.lengths[to] = self.lengths[row]
        for buffer in (self._keys, self._values):
            buffer[:, to, :, :length] = buffer[:, row, :, :length]

    def append(self, states: Sequence[Float[Tensor, "tokens taps"]]) -> None:
        """Add the target's states at the next tokens of the rows 0, 1, …, with one matrix product for all rows.

        Many tokens, as in prompts, are added row by row, to avoid a second copy of their states.
        """
        together = sum(map(len, states)) <= _TOGETHER
        for first in (0,) if together else range(len(states)):
            self._append(first, states if together else states[first : first + 1])

    def _append(self, first: int, states: Sequence[Float[Tensor, "tokens taps"]]) -> None:
        """Add the states at the next tokens to the rows ``first``, ``first + 1``, …."""
        counts = list(map(len, states))
        if not any(counts):
            return
        begins, device = self.lengths[first : first + len(counts)], self._keys.device
        spans = enumerate(zip(begins, counts, strict=True), first)
        index = [(row, begin + i) for row, (begin, count) in spans for i in range(count)]
        rows, positions = torch.tensor(index).to(device, non_blocking=True).T
        read = states[0] if len(states) == 1 else torch.cat(list(states))
        for layer, both in enumerate(self._draft.text_keys(read[None], positions[None])):
            for buffer, fresh in zip((self._keys, self._values), both, strict=True):
                buffer[layer][rows, :, positions] = fresh[0].transpose(0, 1)
        self.lengths[first : first + len(counts)] = [begin + n for begin, n in zip(begins, counts, strict=True)]

    def run(self, embedded: Float[Tensor, "rows slots hidden"]) -> Float[Tensor, "rows slots hidden"]:
        """Run a block after the text of each row of ``embedded``; return the input of the target's lm_head.

        The block is not kept.
        """
        (rows, slots), device = embedded.shape[:2], embedded.device
        begins = self.lengths[:rows]
        keys, mask = max(begins) + slots, None
        starts = torch.tensor(begins).to(device, non_blocking=True)[:, None]
        positions = starts + torch.arange(slots, device=device)
        if len(set(begins)) > 1:
            seen = torch.arange(keys, device=device) < starts + slots
            mask = torch.zeros(seen.shape, dtype=self._keys.dtype, device=device)
            mask = mask.masked_fill_(~seen, torch.finfo(mask.dtype).min)[:, None, None]
        index = torch.arange(rows, device=device)[:, None]

        def held(layer: int, *fresh: Tensor) -> tuple[Tensor, Tensor]:
            for buffer, block in zip((self._keys, self._values), fresh, strict=True):
                buffer[layer][index, :, positions] = block.transpose(1, 2)
            return self._keys[layer, :rows, :, :keys], self._values[layer, :rows, :, :keys]

        hidden: Tensor = self._draft(embedded, positions, held, mask, torch.arange(keys, device=device)[None])
        return hidden


class DSparkSession(RowsSession):
    """A session that drafts for a batch: one forward pass of the draft per step.

    The cache contains keys of the texts only, never of drafted tokens.
    """

    def __init__(self, drafter: DSparkDrafter, draft: PairedDSpark, keys: TextKeys, texts: TextRows) -> None:
        super().__init__(texts)
        self._drafter, self._draft, self._keys, self._texts = drafter, draft, keys, texts
        self._unread: dict[int, list[Tensor]] = {}
        """For each row, the target's states at the tokens that the draft has not read yet."""

    def admit(self, row: int, start: TextStart) -> None:
        super().admit(row, start)
        self._keys.clear(row)
        self._unread[row] = []

    def move(self, row: int, to: int) -> None:
        super().move(row, to)
        self._keys.move(row, to)
        self._unread[to] = self._unread.pop(row)

    @torch.inference_mode()
    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        for row, request in enumerate(requests):
            if request.states is not None:
                self._unread[row].append(request.states)
        growth, texts = self._drafter.growth, self._texts
        deepest = max(growth.tree.cut(request)[0].max_depth for request in requests)
        if not deepest:
            return [Proposal.root_only(request.tokens[-1], texts.device) for request in requests]
        unread = [self._unread[row] for row in range(len(requests))]
        self._keys.append([parts[0] if len(parts) == 1 else torch.cat(parts) for parts in unread])
        self._unread.update({row: [] for row in range(len(requests))})
        newest = torch.tensor([request.tokens[-1] for request in requests]).to(texts.device, non_blocking=True)
        hidden = self._keys.run(self._draft.embed(newest))
        base, bias = self._draft.logits(hidden, deepest).transpose(0, 1), self._draft.draft.markov
        block = self._draft.block_bias(hidden, newest)
        nodes = ConditionalLogits(base, bias, self._draft.output_tokens, block)
        return growth.propose(requests, nodes, texts)
