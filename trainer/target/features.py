"""Features: the target's hidden states on disk, which replace runs of the target. See `trainer.target.store`.

A row belongs to one token. For heads, the row contains the input of the lm_head, and the weight of the lm_head is also
stored. For a DSpark draft, the row contains the states after the layers that the draft reads, and the states after the
last layer but one. From these last states, the target's last layer computes the lm_head's input at every step. Any
number of heads or drafts can use the same features.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from jaxtyping import Float, Int8
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import (
    begun_behind,
    capture_lm_head_input,
    capture_taps,
    hooked,
    last_position,
    layers_of,
    lm_head_input,
    without_gaps,
)
from trainer.data.batch import Batch, Example, collate
from trainer.files.folders import fingerprint_of_all
from trainer.learning.losses import HiddenTeacher
from trainer.learning.spans import span
from trainer.processes import Process, on_first
from trainer.recipe.heads import FeaturesSection, StatesDtype
from trainer.target.loading import Columns, OnlineTarget, Target, logit_transform
from trainer.target.store import BATCH_TOKENS, MANIFEST, WEIGHTS, Column, Origin, Store, ensure_store

LARGEST_KL = 0.01
"""Largest accepted change of the target's distribution by stored states: the mean KL divergence, in nats."""
_MEASURED = 32
"""This change is measured in at most this many examples, and on at most this many tokens of each example."""


@dataclass(frozen=True)
class FeatureOrigin(Origin):
    """Everything from which stored features were made. ``data``: fingerprint of token ids and document lengths of all
    examples, in order.
    """

    noun: ClassVar[str] = "features"
    row: ClassVar[str] = "token"
    setting: ClassVar[str] = "features.folder"

    hidden_size: int
    states: StatesDtype = "target"
    layers: str = ""
    """The layers (from 0) whose outputs are stored, such as ``1, 3, 6``; empty if the lm_head's input is stored."""

    @staticmethod
    def of(
        target: CausalLM,
        fingerprint: str,
        tokenizer: PreTrainedTokenizerBase,
        examples: Sequence[Example],
        section: FeaturesSection,
        layers: Sequence[int] = (),
    ) -> "FeatureOrigin":
        return FeatureOrigin(
            **Origin.of_target(target, fingerprint, tokenizer),
            data=fingerprint_of_all(example.text() for example in examples),
            hidden_size=target.hidden_size,
            states=section.states,
            layers=", ".join(map(str, layers)),
        )

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(map(int, self.layers.split(", "))) if self.layers else ()

    def columns(self) -> dict[str, Column]:
        """Return a column of states (one state per layer if there are several) and, for int8, a column of scales."""
        layers = (len(self.taps),) if self.layers else ()
        if self.states == "int8":
            return {"hidden": Column(torch.int8, (*layers, self.hidden_size)), "scale": Column(torch.float32, layers)}
        dtype = torch.bfloat16 if self.states == "bf16" else self.torch_dtype
        return {"hidden": Column(dtype, (*layers, self.hidden_size))}

    def num_rows(self, example: Example) -> int:
        """Return the number of the example's tokens."""
        return len(example.tokens)

    @property
    def weight_bytes(self) -> int:
        """Bytes of the lm_head; 0 for a draft, because its target stays loaded."""
        return 0 if self.layers else self.vocab_size * self.hidden_size * self.torch_dtype.itemsize


@dataclass(frozen=True)
class FeatureWriter:
    """Writer of features, which runs the target, but computes no logits."""

    target: CausalLM
    origin: FeatureOrigin

    @property
    def batch_tokens(self) -> int:
        return BATCH_TOKENS

    def weights(self) -> dict[str, Tensor]:
        """Return the lm_head's weight; raise UserError for an lm_head with a bias."""
        lm_head = self.target.model.get_output_embeddings()
        if getattr(lm_head, "bias", None) is not None:
            raise UserError("the target's lm_head has a bias, which heads do not support: use another target")
        return {"lm_head": lm_head.weight.detach().cpu().contiguous()}

    @torch.inference_mode()
    def compute_columns(self, batch: Batch) -> dict[str, Tensor]:
        """Return the rows of all tokens, without padding."""
        model, inputs = self.target.model, batch.to(self.target.device).model_inputs()
        taps = self.origin.taps
        with (
            capture_lm_head_input(model, last_position) as captured,
            capture_taps(model, self.target.num_layers, taps) as tapped,
        ):
            model(**inputs, use_cache=False)
        states = tapped[0].unflatten(-1, (len(taps), -1)) if taps else captured[0]
        columns = {"hidden": states[batch.attention_mask.bool().to(states.device)]}
        if self.origin.states == "int8":
            columns["hidden"], columns["scale"] = quantised(columns["hidden"])
        return columns


