"""Names of Medusa heads' tensors and settings in vLLM, for those who write them and those who compare them."""

import re
from collections.abc import Mapping
from typing import Any

_LAYER = re.compile(r"heads\.(\d+)\.blocks\.(\d+)\.linear\.(weight|bias)")
_OUTPUT = re.compile(r"heads\.(\d+)\.lm_head\.weight")


def vllm_name(name: str) -> str:
    """Translate our name of a tensor into that of vLLM's ``MedusaModel``, which ignores every other name in silence."""
    if layer := _LAYER.fullmatch(name):
        return "blocks.{}.layers.{}.{}".format(*layer.groups())
    output = _OUTPUT.fullmatch(name)
    assert output is not None, f"{name} is of heads that vLLM has no place for"
    return f"lm_heads.{output[1]}.weight"


def config_read_by_vllm(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as vLLM's ``MedusaConfig`` reads it: keys with "num" and "heads" or "layers" are renamed."""
    renamed = {}
    for key, value in stored.items():
        heads, layers = "num" in key and "heads" in key, "num" in key and "layers" in key
        renamed["num_heads" if heads else "num_hidden_layers" if layers else key] = value
    return renamed
