"""Speculative decoding for transformers models: drafters, acceptance rules, one decoding loop, and measurements.

``__init__.pyi`` lists the public names and their types. Each name is imported on first use, so ``import decoding`` does
not load PyTorch.
"""

from decoding.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
