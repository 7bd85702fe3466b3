"""Estimates of the bytes that pass through a step of training, by rules of thumb.

A trained transformer layer keeps about 10 hidden and 4 inner numbers of each position for its backward pass; a frozen
one is at work on 4 and 3, and keeps nothing. An adapted linear layer keeps what it reads twice in fp32, with a mask
for dropout. Logits of heads and drafts exist a chunk at a time, and so do those that they are compared with.
"""

from torch import nn

from decoding.model.causal_lm import CausalLM


def frozen_bytes(model: CausalLM, trained: nn.Module) -> int:
    """Return the bytes of a model's weights without those that ``trained`` trains, such as adapters."""
    learning = {id(p) for p in trained.parameters() if p.requires_grad}
    return sum(p.numel() * p.itemsize for p in model.model.parameters() if id(p) not in learning)


def frozen_forward_bytes(model: CausalLM, positions: int) -> int:
    """Return the bytes at work in one layer of a frozen model's forward pass over ``positions`` positions."""
    return positions * (4 * model.hidden_size + 3 * inner_size(model)) * model.dtype.itemsize


def layer_bytes(model: CausalLM, itemsize: int, adapted: bool) -> int:
    """Return the bytes that one trained layer keeps of a position; ``adapted``: its linear layers have adapters."""
    hidden, inner = model.hidden_size, inner_size(model)
    return (10 * hidden + 4 * inner) * itemsize + (9 * (6 * hidden + inner) if adapted else 0)


def inner_size(model: CausalLM) -> int:
    """Return the inner width of a model's feed-forward layers."""
    config = model.model.config.get_text_config(decoder=True)
    inner: int = getattr(config, "intermediate_size", None) or 4 * model.hidden_size
    return inner
