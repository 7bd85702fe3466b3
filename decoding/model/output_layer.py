"""The linear layer to the vocabulary of whatever is trained on a target."""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F


class OutputLayer(nn.Linear):
    """Linear layer from hidden states to the vocabulary."""

    def forward(self, hidden: Tensor, read: Callable[[Tensor, Tensor], Any] = F.linear) -> Any:
        """Return ``read(hidden, weight)``: by default the logits.

        A loss that needs the weight is given as ``read``, because sharded training gathers the weight for this call
        only.
        """
        return read(hidden, self.weight)
