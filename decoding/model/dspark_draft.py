"""DSpark drafts (2607.05147): a block of tokens in one forward pass, from the target's states after several layers.

The draft reads the text only as keys and values, which are computed from the target's states at the text's tokens
(`decoding.model.forward`). The newest token and K - 1 masks run as one block, attend to these keys and to one another,
and predict the next K tokens. A `MarkovBias` makes each distribution conditional on the previous token. The draft uses
the target's embedding and lm_head. A draft without a bias is DFlash (2602.06036). A draft may write only frequent
tokens. Such a draft has its own lm_head with the rows of these tokens, and ``d2t`` contains, for each row, the id of
its token minus the number of the row (as in speculators). Folders have DeepSpec's flat form. vLLM and SGLang load this
form; llama.cpp loads a GGUF file that is made from it.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm, rotate_half

from decoding.errors import UserError
from decoding.files.stored import (
    CONFIG_NAME,
    StoredTensor,
    check_copies,
    check_finite,
    check_tensors,
    read_weights,
    stored_weights,
    weights_header,
    without_d2t,
    write_weights,
)
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import REMEDY, DSparkConfig, Sight, read_dspark_config
from decoding.model.forward import OutputLayer, attend, one_copy_of_masks, unscaled_embeddings, without_gaps
from decoding.model.markov import BlockBias, GatedBias, MarkovBias, RecurrentBias
from decoding.model.vocabulary import check_d2t, d2t_of, tokens_of

_SPREAD = 0.02
_OF_FILES = {
    "markov.embedding.weight": "markov_head.markov_w1.weight",
    "markov.output.weight": "markov_head.markov_w2.weight",
    **{f"markov.{name}": f"markov_head.{name}" for name in ("gate_proj.weight", "gate_proj.bias")},
    **{f"markov.{name}": f"markov_head.{name}" for name in ("joint_proj.weight", "joint_proj.bias")},
    "confidence.weight": "confidence_head.proj.weight",
    "confidence.bias": "confidence_head.proj.bias",
}
"""Maps our tensor names to the names in files, if they differ."""
_BIASES = {"vanilla": MarkovBias, "gated": GatedBias, "rnn": RecurrentBias}
_MASK = "use a draft whose mask is one of the target's tokens"
_TARGETS_OWN = ("embed_tokens.weight", "lm_head.weight", "t2d", "d2t")
"""Tensors that some trainers store: copies of the target's weights, and maps to the target's ids. Most are not loaded.
"""
_OF_REDUCED = ("lm_head.weight", "d2t")
"""The tensors in `_TARGETS_OWN` that are loaded if the draft writes only some of the target's tokens."""


class _Attention(nn.Module):
    """Attention of a block's tokens to one another and to the text, whose keys come from the target's states."""

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        width, self.dim, self.groups = config.hidden_size, config.head_dim, config.num_key_value_heads
        self.q_proj = nn.Linear(width, config.num_attention_heads * self.dim, bias=False)
        self.k_proj = nn.Linear(width, self.groups * self.dim, bias=False)
        self.v_proj = nn.Linear(width, self.groups * self.dim, bias=False)
        self.o_proj = nn.Linear(config.num_attention_heads * self.dim, width, bias=False)
        self.q_norm = Qwen3RMSNorm(self.dim, config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.dim, config.rms_norm_eps)

    def keys_values(self, x: Tensor, rotary: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values of x (batch, positions, hidden), each (batch, key heads, positions, dim)."""
        shape = (*x.shape[:-1], self.groups, self.dim)
        keys = _rotated(self.k_norm(self.k_proj(x).view(shape)).transpose(1, 2), rotary)
        return keys, self.v_proj(x).view(shape).transpose(1, 2)

    def forward(
        self, x: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, mask: Tensor | None
    ) -> Tensor:
        batch, slots = x.shape[:2]
        queries = _rotated(self.q_norm(self.q_proj(x).view(batch, slots, -1, self.dim)).transpose(1, 2), rotary)
        attended: Tensor = self.o_proj(attend(self, queries, keys, values, mask).reshape(batch, slots, -1))
        return attended


def _rotated(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate x (batch, heads, positions, dim) by the angles of its positions."""
    cosine, sine = rotary
    turned: Tensor = x * cosine[:, None] + rotate_half(x) * sine[:, None]
    return turned


class _Layer(GradientCheckpointingLayer):
    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], held: "partial[Any]", mask: Tensor | None) -> Tensor:
        """Return the states after the layer; ``held`` is `Held` for this layer."""
        normed = self.input_layernorm(x)
        x = x + self.self_attn(normed, rotary, *held(*self.self_attn.keys_values(normed, rotary)), mask)
        ran: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return ran


