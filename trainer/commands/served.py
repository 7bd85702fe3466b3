"""The served model of the commands that ask one, by the options that they share."""

import importlib.util
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from trainer.servers.client import ServedModel
    from trainer.servers.connection import Endpoint


class Asking(Protocol):
    """Options that say how a served model is asked."""

    @property
    def endpoint(self) -> str | list[str] | None: ...

    @property
    def model(self) -> str | None: ...

    @property
    def concurrency(self) -> int: ...

    @property
    def timeout(self) -> float: ...


def check_endpoint(options: Asking) -> None:
    """Raise ValueError for an address without a model's name, a name without an address, and a missing `openai`."""
    if options.endpoint is None:
        if options.model is not None:
            raise ValueError(f"--model {options.model} names a model of an --endpoint: give both, or neither")
        return
    if options.model is None:
        raise ValueError("--endpoint serves models by name: say which with --model")
    if importlib.util.find_spec("openai") is None:
        raise ValueError("an --endpoint is asked by the openai package: pip install 'headstart[endpoint]'")


def connect(options: Asking) -> "ServedModel":
    """Return the connection to the server, which sends nothing yet; ValueError for an address that cannot work."""
    from trainer.servers.client import ServedModel

    assert isinstance(options.endpoint, str), "checked by check_endpoint"
    return ServedModel(endpoint_at(options.endpoint, options))


def endpoint_at(address: str, options: Asking) -> "Endpoint":
    """Return the endpoint at an address, with the options' settings of requests."""
    from trainer.servers.connection import Endpoint

    assert options.model is not None, "checked by check_endpoint"
    return Endpoint(address=address, model=options.model, concurrency=options.concurrency, timeout=options.timeout)
