"""Export of trained heads and drafts in the formats that servers load, with a model card: `export`, and `push`.

The names are imported when they are first used, so that ``import trainer.export`` does not wait for PyTorch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.export.exporter import ExportSummary, export
    from trainer.export.upload import push

_HOMES = {"ExportSummary": "exporter", "export": "exporter", "push": "upload"}
__all__ = ["ExportSummary", "export", "push"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"trainer.export.{_HOMES[name]}"), name)
