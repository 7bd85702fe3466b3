"""A low-rank bias on logits by the token before: what makes distributions that were predicted at once conditional.

Heads and parallel drafts predict several tokens from one state, each as if the tokens between were unknown. Drafting
knows them: the token before is the parent in the tree. The bias W2 W1[token before] is added to the logits, so that
each child has a distribution given its parent, at the price of one small product per distinct parent (DSpark's Markov
head). It is shared by all positions ahead.
"""

from jaxtyping import Float, Int
from torch import Tensor, nn

from decoding.model.output_layer import OutputLayer

_SPREAD = 0.02
"""Standard deviation of the embedding's initial weights, as in most language models."""


class MarkovBias(nn.Module):
    """Bias of ``outputs`` logits by the token before, one of ``tokens``, of rank ``rank``; zero at the start."""

    def __init__(self, tokens: int, outputs: int, rank: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(tokens, rank)
        self.output = OutputLayer(rank, outputs, bias=False)
        nn.init.normal_(self.embedding.weight, std=_SPREAD)
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
