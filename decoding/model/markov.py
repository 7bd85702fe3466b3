"""A low-rank bias on the logits that depends on the previous token (DSpark's Markov head).

Heads and DSpark drafts predict several tokens from one state, without knowing the tokens in between. During drafting
the previous token is known: it is the parent in the tree. With the bias W2 W1[previous token] added to the logits, each
child has a distribution conditional on its parent; this takes one small product per parent. All positions share the
bias.

Drafts of speculators may have a bias that also depends on the state at the position (`GatedBias`), or on this state and
all earlier tokens of the block (`RecurrentBias`).
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from decoding.model.forward import OutputLayer


class MarkovBias(nn.Module):
    """Bias of rank ``rank`` on ``outputs`` logits after one of ``vocab_size`` tokens; zero at the start.

    ``spread`` is the standard deviation of the embedding's initial weights. An optimizer whose steps do not depend on
    the size of gradients, such as AdamW, learns the bias at a speed proportional to ``spread``.
    """

    def __init__(self, vocab_size: int, outputs: int, rank: int, hidden: int = 0, spread: float = 0.02) -> None:
        """``hidden``: width of the states that subclasses read."""
        super().__init__()
        self.embedding = nn.Embedding(vocab_size, rank)
        self.output = OutputLayer(rank, outputs, bias=False)
        nn.init.normal_(self.embedding.weight, std=spread)
        nn.init.zeros_(self.output.weight)

    def forward(self, before: Int[Tensor, "*nodes"]) -> Float[Tensor, "*nodes outputs"]:
        """Return the bias of the logits after these tokens, in the bias's own dtype."""
        bias: Tensor = self.output(self.embedding(before))
        return bias

    def factor(
        self,
        before: Int[Tensor, "*nodes"],
        hidden: Float[Tensor, "*nodes hidden"],
        memory: Float[Tensor, "*nodes rank"],
    ) -> tuple[Float[Tensor, "*nodes rank"], Float[Tensor, "*nodes rank"]]:
        """Return the factor (the vector that `output` reads) after these tokens, and the memory for the next position.

        ``hidden`` is the lm_head's input at the position, and ``memory`` is zero in a block's first slot.
        """
        return self.embedding(before), memory

    def added_to(
        self,
        logits: Float[Tensor, "*nodes outputs"],
        before: Int[Tensor, "*nodes"],
        factor: Float[Tensor, "*nodes rank"] | None = None,
    ) -> Float[Tensor, "*nodes outputs"]:
        """Return the logits with the bias after these tokens, in the logits' dtype and on their device.

        ``factor``: see `factor`; None means the embeddings of the tokens.
        """
        factor = self.embedding(before.to(self.embedding.weight.device)) if factor is None else factor
        bias: Tensor = self.output(factor)
        return logits + bias.to(logits)


class GatedBias(MarkovBias):
    """Bias whose factors are scaled by a gate; the gate reads the position's state and the token's embedding."""

    def __init__(self, vocab_size: int, outputs: int, rank: int, hidden: int) -> None:
        super().__init__(vocab_size, outputs, rank)
        self.gate_proj = nn.Linear(hidden + rank, rank)

    def factor(self, before: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(before)
        return torch.sigmoid(self.gate_proj(torch.cat((hidden.to(embedded), embedded), -1))) * embedded, memory


class RecurrentBias(MarkovBias):
    """Bias computed from a memory of the block's tokens, which a gate keeps or replaces at each position."""

    def __init__(self, vocab_size: int, outputs: int, rank: int, hidden: int) -> None:
        super().__init__(vocab_size, outputs, rank)
        self.joint_proj = nn.Linear(hidden + 2 * rank, 3 * rank)

    def factor(self, before: Tensor, hidden: Tensor, memory: Tensor) -> tuple[Tensor, Tensor]:
        embedded = self.embedding(before)
        keep, fresh, read = self.joint_proj(torch.cat((memory, embedded, hidden.to(embedded)), -1)).chunk(3, -1)
        kept = torch.sigmoid(keep)
        return torch.tanh(read), kept * memory + (1 - kept) * torch.tanh(fresh)


class BlockBias:
    """The factors of a `GatedBias` or a `RecurrentBias` at the nodes of one block per row, depth by depth.

    A row has one memory, so a `RecurrentBias` needs chains.
    """

    def __init__(
        self, bias: MarkovBias, hidden: Float[Tensor, "rows slots hidden"], newest: Int[Tensor, " rows"], first: int
    ) -> None:
        """``newest``: the block's first token. ``first``: the slot of depth 0; slots before it predict nothing."""
        self._bias, self._hidden, self._first = bias, hidden, first
        self._memory = bias.output.weight.new_zeros(len(hidden), bias.output.in_features)
        if first:  # in training the bias ran in all slots
            _, self._memory = bias.factor(newest, hidden[:, 0], self._memory)

    def factor(
        self, depth: int, rows: Int[Tensor, " nodes"], before: Int[Tensor, " nodes"]
    ) -> Float[Tensor, "nodes rank"]:
        """Return `MarkovBias.factor` for nodes at a depth (from 0) of these rows, after the tokens ``before``."""
        rows, before = rows.to(self._hidden.device), before.to(self._hidden.device)
        state = self._hidden[rows, self._first + depth]
        factor, self._memory[rows] = self._bias.factor(before, state, self._memory[rows])
        return factor
