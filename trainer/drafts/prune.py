"""Narrower models: the residual channels, attention heads and feed-forward neurons that matter most on given texts.

After Minitron (2407.14679, section 2): importance is judged by activations on a small set of texts, without gradients.
Heads and neurons are judged here by what they write to the channels that stay, which takes the output projections into
account; Minitron looks at the activations alone.

All is measured on the whole model, also where only some of its layers are kept: its later layers then see what they
were trained to see. On storyteller-11m, layers 0, 4 and 7 at 192 of 320 channels, a draft so pruned starts at a forward
KL of 2.71, one measured on the three layers alone at 3.02.
"""

import copy
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from decoding.model.lm_head import capture_lm_head_input, last_position
from trainer.data.batch import Example, collate

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "granite")
"""Families whose names, norms and scalings are known here."""

_AXES: dict[str, tuple[str | None, str | None]] = {
    "embed_tokens": (None, "channels"),
    "lm_head": (None, "channels"),
    "q_proj": ("queries", "channels"),
    "k_proj": ("keys", "channels"),
    "v_proj": ("keys", "channels"),
    "o_proj": ("channels", "queries"),
    "gate_proj": ("neurons", "channels"),
    "up_proj": ("neurons", "channels"),
    "down_proj": ("channels", "neurons"),
    "q_norm": (None, None),
    "k_norm": (None, None),
}
"""Meanings of a weight's rows and columns; a bias has rows alone. All others are norms of channels."""


@dataclass(frozen=True)
class Sizes:
    """Sizes of a narrow model."""

    channels: int
    heads: int
    groups: int
    """Key-value heads."""
    neurons: int


@dataclass(frozen=True)
class Activity:
    """Activations inside a model by the names of its modules: sums over all tokens, in fp64."""

    sizes: dict[str, Float[Tensor, " channels"]]
    """|output| of each channel of a norm."""
    heads: dict[str, Float[Tensor, "heads size size"]]
    """Products of what each head writes, by the o_proj that reads it."""
    neurons: dict[str, Float[Tensor, " neurons"]]
    """Squares of what each neuron writes, by the down_proj that reads it."""


