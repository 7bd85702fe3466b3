"""Sequential heads as logits of a node: each head reads all tokens before its own (Hydra, 2402.05109)."""

from dataclasses import dataclass

from jaxtyping import Float, Int
from torch import Tensor, nn

from decoding.model.heads import MedusaHead, MedusaHeads


class SequentialHeads:
    """Sequential heads with their target: its embeddings, by which they read tokens, and the lm_head they may share."""

    def __init__(self, heads: MedusaHeads, target: nn.Module) -> None:
        embeddings = heads.embeddings_of(target)
        assert embeddings is not None, "these heads read no tokens"
        self._embeddings = embeddings
        self._heads: list[MedusaHead] = list(heads.heads)  # type: ignore[arg-type]  # ModuleList's items
        self._like = next(heads.parameters())
        self._lm_head: nn.Module = target.get_output_embeddings()  # type: ignore[operator]  # nn.Module's getattr

    def at(self, hidden: Float[Tensor, "rows hidden"]) -> "SequentialLogits":
        """Return the logits of one step, from the hidden states that the rows' roots were written from."""
        return SequentialLogits(self, hidden)

    def logits(
        self, hidden: Float[Tensor, "nodes hidden"], paths: Int[Tensor, "nodes tokens"]
    ) -> Float[Tensor, "nodes vocab"]:
        """Return the logits of the token after each path of tokens (root first).

        ``hidden``: the state from which each path's root was written. The logits are on the device of the head's
        output layer.
        """
        head = self._heads[paths.shape[1] - 1]
        logits: Tensor = head(hidden.to(self._like), self._lm_head, self._embeddings(paths).to(self._like))
        return logits


@dataclass(frozen=True)
class SequentialLogits:
    """Logits of sequential heads for one step; one pass of one head serves a whole depth."""

    heads: SequentialHeads
    hidden: Float[Tensor, "rows hidden"]

    def logits(self, rows: Int[Tensor, " nodes"], paths: Int[Tensor, "nodes tokens"]) -> Float[Tensor, "nodes vocab"]:
        """Return the logits after each path, as `decoding.drafters.growth.PathLogits` promises."""
        return self.heads.logits(self.hidden[rows], paths)
