"""Configs of EAGLE-3 drafts: the flat ``config.json`` of EAGLE, SpecForge and ModelOpt, and the nested form that the
library speculators writes.

Files number a tap by the layer that its state enters: tap k is the state after layer k - 1 (from 0).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from decoding.errors import UserError, check_whole
from decoding.files.stored import CONFIG_NAME, read_object
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import SLIDING

_ARCHITECTURE, _OF_QWEN3 = "LlamaForCausalLMEagle3", "Eagle3Qwen3ForCausalLM"
_STYLES = ("llama", _ARCHITECTURE, "Eagle3LlamaForCausalLM", "qwen3", _OF_QWEN3)
_TAKEN: dict[str, tuple[Any, ...]] = {
    "num_hidden_layers": (None, 1),
    "hidden_act": (None, "silu"),
    "attention_bias": (None, False),
    "mlp_bias": (None, False),
    "partial_rotary_factor": (None, 1),
    "embed_requires_grad": (None, False),
}
"""Settings that change the computation, with the values that are supported here."""
_ROTARY = ("default", "linear", "llama3", "yarn")
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_DEFAULT_TAPS = 3
_WIDEST = 1 << 16  # largest size of an attention head
REMEDY = "use an EAGLE-3 draft of one Llama or Qwen 3 layer, as EAGLE, SpecForge, ModelOpt or speculators write it"
_THIS_TARGET = "use a draft trained on this target"


@dataclass(frozen=True)
class Eagle3Config:
    """Sizes and flags of a draft, mostly named as in ``config.json``; raises UserError if sizes do not fit.

    ``hidden_size`` and ``vocab_size`` are sizes of the target. ``draft_vocab_size``: the number of different tokens
    that the draft can write. ``target_layer_ids``: the target's layers (from 0) after which states are read; empty for
    the three default layers, which depend on the target's depth.

    ``norm_before_residual``: the residual stream starts from the normed state. ``norm_before_fc``: one norm over all
    taps. ``fc_norm``: one norm per tap. ``norm_output``: the next step reads the state after the final norm.

    ``sliding_window``: a slot attends to this many slots, including itself; None means that the slot attends to all
    slots before it. ``qk_norm``: the queries and keys of each head are normed, as in Qwen 3.
    """

    hidden_act: ClassVar[str] = "silu"
    num_hidden_layers: ClassVar[int] = 1
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_layer_ids: tuple[int, ...] = ()
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 2048
    rope_parameters: Mapping[str, Any] = field(default_factory=lambda: {"rope_theta": 1e4, "rope_type": "default"})
    sliding_window: int | None = None
    qk_norm: bool = False

    def __post_init__(self) -> None:
        for size in fields(self):
            if size.type is int:
                check_whole(size.name, getattr(self, size.name))
        for name in _FLAGS:
            if type(value := getattr(self, name)) is not bool:
                raise UserError(f"{name} is {value!r}: use true or false")
        taps = tuple(self.target_layer_ids)
        for tap in taps:
            check_whole("an entry of target_layer_ids", tap, 0)
        if list(taps) != sorted(set(taps)):
            raise UserError(f"target_layer_ids is {list(taps)}: use increasing layers")
        heads, of_keys = self.num_attention_heads, self.num_key_value_heads
        if heads % of_keys or self.head_dim % 2 or self.head_dim > _WIDEST:
            raise UserError(
                f"the draft has {heads} attention heads of size {self.head_dim} and {of_keys} key heads: "
                "use an even size, and a number of attention heads that is a multiple of the number of key heads"
            )
        if self.draft_vocab_size > self.vocab_size:
            raise UserError(
                f"draft_vocab_size is {self.draft_vocab_size}: use at most the target's {self.vocab_size} tokens"
            )
        if type(self.rms_norm_eps) is not float or not 0 <= self.rms_norm_eps < 1:
            raise UserError(f"rms_norm_eps is {self.rms_norm_eps!r}: use a number from 0 to 1")
        if self.norm_before_fc and self.fc_norm:
            raise UserError("norm_before_fc and fc_norm are both true: use one of them")
        if self.sliding_window is not None:
            check_whole("sliding_window", self.sliding_window)
        object.__setattr__(self, "target_layer_ids", taps)

    @property
    def taps(self) -> int:
        """The number of the target's layers whose states are read."""
        return len(self.target_layer_ids) or _DEFAULT_TAPS

    def frequencies(self) -> tuple[torch.Tensor, float]:
        """Return the rotary frequencies, of shape (head_dim / 2,) in fp32, and the factor on cosine and sine."""
        config = LlamaConfig(
            hidden_size=self.num_attention_heads * self.head_dim,
            num_attention_heads=self.num_attention_heads,
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters=dict(self.rope_parameters),
        )
        with torch.device("cpu"):  # even while a draft without weights is made
            rotary = LlamaRotaryEmbedding(config)
        return rotary.inv_freq, rotary.attention_scaling

    def for_target(self, target: CausalLM) -> "Eagle3Config":
        """Return the config with the target's default layers; raise UserError if the config does not fit the target."""
        width = target.model.config.get_text_config(decoder=True).hidden_size
        embedding: Any = target.model.get_input_embeddings()
        sizes = {"hidden_size": {width, embedding.weight.shape[1]}, "vocab_size": {target.vocab_size}}
        for name, size in ((name, size) for name, allowed in sizes.items() for size in allowed):
            if getattr(self, name) != size:
                raise UserError(
                    f"this draft needs a target whose {name} is {getattr(self, name)}, not {size}: {_THIS_TARGET}"
                )
        filled = self if self.target_layer_ids else replace(self, target_layer_ids=default_layers(target.num_layers))
        if (last := filled.target_layer_ids[-1]) > (most := target.num_layers - 2):
            raise UserError(f"this draft reads layer {last}, but only layers 0 to {most} can be read: {_THIS_TARGET}")
        return filled

    def to_json(self) -> dict[str, Any]:
        """Return the content of a flat ``config.json``: flags and layers are written only if they differ from defaults.

        vLLM, SGLang and llama.cpp agree on drafts that have no flags and read the default layers.
        """
        own = asdict(self)
        layers, of_qwen3 = own.pop("target_layer_ids"), own.pop("qk_norm")
        rope = own["rope_parameters"] = dict(self.rope_parameters)
        for name in (*_FLAGS, "sliding_window"):
            if not own[name]:
                del own[name]
        if self.sliding_window is not None:
            own |= {"use_sliding_window": True, "layer_types": [SLIDING]}
        if layers and not _is_default(layers):
            own |= self.named_layers()
        if rope["rope_type"] != "default":  # this key and rope_theta are for programs that read transformers 4's keys
            own["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
        return {
            "architectures": [_OF_QWEN3 if of_qwen3 else _ARCHITECTURE],
            "model_type": "qwen3" if of_qwen3 else "llama",
            "num_hidden_layers": self.num_hidden_layers,
            **own,
            "rope_theta": rope["rope_theta"],
            "hidden_act": self.hidden_act,
            "attention_bias": False,
            "tie_word_embeddings": False,
        }

    def named_layers(self) -> dict[str, Any]:
        """Return the keys of ``config.json`` that name the layers, even if these are the default layers."""
        layers = self.target_layer_ids
        return {"eagle_aux_hidden_state_layer_ids": [at + 1 for at in layers], "num_aux_hidden_states": len(layers)}


def usual_layers(count: int) -> tuple[int, int, int]:
    """Return the layers of `default_layers` without the check that the target has enough layers for them."""
    return (1, count // 2 - 1, count - 4)


def default_layers(count: int) -> tuple[int, ...]:
    """Return the layers (from 0) of a target of ``count`` layers after which drafts read states by default."""
    layers = usual_layers(count)
    if list(layers) != sorted(set(layers)):
        raise UserError(
            f"this draft reads the default layers, but a target of {count} layers does not have so many: name the "
            "draft's layers in eagle_aux_hidden_state_layer_ids, or use a target of at least 7 layers"
        )
    return layers


def _is_default(layers: Sequence[int]) -> bool:
    """Return True if these layers are the default layers of some target."""
    return tuple(layers) == usual_layers(layers[-1] + 4)


def is_eagle3_folder(folder: Path) -> bool:
    """Return True if a folder's config describes an EAGLE-3 draft."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        return False
    stored = read_object(path, REMEDY)
    names = stored.get("architectures")
    named = isinstance(names, list) and len(names) == 1 and "eagle3" in str(names[0]).lower()
    return named or stored.get("speculators_model_type") == "eagle3"


def read_eagle3_config(folder: Path) -> Eagle3Config:
    """Read a draft's ``config.json``; raise UserError if a size is missing or a setting is not supported."""
    path = folder / CONFIG_NAME
    stored = read_object(path, REMEDY)
    try:
        config = _config_of(stored)
        if not config.frequencies()[0].isfinite().all():
            raise UserError(f"rope_parameters is {config.rope_parameters}, which does not lead to finite angles")
        return config
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, StrictDataclassError) as error:
        told = f"{error} is missing" if isinstance(error, KeyError) else " ".join(str(error).split())
        raise UserError(f"{path} does not describe an EAGLE-3 draft ({told}): {REMEDY}") from error


def _config_of(stored: Mapping[str, Any]) -> Eagle3Config:
    nested = stored.get("transformer_layer_config")
    flat: dict[str, Any] = {**(nested or {}), **stored}
    own: Mapping[str, Any] = flat.get("eagle_config") or {}
    rope = {**(flat.get("rope_parameters") or flat.get("rope_scaling") or {})}
    rope["rope_type"] = rope.get("rope_type", rope.pop("type", "default"))
    rope = {"rope_theta": flat.get("rope_theta", 10_000.0), **rope}
    for key, values in _TAKEN.items():
        for value in (flat.get(key), rope.pop(key, None)):
            if value not in values:
                raise UserError(f"{key} is {value}")
    style = nested.get("model_type", "llama") if nested else (flat.get("architectures") or [None])[0]
    width, of_target = flat["hidden_size"], flat.get("target_hidden_size")
    uses, types = flat.get("use_sliding_window"), list(flat.get("layer_types") or ())
    slides = types == [SLIDING]
    refused = {
        f"the draft has a layer of {style}, not of Llama or Qwen 3": style not in _STYLES,
        f"use_sliding_window is {uses}, but layer_types is {types}": (uses and not types) or (uses is False and slides),
        f"layer_types is {types}": types not in ([], ["full_attention"], [SLIDING]),
        f"the rotary embeddings are {rope['rope_type']}": rope["rope_type"] not in _ROTARY,
        f"the draft's states have size {width}, not the target's size {of_target}": of_target not in (None, width),
        "the draft reads no states between the target's layers": own.get("use_aux_hidden_state") is False,
    }
    # In a nested file a missing norm_before_residual means false, as speculators reads it; vLLM assumes true.
    for problem in (problem for problem, applies in refused.items() if applies):
        raise UserError(problem)
    known = {size.name: flat[size.name] for size in fields(Eagle3Config) if flat.get(size.name) is not None}
    known["norm_before_fc"] = flat.get("norm_before_fc") or own.get("norm_before_fc") or False
    config = Eagle3Config(
        **{
            "num_key_value_heads": flat["num_attention_heads"],
            "head_dim": flat["hidden_size"] // flat["num_attention_heads"],
            "draft_vocab_size": flat["vocab_size"],
            **known,
            "target_layer_ids": _layers(flat, own),
            "rope_parameters": rope,
            "sliding_window": flat["sliding_window"] if slides else None,
            "qk_norm": style in ("qwen3", _OF_QWEN3),
        }
    )
    if (count := flat.get("num_aux_hidden_states") or config.taps) != config.taps:
        raise UserError(f"num_aux_hidden_states is {count}, but the config names {config.taps} layers")
    return config


def _layers(flat: Mapping[str, Any], own: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers (from 0) after which states are read; empty for the default layers."""
    if taps := flat.get("eagle_aux_hidden_state_layer_ids"):
        return tuple(tap - 1 for tap in taps)
    # Servers ignore these ids, or number them from 0 or from 1, so only the default layers are unmistakable.
    ids = own.get("eagle_aux_hidden_state_layer_ids") or own.get("layer_ids")
    if ids and not any(_is_default([layer - by for layer in ids]) for by in (0, 1)):
        raise UserError(f"eagle_config names the layers {ids}, which servers number in different ways")
    return ()
