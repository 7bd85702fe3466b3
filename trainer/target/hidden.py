"""Where the heads' training gets the target's hidden states: from the target itself, or from features on disk."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel

from decoding.model.causal_lm import CausalLM, capture_lm_head_input, last_position
from trainer.data.batch import Batch

if TYPE_CHECKING:
    from trainer.target.features import FeatureStore

LogitTransform = Callable[[Tensor], Tensor]


class TopLogits(NamedTuple):
    """The target's best logits at each position, as it gives them, and the logarithm of Σ exp over all its logits."""

    tokens: Int[Tensor, "batch positions k"]
    logits: Float[Tensor, "batch positions k"]
    log_total: Float[Tensor, "batch positions"]


class HiddenStates(Protocol):
    """What a frozen target gives to heads that are trained on it."""

    transform: LogitTransform | None
    """From the lm_head's products to the target's logits, where a family does anything to them."""

    @property
    def lm_head(self) -> Float[Tensor, "vocab hidden"]:
        """The weight of the target's output layer."""

    def hidden(self, batch: Batch) -> Float[Tensor, "batch positions hidden"]:
        """What the lm_head reads."""

    def embedded(self, tokens: Int[Tensor, "batch positions"]) -> Float[Tensor, "batch positions hidden"]:
        """The target's own embeddings of tokens."""

    def top_k(self, batch: Batch) -> TopLogits | None:
        """The target's best logits at (batch, positions, k), where they are on disk."""


class OnlineTarget:
    """The target itself, run without gradients on every batch."""

    def __init__(self, target: CausalLM) -> None:
        check_logits(target.model)
        self._model = target.model.requires_grad_(False)
        self.transform = logit_transform(target.model.config.get_text_config(decoder=True))

    @property
    def lm_head(self) -> Float[Tensor, "vocab hidden"]:
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight

    @torch.no_grad()
    def hidden(self, batch: Batch) -> Float[Tensor, "batch positions hidden"]:
        with capture_lm_head_input(self._model, select=last_position) as captured:
            self._model(**batch.model_inputs(), use_cache=False)
        return captured[0].to(batch.tokens.device)  # a target spread over devices ends on another

    @torch.no_grad()
    def embedded(self, tokens: Int[Tensor, "batch positions"]) -> Float[Tensor, "batch positions hidden"]:
        embeddings: Tensor = self._model.get_input_embeddings()(tokens)
        return embeddings.to(tokens.device)

    def top_k(self, batch: Batch) -> TopLogits | None:
        return None


class StoredFeatures:
    """Hidden states written to disk before; the target need not be loaded."""

    def __init__(self, store: "FeatureStore", config: PreTrainedConfig, device: torch.device) -> None:
        """``config`` is the target's."""
        self._store = store
        self._device = device
        self.transform = logit_transform(config.get_text_config(decoder=True))

    @cached_property
    def lm_head(self) -> Float[Tensor, "vocab hidden"]:
        return self._store.lm_head.to(self._device)

    @cached_property
    def _embedding(self) -> Float[Tensor, "vocab hidden"]:
        return self._store.embedding.to(self._device)

    def hidden(self, batch: Batch) -> Float[Tensor, "batch positions hidden"]:
        return self._store.hidden(batch).to(self._device)

    def embedded(self, tokens: Int[Tensor, "batch positions"]) -> Float[Tensor, "batch positions hidden"]:
        return torch.nn.functional.embedding(tokens, self._embedding)

    def top_k(self, batch: Batch) -> TopLogits | None:
        found = self._store.top_k(batch)
        return None if found is None else TopLogits(*(tensor.to(self._device) for tensor in found))


@contextmanager
def read_at_lm_head(model: nn.Module, read: Callable[[Tensor, Tensor], None]) -> Iterator[None]:
    """Hand what the lm_head reads, and its weight, to ``read`` from within its forward.

    Only there is the weight whole when it is sharded. The layer itself writes the last position's logits alone.
    """
    layer: nn.Linear = model.get_output_embeddings()  # type: ignore[operator]  # nn.Module's getattr

    def forward(hidden: Tensor) -> Tensor:
        read(hidden, layer.weight)
        return F.linear(last_position(hidden), layer.weight)

    with replaced_forward(layer, forward):
        yield


@contextmanager
def replaced_forward(layer: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Let a layer do something else when it is called, inside the hooks that make its weight whole."""
    before = vars(layer).get("forward")  # launchers may have put one of their own there
    layer.forward = forward
    try:
        yield
    finally:
        if before is None:
            del layer.forward
        else:
            layer.forward = before


def logit_scale(config: PreTrainedConfig) -> float:
    """What a family multiplies its lm_head's products by: Granite divides them, Cohere has a factor."""
    factor, divisor = getattr(config, "logit_scale", None), getattr(config, "logits_scaling", None)
    return float(factor or 1.0) / float(divisor or 1.0)


def logit_transform(config: PreTrainedConfig) -> LogitTransform | None:
    """From the lm_head's products to the logits: `logit_scale`, and Gemma-2's soft cap."""
    scale, cap = logit_scale(config), getattr(config, "final_logit_softcapping", None)
    if cap:
        return lambda logits: torch.tanh(logits * scale / cap) * cap
    return None if scale == 1.0 else lambda logits: logits * scale


@torch.no_grad()
def check_logits(model: PreTrainedModel, role: str = "target") -> None:
    """Refuse a model whose logits are anything else than `logit_transform` of its lm_head's products.

    Losses are formed from these products: its own distribution would not be what is learnt, or learns.
    """
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        raise ValueError(f"the {role}'s lm_head has a bias, which losses here have no place for: give another {role}")
    tokens = torch.tensor([[0, 1]], device=model.device)
    with capture_lm_head_input(model) as captured:
        logits = model(input_ids=tokens, use_cache=False).logits
    weight = model.get_output_embeddings().weight
    products = weight @ captured[0][0].to(weight.device).mT
    transform = logit_transform(model.config.get_text_config(decoder=True))
    expected = (products.mT if transform is None else transform(products.mT)).to(logits.device)
    if not torch.allclose(logits[0].float(), expected.float(), rtol=0.05, atol=0.05 * float(expected.abs().max())):
        raise ValueError(
            f"the {role} ({model.config.model_type}) does more to its lm_head's products than this trainer knows of: "
            f"give another {role}"
        )
