"""Any transformers causal language model behind one call: tokens or trees in, hidden states and logits out."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel

from decoding.model.architecture import (
    key_devices,
    layer_types,
    max_positions,
    refuse_changing_rope,
    refuse_several_devices,
)
from decoding.model.attention import copy_free_attention, leave_out_cudnn
from decoding.model.cache import PreallocatedCache
from decoding.model.lm_head import capture_lm_head_input, last_position
from decoding.model.static import StaticSteps, nodes_at
from decoding.rules.tree import TokenTree, TreeShape

_MOST_STORED = 256
_LARGEST_STORED = 256
"""Limits on stored tree masks: their number, and the nodes of the largest. A block of appended text has more nodes, and
its shape seldom occurs again."""

_PREFILL_TOKENS = 1 << 14
"""Greatest number of tokens, with padding, in one prefill pass: it fills a GPU; 32 texts of 8k would take 40 GB."""


class ModelOutput(NamedTuple):
    """Outputs of a pass. ``hidden``: the input of the lm_head. ``logits``: its output."""

    hidden: Float[Tensor, "*positions hidden"]
    logits: Float[Tensor, "*positions vocab"]


def _refuse_unfit(model: PreTrainedModel) -> None:
    """Refuse a model that cannot run a tree's branches in one pass, or cannot drop rejected tokens."""
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
    accepted = inspect.signature(type(model).forward).parameters
    alibi = kind in ("bloom", "mpt") or getattr(text_config, "alibi", False)
    if alibi or "position_ids" not in accepted:
        raise ValueError(
            f"{kind} places tokens by their order{' (ALiBi)' * alibi}, so a tree's branches cannot stand side by side: "
            "give a model that takes position ids"
        )
    if "past_key_values" not in accepted:
        raise ValueError(f"{kind} keeps no key-value cache: give a model that does")
    # is_decoder: old config files hold it for any model; the GPT-NeoX family declares it, but does not read it.
    declared = hasattr(type(text_config), "is_decoder") and not kind.startswith("gpt_neox")
    if declared and not text_config.is_decoder:
        raise ValueError(f"{kind} reads texts in both directions: give a causal LM, or set is_decoder in its config")
    attention = text_config._attn_implementation
    if attention not in (None, "eager", "sdpa"):
        raise ValueError(
            f"the model attends by {attention!r}, which does not take a tree's mask: "
            "load it with attn_implementation='sdpa' or 'eager'"
        )
    if model.get_output_embeddings() is None:
        raise ValueError(f"{type(model).__name__} has no lm_head: load the model with AutoModelForCausalLM")


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Switch a model that is being trained to eval mode inside this context; each module has its own mode afterwards.

    The model's own flag tells: a model in eval mode is left alone, which costs a pass nothing.
    """
    if not model.training:
        yield
        return
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


class CausalLM:
    """A causal language model, target or draft, ready to decode: rows of different lengths, a cache, tree attention."""

    def __init__(
        self,
        model: PreTrainedModel,
        output_tokens: Int[Tensor, " outputs"] | None = None,
        static: str | None = None,
    ) -> None:
        """Leaves the model's mode alone: a model in training mode is switched for the length of each pass.

        ``output_tokens``: the token id of each output of a draft with a trimmed lm_head (None: all tokens).

        ``static`` runs steps in fixed shapes: ``graphs`` as CUDA graphs, ``compile`` through `torch.compile` as well,
        ``eager`` with neither, for tests. Such a model decodes one batch at a time.
        """
        _refuse_unfit(model)
        leave_out_cudnn()  # here, because every model passes here; it also holds for the peers
        self.model = model
        self.output_tokens = None if output_tokens is None else output_tokens.to(model.device)
        text_config = model.config.get_text_config(decoder=True)
        self.num_layers: int = text_config.num_hidden_layers
        # The input size of the lm_head; some models (the smallest OPT) are wider inside.
        self.hidden_size: int = getattr(model.get_output_embeddings(), "in_features", text_config.hidden_size)
        self.vocab_size: int = text_config.vocab_size
        self.max_positions = max_positions(text_config)
        self._layer_types = layer_types(text_config)
        window = getattr(text_config, "sliding_window", None)
        self._window: int | None = window if getattr(text_config, "use_sliding_window", True) else None
        self._tree_masks: dict[TreeShape, Tensor] = {}
        self._static: StaticSteps | None = None
        self._static_cache: PreallocatedCache | None = None
        if static is not None:
            refuse_changing_rope(text_config)
            refuse_several_devices(model)
            self._static = StaticSteps(model, self._forward, self.windows(), self.max_positions, self.dtype, static)

    @property
    def is_static(self) -> bool:
        """True if its steps have fixed shapes; all texts that it decodes at a time then share one cache."""
        return self._static is not None

    @property
    def device(self) -> torch.device:
        """Device of the input tokens; a model spread over several devices brings its outputs there."""
        device: torch.device = self.model.device
        return device

    @cached_property
    def _key_devices(self) -> tuple[torch.device, ...] | None:
        return key_devices(self.model)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    def new_cache(self, capacity: int, rows: int = 1) -> PreallocatedCache:
        """Make a cache for ``rows`` texts of about ``capacity`` positions; a static model restarts its only cache."""
        if self._static is None:
            return PreallocatedCache(self.num_layers, capacity, rows, self._key_devices)
        capacity = self._static.capacity(capacity)
        if self._static_cache is None or self._static_cache.rows < rows:
            self._static_cache = PreallocatedCache(self.num_layers, capacity, rows)
        self._static_cache.restart(capacity)
        return self._static_cache

    @torch.inference_mode()
    def prefill(
        self, texts: Sequence[Sequence[int]], cache: PreallocatedCache, slots: Sequence[int] | None = None
    ) -> ModelOutput:
        """Run whole texts into empty ``slots`` of the cache (None: the first ones).

        Returns hidden state and logits of each text's last token, (rows, hidden) and (rows, vocab). Shorter texts are
        padded on the right, where none of their tokens attends. Texts run in groups of up to `_PREFILL_TOKENS` tokens,
        which bounds the memory of a pass.
        """
        slots = range(len(texts)) if slots is None else slots
        assert not any(cache.lengths[slot] for slot in slots), "these rows are not empty"
        rows = max(1, _PREFILL_TOKENS // max(len(text) for text in texts))
        outputs = [
            self._prefill_group(texts[begin : begin + rows], cache, slots[begin : begin + rows])
            for begin in range(0, len(texts), rows)
        ]
        if len(outputs) == 1:
            return outputs[0]
        return ModelOutput(*(torch.cat(parts) for parts in zip(*outputs, strict=True)))

    def _prefill_group(
        self, texts: Sequence[Sequence[int]], cache: PreallocatedCache, slots: Sequence[int]
    ) -> ModelOutput:
        lengths = [len(text) for text in texts]
        longest = max(lengths)
        tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=self.device)
        cache.begin(slots, longest, self.device)
        positions = torch.arange(longest, device=self.device)[None]
        output = self._run(self.model, tokens, positions, cache, None, self._last_of(lengths))
        cache.end(lengths)
        return ModelOutput(output.hidden[:, 0], output.logits[:, 0])

    @torch.inference_mode()
    def append(self, blocks: Sequence[Sequence[int]], cache: PreallocatedCache) -> ModelOutput:
        """Run a chain of tokens after each row.

        Returns hidden state and logits of each row's last token, (rows, hidden) and (rows, vocab).
        """
        if not any(cache.lengths[: len(blocks)]):
            return self.prefill(blocks, cache)
        trees = [TokenTree.chain(block) for block in blocks]
        if self._static is not None and self._static.fits(trees):
            output = ModelOutput(*self._static.run(trees, cache, last_only=True))
        else:
            output = self._run_trees(trees, cache, [0] * len(trees), self._last_of([len(block) for block in blocks]))
        return ModelOutput(output.hidden[:, 0], output.logits[:, 0])

    @torch.inference_mode()
    def step(self, tokens: Int[Tensor, " rows"], cache: PreallocatedCache) -> ModelOutput:
        """Run one token after each row, without waiting for tokens that the device has yet to compute.

        Returns (rows, hidden) and (rows, vocab).
        """
        if self._static is not None:
            output = ModelOutput(*self._static.step(tokens, cache))
        else:
            trees = [TokenTree(tokens[row : row + 1], TreeShape.chain(0)) for row in range(len(tokens))]
            output = self._run_trees(trees, cache, [0] * len(trees), None)
        return ModelOutput(output.hidden[:, 0], output.logits[:, 0])

    @torch.inference_mode()
    def verify(
        self, trees: Sequence[TokenTree], cache: PreallocatedCache, first: Sequence[int] | None = None
    ) -> ModelOutput:
        """Run a tree after each row, each node attending to its row's prefix and its own path.

        The nodes of row i before ``first[i]`` are in the cache already (a tree drafted level by level); the others run.
        Returns (rows, nodes, hidden) and (rows, nodes, vocab); rows with fewer nodes than others are padded.
        """
        if self._static is not None and self._static.fits(trees):
            return ModelOutput(*self._static.run(trees, cache, first))
        return self._run_trees(trees, cache, first or [0] * len(trees), None)

    def _last_of(self, lengths: Sequence[int]) -> Callable[[Tensor], Tensor]:
        """Return a function that selects each row's last own position, (rows, 1, hidden)."""
        if len(set(lengths)) == 1:
            return last_position
        index = torch.tensor(lengths, device=self.device) - 1
        rows = torch.arange(len(lengths), device=self.device)

        def select(hidden: Tensor) -> Tensor:
            return hidden[rows.to(hidden.device), index.to(hidden.device)][:, None]

        return select

    def _run_trees(
        self,
        trees: Sequence[TokenTree],
        cache: PreallocatedCache,
        first: Sequence[int],
        select: Callable[[Tensor], Tensor] | None,
    ) -> ModelOutput:
        counts = [len(tree) - skipped for tree, skipped in zip(trees, first, strict=True)]
        size = max(counts)
        tokens = self._stack([tree.tokens[skipped:] for tree, skipped in zip(trees, first, strict=True)], size)
        depths = self._stack(
            [tree.shape.depth_tensor[skipped:] for tree, skipped in zip(trees, first, strict=True)], size
        )
        starts = [cache.lengths[row] - skipped for row, skipped in enumerate(first)]
        positions = depths + torch.tensor(starts).to(self.device, non_blocking=True)[:, None]
        if self.max_positions is not None:  # a row that is done may be padded past the end of the position table
            positions.clamp_(max=self.max_positions - 1)
        uniform = len(set(starts)) == 1
        if uniform and size == 1 and not any(first) and not any(self.windows().values()):
            masks = None  # one token per row: `transformers` builds the masks of its layers
        else:
            masks = self._masks([tree.shape for tree in trees], starts, first, size)
        cache.begin(range(len(trees)), size, self.device)
        output = self._run(self.model, tokens, positions, cache, masks, select)
        cache.end(counts)
        return output

    def _stack(self, parts: Sequence[Tensor], size: int) -> Tensor:
        """Stack the parts to (rows, size) on the model's device, shorter ones padded with zeros."""
        parts = [part.to(self.device, non_blocking=True) for part in parts]
        if all(len(part) == size for part in parts):
            return torch.stack(list(parts))
        return nn.utils.rnn.pad_sequence(list(parts), batch_first=True)

    def _run(
        self,
        model: Callable[..., Any],
        tokens: Tensor,
        positions: Tensor,
        cache: PreallocatedCache,
        mask: Any,
        select: Callable[[Tensor], Tensor] | None,
    ) -> ModelOutput:
        lm_head_input = capture_lm_head_input(self.model, select)
        with in_eval_mode(self.model), lm_head_input as captured, copy_free_attention(self.model):
            output = model(
                input_ids=tokens, position_ids=positions, attention_mask=mask, past_key_values=cache, use_cache=True
            )
        hidden = captured[0] if select is None else select(captured[0])
        return ModelOutput(hidden.to(tokens.device), output.logits.to(tokens.device))

    def _forward(
        self,
        model: Callable[..., Any],
        tokens: Tensor,
        positions: Tensor,
        cache: PreallocatedCache,
        mask: Any,
        last: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        """Run a step for `decoding.model.static`; ``model`` may be compiled, ``last`` selects a node of each row."""
        select = None if last is None else partial(nodes_at, last)
        output = self._run(model, tokens, positions, cache, mask, select)
        return output.hidden, output.logits

    def windows(self) -> dict[str, int | None]:
        """Return the sliding window (None: full attention) of each layer type that takes a mask."""
        if "sliding_attention" in self._layer_types:
            return {"full_attention": None, "sliding_attention": self._window}
        return {"full_attention": None if self._layer_types else self._window}

    def _masks(self, shapes: Sequence[TreeShape], starts: Sequence[int], first: Sequence[int], size: int) -> Any:
        """Make additive masks (rows, 1, queries, keys): boolean 4-D masks are silently wrong under eager attention.

        Returns one mask for all layers, or a dict by layer type for models that mix full and sliding attention.
        """
        masks = {kind: self._mask(shapes, starts, first, size, window) for kind, window in self.windows().items()}
        return masks if len(masks) > 1 else masks["full_attention"]

    def _mask(
        self, shapes: Sequence[TreeShape], starts: Sequence[int], first: Sequence[int], size: int, window: int | None
    ) -> Tensor:
        if len(set(starts)) == len(set(first)) == len(set(shapes)) == 1:
            return self._shared_mask(shapes[0], starts[0], first[0], window)
        return self._ragged_mask(shapes, starts, first, size, window)

    def _shared_mask(self, shape: TreeShape, start: int, first: int, window: int | None) -> Tensor:
        """Make one mask for all rows, (1, 1, queries, keys): they have the same length and the same tree."""
        nodes = len(shape)
        mask = torch.zeros(nodes - first, start + nodes, dtype=self.dtype, device=self.device)
        mask[:, start:] = self._tree_mask(shape)[first:]
        if window is not None and start + shape.max_depth >= window:
            depths = shape.depth_tensor.to(self.device)
            key_positions = torch.cat([torch.arange(start, device=self.device), depths + start])
            too_far = (depths[first:, None] + start) - key_positions >= window
            mask.masked_fill_(too_far, torch.finfo(self.dtype).min)
        return mask[None, None]

    def _ragged_mask(
        self, shapes: Sequence[TreeShape], starts: Sequence[int], first: Sequence[int], size: int, window: int | None
    ) -> Tensor:
        """Make a mask for each row. A row's keys are its prefix, its tree's nodes, then padding that is masked out."""
        device, blocked = self.device, torch.finfo(self.dtype).min
        nodes = max(skipped + size for skipped in first)
        tree_masks = torch.full((len(shapes), size, nodes), blocked, dtype=self.dtype, device=device)
        depths = torch.zeros(len(shapes), nodes, dtype=torch.long, device=device)
        for row, (shape, skipped) in enumerate(zip(shapes, first, strict=True)):
            tree_masks[row, : len(shape) - skipped, : len(shape)] = self._tree_mask(shape)[skipped:]
            depths[row, : len(shape)] = shape.depth_tensor.to(device)
        begin = torch.tensor(starts).to(device, non_blocking=True)[:, None]
        width = max(start + skipped for start, skipped in zip(starts, first, strict=True)) + size
        keys = torch.arange(width, device=device)[None]
        node = (keys - begin).clamp(0, nodes - 1)
        behind_prefix = (keys >= begin)[:, None]
        mask = tree_masks.gather(2, node[:, None].expand(-1, size, -1))
        mask = torch.where(
            behind_prefix & (keys < begin + nodes)[:, None], mask, torch.where(behind_prefix, blocked, 0.0)
        )
        if window is not None:
            key_positions = torch.where(keys < begin, keys, begin + depths.gather(1, node))
            queries = torch.stack([depths[row, skipped : skipped + size] for row, skipped in enumerate(first)]) + begin
            mask = mask.masked_fill(queries[:, :, None] - key_positions[:, None] >= window, blocked)
        return mask.to(self.dtype)[:, None]

    def _tree_mask(self, shape: TreeShape) -> Tensor:
        """Return the additive mask among a tree's nodes, (nodes, nodes); it is stored for small trees."""
        if shape in self._tree_masks:
            return self._tree_masks[shape]
        mask = torch.full((len(shape),) * 2, torch.finfo(self.dtype).min, dtype=self.dtype, device=self.device)
        if shape.is_chain:
            mask.triu_(1)
        else:
            mask.masked_fill_(shape.ancestor_mask.to(self.device), 0)
        if len(shape) <= _LARGEST_STORED:
            if len(self._tree_masks) >= _MOST_STORED:  # dynamic trees: keep the memory bounded
                self._tree_masks.clear()
            self._tree_masks[shape] = mask
        return mask
