"""Training and export of Medusa heads and distilled drafts. This package imports decoding; decoding never imports this
package.

``__init__.pyi`` lists the public names. These names are imported on first use, so ``import trainer`` does not wait for
PyTorch.
"""

from decoding.lazy import lazy_names

__getattr__, __dir__, __all__ = lazy_names(__name__, __file__)
