"""The served model of the commands that ask one."""

import importlib.util
from collections.abc import Sequence
from typing import TYPE_CHECKING

from decoding.errors import UserError

if TYPE_CHECKING:
    from trainer.servers.client import ServedModel


def check_endpoint(endpoint: str | Sequence[str] | None, model: str | None) -> None:
    """Raise UserError for an address without a model's name, a name without an address, and a missing `openai`."""
    if endpoint is None:
        if model is not None:
            raise UserError(f"--model {model} names a model of an --endpoint", "give both, or neither")
        return
    if model is None:
        raise UserError("--endpoint serves models by name", "say which with --model")
    if importlib.util.find_spec("openai") is None:
        raise UserError("an --endpoint is asked by the openai package", "pip install 'headstart[endpoint]'")


def connect(endpoint: str, model: str) -> "ServedModel":
    """Return the connection to the server, which sends nothing yet; ValueError for an address that cannot work."""
    from trainer.servers.client import ServedModel
    from trainer.servers.connection import Endpoint

    return ServedModel(Endpoint(address=endpoint, model=model))
