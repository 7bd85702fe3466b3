"""A server on the loopback that completes prompts of token ids with an engine of this process, which may be faulty."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from scripted_endpoint import Reply, Request, serve

from decoding.generate import DecodingConfig, Engine
from decoding.rules.sampling import SamplingConfig

NAME = "loopback"
"""Name of the served model."""


@contextmanager
def served(engine: Engine, eos_token_ids: tuple[int, ...] = (), heat: float = 1.0) -> Iterator[str]:
    """Serve the engine until the end of the context; yield the address.

    ``heat`` multiplies the requested temperature; any value except 1 is a fault.
    """
    turn = threading.Lock()  # because of the hooks on the model, only one pass may run at a time

    def script(request: Request) -> Reply:
        with turn:
            return 200, _answer(engine, request.body, eos_token_ids, heat)

    with serve(script) as endpoint:
        yield endpoint.address


def _answer(engine: Engine, asked: dict[str, Any], eos_token_ids: tuple[int, ...], heat: float) -> dict[str, Any]:
    sampling = SamplingConfig(temperature=heat * asked["temperature"], top_p=asked["top_p"])
    config = DecodingConfig(asked["max_tokens"], sampling, eos_token_ids=eos_token_ids, seed=asked["seed"])
    tokens = engine.decode(asked["prompt"], config).tokens
    ended = bool(tokens) and tokens[-1] in eos_token_ids
    choice = {"index": 0, "text": "", "token_ids": list(tokens), "finish_reason": "stop" if ended else "length"}
    return {"id": "1", "object": "text_completion", "created": 0, "model": NAME, "choices": [choice]}
