"""Benchmark stand-ins: a model with the outputs of a small trained model, at the cost of a larger one.

A small target can be trained anywhere, but its pass is so cheap that drafting saves little time. Widened and deepened,
it writes the same texts with the same acceptance, while a pass costs as much as a larger model's pass. Every figure
measured with a stand-in must say so: it has the speed of the larger size and the behaviour of the small model.

The added part of the residual stream is always zero, and an added layer adds zeros to the stream. RMSNorm is preserved
by weight × sqrt(H/H') and eps × H/H' (H and H': the hidden sizes before and after). H'/H is a power of 4, so the two
factors are powers of 2, exact in every dtype. Weights that write to the residual stream (embeddings, the output
projections of attention and MLP) are padded with zeros. All other added weights cannot change the result; they are
random and never zero, to cost as much as real ones. Growing a network without changing its function follows Net2Net
(1511.05641).
"""

import copy
import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.heads import MedusaHeads

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
WIDTHS = (1, 4, 16)
"""Width factors tried by `widened_to`, in this order."""

_WIDER = ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size")
_WRITES_RESIDUAL = ("embed_tokens", "o_proj", "down_proj", "fc")
_WEIGHT_SIZE = 0.02
_BLOCK = 1_048_573
"""Count of random numbers; a prime, so rows of a matrix start at different numbers."""


