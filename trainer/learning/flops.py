"""Floating-point operations that a step needs by its model: 2 for each weight and token of a forward pass.

A weight that learns takes 6: forward, and the gradients of its input and of itself; a frozen one through which a
gradient flows takes 4 (PaLM, 2204.02311, appendix B). Attention takes 4 for each pair of positions of a text and number
of a query, full squares as is usual; two windows of each position where layers have one. Padding, embeddings, norms,
softmaxes and anything run again count nothing.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from decoding.model.architecture import layer_types, windows
from trainer.data.batch import Batch

FORWARD, THROUGH, LEARNING = 2, 4, 6
"""Operations for each weight and token: forward alone; with its input's gradient; with its own too."""
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


class Text(NamedTuple):
    """The lengths of a batch's texts in tokens, without padding."""

    lengths: tuple[int, ...]

    @staticmethod
    def of(batch: Batch) -> "Text":
        """Count the tokens of a batch on the host."""
        rows = [documents[documents >= 0].bincount() for documents in batch.documents]
        return Text(tuple(length for row in rows for length in row.tolist()))

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    def pairs(self, window: int | None = None) -> int:
        """Return the pairs of a query and a key, of one text each: all, or with two windows of keys a query."""
        return sum(length * (length if window is None else min(length, 2 * window)) for length in self.lengths)


class Layers(NamedTuple):
    """Weights of a model's layers in products with each token, those of its adapters, and attention for each pair."""

    weights: float
    adapters: float
    attention: Mapping[int | None, float]
    """By the window of the layers; None: they attend to the whole text."""

    @staticmethod
    def of(model: PreTrainedModel) -> "Layers":
        """Count a model's layers, without its lm_head; NaN for a mixture of experts, which uses some of its weights."""
        config, lm_head = model.config.get_text_config(decoder=True), model.get_output_embeddings()
        if any(getattr(config, name, None) for name in _EXPERTS):
            return Layers(math.nan, 0, {})
        named = [(name, module) for name, module in model.named_modules() if module is not lm_head]
        heads = getattr(config, "num_attention_heads", 0)
        width = heads * (getattr(config, "head_dim", None) or config.hidden_size // max(heads, 1))
        by_type = windows(config)
        kinds = layer_types(config) or tuple(by_type) * config.num_hidden_layers
        return Layers(
            weights_of(module for name, module in named if "lora_" not in name),
            weights_of(module for name, module in named if "lora_" in name),
            {window: 4.0 * width * count for window, count in Counter(by_type.get(kind) for kind in kinds).items()},
        )

    def flops(self, text: Text, each: int = FORWARD, adapters: int = FORWARD) -> float:
        """Return the operations on a text at ``each`` for a weight and ``adapters`` for an adapter's."""
        passes = 1 if each == FORWARD else 3
        attended = sum(numbers * text.pairs(window) for window, numbers in self.attention.items())
        return text.tokens * (each * self.weights + adapters * self.adapters) + passes * attended


def weights_of(modules: Iterable[nn.Module]) -> float:
    """Count the weights of linear layers among modules, sharded or whole."""
    count = 0
    for module in modules:
        if isinstance(module, nn.Linear):
            count += module.in_features * module.out_features
        elif isinstance(module, Conv1D):
            count += module.nx * module.nf
    return count
