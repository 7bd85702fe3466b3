"""A low-rank bias on logits that depends on the previous token (DSpark's Markov head).

Heads and DSpark drafts predict several tokens from one state, without knowing the tokens in between. During drafting
the previous token is known: it is the parent in the tree. Adding the bias W2 W1[previous token] to the logits gives
each child a distribution conditional on its parent, for one small product per distinct parent. All positions share the
bias.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from decoding.model.lm_head import OutputLayer

LARGEST_TABLE = 64 << 20
"""Largest table of biases that decoding keeps, in bytes."""


class MarkovBias(nn.Module):
    """Bias of rank ``rank`` on ``outputs`` logits after one of ``tokens`` tokens; zero at the start.

    ``spread`` is the standard deviation of the embedding's initial weights. An optimizer whose steps do not depend on
    the gradients' size, such as AdamW, learns the bias in proportion to it.
    """

    def __init__(self, tokens: int, outputs: int, rank: int, spread: float = 0.02) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, rank)
        self.output = OutputLayer(rank, outputs, bias=False)
        nn.init.normal_(self.embedding.weight, std=spread)
        nn.init.zeros_(self.output.weight)

    def forward(self, before: Int[Tensor, "*nodes"]) -> Float[Tensor, "*nodes outputs"]:
        """Return the bias of the logits after these tokens, in the bias's own dtype."""
        bias: Tensor = self.output(self.embedding(before))
        return bias

    def added_to(
        self, logits: Float[Tensor, "*nodes outputs"], before: Int[Tensor, "*nodes"]
    ) -> Float[Tensor, "*nodes outputs"]:
        """Return the logits with the bias after these tokens, in the logits' dtype and on their device."""
        bias: Tensor = self(before.to(self.embedding.weight.device))
        return logits + bias.to(logits)


class DecodingBias:
    """A `MarkovBias` for decoding: a table of the biases after every token if it is small, else the product.

    With 4,096 tokens a look-up takes a twentieth of the product's time. Later changes of the weights do not change the
    table.
    """

    def __init__(self, bias: MarkovBias) -> None:
        self._bias = bias
        self._tokens, outputs = bias.embedding.num_embeddings, bias.output.out_features
        self._table: Tensor | None = None
        if self._tokens * outputs * bias.output.weight.element_size() <= LARGEST_TABLE:
            with torch.no_grad():
                self._table = bias(torch.arange(self._tokens, device=bias.output.weight.device))

    def added_to(
        self, logits: Float[Tensor, "*nodes outputs"], before: Int[Tensor, "*nodes"]
    ) -> Float[Tensor, "*nodes outputs"]:
        """Return the logits with the bias after these tokens, like `MarkovBias.added_to`.

        A token that the draft does not know is replaced by the draft's last token: q is worse, but any q is lossless.
        """
        known = before.clamp(max=self._tokens - 1)
        if self._table is None:
            return self._bias.added_to(logits, known)
        return logits + self._table[known.to(self._table.device)].to(logits)