def quantised(
    states: Float[Tensor, "*tokens hidden"],
) -> tuple[Int8[Tensor, "*tokens hidden"], Float[Tensor, "*tokens"]]:
    """Round each state to int8 with an fp32 scale: the state's largest magnitude divided by 127.

    ``rounded * scale`` differs from the state by at most half a scale.
    """
    wide = states.float()
    scale = wide.abs().amax(-1) / 127
    return (wide / scale.where(scale > 0, 1.0)[..., None]).round_().to(torch.int8), scale


def as_read(columns: Columns, dtype: torch.dtype) -> Float[Tensor, "*tokens hidden"]:
    """Return the states of stored columns in ``dtype``."""
    hidden, scale = columns["hidden"], columns.get("scale")
    return (hidden if scale is None else hidden * scale[..., None]).to(dtype)


class FeatureStore(Store[FeatureOrigin]):
    """Features on disk, memory-mapped: only the rows of a batch are copied."""

    @cached_property
    def lm_head(self) -> Float[Tensor, "vocab hidden"]:
        """The weight of the target's lm_head."""
        weight: Tensor = self._open(WEIGHTS).get_tensor("lm_head")
        return weight

    def read(self, batch: Batch) -> dict[str, Tensor]:
        """Return the columns of a batch on the batch's device; the columns of padding are zero."""
        return {name: self._padded(name, batch) for name in self.origin.columns()}

    def hidden(self, batch: Batch, columns: Columns | None = None) -> Float[Tensor, "batch positions *layers hidden"]:
        """Return the states in the target's dtype; ``columns`` is the result of `read`, which may since have been moved
        to a GPU.
        """
        return as_read(self.read(batch) if columns is None else columns, self.origin.torch_dtype)

    def _padded(self, name: str, batch: Batch) -> Tensor:
        rows = self._column(name, batch)
        shape = (*batch.tokens.shape, *rows[0].shape[1:])
        padded = torch.zeros(shape, dtype=rows[0].dtype)
        for into, row in zip(padded, rows, strict=True):
            into[: len(row)] = row
        return padded.to(batch.tokens.device)


class StoredFeatures:
    """`trainer.target.loading.HiddenStates` read from disk, without a loaded target."""

    def __init__(self, store: FeatureStore, config: PreTrainedConfig, device: torch.device) -> None:
        """Read ``store`` for training on ``device``; ``config`` is the target's config."""
        self._store = store
        self._device = device
        self.transform = logit_transform(config.get_text_config(decoder=True))

    @cached_property
    def lm_head(self) -> Float[Tensor, "vocab hidden"]:
        return self._store.lm_head.to(self._device)

    def read(self, batch: Batch) -> Columns:
        return self._store.read(batch)

    def hidden(self, batch: Batch, stored: Columns | None = None) -> Float[Tensor, "batch positions hidden"]:
        return self._store.hidden(batch, stored)


class LastLayer(OnlineTarget):
    """A target that runs only its last layer, to compute the lm_head's input."""

    def __init__(self, target: CausalLM) -> None:
        """Raise UserError if the target's last layer reads more than the previous layer's states."""
        super().__init__(target)
        self._last = target.num_layers - 2
        batch = collate([Example((0, 1), (True, True), 0)]).to(target.device)
        outputs: list[Any] = []
        layer = layers_of(target.model, target.num_layers)[self._last]
        with hooked(layer.register_forward_hook, lambda module, args, output: outputs.append(output)):
            wanted, state = super().tapped(batch, (self._last,))
        self._in_tuple = isinstance(outputs[0], tuple)
        computed = self.behind(batch, state)
        if not torch.allclose(computed.float(), wanted.float(), rtol=0.05, atol=0.05 * float(wanted.abs().max())):
            raise UserError(
                f"the last layer of the target ({target.model.config.model_type}) reads more than the stored states: "
                "set features=null"
            )

    @torch.no_grad()
    def behind(self, batch: Batch, state: Tensor) -> Float[Tensor, "batch positions hidden"]:
        """Return the lm_head's input, from a state of the last layer but one."""
        # Unlike `OnlineTarget.tapped`, this runs all rows at once, because ``state`` contains all rows.
        state = without_gaps(state)
        with span("target"), begun_behind(self._model, self._layers, self._last, state, self._in_tuple):
            return lm_head_input(self._model, batch.model_inputs()).to(batch.tokens.device)