def widened(
    model: PreTrainedModel,
    width: int = 4,
    extra_layers: int = 0,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> PreTrainedModel:
    """Make a model that computes the function of ``model`` with ``width`` times the width and ``extra_layers`` more
    layers.

    Hidden size, attention heads, key-value heads and intermediate size grow by ``width``, a power of 4. Head size and
    vocabulary stay. The extra layers are spread evenly between the real ones. The logits differ from the logits of
    ``model`` only by the order of summation. The lm_head reads ``model``'s hidden state followed by zeros (see
    `widened_heads`). The model is built in the same dtype directly on ``device`` (None: the model's device);
    ``generator`` (on the CPU) draws the padding. ``config.stand_in`` describes the result.

    Raises ValueError for another width, a family not in `FAMILIES`, or parameters that a plain model does not have.
    """
    _refuse_unfit(model, width, extra_layers)
    place = torch.device(device) if device is not None else model.device
    config = _widened_config(model.config, width, extra_layers)
    with torch.device(place), no_init_weights():
        wide = _new_model(config, model.dtype)
    wide.tie_weights()
    wide.generation_config = copy.deepcopy(model.generation_config)
    noise = _Noise(model.dtype, place, generator)
    real_layers = _real_layers(model.config.num_hidden_layers, extra_layers)
    real = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            size, factor = _sizes(name, config.model_type, width)
            noise.fill(parameter, size * factor)
            if (source := _source_name(name, real_layers)) is not None:
                _paste(parameter, real[source], factor)
    wide.config.stand_in = _describe(model, wide, width, extra_layers)
    wide.eval()
    return wide


def widened_to(
    model: PreTrainedModel,
    parameters: int,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
    max_layers: int = 64,
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Make the narrowest `widened` model with at least ``parameters`` parameters and at most ``max_layers`` layers.

    Returns the model and its description (``config.stand_in``). Raises ValueError if the model already has that many
    parameters, or if no width in `WIDTHS` reaches them.
    """
    have = model.num_parameters()
    _refuse_unfit(model, 1, 0)
    if have >= parameters:
        raise ValueError(f"the model already has {have:,} parameters: use a number above that, not {parameters:,}")
    layers = model.config.num_hidden_layers
    for width in WIDTHS:
        smallest = _count(model.config, width, 0)
        per_layer = _count(model.config, width, 1) - smallest
        extra_layers = max(0, math.ceil((parameters - smallest) / per_layer))
        if layers + extra_layers <= max(max_layers, layers):
            wide = widened(model, width, extra_layers, device, generator)
            return wide, dict(wide.config.stand_in)
    most = smallest + per_layer * max(0, max_layers - layers)
    raise ValueError(f"{max_layers} layers have at most {most:,} parameters, not {parameters:,}: raise max_layers")


def widened_heads(heads: MedusaHeads, width: int, generator: torch.Generator | None = None) -> MedusaHeads:
    """Make heads for a target `widened` by ``width``, with the predictions of ``heads`` on the original target.

    They read the hidden state, ignore the zeros after it, and cost as much as trained heads of the wide size. Raises
    ValueError unless ``width`` is a power of 4.
    """
    _refuse_factor(width)
    first = next(heads.parameters())
    config = replace(heads.config, hidden_size=heads.config.hidden_size * width)
    with torch.device(first.device), no_init_weights():
        wide = MedusaHeads(config).to(first.dtype)
    noise = _Noise(first.dtype, first.device, generator)
    real = dict(heads.named_parameters())
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            noise.fill(parameter, _WEIGHT_SIZE)
            if ".blocks." in name:
                parameter[heads.config.hidden_size :] = 0  # the next block must read zeros here
            _paste(parameter, real[name])
    return wide.eval()


def widened_dspark(draft: DSparkDraft, target: CausalLM, width: int) -> DSparkDraft:
    """Make a DSpark draft for ``target``, `widened` by ``width``, that drafts like ``draft`` on the original target.

    Except for the rank of its bias, it costs as much as a draft trained for the wide target.
    """
    _refuse_factor(width)
    old, first = draft.config, draft.fc.weight
    real = _real_layers(old.num_target_layers, target.num_layers - old.num_target_layers)
    config = replace(
        old,
        **{name: getattr(old, name) * width for name in _WIDER},
        rms_norm_eps=old.rms_norm_eps / width,
        target_layer_ids=tuple(index for index, layer in real.items() if layer in old.target_layer_ids),
        num_target_layers=target.num_layers,
        enable_confidence_head=False,
    )
    with torch.device(first.device), no_init_weights():
        wide = DSparkDraft(config).to(first.dtype)
    noise, trained = _Noise(first.dtype, first.device, None), dict(draft.named_parameters())
    with torch.no_grad():
        for name, parameter in wide.named_parameters():
            size, factor = _sizes(name, "qwen3", width)
            noise.fill(parameter, size * factor)
            if name != "fc.weight":
                _paste(parameter, trained[name], factor)
        for tap in range(len(old.target_layer_ids)):
            columns = trained["fc.weight"][:, tap * old.hidden_size : (tap + 1) * old.hidden_size]
            _paste(wide.fc.weight[:, tap * config.hidden_size :], columns)
    return wide.requires_grad_(False).eval()


class _Noise:
    """Random numbers with magnitudes from 0.5 to 1.5 and either sign, drawn once and copied into tensors."""

    def __init__(self, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> None:
        self._generator = generator or torch.Generator().manual_seed(0)
        magnitude = 0.5 + torch.rand(_BLOCK, generator=self._generator)
        sign = 2 * torch.randint(2, (_BLOCK,), generator=self._generator) - 1
        self._block = (magnitude * sign).to(device, dtype)

    def fill(self, tensor: Tensor, size: float) -> None:
        """Overwrite a contiguous tensor with ``size`` times the numbers, starting at a random one; if ``size`` is 0,
        overwrite it with zeros.
        """
        if not size:
            tensor.zero_()
            return
        start = int(torch.randint(_BLOCK, (), generator=self._generator))
        block = (self._block * size).roll(-start)
        for part in tensor.view(-1).split(_BLOCK):
            part.copy_(block[: len(part)])


def _paste(wide: Tensor, real: Tensor, factor: float = 1.0) -> None:
    """Write the real weights, times ``factor``, into the first rows and columns of the wide weights."""
    wide[tuple(slice(length) for length in real.shape)].copy_(real * factor)


def _sizes(name: str, family: str, width: int) -> tuple[float, float]:
    """Return the size of the numbers that pad a parameter (0: zeros), and the factor by which its real part is
    multiplied.

    Qwen3 also normalises each query and key head. The size of these heads stays, but the config has only one eps, and
    that shrinks. Scaling queries and keys by sqrt(1/width) compensates for this.
    """
    part = name.split(".")[-2]
    if part in _WRITES_RESIDUAL:
        return 0.0, 1.0
    if part in ("q_norm", "k_norm"):
        return 1.0, 1.0
    if part.endswith("norm"):
        return 1.0, 1 / math.isqrt(width)
    return _WEIGHT_SIZE, 1 / math.isqrt(width) if family == "qwen3" and part in ("q_proj", "k_proj") else 1.0


def _real_layers(layers: int, extra_layers: int) -> dict[int, int]:
    """Map the index of each real layer in the wide model to its index in the real model; layer 0 is real."""
    return {index * (layers + extra_layers) // layers: index for index in range(layers)}


def _source_name(name: str, real_layers: dict[int, int]) -> str | None:
    """Return the real model's name of a wide parameter; None if the parameter belongs to an extra layer."""
    if not name.startswith("model.layers."):
        return name
    index, rest = name.removeprefix("model.layers.").split(".", 1)
    return f"model.layers.{real_layers[int(index)]}.{rest}" if int(index) in real_layers else None


def _widened_config(config: PreTrainedConfig, width: int, extra_layers: int) -> PreTrainedConfig:
    """Return the config of the wide model; extra layers have the attention type of the previous real layer."""
    wide = copy.deepcopy(config)
    for name in _WIDER:
        setattr(wide, name, getattr(config, name) * width)
    wide.num_hidden_layers += extra_layers
    wide.rms_norm_eps /= width
    if types := getattr(config, "layer_types", None):
        real_layers = _real_layers(len(types), extra_layers)
        wide.layer_types = []
        for index in range(wide.num_hidden_layers):
            wide.layer_types.append(types[real_layers[index]] if index in real_layers else wide.layer_types[-1])
    return wide


def _new_model(config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        config, dtype=dtype, attn_implementation=config._attn_implementation
    )
    return model


def _shapes(config: PreTrainedConfig) -> dict[str, torch.Size]:
    """Return the shape of every parameter of a model with this config, without allocating memory."""
    with torch.device("meta"):
        model = _new_model(copy.deepcopy(config), torch.float32)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _count(config: PreTrainedConfig, width: int, extra_layers: int) -> int:
    return sum(shape.numel() for shape in _shapes(_widened_config(config, width, extra_layers)).values())


def _refuse_factor(width: int) -> None:
    root = math.isqrt(max(width, 0))
    if width < 1 or root * root != width or root & (root - 1):
        raise ValueError(
            f"width is {width}: use a power of 4 (1, 4, 16, 64), so that its square root scales norms without rounding"
        )


def _refuse_unfit(model: PreTrainedModel, width: int, extra_layers: int) -> None:
    _refuse_factor(width)
    if extra_layers < 0:
        raise ValueError(f"extra_layers is {extra_layers}: use 0 or more")
    family = model.config.model_type
    if family not in FAMILIES:
        raise ValueError(f"{family} cannot be widened: use a model from {', '.join(FAMILIES)}")
    expected = _shapes(model.config)
    found = {name: parameter.shape for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    if other := sorted({name for name, _ in expected.items() ^ found.items()}):
        raise ValueError(
            f"{', '.join(other[:3])}{', …' if other[3:] else ''} differ from a plain {family} with this config: "
            "use a causal LM without adapters or quantisation"
        )


def _describe(model: PreTrainedModel, wide: PreTrainedModel, width: int, extra_layers: int) -> dict[str, Any]:
    """Describe a stand-in, for its config and for every report of figures measured with it."""
    have, parameters = model.num_parameters(), wide.num_parameters()
    return {
        "width": width,
        "extra_layers": extra_layers,
        "hidden_size": wide.config.hidden_size,
        "layers": wide.config.num_hidden_layers,
        "source_parameters": have,
        "parameters": parameters,
        "note": (
            f"benchmark stand-in: computes the function of a model of {_short(have)} parameters "
            f"at the cost of {_short(parameters)}"
        ),
    }


def _short(count: int) -> str:
    """Format a count of parameters: 4.5K, 11.2M, 1.0B."""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if count >= 0.99995 * size:
            return f"{count / size:.1f}{letter}"
    return f"{count / 1e3:.1f}K"
