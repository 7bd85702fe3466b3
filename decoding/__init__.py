"""Speculative decoding for transformers models: drafters, acceptance rules, one loop, and its measurement.

``__init__.pyi`` has the public names and their types. They are imported on first use, to keep ``import decoding`` from
loading PyTorch.
"""

from decoding.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
