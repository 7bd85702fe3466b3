"""Speculative decoding for transformers models: drafters, acceptance rules, one loop, and its measurement.

Names are imported on first use, to keep ``import decoding`` from loading PyTorch. ``__init__.pyi`` has their types.
"""

from decoding.lazy import lazy_names

_HOMES = {
    "Conversation": "decoding.conversation",
    "DecodingConfig": "decoding.generate",
    "Engine": "decoding.engine",
    "HeadstartModel": "decoding.headstart_model",
    "SamplingConfig": "decoding.rules.sampling",
    "speculate": "decoding.speculation",
}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
