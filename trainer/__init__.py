"""Training and export of Medusa heads and distilled drafts. Imports decoding, never the reverse.

``__init__.pyi`` has the public names, which load on first use, to keep ``import trainer`` from waiting for PyTorch.
"""

from decoding.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
