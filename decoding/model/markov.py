"""A low-rank bias on logits that depends on the previous token (DSpark's Markov head).

Heads and DSpark drafts predict several tokens from one state, without knowing the tokens in between. During drafting
the previous token is known: it is the parent in the tree. Adding the bias W2 W1[previous token] to the logits gives
each child a distribution conditional on its parent, for one small product per parent. All positions share the bias.
"""

from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from decoding.model.forward import OutputLayer


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
        self,
        logits: Float[Tensor, "*nodes outputs"],
        before: Int[Tensor, "*nodes"],
        outputs: Int[Tensor, "*nodes outputs"] | None = None,
    ) -> Float[Tensor, "*nodes outputs"]:
        """Return the logits with the bias after these tokens, in the logits' dtype and on their device.

        ``outputs``: the output of each logit; None if the logits are of all outputs.
        """
        before = before.to(self.embedding.weight.device)
        if outputs is not None and outputs.numel() < self.output.out_features:
            rows = F.embedding(outputs.to(before.device), self.output.weight)
            bias: Tensor = (rows @ self.embedding(before)[..., None])[..., 0]
        else:  # the nodes' own rows of the weight would be larger than the weight
            bias = self(before)
            bias = bias if outputs is None else bias.gather(-1, outputs.to(bias.device))
        return logits + bias.to(logits)
