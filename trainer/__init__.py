"""Training and export of Medusa heads and distilled drafts. Imports decoding, never the reverse.

``__init__.pyi`` lists the public names. They are imported on first use, so ``import trainer`` does not wait for
PyTorch.
"""

from decoding.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
