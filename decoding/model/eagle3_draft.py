"""EAGLE-3 drafts (2503.01840): one layer that continues from the target's states, token by token.

Slot p of a text pairs the embedding of token p + 1 with the target's states at token p, taken after several layers
(`decoding.model.forward`) and mapped to one vector by ``fc``. The layer attends to earlier slots and computes a state,
from which the draft's own lm_head predicts token p + 2. Beyond the text the draft continues with its own states: the
next slot pairs the drafted token with the state of the previous slot, without ``fc``. ``d2t`` contains, for each
output, the id of its token minus the number of the output.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from decoding.errors import UserError
from decoding.files.stored import (
    CONFIG_NAME,
    StoredTensor,
    check_copies,
    check_finite,
    check_tensors,
    has_weights,
    read_weights,
    weights_header,
    without_d2t,
    write_weights,
)
from decoding.model.causal_lm import CausalLM
from decoding.model.eagle3_config import REMEDY, Eagle3Config, read_eagle3_config
from decoding.model.forward import OutputLayer, attend
from decoding.model.vocabulary import check_d2t, d2t_of, tokens_of

_SPREAD = 0.02
_EMBEDDING = "embed_tokens.weight"
_NOT_LOADED = (_EMBEDDING, "t2d")
"""Tensors that some trainers store: a copy of the target's embedding, and the inverse of ``d2t``."""

Held = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
"""Function from the keys and values of running slots to all keys and values to which these slots attend."""


