"""Names of Medusa heads' tensors, ours and those of other programs, in one table for all who write or read them."""

import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, NamedTuple


class Names(NamedTuple):
    """Names in one format: of a layer's weight and bias, and of a head's output layer. Numbers count from 0."""

    layer: str
    output: str


OURS = Names("heads.{head}.blocks.{layer}.linear.{part}", "heads.{head}.lm_head.weight")
VLLM = Names("blocks.{head}.layers.{layer}.{part}", "lm_heads.{head}.weight")
"""vLLM's ``MedusaModel``, which ignores every other name in silence."""
MEDUSA = Names("{head}.{layer}.linear.{part}", "{head}.{layer}.weight")
"""FasterDecoding's Medusa, TensorRT-LLM and Text Generation Inference; the output layer is a head's last."""
MEDUSA_PREFIX = re.compile(r"medusa_heads?\.")
"""Start of such names in checkpoints that hold the target too, and in those of some trainers."""


class Place(NamedTuple):
    """A tensor's place in the heads. ``part``: weight or bias of a layer, or output.

    ``layer``: for an output layer the number in its name, None where its name has none.
    """

    head: int
    layer: int | None
    part: str


def place_in(names: Names, name: str) -> Place | None:
    """Return the place that a tensor's name means in a format; None for any other name."""
    for pattern, part in zip(_patterns(names), (None, "output"), strict=True):
        if found := pattern.fullmatch(name):
            layer = found.groupdict().get("layer")
            return Place(int(found["head"]), None if layer is None else int(layer), part or found["part"])
    return None


def name_in(names: Names, place: Place, num_layers: int = 0) -> str:
    """Return the name of a place in a format; ``num_layers`` is a head's, for a format that counts its output layer."""
    if place.part == "output":
        return names.output.format(head=place.head, layer=num_layers)
    return names.layer.format(**place._asdict())


def vllm_name(name: str) -> str:
    """Translate our name of a tensor into vLLM's."""
    return name_in(VLLM, _own_place(name))


def medusa_name(name: str, num_layers: int) -> str:
    """Translate our name of a tensor into that of FasterDecoding's files."""
    return name_in(MEDUSA, _own_place(name), num_layers)


def read_by_vllm(name: str) -> str:
    """Return the name under which vLLM looks for a tensor of this name: it reads FasterDecoding's names as well."""
    name = name.replace("medusa_heads.", "")
    place = place_in(MEDUSA, name)
    return name if place is None else name_in(VLLM, place)


def config_read_by_vllm(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as vLLM's ``MedusaConfig`` reads it: keys with "num" and "heads" or "layers" are renamed."""
    renamed = {}
    for key, value in stored.items():
        heads, layers = "num" in key and "heads" in key, "num" in key and "layers" in key
        renamed["num_heads" if heads else "num_hidden_layers" if layers else key] = value
    return renamed


def _own_place(name: str) -> Place:
    place = place_in(OURS, name)
    if place is None:
        raise AssertionError(f"{name} is of heads for which other programs have no place")
    return place


@lru_cache
def _patterns(names: Names) -> tuple[re.Pattern[str], ...]:
    number = "0|[1-9][0-9]{0,3}"
    groups = {"head": f"(?P<head>{number})", "layer": f"(?P<layer>{number})", "part": "(?P<part>weight|bias)"}
    return tuple(re.compile(name.replace(".", r"\.").format(**groups)) for name in names)
