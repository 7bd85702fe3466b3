"""Any transformers causal language model behind one call: tokens or a tree in, hidden states and logits out."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.cache import PreallocatedCache
from decoding.tree import TokenTree


class ModelOutput(NamedTuple):
    """``hidden``: what the lm_head read, (positions, hidden_size). ``logits``: what it wrote, (positions, vocab)."""

    hidden: Float[Tensor, "positions hidden"]
    logits: Float[Tensor, "positions vocab"]


@contextmanager
def capture_lm_head_input(model: nn.Module, keep_last: bool = False) -> Iterator[list[Tensor]]:
    """Collect what the lm_head reads while the model runs inside this context, whatever the architecture.

    With ``keep_last`` the lm_head itself is given the last position only, so that training on hidden states does not
    pay for logits nobody reads; the captured tensor is whole: (batch, positions, hidden).
    """
    captured: list[Tensor] = []

    def hook(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        captured.append(args[0])
        return (args[0][:, -1:], *args[1:]) if keep_last else None

    handle = model.get_output_embeddings().register_forward_pre_hook(hook)  # type: ignore[operator]  # nn.Module's getattr
    try:
        yield captured
    finally:
        handle.remove()


def _refuse_unfit(model: PreTrainedModel) -> None:
    """Refuse a model whose branches could not stand side by side in one pass, or could not be taken back."""
    config = model.config
    kind = config.model_type
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{kind} is an encoder-decoder model: give a decoder-only causal LM")
    if getattr(model, "_is_stateful", False):
        raise ValueError(
            f"{kind} keeps a recurrent state, which cannot be rolled back after a rejected draft: "
            "give an attention-only model"
        )
    text_config = config.get_text_config(decoder=True)
    layer_types = {*(getattr(text_config, "layer_types", None) or ()), *getattr(text_config, "attention_layers", ())}
    if other := sorted(layer_types - {"full_attention", "sliding_attention", "global"}):
        raise ValueError(
            f"{kind} has {' and '.join(other)} layers, which do not take a tree's mask: "
            "give a model with full or sliding attention only"
        )
    if kind in ("bloom", "mpt") or getattr(text_config, "alibi", False):
        raise ValueError(
            f"{kind} places tokens by their order (ALiBi), so a tree's branches cannot stand side by side: "
            "give a model that takes position ids"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no lm_head: load the model with AutoModelForCausalLM")


class CausalLM:
    """A causal language model ready to decode with: batch 1, its own cache type, tree attention.

    Serves for the target and for a draft model alike.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        _refuse_unfit(model)
        self.model = model.eval()
        text_config = model.config.get_text_config(decoder=True)
        self.num_layers: int = text_config.num_hidden_layers
        self.hidden_size: int = text_config.hidden_size
        self.vocab_size: int = text_config.vocab_size
        self.max_positions: int | None = getattr(text_config, "max_position_embeddings", None)
        self._layer_types: tuple[str, ...] = tuple(getattr(text_config, "layer_types", None) or ())
        window = getattr(text_config, "sliding_window", None)
        self._window: int | None = window if getattr(text_config, "use_sliding_window", True) else None
        self._tree_masks: dict[Any, Tensor] = {}

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    def new_cache(self, capacity: int) -> PreallocatedCache:
        return PreallocatedCache(self.num_layers, capacity)

    @torch.inference_mode()
    def append(self, tokens: Int[Tensor, " positions"], cache: PreallocatedCache) -> ModelOutput:
        """Run ``tokens`` behind what the cache holds, as one causal line; hidden state and logits of the last only."""
        start = cache.length
        positions = torch.arange(start, start + len(tokens), device=self.device)
        mask = None
        if start and len(tokens) > 1:
            mask = self._mask(TokenTree.chain(tokens.tolist()), start)
        return self._run(tokens, positions, cache, mask, last_only=True)

    @torch.inference_mode()
    def verify(self, tree: TokenTree, cache: PreallocatedCache, first: int = 0) -> ModelOutput:
        """Run a tree behind what the cache holds, each node attending to the prefix and its own path.

        The nodes before ``first`` are in the cache already (a tree drafted level by level); only the others run.
        """
        start = cache.length - first
        depths = tree.shape.depth_tensor[first:].to(self.device)
        mask = self._mask(tree, start, first) if len(tree) > 1 else None
        return self._run(tree.tokens[first:], depths + start, cache, mask, last_only=False)

    def _run(
        self, tokens: Tensor, positions: Tensor, cache: PreallocatedCache, mask: Any, last_only: bool
    ) -> ModelOutput:
        with capture_lm_head_input(self.model) as captured:
            output = self.model(
                input_ids=tokens.to(self.device)[None],
                position_ids=positions[None],
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1 if last_only else 0,
            )
        return ModelOutput(captured[0][0], output.logits[0])

    def _mask(self, tree: TokenTree, start: int, first: int = 0) -> Any:
        """Additive masks (1, 1, queries, start + nodes); boolean 4-D masks are silently wrong under eager attention.

        One for all layers, or a dict by layer type for models that mix full and sliding attention.
        """
        if "sliding_attention" in self._layer_types:
            return {
                "full_attention": self._additive_mask(tree, start, first, None),
                "sliding_attention": self._additive_mask(tree, start, first, self._window),
            }
        return self._additive_mask(tree, start, first, None if self._layer_types else self._window)

    def _additive_mask(self, tree: TokenTree, start: int, first: int, window: int | None) -> Tensor:
        nodes = len(tree)
        mask = torch.zeros(nodes - first, start + nodes, dtype=self.dtype, device=self.device)
        mask[:, start:] = self._tree_mask(tree)[first:]
        if window is not None and start + tree.shape.max_depth >= window:
            depths = tree.shape.depth_tensor.to(self.device)
            key_positions = torch.cat([torch.arange(start, device=self.device), depths + start])
            too_far = (depths[first:, None] + start) - key_positions >= window
            mask.masked_fill_(too_far, torch.finfo(self.dtype).min)
        return mask[None, None]

    def _tree_mask(self, tree: TokenTree) -> Tensor:
        key = tree.shape.parents
        if key not in self._tree_masks:
            if len(self._tree_masks) > 256:  # dynamic trees: keep the memory bounded
                self._tree_masks.clear()
            hidden = ~tree.shape.ancestor_mask.to(self.device)
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            self._tree_masks[key] = mask.masked_fill_(hidden, torch.finfo(self.dtype).min)
        return self._tree_masks[key]