def _seen(sight: Sight, mask: Tensor | None, at: Tensor, keys_at: Tensor | None, x: Tensor) -> Tensor | None:
    """Return the additive mask of a layer's slots, which are at positions ``at``.

    In addition to the keys that ``mask`` hides, the result hides the keys that the layer cannot see.
    """
    if sight == Sight():
        return mask
    assert keys_at is not None, "windows and causal blocks need the keys' positions"
    before = (at[..., None] - keys_at[:, None])[:, None]  # (batch, 1, slots, keys)
    hidden = (before >= (sight.window or 1 << 60)) | ((before < 0) & sight.causal)
    seen = x.new_zeros(hidden.shape) if mask is None else mask
    return seen.masked_fill(hidden, torch.finfo(seen.dtype).min)


Held = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function from a layer's index and a block's keys and values to all keys and values that the block sees."""


class DSparkDraft(nn.Module):
    """The weights of a draft.

    Callers provide the target's embedding, and also the target's lm_head unless the draft has one.
    """

    d2t: Tensor

    def __init__(self, config: DSparkConfig) -> None:
        super().__init__()
        self.config = config
        width = config.hidden_size
        self.fc = nn.Linear(len(config.target_layer_ids) * width, width, bias=False)
        self.hidden_norm = Qwen3RMSNorm(width, config.rms_norm_eps)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = Qwen3RMSNorm(width, config.rms_norm_eps)
        rank = config.markov_rank
        bias = _BIASES[config.markov_head_type]
        self.markov = bias(config.vocab_size, config.outputs, rank, width) if rank else None
        read = width + rank * config.confidence_head_with_markov
        self.confidence = nn.Linear(read, 1) if config.enable_confidence_head else None
        for module in self.modules():
            if isinstance(module, nn.Linear) and (self.markov is None or module is not self.markov.output):
                nn.init.normal_(module.weight, std=_SPREAD)
        self.lm_head = None
        if config.draft_vocab_size is not None:
            self.lm_head = OutputLayer(width, config.draft_vocab_size, bias=False).requires_grad_(False)
            self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))

    @property
    def output_tokens(self) -> Int[Tensor, " outputs"] | None:
        """The token that each row of the draft's own lm_head writes, in increasing order; None without an lm_head."""
        if self.lm_head is None:
            return None
        return tokens_of(self.d2t)

    @torch.no_grad()
    def write_only(self, tokens: Sequence[int], lm_head: Float[Tensor, "vocab hidden"]) -> None:
        """Set the tokens that the draft can write, in increasing order; copy their rows from the target's lm_head."""
        assert self.lm_head is not None, "the config must have a draft_vocab_size"
        self.d2t.copy_(d2t_of(tokens))
        self.lm_head.weight.copy_(lm_head[list(tokens)])

    def rotary(self, positions: Int[Tensor, "batch positions"]) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the angles, each of shape (batch, positions, dim), in the draft's dtype."""
        frequencies, factor = self.config.frequencies(positions.device)
        angles = positions[..., None].float() * frequencies
        angles = torch.cat((angles, angles), -1)
        both = (angles.cos(), angles.sin()) if factor == 1.0 else (angles.cos() * factor, angles.sin() * factor)
        return both[0].to(self.fc.weight.dtype), both[1].to(self.fc.weight.dtype)

    def text_keys(
        self, states: Float[Tensor, "batch positions taps"], positions: Int[Tensor, "batch positions"]
    ) -> list[tuple[Tensor, Tensor]]:
        """Return the text's keys and values for each layer, computed from the target's states at ``positions``."""
        # Under autocast the states are not cast here: the layer itself casts them, and an fp32 copy of all layers'
        # states would be large.
        cast = states if torch.is_autocast_enabled(states.device.type) else states.to(self.fc.weight)
        read, rotary = self.hidden_norm(self.fc(cast)), self.rotary(positions)
        return [layer.self_attn.keys_values(read, rotary) for layer in self.layers]  # type: ignore[union-attr, operator]

    @one_copy_of_masks()
    def forward(
        self,
        embedded: Float[Tensor, "batch slots hidden"],
        positions: Int[Tensor, "batch slots"],
        held: Held,
        mask: Tensor | None = None,
        keys_at: Int[Tensor, "#batch keys"] | None = None,
    ) -> Float[Tensor, "batch slots hidden"]:
        """Run blocks of tokens; return the input of the target's lm_head. ``mask`` is additive (None: no mask).

        ``keys_at``: the positions of all keys in ``held``, for layers with a window or a causal block.
        """
        x, rotary, sights = embedded.to(self.fc.weight), self.rotary(positions), self.config.sights
        masks = {sight: _seen(sight, mask, positions, keys_at, x) for sight in set(sights)}
        for index, layer in enumerate(self.layers):
            x = layer(x, rotary, partial(held, index), masks[sights[index]])
        normed_last: Tensor = self.norm(x)
        return normed_last

    def sure(self, hidden: Float[Tensor, "*slots hidden"], before: Int[Tensor, " *slots"]) -> Float[Tensor, " *slots"]:
        """Return for each slot the logit of the probability that its token is accepted if the token before it was
        accepted.
        """
        assert self.confidence is not None, "this draft lacks a confidence head"
        if self.markov is not None and self.config.confidence_head_with_markov:
            hidden = torch.cat((hidden, self.markov.embedding(before).detach().to(hidden)), -1)
        logits: Tensor = self.confidence(hidden)[..., 0]
        return logits

    def save_pretrained(self, folder: Path) -> None:
        """Write ``config.json`` and the weights."""
        folder.mkdir(parents=True, exist_ok=True)
        dtype = str(self.fc.weight.dtype).removeprefix("torch.")
        (folder / CONFIG_NAME).write_text(json.dumps({**self.config.to_json(), "dtype": dtype}, indent=2) + "\n")
        write_weights(folder, {_OF_FILES.get(name, name): tensor for name, tensor in self.state_dict().items()})

    @staticmethod
    def from_pretrained(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> "DSparkDraft":
        """Read a draft, ready to decode, in ``dtype``.

        Raises UserError, before anything is built, if tensors do not match the config, and later if a weight is not
        finite in the dtype.
        """
        config, header = read_described(folder)
        ours = {theirs: name for name, theirs in _OF_FILES.items()}
        weights = {ours.get(name, name): part for name, part in read_weights(folder, REMEDY).items() if name in header}
        with torch.device("meta"):  # random weights, which a CPU makes slowly, would be overwritten
            draft = DSparkDraft(config)
        draft.load_state_dict(weights, assign=True)
        if draft.lm_head is not None:
            check_d2t(draft.d2t, config.vocab_size, folder, REMEDY)
        draft.to(dtype)
        check_finite(draft.state_dict(), f"{folder} in {dtype}", "use an earlier checkpoint, or train the draft again")
        return draft.to(device).requires_grad_(False).eval()


def read_described(folder: Path) -> tuple[DSparkConfig, dict[str, StoredTensor]]:
    """Read a draft's config and the header of its tensors; raise UserError if they do not match."""
    config = read_dspark_config(folder)
    if (folder / "mask_embedding.pt").is_file():
        raise UserError(f"{folder} contains mask_embedding.pt, and separate masks are not supported: {_MASK}")
    loaded = _OF_REDUCED if config.draft_vocab_size is not None else ()
    stored = weights_header(folder, REMEDY)
    header = {name: part for name, part in stored.items() if name in loaded or name not in _TARGETS_OWN}
    weights = without_d2t(header, config.draft_vocab_size, folder, REMEDY)
    check_tensors(folder, weights, _stored_shapes(config), REMEDY)
    return config, header


def check_ends(folder: Path, target: CausalLM) -> None:
    """Raise UserError if the embedding, lm_head or ids in a folder differ by more than rounding from those of the
    target. A draft that writes only some of the target's tokens has a different lm_head, which is not compared.
    """
    reduced = read_dspark_config(folder).draft_vocab_size is not None
    ends: dict[str, Any] = {
        "embed_tokens.weight": target.model.get_input_embeddings(),
        "lm_head.weight": target.model.get_output_embeddings(),
    }
    if not reduced and "d2t" in weights_header(folder, REMEDY):
        differences = next(tensor for name, tensor in stored_weights(folder, REMEDY) if name == "d2t")
        if differences.any():
            raise UserError(f"{folder} contains d2t, but its config has no draft_vocab_size: {REMEDY}")
    copies = {name: layer.weight for name, layer in ends.items() if not (reduced and name in _OF_REDUCED)}
    check_copies(folder, copies, REMEDY)


def _stored_shapes(config: DSparkConfig) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name in files and the shape of every tensor of a draft except ``d2t``."""
    with torch.device("meta"):
        tensors = dict(DSparkDraft(config).named_parameters())
    for name, tensor in tensors.items():
        yield _OF_FILES.get(name, name), tuple(tensor.shape)


@dataclass(frozen=True)
class PairedDSpark:
    """A draft together with its target; raises UserError if their sizes differ."""

    draft: DSparkDraft
    target: CausalLM

    def __post_init__(self) -> None:
        self.draft.config.check_fits(self.target)

    @property
    def config(self) -> DSparkConfig:
        return self.draft.config

    def embed(self, newest: Int[Tensor, " rows"]) -> Float[Tensor, "rows slots hidden"]:
        """Return the embeddings of each row's block, which consists of the newest token and masks.

        As in servers, the embeddings are not scaled.
        """
        masks = newest.new_full((len(newest), self.config.slots - 1), self.config.mask_token_id)
        return unscaled_embeddings(self.target.model, torch.cat((newest[:, None], masks), 1))

    def logits(
        self, hidden: Float[Tensor, "rows slots hidden"], count: int | None = None
    ) -> Float[Tensor, "rows count outputs"]:
        """Return the logits of the next ``count`` tokens (None: all K) without the bias, as servers compute them."""
        first = self.config.slots - self.config.block_size
        read = hidden[:, first : first + (count or self.config.block_size)]
        return F.linear(without_gaps(read.to(self._lm_head)), self._lm_head)

    @cached_property
    def output_tokens(self) -> Int[Tensor, " outputs"] | None:
        """`DSparkDraft.output_tokens`, computed once."""
        return self.draft.output_tokens

    def block_bias(self, hidden: Float[Tensor, "rows slots hidden"], newest: Tensor) -> BlockBias | None:
        """Return the bias for these blocks, or None if the bias depends only on the previous token, or if there is
        none.
        """
        if self.draft.markov is None or self.config.markov_head_type == "vanilla":
            return None
        return BlockBias(self.draft.markov, hidden, newest, self.config.slots - self.config.block_size)

    @cached_property
    def _lm_head(self) -> Tensor:
        weight: Tensor = (self.draft.lm_head or self.target.model.get_output_embeddings()).weight
        return weight