class StoredTaps(LastLayer):
    """States of a target's layers from disk; only the last layer runs, to compute the lm_head's input."""

    def __init__(self, target: CausalLM, store: FeatureStore) -> None:
        super().__init__(target)
        self._store = store

    def read(self, batch: Batch) -> Columns:
        return self._store.read(batch)

    def tapped(self, batch: Batch, taps: Sequence[int], stored: Columns | None = None) -> tuple[Tensor, Tensor]:
        states, layers = self._store.hidden(batch, stored), self._store.origin.taps
        chosen = [layers.index(tap) for tap in taps]
        return self.behind(batch, states[..., layers.index(self._last), :]), states[..., chosen, :].flatten(-2)


def ensure_features(
    target: Target, examples: Sequence[Example], section: FeaturesSection, process: Process, taps: Sequence[int] = ()
) -> FeatureStore:
    """Write the missing features of these examples, and return all features; ``taps`` are the layers that a draft
    reads.

    Every process calls this and waits for the other processes. Raises UserError, before anything is written, if states
    in the section's dtype would change the target's distribution too much.
    """
    layers = sorted({*taps, target.model.num_layers - 2}) if taps else ()
    origin = FeatureOrigin.of(target.model, target.fingerprint, target.tokenizer, examples, section, layers)
    folder = Path(section.folder)
    writer = FeatureWriter(target.model, origin)
    if origin.columns()["hidden"].dtype != origin.torch_dtype:
        # Only the first process looks for the manifest, because other processes may have another disk, and another run
        # may write the manifest meanwhile.
        on_first(lambda: None if (folder / MANIFEST).exists() else process.say(_check_rounding(writer, examples)))
    layout = ensure_store(writer, examples, folder, section.shard_tokens, process)
    return FeatureStore(folder, origin, layout)


@torch.inference_mode()
def rounding_kl(writer: FeatureWriter, examples: Sequence[Example]) -> Float[Tensor, " tokens"]:
    """Return KL(p‖q) in nats at some tokens of the examples: p is the target's distribution, and q the distribution
    from stored states.
    """
    origin, target = writer.origin, writer.target
    online = LastLayer(target) if origin.taps else OnlineTarget(target)
    divergences, kinds = [], origin.columns()
    for example in examples[:: -(-len(examples) // _MEASURED)]:
        batch = collate([example]).to(target.device)
        exact = online.tapped(batch, ())[0][0]
        columns = writer.compute_columns(batch)
        stored = as_read({name: columns[name].to(kind.dtype) for name, kind in kinds.items()}, origin.torch_dtype)
        if isinstance(online, LastLayer):
            stored = online.behind(batch, stored[None, :, origin.taps.index(target.num_layers - 2)])[0]
        chosen = slice(None, None, -(-len(exact) // _MEASURED))
        p, q = (
            HiddenTeacher(hidden[chosen], online.lm_head, online.transform).known_logits(0, len(exact), 1.0)
            for hidden in (exact, stored)
        )
        logs = [side.logits.float().log_softmax(-1) for side in (p, q)]
        divergences.append((logs[0].exp() * (logs[0] - logs[1])).sum(-1))
    return torch.cat(divergences)


def _check_rounding(writer: FeatureWriter, examples: Sequence[Example]) -> str:
    """Return a sentence on how much stored states change the target's distribution; raise UserError if the change
    exceeds `LARGEST_KL`.
    """
    divergences, states = rounding_kl(writer, examples), writer.origin.states
    kl = float(divergences.mean())
    told = (
        f"states in {states} change the target's distribution by {kl:.2g} nats (mean KL over {len(divergences)} tokens)"
    )
    if not kl <= LARGEST_KL:
        wider = "bf16" if states == "int8" and writer.origin.dtype != "float16" else "target"
        raise UserError(f"{told}, and at most {LARGEST_KL:g} is accepted: set features.states={wider}")
    return told