class _Attention(nn.Module):
    """Attention as in Llama or Qwen 3, over pairs of an embedding and a state."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        width, self.dim = config.hidden_size, config.head_dim
        queries, keys = config.num_attention_heads * self.dim, config.num_key_value_heads * self.dim
        self.q_proj = nn.Linear(2 * width, queries, bias=False)
        self.k_proj = nn.Linear(2 * width, keys, bias=False)
        self.v_proj = nn.Linear(2 * width, keys, bias=False)
        self.o_proj = nn.Linear(queries, width, bias=False)
        eps = config.rms_norm_eps
        self.q_norm, self.k_norm = (LlamaRMSNorm(self.dim, eps) if config.qk_norm else nn.Identity() for _ in range(2))

    def forward(self, pairs: Tensor, rotary: tuple[Tensor, Tensor], held: Held, mask: Tensor | None) -> Tensor:
        batch, slots = pairs.shape[:2]
        queries, keys, values = (
            part(pairs).view(batch, slots, -1, self.dim) for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        queries, keys = self.q_norm(queries).transpose(1, 2), self.k_norm(keys).transpose(1, 2)
        values = values.transpose(1, 2)
        queries, keys = apply_rotary_pos_emb(queries, keys, *rotary)
        keys, values = held(keys, values)
        out = attend(self, queries, keys, values, mask, is_causal=slots > 1)
        attended: Tensor = self.o_proj(out.reshape(batch, slots, -1))
        return attended


class _Layer(GradientCheckpointingLayer):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = Qwen3MLP(config)

    def forward(
        self,
        states: Tensor,
        embedded: Tensor,
        rotary: tuple[Tensor, Tensor],
        held: Held,
        mask: Tensor | None,
        norm_before_residual: bool,
    ) -> Tensor:
        normed = self.hidden_norm(states)
        pairs = torch.cat((self.input_layernorm(embedded.to(normed)), normed), -1)
        x = (normed if norm_before_residual else states) + self.self_attn(pairs, rotary, held, mask)
        ran: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return ran


class Eagle3Draft(nn.Module):
    """The weights of a draft; callers provide the target's embeddings."""

    d2t: Tensor
    max_positions = None

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        width, read = config.hidden_size, config.taps * config.hidden_size
        self.input_norm = LlamaRMSNorm(read, config.rms_norm_eps) if config.norm_before_fc else None
        norms = config.taps if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(LlamaRMSNorm(width, config.rms_norm_eps) for _ in range(norms))
        self.fc = nn.Linear(read, width, bias=False)
        self.midlayer = _Layer(config)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = OutputLayer(width, config.draft_vocab_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.normal_(module.weight, std=_SPREAD)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.long))
        self._frequencies, self._scale = config.frequencies()  # not a buffer, because a narrower dtype would round it

    @property
    def device(self) -> torch.device:
        return self.fc.weight.device

    @property
    def output_tokens(self) -> Int[Tensor, " outputs"]:
        """The token of each output, in increasing order."""
        return tokens_of(self.d2t)

    @torch.no_grad()
    def write_only(self, tokens: Sequence[int]) -> None:
        """Set the ``draft_vocab_size`` tokens, in increasing order."""
        self.d2t.copy_(d2t_of(tokens))

    def fused(self, states: Float[Tensor, "*batch slots taps"]) -> Float[Tensor, "*batch slots hidden"]:
        """Map the target's states to the vector that enters the draft. The states are taken after the layers that the
        draft reads, and are concatenated.
        """
        # The states are cast as in `DSparkDraft.text_keys`, and also before norms, because norms would round their
        # results to the dtype of the states.
        normed = self.input_norm is not None or len(self.fc_norm) > 0
        if normed or not torch.is_autocast_enabled(states.device.type):
            states = states.to(self.fc.weight)
        if self.input_norm is not None:
            states = self.input_norm(states)
        if len(self.fc_norm):
            parts = states.chunk(len(self.fc_norm), -1)
            states = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        fused: Tensor = self.fc(states)
        return fused

    def forward(
        self,
        embedded: Float[Tensor, "batch slots hidden"],
        states: Float[Tensor, "batch slots hidden"],
        positions: Int[Tensor, "batch slots"],
        held: Held,
        mask: Tensor | None = None,
    ) -> Float[Tensor, "batch slots hidden"]:
        """Run slots; return their states.

        ``states`` are the inputs of the slots, from `fused` or `recycled`. ``held`` adds the keys and values of other
        slots. ``mask`` is additive, or true at keys to which a slot attends. Without a mask a single slot attends to
        everything, and several slots attend to one another causally.
        """
        rotary, residual = self._rotary(positions), self.config.norm_before_residual
        ran: Tensor = self.midlayer(states, embedded, rotary, held, mask, residual)
        return ran

    def recycled(self, states: Float[Tensor, "*slots hidden"]) -> Float[Tensor, "*slots hidden"]:
        """Return the inputs of the next slots, given the states of the slots before them."""
        if not self.config.norm_output:
            return states
        normed: Tensor = self.norm(states)
        return normed

    def logits(self, states: Float[Tensor, "*slots hidden"]) -> Float[Tensor, "*slots outputs"]:
        """Return for each slot the logits of the token that it predicts, over the draft's own outputs."""
        logits: Tensor = self.lm_head(self.norm(states))
        return logits

    def _rotary(self, positions: Int[Tensor, "batch slots"]) -> tuple[Tensor, Tensor]:
        """Return cosine and sine of the angles, each of shape (batch, slots, dim), in the draft's dtype."""
        if self._frequencies.device != positions.device:
            self._frequencies = self._frequencies.to(positions.device)
        angles = positions[..., None].float() * self._frequencies
        angles = torch.cat((angles, angles), -1)
        dtype = self.fc.weight.dtype
        return (angles.cos() * self._scale).to(dtype), (angles.sin() * self._scale).to(dtype)

    def save_pretrained(self, folder: Path) -> None:
        """Write a flat ``config.json`` and the weights, named as servers read them."""
        folder.mkdir(parents=True, exist_ok=True)
        dtype = str(self.fc.weight.dtype).removeprefix("torch.")
        (folder / CONFIG_NAME).write_text(json.dumps({**self.config.to_json(), "dtype": dtype}, indent=2) + "\n")
        tensors = self.state_dict()
        if self.config.draft_vocab_size == self.config.vocab_size:
            del tensors["d2t"]
        write_weights(folder, tensors)

    @staticmethod
    def from_pretrained(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu") -> "Eagle3Draft":
        """Read a draft, ready to decode, in ``dtype``.

        Raises UserError, before anything is built, if tensors do not match the config, and later if a weight is not
        finite in the dtype.
        """
        config, header = read_described(folder)
        weights = {_ours(name): part for name, part in read_weights(folder, REMEDY).items() if _ours(name) in header}
        with torch.device("meta"):  # random weights, which a CPU makes slowly, would be overwritten
            draft = Eagle3Draft(config)
        draft.load_state_dict({"d2t": torch.zeros(config.draft_vocab_size, dtype=torch.long), **weights}, assign=True)
        check_d2t(draft.d2t, config.vocab_size, folder, REMEDY)
        draft.to(dtype)
        check_finite(draft.state_dict(), f"{folder} in {dtype}", "use an earlier checkpoint, or train the draft again")
        return draft.to(device).requires_grad_(False).eval()


def _ours(name: str) -> str:
    """Return our name for a tensor: in the names of some trainers, the layer has a number."""
    return name.replace("layers.0.", "midlayer.", 1) if name.startswith("layers.0.") else name


def read_described(folder: Path) -> tuple[Eagle3Config, dict[str, StoredTensor]]:
    """Read a draft's config and the header of its tensors, by our names; raise UserError if they do not match."""
    config = read_eagle3_config(folder)
    if not has_weights(folder):
        raise UserError(f"{folder} lacks .safetensors files: convert its weights (pickled weights are not loaded)")
    stored = weights_header(folder, REMEDY)
    header = {_ours(name): part for name, part in stored.items() if name not in _NOT_LOADED}
    whole = config.draft_vocab_size == config.vocab_size and "d2t" not in header
    weights = without_d2t(header, None if whole else config.draft_vocab_size, folder, REMEDY)
    check_tensors(folder, weights, _shapes(config), REMEDY)
    return config, header


def check_embedding(folder: Path, target: CausalLM) -> None:
    """Raise UserError if a folder's embedding differs from the target's embedding by more than rounding."""
    embedding: Any = target.model.get_input_embeddings()
    check_copies(folder, {_EMBEDDING: embedding.weight}, REMEDY)


def _shapes(config: Eagle3Config) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield the name and shape of every tensor of a draft except ``d2t``."""
    with torch.device("meta"):
        tensors = dict(Eagle3Draft(config).named_parameters())
    for name, tensor in tensors.items():
        yield name, tuple(tensor.shape)
