"""Speculative decoding for transformers models: drafters, acceptance rules, one loop, and its measurement.

Names are imported on first use, to keep ``import decoding`` from loading PyTorch. ``__init__.pyi`` has their types.
"""

from importlib import import_module
from typing import Any

_HOMES = {
    "Conversation": "decoding.conversation",
    "DecodingConfig": "decoding.generate",
    "Engine": "decoding.engine",
    "HeadstartModel": "decoding.headstart_model",
    "SamplingConfig": "decoding.rules.sampling",
    "speculate": "decoding.speculation",
}
__all__ = list(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
