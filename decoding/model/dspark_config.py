"""Configs of DSpark and DFlash drafts: DeepSpec's flat ``config.json``, and the forms of other trainers.

Configs number the layers whose states are read (the taps) in different ways. ``target_layer_ids`` (DeepSpec, and
SpecForge and z-lab in a ``dflash_config``) counts layers from 0. ``aux_hidden_state_layer_ids`` (speculators) and
``eagle_aux_hidden_state_layer_ids`` count the state before the first layer as 0.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from decoding.errors import UserError, check_whole
from decoding.files.stored import CONFIG_NAME, read_object
from decoding.model.causal_lm import CausalLM
from decoding.rules.tree import MOST_NODES, checked_paths

ARCHITECTURE, WITHOUT_BIAS = "Qwen3DSparkModel", "DFlashDraftModel"
_WITH_BIAS = (ARCHITECTURE, "DSparkDraftModel")
_TAKEN: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "use_swa": (None, False),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1),
    "is_neox_style": (None, True),
    "partial_rotary_factor": (None, 1.0),
    "hidden_act": (None, "silu"),
}
"""Settings of other trainers that change the computation, and the values that are supported here."""
HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
GPU_HEAD_DIMS = (64, 128)
"""Sizes of attention heads for which servers have kernels: `HEAD_DIMS` on any device, and `GPU_HEAD_DIMS` on GPUs."""
REMEDY = "use a DSpark or DFlash draft as headstart, DeepSpec, speculators, SpecForge or z-lab write it"
_THIS_TARGET = "use a draft trained on this target"
MARKOV_HEADS = ("vanilla", "gated", "rnn")
_FULL, SLIDING = "full_attention", "sliding_attention"


class Sight(NamedTuple):
    """What the slots of a layer see: the last ``window`` positions including the slot itself (None: all earlier
    positions), and also later slots of the block unless ``causal`` is true.
    """

    window: int | None = None
    causal: bool = False


@dataclass(frozen=True)
class DSparkConfig:
    """Sizes of a draft, named as in ``config.json``; raises UserError for sizes that no server loads.

    ``hidden_size`` and ``vocab_size`` are sizes of the target. ``target_layer_ids``: the target's layers (from 0) after
    which states are read. ``num_target_layers`` is None if it is unknown. ``mask_token_id``: a token that does not
    occur in texts. ``block_size``: K, the number of tokens drafted in one forward pass. ``slots``: the number of tokens
    that run in one forward pass. ``sample_from_anchor``: each slot predicts the token after the slot's position. If it
    is False, each mask predicts the token at the mask's own position, and the block has one more token, which DFlash
    and speculators count in ``block_size``.

    ``markov_rank`` 0 means that there is no bias, as in DFlash and in ablations of DSpark. ``tree``: the paths of ranks
    that are drafted by default; empty for a chain. ``draft_vocab_size``: the number of different tokens that the draft
    can write, with its own lm_head; None means all tokens, with the target's lm_head.

    ``layer_types``: for each layer, whether it attends to the whole text or to the last ``sliding_window`` positions;
    if empty, all layers attend to the whole text. ``is_causal``: whether slots see only earlier slots; None means that
    this is so only in sliding layers. ``rope_scaling``: transformers' ``rope_parameters`` without the base; if it is
    empty, the embeddings are not scaled. ``markov_head_type``: the class of the bias, see `decoding.model.markov`.
    """

    hidden_act: ClassVar[str] = "silu"
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    block_size: int
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    num_target_layers: int | None = None
    markov_rank: int = 0
    enable_confidence_head: bool = False
    confidence_head_with_markov: bool = True
    sample_from_anchor: bool = True
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)
    max_position_embeddings: int = 2048
    draft_vocab_size: int | None = None
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None
    is_causal: bool | None = None
    markov_head_type: str = "vanilla"
    tree: tuple[tuple[int, ...], ...] = ()

    def __post_init__(self) -> None:
        for size in fields(self):
            if size.type is int:
                check_whole(size.name, getattr(self, size.name), size.name not in ("mask_token_id", "markov_rank"))
        taps = tuple(self.target_layer_ids)
        for tap in taps:
            check_whole("an entry of target_layer_ids", tap, 0)
        highest = (self.num_target_layers or 1 << 20) - 1
        if not taps or list(taps) != sorted(set(taps)) or taps[-1] > highest:
            raise UserError(f"target_layer_ids is {list(taps)}: use increasing layers from 0 to {highest}")
        if self.mask_token_id >= self.vocab_size:
            raise UserError(f"mask_token_id is {self.mask_token_id}: use one of the target's {self.vocab_size} tokens")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_attention_heads ({self.num_attention_heads}) is not a multiple of num_key_value_heads "
                f"({self.num_key_value_heads})"
            )
        if self.head_dim not in HEAD_DIMS:
            raise UserError(
                f"head_dim is {self.head_dim}: use one of {', '.join(map(str, HEAD_DIMS))}, which servers support"
            )
        if self.block_size >= MOST_NODES:
            raise UserError(f"block_size is {self.block_size}: use at most {MOST_NODES - 1}")
        if self.draft_vocab_size is not None:
            check_whole("draft_vocab_size", self.draft_vocab_size)
            if self.draft_vocab_size >= self.vocab_size:
                raise UserError(
                    f"draft_vocab_size is {self.draft_vocab_size}: use fewer than the target's {self.vocab_size} tokens"
                )
        self._check_attention()
        paths = checked_paths(self.tree, self.outputs)
        deepest = max((len(path) for path in paths), default=0)
        if deepest > self.block_size:
            raise UserError(
                f"the tree has depth {deepest}, but a pass drafts {self.block_size} tokens: "
                "shorten the paths of the tree"
            )
        object.__setattr__(self, "target_layer_ids", taps)
        object.__setattr__(self, "tree", paths)
        slides = SLIDING in self.layer_types
        object.__setattr__(self, "layer_types", tuple(self.layer_types) if slides else ())
        object.__setattr__(self, "sliding_window", self.sliding_window if slides else None)
        object.__setattr__(self, "is_causal", self.is_causal if slides else self.is_causal or None)

    def _check_attention(self) -> None:
        """Raise UserError for layers, rotary embeddings and biases that this package cannot compute."""
        slides = SLIDING in self.layer_types
        if set(self.layer_types) - {_FULL, SLIDING} or (slides and len(self.layer_types) != self.num_hidden_layers):
            raise UserError(
                f"layer_types is {list(self.layer_types)}: use {_FULL} or {SLIDING} for each of the "
                f"{self.num_hidden_layers} layers"
            )
        if slides:
            check_whole("sliding_window", self.sliding_window)
        if self.is_causal not in (None, True, False):
            raise UserError(f"is_causal is {self.is_causal}: use true or false")
        if self.rope_scaling:
            kind = self.rope_scaling.get("rope_type")
            if kind not in ROPE_INIT_FUNCTIONS:
                raise UserError(f"its rotary embeddings are {kind}: use one of {', '.join(ROPE_INIT_FUNCTIONS)}")
            try:
                _ = self._scaled
            except (KeyError, TypeError, ValueError, ArithmeticError, RuntimeError) as error:
                raise UserError(f"its rotary embeddings are {kind} with missing or wrong settings: {error}") from error
        if self.markov_head_type not in MARKOV_HEADS:
            raise UserError(f"markov_head_type is {self.markov_head_type}: use one of {', '.join(MARKOV_HEADS)}")

    @cached_property
    def _scaled(self) -> tuple[Float[Tensor, " pairs"], float]:
        """Scaled frequency of each pair of dimensions, and the factor by which sines and cosines are multiplied.

        For ``dynamic`` and ``longrope``, transformers uses these frequencies within the context length of pretraining.
        """
        config = Qwen3Config(
            head_dim=self.head_dim,
            max_position_embeddings=self.max_position_embeddings,
            rope_parameters={**self.rope_scaling, "rope_theta": self.rope_theta},
        )
        scaled: tuple[Tensor, float] = ROPE_INIT_FUNCTIONS[self.rope_scaling["rope_type"]](config, torch.device("cpu"))
        return scaled

    def frequencies(self, device: torch.device) -> tuple[Float[Tensor, " pairs"], float]:
        """Return the angle per position of each pair of dimensions, and the factor for sines and cosines."""
        if self.rope_scaling:
            scaled, factor = self._scaled
            return scaled.to(device, non_blocking=True), factor
        return _frequencies(self.rope_theta, self.head_dim, device), 1.0

    @property
    def sights(self) -> tuple[Sight, ...]:
        """What the slots of each layer see. A window also hides early slots of a long block, as in servers."""
        sliding = [kind == SLIDING for kind in self.layer_types or (_FULL,) * self.num_hidden_layers]
        causal = [slides if self.is_causal is None else self.is_causal for slides in sliding]
        windows = [self.sliding_window if slides else None for slides in sliding]
        return tuple(map(Sight, windows, causal))

    @property
    def is_dflash(self) -> bool:
        """True for a DFlash draft: there is no bias, and each mask predicts the token at its own position."""
        return not (self.markov_rank or self.sample_from_anchor)

    @property
    def slots(self) -> int:
        """Number of tokens in a block: the newest token and the masks."""
        return self.block_size + (not self.sample_from_anchor)

    @property
    def outputs(self) -> int:
        """The number of different tokens that the draft can write."""
        return self.draft_vocab_size or self.vocab_size

    def check_fits(self, target: CausalLM) -> None:
        """Raise UserError if the target's sizes differ from the sizes in this config."""
        sizes = {"hidden_size": target.hidden_size, "vocab_size": target.vocab_size}
        for name, size in {**sizes, "num_target_layers": target.num_layers}.items():
            if getattr(self, name) not in (None, size):
                raise UserError(
                    f"this draft needs a target whose {name} is {getattr(self, name)}, not {size}: {_THIS_TARGET}"
                )
        if (last := self.target_layer_ids[-1]) > (most := target.num_layers - 1):
            raise UserError(f"this draft reads layer {last}, but only layers 0 to {most} can be read: {_THIS_TARGET}")
        if (width := target.model.config.get_text_config(decoder=True).hidden_size) != self.hidden_size:
            raise UserError(
                f"the target's lm_head reads states of size {self.hidden_size}, but its layers write size {width}: "
                "use another target"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the content of ``config.json`` in the form that vLLM, SGLang and llama.cpp's converter read."""
        own = asdict(self)
        tree = own.pop("tree")
        theta, scaling = own.pop("rope_theta"), own.pop("rope_scaling")
        for name in ("draft_vocab_size", "sliding_window", "is_causal"):
            if own[name] is None:
                del own[name]
        if self.is_dflash:
            own["block_size"] = self.slots
            own["dflash_config"] = {"mask_token_id": self.mask_token_id, "target_layer_ids": self.target_layer_ids}
        if scaling:
            own["rope_scaling"] = scaling  # this key and the next are for programs that read transformers 4's keys
        return {
            "architectures": [WITHOUT_BIAS if self.is_dflash else ARCHITECTURE],
            "model_type": "qwen3",
            **own,
            "rope_theta": theta,  # for programs that read the keys of transformers 4
            "rope_parameters": {"rope_theta": theta, "rope_type": "default", **scaling},
            "hidden_act": self.hidden_act,
            "attention_bias": False,
            "tie_word_embeddings": False,
            "layer_types": self.layer_types or [_FULL] * self.num_hidden_layers,
            "headstart": {"tree": tree},
        }


@lru_cache(maxsize=16)
def _frequencies(theta: float, head_dim: int, device: torch.device) -> Float[Tensor, " pairs"]:
    """Return the unscaled frequencies, which every pass of a draft needs, in the same tensor each time."""
    with torch.inference_mode(False):  # training uses the tensor as well
        return theta ** -(torch.arange(0, head_dim, 2, device=device).float() / head_dim)


def is_dspark_folder(folder: Path) -> bool:
    """Return True if a folder's config describes a DSpark or DFlash draft."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        return False
    stored = read_object(path, REMEDY)
    names = stored.get("architectures")
    of_speculators = stored.get("speculators_model_type") in ("dspark", "dflash")
    return of_speculators or (isinstance(names, list) and len(names) == 1 and names[0] in (*_WITH_BIAS, WITHOUT_BIAS))


def read_dspark_config(folder: Path) -> DSparkConfig:
    """Read a draft's ``config.json``; raise UserError if a size is missing or a setting is not supported."""
    path = folder / CONFIG_NAME
    stored = read_object(path, REMEDY)
    try:
        if not is_dspark_folder(folder):
            raise UserError(f"architectures is {stored.get('architectures')}")
        return _config_of(stored)
    except (TypeError, ValueError) as error:
        raise UserError(f"{path} does not describe a DSpark draft ({error}): {REMEDY}") from error


def _config_of(stored: Mapping[str, Any]) -> DSparkConfig:
    of_speculators = stored.get("speculators_model_type")
    is_dspark = of_speculators == "dspark" if of_speculators else stored["architectures"][0] in _WITH_BIAS
    flat = dict(stored)
    for nested in ("transformer_layer_config", "dflash_config", "dspark_config"):
        flat |= stored.get(nested) or {}
    if not is_dspark and flat.get("markov_rank"):
        raise UserError(f"markov_rank is {flat['markov_rank']} in a DFlash draft: use 0")
    for key, values in _TAKEN.items():
        if flat.get(key) not in values:
            raise UserError(f"{key} is {flat[key]}")
    uses, types = flat.get("use_sliding_window"), flat.get("layer_types") or ()
    if (uses and not types) or (uses is False and SLIDING in types):
        raise UserError(f"use_sliding_window is {uses}, but layer_types is {list(types)}")
    if flat.get("draft_vocab_size") == flat.get("vocab_size"):
        flat["draft_vocab_size"] = None
    anchored = flat.get("sample_from_anchor", is_dspark and not of_speculators)
    config = DSparkConfig(
        **{
            **{field.name: flat[field.name] for field in fields(DSparkConfig) if field.name in flat},
            "target_layer_ids": _taps(flat),
            "sample_from_anchor": anchored,
            "layer_types": tuple(types),
            "is_causal": _is_causal(flat, bool(of_speculators)),
            "markov_head_type": flat.get("markov_head_type") or "vanilla",
            **_rotary(flat),
            "tree": (stored.get("headstart") or {}).get("tree", ()),
        }
    )
    counts_newest = not config.sample_from_anchor and (bool(of_speculators) or not is_dspark)
    return replace(config, block_size=config.block_size - 1) if counts_newest else config


def _is_causal(flat: Mapping[str, Any], of_speculators: bool) -> bool | None:
    """Return `DSparkConfig.is_causal`. Files of speculators say whether their sliding layers also see later slots."""
    if of_speculators:
        return False if flat.get("sliding_window_non_causal") else None
    given: bool | None = flat.get("causal") if flat.get("is_causal") is None else flat["is_causal"]
    return given


def _rotary(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the base and the scaling of the rotary embeddings, from the keys of transformers 5 or transformers 4."""
    rope = dict(flat.get("rope_parameters") or flat.get("rope_scaling") or {})
    if any(isinstance(value, Mapping) for value in rope.values()):
        raise UserError("the rotary embeddings differ between types of layers")
    theta = float(rope.pop("rope_theta", None) or flat.get("rope_theta") or DSparkConfig.rope_theta)
    if (share := rope.pop("partial_rotary_factor", None)) not in (None, 1.0):
        raise UserError(f"partial_rotary_factor is {share}")
    older = rope.pop("type", None)
    kind = rope.pop("rope_type", None) or older or "default"
    return {"rope_theta": theta, "rope_scaling": {} if kind == "default" else {**rope, "rope_type": kind}}


def _taps(flat: Mapping[str, Any]) -> tuple[int, ...]:
    """Return the layers (from 0) after which states are read. Configs store this list under different names."""
    for name in ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids"):
        if flat.get(name):
            return tuple(index - 1 for index in flat[name])
    return tuple(flat.get("target_layer_ids") or flat.get("dspark_target_layer_ids") or ())
