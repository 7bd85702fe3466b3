"""Chains drafted token by token, in all rows of a batch at once."""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from decoding.drafters.text_rows import TextRows
from decoding.rules.drawing import inverse_cdf
from decoding.rules.proposal import Proposal, ProposalKind
from decoding.rules.sampling import HistoryRows, adjusted_logits, best_tokens, probabilities
from decoding.rules.tree import TokenTree, TreeShape

NextLogits = Callable[[Int[Tensor, "rows tokens"]], Float[Tensor, "rows vocab"]]
"""Function from each row's chain so far, the root included, to the logits of the tokens after it."""


class ChainGrowth:
    """Growth of one chain in each row. Each row draws from its own source, and only for tokens that it proposes.

    With ``sampled``, tokens are drawn from q above temperature 0; without, and at temperature 0, they are the best ones
    after penalties and processors. A chain ends after a token whose probability is below ``stop_below``, and where
    processors forbid every token that the draft knows.
    """

    def __init__(self, rows: TextRows, sampled: bool = True, stop_below: float = 0.0) -> None:
        self._rows = rows
        self._sampling = rows.sampling
        self._sampled = sampled and not rows.sampling.greedy
        self._stop_below = stop_below

    def propose(
        self, texts: Sequence[Sequence[int]], depths: Sequence[int], next_logits: NextLogits
    ) -> tuple[list[Proposal], int]:
        """Draft a chain of up to ``depths[row]`` tokens in each row; return them and the number of steps.

        Nothing is read from the device unless a control or a stop needs it.
        """
        roots = torch.tensor([text[-1] for text in texts])
        chains = roots.to(self._rows.device, non_blocking=True)[:, None]
        q_steps: list[Tensor] = []
        step = 0
        while step < max(depths):
            logits = next_logits(chains)
            chosen = self._choose(texts, chains, logits, [depth > step for depth in depths], q_steps)
            if self._sampling.processors and self._sampled:
                ended: list[bool] = (chosen == logits.shape[1]).tolist()
                depths = [min(depth, step) if end else depth for depth, end in zip(depths, ended, strict=True)]
                chosen.clamp_(max=logits.shape[1] - 1)  # a valid id, which is never read
            chains = torch.cat([chains, chosen[:, None]], dim=1)
            step += 1
            if self._stop_below:
                unsure: list[bool] = self._unsure(logits, chosen, q_steps).tolist()
                depths = [min(depth, step) if low else depth for depth, low in zip(depths, unsure, strict=True)]
        trees = [TokenTree(chains[row, : depth + 1], TreeShape.chain(depth)) for row, depth in enumerate(depths)]
        if not self._sampled:
            return [Proposal(tree, ProposalKind.DETERMINISTIC) for tree in trees], step
        q = torch.stack(q_steps, dim=1)
        return [Proposal(tree, ProposalKind.SAMPLED, q[row, : len(tree) - 1]) for row, tree in enumerate(trees)], step

    def _choose(
        self,
        texts: Sequence[Sequence[int]],
        chains: Tensor,
        logits: Tensor,
        drawing: Sequence[bool],
        q_steps: list[Tensor],
    ) -> Tensor:
        """Choose the next token of each chain, (rows,): the best one, or a draw from q, which joins ``q_steps``.

        If processors forbid every token that the draft knows, q is NaN and the draw is ``vocab``, which is no token id.
        """
        history = None
        if self._sampling.needs_history:
            tokens: list[list[int]] = chains.tolist()
            last = [chains.shape[1] - 1]
            history = HistoryRows.cat(
                [
                    self._rows.history_at(row, texts[row], TokenTree.chain(chain), last)
                    for row, chain in enumerate(tokens)
                ]
            )
        if not self._sampled:
            return best_tokens(adjusted_logits(logits, self._sampling, history))
        q = probabilities(logits, self._sampling, history)
        q_steps.append(q)
        # A row that has ended takes nothing from its source: its samples must not depend on its neighbours.
        uniforms = [self._rows.sources[row].uniform() if wanted else 0.5 for row, wanted in enumerate(drawing)]
        return inverse_cdf(q, torch.tensor(uniforms, dtype=torch.float64).to(q.device, non_blocking=True))

    def _unsure(self, logits: Tensor, chosen: Tensor, q_steps: Sequence[Tensor]) -> Tensor:
        q = q_steps[-1] if self._sampled else logits.float().softmax(-1)
        return q.gather(1, chosen[:, None])[:, 0] < self._stop_below
