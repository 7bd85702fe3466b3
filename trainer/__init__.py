"""Training and export of Medusa heads and distilled drafts. Imports decoding, never the reverse.

The public names load on first use, to keep ``import trainer`` from waiting for PyTorch; see ``__init__.pyi`` for types.
"""

from decoding.lazy import lazy_names

_HOMES = {"load_recipe": "trainer.recipe.reading", "run_recipe": "trainer.run.train"}
__all__ = list(_HOMES)
__getattr__, __dir__ = lazy_names(__name__, _HOMES)
