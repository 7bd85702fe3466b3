"""Benchmark stand-ins: a model that computes what a small trained one computes, at the cost of a larger one.

A small target can be trained anywhere, but its pass is so cheap that drafting has little to save. Widened and deepened,
the same target behaves as before (same texts, same acceptance) while a pass costs what a larger model's costs. Every
figure measured so must say so: the speed is the larger size's, the behaviour the small model's.

The residual stream's new part is zero throughout, so RMSNorm is kept by weight × sqrt(H/H') and eps × H/H' (H and H':
the widths before and after), and an added layer writes nothing. H'/H is a power of 4, so that both factors are powers
of 2, exact in every dtype. What is read but cannot change the result is random and nowhere zero, so that it costs its
real price; only what writes to the residual stream (embeddings, the output projections of attention and MLP) is padded
with zeros. Growing a network without changing its function is Net2Net's idea (1511.05641).

``python -m decoding.measure.widen SOURCE OUTPUT --parameters 150e6`` writes such a model to a folder.
"""

import argparse
import copy
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.initialization import no_init_weights

from decoding.model.heads import MedusaHeads
from decoding.model.loading import DTYPES, load_model, load_tokenizer, parse_dtype

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
WIDTHS = (1, 4, 16)
"""The factors `widened_to` chooses from."""

_WRITES_RESIDUAL = ("embed_tokens", "o_proj", "down_proj")
_WEIGHT_SIZE = 0.02
_BLOCK = 1_048_573
"""How many random numbers are made. A prime, so that a matrix's rows do not start alike."""


