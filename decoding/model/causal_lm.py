"""One interface to any causal LM of transformers: it runs tokens or trees and returns hidden states and logits."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedModel

from decoding.errors import UserError
from decoding.model.architecture import (
    key_devices,
    max_positions,
    static_of,
    why_no_chains,
    why_no_trees,
    why_unfit,
    windows,
)
from decoding.model.cache import PreallocatedCache, rounded_up
from decoding.model.dynamic import DynamicSteps, TreeMasks, last_of
from decoding.model.forward import ModelOutput, leave_out_cudnn, run_model
from decoding.model.invariant import BatchInvariant
from decoding.model.sequential import SequentialSteps
from decoding.model.static import StaticSteps
from decoding.model.turns import CacheHolder, CacheTurns, lock_of
from decoding.rules.tree import TokenTree

_PREFILL_TOKENS = 1 << 14
"""Largest number of tokens, including padding, in one prefill pass. This number of tokens keeps a GPU fully busy; 32
texts of 8k tokens in one pass would take 40 GB.
"""


class CausalLM:
    """A causal LM, target or draft, ready to decode: with rows of different lengths, a cache and tree attention."""

    def __init__(
        self,
        model: PreTrainedModel,
        output_tokens: Int[Tensor, " outputs"] | None = None,
        static: str | None = None,
        batch_invariant: bool = False,
    ) -> None:
        """Wrap a model. A model in training mode is switched to eval mode only during each pass.

        ``output_tokens``: for a draft with a trimmed lm_head, the token id of each output (None: all tokens).

        With ``static``, steps have fixed shapes. The mode ``graphs`` runs them as CUDA graphs, ``auto`` does so until a
        graph cannot be recorded, and ``eager`` runs them without graphs, for tests. Such a model decodes one batch at a
        time.

        With ``batch_invariant`` the outputs at a token do not depend on the other tokens of its pass, in any dtype. So
        greedy texts equal the texts of plain decoding, and a text is the same alone and in a batch (see
        `BatchInvariant`). Raises UserError if such a model cannot run trees.
        """
        if reason := why_unfit(model):
            raise UserError(reason)
        # Every model is wrapped, so cuDNN is always left out, even when transformers decodes in this process.
        leave_out_cudnn()
        self.model = model
        self.lock = lock_of(model)
        """Lock that is held during a decoding step; all wrappers of the model share it."""
        self.output_tokens = None if output_tokens is None else output_tokens.to(model.device)
        text_config = model.config.get_text_config(decoder=True)
        self.num_layers: int = text_config.num_hidden_layers
        # The input size of the lm_head: inner layers of some models (the smallest OPT) are wider.
        self.hidden_size: int = getattr(model.get_output_embeddings(), "in_features", text_config.hidden_size)
        self.vocab_size: int = text_config.vocab_size
        self.max_positions = max_positions(text_config)
        self._masks = TreeMasks(model, windows(text_config))
        self._dynamic = DynamicSteps(model, self._masks, self.max_positions)
        self.no_trees = why_no_trees(model)
        """The reason why the model runs only chains; None if it runs trees."""
        if batch_invariant and self.no_trees:
            raise UserError(f"{self.no_trees}, so its passes cannot be batch-invariant: leave batch_invariant out")
        self.batch_invariant = batch_invariant
        self._numerics = BatchInvariant if batch_invariant else nullcontext
        """Context manager around every pass after a prefill."""
        self._sequential = SequentialSteps(model) if self.no_trees else None
        self._static: StaticSteps | None = None
        self._static_cache: PreallocatedCache | None = None
        self.turns = CacheTurns()
        self.static = static
        """The mode in which steps have fixed shapes; None for dynamic shapes."""
        if static is not None:
            self._static = StaticSteps(model, self._masks, self.max_positions, static, self._dynamic)

    @property
    def is_static(self) -> bool:
        """True if steps have fixed shapes, or had fixed shapes until a graph could not be recorded; the model then has
        a single cache.
        """
        return self._static is not None

    @property
    def shapes(self) -> str:
        """How steps run now, for reports: ``graphs``, ``eager`` (fixed shapes without graphs) or ``off`` (dynamic
        shapes).
        """
        if self._static is None or self._static.gave_way:
            return "off"
        return "graphs" if self._static.captures else "eager"

    def with_static(self, static: str | None) -> "CausalLM":
        """Return a model with this ``static`` that shares the weights; if nothing changes, return this object."""
        if static == self.static:
            return self
        return CausalLM(self.model, self.output_tokens, static, self.batch_invariant)

    def at_its_fastest(self) -> "CausalLM":
        """Return the model in the mode that ``auto`` chooses for it; dropping the result frees its graphs and cache."""
        return self.with_static(static_of("auto", self.model))

    @property
    def device(self) -> torch.device:
        """Device of the input tokens; a model that is spread over several devices also returns its outputs there."""
        device: torch.device = self.model.device
        return device

    def check_drafts(self, drafter: str, has_chains: bool) -> None:
        """Raise UserError if a drafter cannot run on this target; ``has_chains``: the drafter can draft chains."""
        kind = self.model.config.model_type
        if (reason := why_no_chains(self.model)) is not None:
            raise UserError(
                f"{reason}, so it cannot verify drafts: decode and measure the {kind} model without a drafter"
            )
        if self.no_trees is not None and not has_chains:
            raise UserError(
                f"{self.no_trees}, but {drafter} drafts trees: for {kind} use heads, a draft, dspark as a chain, "
                "or lookup with one branch"
            )

    @torch.inference_mode()
    def state_bytes(self) -> int:
        """Return the bytes of one text's recurrent states (0 if it has none); drafting a chain needs twice as many."""
        return self._sequential.state_bytes() if self._sequential is not None else 0

    @cached_property
    def _key_devices(self) -> tuple[torch.device, ...] | None:
        return key_devices(self.model)

    @property
    def dtype(self) -> torch.dtype:
        dtype: torch.dtype = self.model.dtype
        return dtype

    def new_cache(self, capacity: int, rows: int = 1, generation: CacheHolder | None = None) -> PreallocatedCache:
        """Make a cache for ``rows`` texts of about ``capacity`` positions.

        A static model has only one cache: the call waits until other threads have released it, and then empties it for
        ``generation``.
        """
        if self._sequential is not None:
            return self._sequential.new_cache(rows)
        if self._static is None:
            return PreallocatedCache(self.num_layers, capacity, rows, self._key_devices)
        self.turns.take(generation)
        capacity, rows = self._static.capacity(capacity), rounded_up(rows)
        with self.lock:
            held = self._static_cache
            if held is None or not held.fits(capacity, rows):
                if held is not None:
                    held.take()  # a generation on the old buffers ends
                self._static.drop_graphs()  # frees the old buffers before the new ones are allocated
                held = self._static_cache = PreallocatedCache(self.num_layers, capacity, rows)
            held.restart(capacity, rows)
            return held

    @torch.inference_mode()
    def prefill(
        self,
        texts: Sequence[Sequence[int]],
        cache: PreallocatedCache,
        rows: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> ModelOutput:
        """Run whole texts into empty ``rows`` of the cache.

        Returns hidden state and logits of each text's last token, (rows, hidden) and (rows, vocab). Shorter texts are
        padded on the right, and no token attends to the padding. To limit memory, texts run in groups of up to
        `_PREFILL_TOKENS` tokens. If ``rows`` is None, the first rows are used. ``taps``: also return the states of all
        positions after these layers (from 0). The states take 8 KiB per token and layer for an 8B model in bf16.
        """
        rows = range(len(texts)) if rows is None else rows
        assert not any(cache.lengths[row] for row in rows), "these rows are not empty"
        if self._sequential is not None:
            output = self._sequential.run(texts, cache, rows, last=True, taps=taps)
            return output._replace(hidden=output.hidden[:, 0], logits=output.logits[:, 0])
        # A batch-invariant model runs each text alone, so that the pass depends only on the text.
        together = 1 if self.batch_invariant else max(1, _PREFILL_TOKENS // max(len(text) for text in texts))
        outputs = []
        for begin in range(0, len(texts), together):
            group = slice(begin, begin + together)
            outputs.append(self._prefill_group(texts[group], cache, rows[group], taps))
        return outputs[0] if len(outputs) == 1 else ModelOutput.cat(outputs)

    def _prefill_group(
        self, texts: Sequence[Sequence[int]], cache: PreallocatedCache, rows: Sequence[int], taps: Sequence[int]
    ) -> ModelOutput:
        lengths = [len(text) for text in texts]
        longest = max(lengths)
        tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts], device=self.device)
        cache.begin(rows, longest, self.device)
        positions = torch.arange(longest, device=self.device)[None]
        select = last_of(lengths, 1, self.device)
        output = run_model(self.model, tokens, positions, cache, None, select, taps)
        cache.end(lengths)
        states = tuple(row[:length] for row, length in zip(output.states, lengths, strict=bool(taps)))
        return ModelOutput(output.hidden[:, 0], output.logits[:, 0], states)

    @torch.inference_mode()
    def append(
        self, blocks: Sequence[Sequence[int]], cache: PreallocatedCache, taps: Sequence[int] = ()
    ) -> ModelOutput:
        """Run a chain of tokens after each row.

        Returns hidden state and logits of each row's last token, (rows, hidden) and (rows, vocab), and the states of
        all tokens of the chain after the layers ``taps``.
        """
        if not any(cache.lengths[: len(blocks)]):
            return self.prefill(blocks, cache, taps=taps)
        trees = [TokenTree.chain(block) for block in blocks]
        if self._sequential is not None:
            output = self._sequential.run(blocks, cache, last=True, taps=taps)
        elif self._static is not None and self._static.fits(trees):
            output = self._run(trees, cache, None, last_of(list(map(len, blocks)), 1, self.device), taps)
            own = zip(output.states, blocks, strict=bool(taps))
            output = output._replace(states=tuple(states[: len(block)] for states, block in own))
        else:
            with self._numerics():
                output = self._dynamic.append(blocks, cache, taps)
        return ModelOutput(output.hidden[:, 0], output.logits[:, 0], output.states)

    @torch.inference_mode()
    def step(self, tokens: Int[Tensor, " rows"], cache: PreallocatedCache) -> ModelOutput:
        """Run one token after each row, without waiting for tokens that the device is still computing.

        Returns hidden states (rows, hidden) and logits (rows, vocab).
        """
        if self._sequential is not None:
            output = self._sequential.run([[token] for token in tokens.tolist()], cache)
        else:
            with self._numerics():
                output = (self._static or self._dynamic).step(tokens, cache)
        return ModelOutput(output.hidden[:, 0], output.logits[:, 0])

    @torch.inference_mode()
    def verify(
        self,
        trees: Sequence[TokenTree],
        cache: PreallocatedCache,
        first: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> ModelOutput:
        """Run a tree after each row; each node attends to its row's prefix and its own path.

        Row i runs node ``first[i]`` and all nodes after it. The nodes before it are in the cache already, as in a tree
        that is drafted level by level. Returns hidden states (rows, nodes, hidden) and logits (rows, nodes, vocab);
        smaller trees are padded. ``taps``: also return the states of all nodes after these layers.
        """
        return self._run(trees, cache, first, None, taps)

    def _run(
        self,
        trees: Sequence[TokenTree],
        cache: PreallocatedCache,
        first: Sequence[int] | None,
        select: Callable[[Tensor], Tensor] | None,
        taps: Sequence[int] = (),
    ) -> ModelOutput:
        """Run trees in fixed shapes if the model is static and the trees fit, and otherwise in dynamic shapes."""
        if self._sequential is not None:
            assert not any(first or ()) and all(tree.shape.is_chain for tree in trees), self.no_trees
            return self._sequential.run([tree.token_list for tree in trees], cache, taps=taps)
        with self._numerics():
            if self._static is None or cache.device is None or not self._static.fits(trees):
                return self._dynamic.run(trees, cache, first or [0] * len(trees), select, taps=taps)
            output = self._static.run(trees, cache, first, taps)
        if select is None:
            return output
        return output._replace(hidden=select(output.hidden), logits=select(output.logits))

    def prepare(
        self, cache: PreallocatedCache, rows: int, nodes: Sequence[int], longest: int, taps: Sequence[int] = ()
    ) -> None:
        """Record, before the steps are timed, the CUDA graphs that the texts in the first ``rows`` rows will need soon.

        ``nodes``: sizes of the coming trees. ``longest``: final length of the longest text, in positions. ``taps``:
        layers after which states will be read. Without graphs this method does nothing.
        """
        if self._static is not None:
            with self._numerics():
                self._static.prepare(cache, rows, nodes, longest, taps)
