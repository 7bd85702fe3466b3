"""A server on the loopback that completes prompts of token ids with an engine of this process, right or faulty."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.rules.sampling import SamplingConfig

NAME = "loopback"
"""Name of the model that it serves."""


@contextmanager
def served(engine: Engine, eos_token_ids: tuple[int, ...] = (), heat: float = 1.0) -> Iterator[str]:
    """Serve the engine until the end of the context; yields the address.

    ``heat`` multiplies the temperature that is asked for: other than 1 it is a fault.
    """
    turn = threading.Lock()  # hooks on the model serve one pass at a time

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with turn:
                answer = _answer(engine, asked, eos_token_ids, heat)
            sent = json.dumps(answer).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(sent)))
            self.end_headers()
            self.wfile.write(sent)

        def log_message(self, format: str, *args: object) -> None:
            """Keep silent."""

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # connections that come at once; five by default, and more are reset

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/v1"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _answer(engine: Engine, asked: dict[str, Any], eos_token_ids: tuple[int, ...], heat: float) -> dict[str, Any]:
    sampling = SamplingConfig(temperature=heat * asked["temperature"], top_p=asked["top_p"])
    config = DecodingConfig(asked["max_tokens"], sampling, eos_token_ids=eos_token_ids, seed=asked["seed"])
    tokens = engine.decode(asked["prompt"], config).tokens
    ended = bool(tokens) and tokens[-1] in eos_token_ids
    choice = {"index": 0, "text": "", "token_ids": list(tokens), "finish_reason": "stop" if ended else "length"}
    return {"id": "1", "object": "text_completion", "created": 0, "model": NAME, "choices": [choice]}