def widened(
    model: PreTrainedModel,
    width: int = 4,
    extra_layers: int = 0,
    device: torch.device | str | None = None,
    generator: torch.Generator | None = None,
) -> PreTrainedModel:
    """A new model with ``model``'s function, ``width`` times its width and ``extra_layers`` more layers.

    Hidden size, attention heads, key-value heads and intermediate size grow by ``width``, a power of 4; head size and
    vocabulary stay; the extra layers are spread evenly between the real ones. Logits differ from ``model``'s by the
    order of summation only. The lm_head reads ``model``'s own hidden state followed by zeros: see `widened_heads`.
    Built in the model's dtype straight on ``device`` (the model's unless given); the padding comes from ``generator``
    (on the CPU). The config says what it is under ``stand_in``.

    Raises ValueError for another factor, another family, or weights that are not plain ones of their family.
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
    """`widened` to at least ``parameters``, and what it is: the narrowest that needs no more than ``max_layers``.

    Raises ValueError where the model has as many already, or no width in `WIDTHS` reaches as many.
    """
    have = model.num_parameters()
    _refuse_unfit(model, 1, 0)
    if have >= parameters:
        raise ValueError(f"the model has {have:,} parameters already: ask for more than that, not for {parameters:,}")
    layers = model.config.num_hidden_layers
    for width in WIDTHS:
        smallest = _count(model.config, width, 0)
        per_layer = _count(model.config, width, 1) - smallest
        extra_layers = max(0, math.ceil((parameters - smallest) / per_layer))
        if layers + extra_layers <= max(max_layers, layers):
            wide = widened(model, width, extra_layers, device, generator)
            return wide, dict(wide.config.stand_in)
    most = smallest + per_layer * max(0, max_layers - layers)
    raise ValueError(f"{max_layers} layers make {most:,} parameters at most, not {parameters:,}: raise max_layers")


def widened_heads(heads: MedusaHeads, width: int, generator: torch.Generator | None = None) -> MedusaHeads:
    """Heads for a target `widened` by ``width`` that predict what ``heads`` predict for the target itself.

    They read the hidden state and ignore the zeros behind it, at the cost of heads of that size. ValueError for
    sequential heads, whose unit-size embeddings the zeros would change.
    """
    _refuse_factor(width)
    if heads.config.sequential:
        raise ValueError("sequential heads cannot be widened: give heads with sequential=false")
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
                parameter[heads.config.hidden_size :] = 0  # a block's new outputs: what follows must read zeros
            _paste(parameter, real[name])
    return wide.eval()


class _Noise:
    """Numbers of magnitude 0.5 to 1.5, none of them zero: made once, then laid over tensors at the speed of a copy."""

    def __init__(self, dtype: torch.dtype, device: torch.device, generator: torch.Generator | None) -> None:
        self._generator = generator or torch.Generator().manual_seed(0)
        magnitude = 0.5 + torch.rand(_BLOCK, generator=self._generator)
        sign = 2 * torch.randint(2, (_BLOCK,), generator=self._generator) - 1
        self._block = (magnitude * sign).to(device, dtype)

    def fill(self, tensor: Tensor, size: float) -> None:
        """Overwrite a contiguous tensor with ``size`` times the numbers, from a random one on; with 0: zeros."""
        if not size:
            tensor.zero_()
            return
        start = int(torch.randint(_BLOCK, (), generator=self._generator))
        block = (self._block * size).roll(-start)
        for part in tensor.view(-1).split(_BLOCK):
            part.copy_(block[: len(part)])


def _paste(wide: Tensor, real: Tensor, factor: float = 1.0) -> None:
    """The real weights, times ``factor``, into the first rows and columns of the wide ones."""
    wide[tuple(slice(length) for length in real.shape)].copy_(real * factor)


def _sizes(name: str, family: str, width: int) -> tuple[float, float]:
    """How large a parameter's padding is (0: it must be zero), and the factor of its real part.

    Qwen3 also normalises each query and key head, whose width stays but whose eps shrinks with the config's only one.
    Queries and keys smaller by sqrt(1/width) make up for it.
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
    """Where the real layers stand among all, the first of them first: {index among all: index among the real}."""
    return {index * (layers + extra_layers) // layers: index for index in range(layers)}


def _source_name(name: str, real_layers: dict[int, int]) -> str | None:
    """What a wide parameter is called in the real model; None for an extra layer's."""
    if not name.startswith("model.layers."):
        return name
    index, rest = name.removeprefix("model.layers.").split(".", 1)
    return f"model.layers.{real_layers[int(index)]}.{rest}" if int(index) in real_layers else None


def _widened_config(config: PreTrainedConfig, width: int, extra_layers: int) -> PreTrainedConfig:
    """The config with everything grown; an extra layer attends like the real one before it."""
    wide = copy.deepcopy(config)
    for name in ("hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size"):
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
    """The parameters a model of this config has, none of them allocated."""
    with torch.device("meta"):
        model = _new_model(copy.deepcopy(config), torch.float32)
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def _count(config: PreTrainedConfig, width: int, extra_layers: int) -> int:
    return sum(shape.numel() for shape in _shapes(_widened_config(config, width, extra_layers)).values())


def _refuse_factor(width: int) -> None:
    root = math.isqrt(max(width, 0))
    if width < 1 or root * root != width or root & (root - 1):
        raise ValueError(
            f"width is {width}: give a power of 4 (1, 4, 16, 64), whose square root scales the norms without rounding"
        )


def _refuse_unfit(model: PreTrainedModel, width: int, extra_layers: int) -> None:
    _refuse_factor(width)
    if extra_layers < 0:
        raise ValueError(f"extra_layers is {extra_layers}: give 0 or more")
    family = model.config.model_type
    if family not in FAMILIES:
        raise ValueError(f"{family} cannot be widened: give a model of one of {', '.join(FAMILIES)}")
    expected = _shapes(model.config)
    found = {name: parameter.shape for name, parameter in model.named_parameters() if parameter.is_floating_point()}
    if other := sorted({name for name, _ in expected.items() ^ found.items()}):
        raise ValueError(
            f"{', '.join(other[:3])}{', …' if other[3:] else ''}: not what a plain {family} of this config has; "
            "give a causal LM without adapters or quantisation"
        )


def _describe(model: PreTrainedModel, wide: PreTrainedModel, width: int, extra_layers: int) -> dict[str, Any]:
    """What a stand-in is, for its config and for every report of figures measured with it."""
    have, parameters = model.num_parameters(), wide.num_parameters()
    return {
        "width": width,
        "extra_layers": extra_layers,
        "hidden_size": wide.config.hidden_size,
        "layers": wide.config.num_hidden_layers,
        "source_parameters": have,
        "parameters": parameters,
        "note": (
            f"benchmark stand-in: computes what a model of {_short(have)} parameters computes, "
            f"at the cost of one of {_short(parameters)}"
        ),
    }


def _short(count: int) -> str:
    """4.5K, 11.2M, 1.0B"""
    for size, letter in ((1e9, "B"), (1e6, "M")):
        if count >= 0.99995 * size:
            return f"{count / size:.1f}{letter}"
    return f"{count / 1e3:.1f}K"


def _readme(source: str, stand_in: dict[str, Any]) -> str:
    return (
        f"# Benchmark stand-in for {source}\n\n"
        f"{stand_in['note'][0].upper()}{stand_in['note'][1:]}: width × {stand_in['width']}, "
        f"{stand_in['extra_layers']} extra layers, the added weights read but without influence.\n"
        "Use it to time decoding at that size, and label every figure: the speed is the larger size's, the texts and "
        "the acceptance are the small model's. It knows nothing that the small model does not know.\n"
    )


def write_stand_in(
    source: str, output: Path, parameters: int, heads: Path | None = None, dtype: torch.dtype = torch.bfloat16
) -> dict[str, Any]:
    """`widened_to`, from a folder or hub id to a folder with tokenizer and README; heads go to ``output/heads``."""
    if output.exists() and any(output.iterdir()):
        raise ValueError(f"{output} is not empty: give a new folder")
    wide, stand_in = widened_to(load_model(source, dtype), parameters)
    wide.save_pretrained(output)
    load_tokenizer(source).save_pretrained(output)
    (output / "README.md").write_text(_readme(Path(source).name, stand_in))
    if heads is not None:
        widened_heads(MedusaHeads.from_pretrained(heads, dtype), stand_in["width"]).save_pretrained(output / "heads")
    return stand_in


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m decoding.measure.widen", description=__doc__.splitlines()[0])
    parser.add_argument("source", help="hub id or folder of a causal LM")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--parameters", type=float, required=True, help="at least as many, for instance 150e6")
    parser.add_argument("--heads", type=Path, help="Medusa heads of the source, to be widened too (OUTPUT/heads)")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    given = parser.parse_args(arguments)
    try:
        stand_in = write_stand_in(
            given.source, given.output, int(given.parameters), given.heads, parse_dtype(given.dtype)
        )
    except ValueError as error:
        sys.exit(str(error))
    print(f"{given.output}: {stand_in['note']}")


if __name__ == "__main__":
    main()