def narrow_sizes(config: PreTrainedConfig, width: int | None, inner_width: int | None) -> Sizes:
    """Return the sizes of a model with ``width`` residual channels and ``inner_width`` neurons a feed-forward layer.

    None: all channels; neurons in proportion to ``width``, rounded to a multiple of 8. Heads keep their size, their
    number falls with ``width``. ValueError, in the words of a recipe, for other families, sizes larger than the
    model's, and a width that is no whole number of heads.
    """
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"draft.init.from_target makes no {config.model_type} narrower: leave width and inner_width out, or give "
            f"a target of one of {', '.join(FAMILIES)}"
        )
    hidden, inner, heads = config.hidden_size, config.intermediate_size, config.num_attention_heads
    width = hidden if width is None else width
    if inner_width is None:
        inner_width = min(inner, max(8, round(inner * width / hidden / 8) * 8))
    for name, value, most in (("width", width, hidden), ("inner_width", inner_width, inner)):
        if not 1 <= value <= most:
            raise ValueError(f"draft.init.from_target.{name} is {value} but the target's is {most}: give 1 to {most}")
    groups_at = {
        hidden * count // heads: groups
        for count in range(1, heads + 1)
        if hidden * count % heads == 0 and (groups := _groups(count, heads, config.num_key_value_heads))
    }
    if width not in groups_at:
        nearest = sorted(sorted(groups_at, key=lambda possible: abs(possible - width))[:2])
        raise ValueError(
            f"draft.init.from_target.width is {width}, which is no whole number of the target's {heads} attention "
            f"heads, of {hidden} channels together: give {' or '.join(map(str, nearest))}"
        )
    return Sizes(width, width * heads // hidden, groups_at[width], inner_width)


def _groups(count: int, heads: int, groups: int) -> int | None:
    """Return the number of key-value heads for ``count`` heads, nearest to the old proportion; None if none fits."""
    fitting = [n for n in range(1, min(count, groups) + 1) if count % n == 0 and count // n <= heads // groups]
    return min(fitting, key=lambda n: abs(n * heads - groups * count), default=None)


# --- what is active -------------------------------------------------------------------------------------------------


@torch.no_grad()
def measured(model: PreTrainedModel, examples: Sequence[Example]) -> Activity:
    """Run the examples through the model, one at a time."""
    heads = model.config.get_text_config(decoder=True).num_attention_heads
    activity = Activity({}, {}, {})
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            part = name.rpartition(".")[2]
            if part == "o_proj":
                handle = module.register_forward_pre_hook(partial(_see_heads, activity, name, heads))
            elif part == "down_proj":
                handle = module.register_forward_pre_hook(partial(_see_neurons, activity, name))
            elif part.endswith("norm") and part not in _AXES:
                handle = module.register_forward_hook(partial(_see_norm, activity, name))
            else:
                continue
            hooks.callback(handle.remove)
        hooks.enter_context(capture_lm_head_input(model, last_position))
        for example in examples:
            model(**collate([example]).to(model.device).model_inputs(), use_cache=False)
    return activity


def _see_heads(activity: Activity, name: str, heads: int, module: nn.Module, args: tuple[Any, ...]) -> None:
    written = args[0].double().flatten(0, -2).unflatten(1, (heads, -1))
    _add(activity.heads, name, torch.einsum("thi,thj->hij", written, written))


def _see_neurons(activity: Activity, name: str, module: nn.Module, args: tuple[Any, ...]) -> None:
    _add(activity.neurons, name, args[0].double().flatten(0, -2).square().sum(0))


def _see_norm(activity: Activity, name: str, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
    _add(activity.sizes, name, output.double().flatten(0, -2).abs().sum(0))


def _add(sums: dict[str, Tensor], name: str, value: Tensor) -> None:
    sums[name] = sums[name] + value.cpu() if name in sums else value.cpu()


# --- what stays -----------------------------------------------------------------------------------------------------


def pruned(draft: PreTrainedModel, layers: Sequence[int], activity: Activity, sizes: Sizes) -> PreTrainedModel:
    """Return a draft made narrower, in its dtype on the CPU: the parts most active in its target stay.

    ``draft`` has the target's ``layers``, in this order, at their full width. Each norm's activity counts alike in the
    choice of channels. A norm over fewer channels writes sqrt(channels before / after) times as much to each: its
    readers get as much as before, and exactly the same where the channels left out are silent.
    """
    config = draft.config.get_text_config(decoder=True)
    activity = _of_layers(activity, layers)
    importance = torch.stack([size / size.mean() for size in activity.sizes.values()]).mean(0)
    narrow: PreTrainedModel = AutoModelForCausalLM.from_config(_narrow_config(config, sizes), dtype=draft.dtype)
    cut = _Cut(draft, narrow, sizes, activity, _best(importance, sizes.channels))
    weights = dict(draft.named_parameters())
    with torch.no_grad():
        for name, parameter in narrow.named_parameters():  # tied weights stand here once
            parameter.copy_(cut(name, weights[name]))
    narrow.generation_config = copy.deepcopy(draft.generation_config)
    return narrow


def _of_layers(activity: Activity, layers: Sequence[int]) -> Activity:
    """Return the activity of a model that has only these layers, by its own names."""

    def renamed(found: dict[str, Tensor]) -> dict[str, Tensor]:
        of_layers = {
            name.replace(f".layers.{layer}.", f".layers.{index}."): value
            for index, layer in enumerate(layers)
            for name, value in found.items()
            if f".layers.{layer}." in name
        }
        return of_layers | {name: value for name, value in found.items() if ".layers." not in name}

    return Activity(**{name: renamed(found) for name, found in vars(activity).items()})


def _narrow_config(config: PreTrainedConfig, sizes: Sizes) -> PreTrainedConfig:
    """Cut a config to these sizes; ``head_dim`` stays, or follows: the width is a whole number of heads."""
    narrow = copy.deepcopy(config)
    narrow.hidden_size, narrow.intermediate_size = sizes.channels, sizes.neurons
    narrow.num_attention_heads, narrow.num_key_value_heads = sizes.heads, sizes.groups
    narrow.rms_norm_eps *= config.hidden_size / sizes.channels  # beside a mean over fewer channels
    return narrow


def _best(importance: Float[Tensor, " all"], count: int) -> Int[Tensor, " kept"]:
    """Return the most important, in the order they stand in."""
    best: Tensor = importance.topk(count).indices.sort().values
    return best


class _Cut:
    """The part of each weight that stays, by name."""

    def __init__(
        self,
        model: PreTrainedModel,
        narrow: PreTrainedModel,
        sizes: Sizes,
        activity: Activity,
        channels: Int[Tensor, " kept"],
    ) -> None:
        config = model.config.get_text_config(decoder=True)
        self._channels = channels
        self._ratio = config.hidden_size / sizes.channels
        self._offset = 1.0 if config.model_type.startswith("gemma") else 0.0  # whose norms scale by 1 + weight
        self._embedding_factor = _embedding_scale(model) / _embedding_scale(narrow)
        lm_head: Any = model.get_output_embeddings()
        self._tied = lm_head.weight is model.get_input_embeddings().weight
        modules: dict[str, Any] = dict(model.named_modules())
        self._last_norm = next(name for name in activity.sizes if ".layers." not in name)
        self._normed_heads = any(name.endswith(".q_norm") for name in modules)
        self._kept: dict[str, dict[str, Tensor]] = {}
        for name, products in activity.heads.items():
            heads = _kept_heads(modules[name].weight[channels], products, config.num_key_value_heads, sizes)
            self._kept[_layer(name)] = {"channels": channels, **heads}
        for name, squares in activity.neurons.items():
            energy = modules[name].weight[channels].double().square().sum(0) * squares
            self._kept[_layer(name)]["neurons"] = _best(energy, sizes.neurons)

    def __call__(self, name: str, weight: Tensor) -> Tensor:
        module = name.rpartition(".")[0]
        part = module.rpartition(".")[2]
        if part not in _AXES:
            return self._norm(module, weight)
        kept = self._kept.get(_layer(module), {"channels": self._channels})
        for dimension, axis in enumerate(_AXES[part][: weight.ndim]):
            if axis is not None:
                weight = weight.index_select(dimension, kept[axis])
        if part == "embed_tokens":
            return weight * self._embedding_factor
        if part in ("q_proj", "k_proj") and self._normed_heads:
            weight = weight * self._ratio**0.5  # their norms have the same eps, which has grown
        return weight

    def _norm(self, name: str, weight: Tensor) -> Tensor:
        factor: float = self._ratio**0.5
        if self._tied and name == self._last_norm:  # the lm_head has the embeddings' factor
            factor /= self._embedding_factor
        return (weight[self._channels] + self._offset) * factor - self._offset


def _layer(name: str) -> str:
    """Return ``model.layers.3`` of ``model.layers.3.mlp.down_proj``."""
    return ".".join(name.split(".")[:-2])


def _kept_heads(
    o_proj: Float[Tensor, "channels written"], products: Float[Tensor, "heads size size"], groups: int, sizes: Sizes
) -> dict[str, Tensor]:
    """Return the rows of queries, and of keys and values, of the heads that write most to the channels.

    First the key-value heads whose queries write most together, then of each the queries that write most.
    """
    heads, size, _ = products.shape
    readers = o_proj.double().unflatten(1, (heads, size))
    energy = (torch.einsum("chi,hij->chj", readers, products) * readers).sum((0, 2)).view(groups, -1)
    best_groups = _best(energy.sum(1), sizes.groups)
    inside = torch.stack([_best(energy[group], sizes.heads // sizes.groups) for group in best_groups])
    best_heads = (best_groups[:, None] * energy.shape[1] + inside).flatten()
    rows = torch.arange(size)
    return {
        "queries": (best_heads[:, None] * size + rows).flatten(),
        "keys": (best_groups[:, None] * size + rows).flatten(),
    }


def _embedding_scale(model: PreTrainedModel) -> float:
    """Return the factor that a model multiplies its embeddings by: Gemma, by the square root of its width."""
    return float(getattr(model.get_input_embeddings(), "embed_scale", 1.0))
