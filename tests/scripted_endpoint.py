"""A server on the loopback that speaks OpenAI's protocol as far as the script of a test provides."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Reply = tuple[int, Any]
"""The HTTP status and the content: text is sent unchanged, an iterator is sent as the events of a stream, and anything
else as JSON."""


_NONE: Mapping[str, str] = {}

DROPPED: Reply = (0, None)
"""No reply: the connection breaks off, as if the server were killed."""


@dataclass
class Request:
    path: str
    key: str
    body: dict[str, Any]


@dataclass
class ScriptedEndpoint:
    address: str = ""
    requests: list[Request] = field(default_factory=list)


def chat(text: str | None, finish_reason: str = "stop", tokens: int = 3) -> Reply:
    """A chat completion."""
    choice = {"index": 0, "finish_reason": finish_reason, "message": {"role": "assistant", "content": text}}
    return 200, {**_COMMON, "object": "chat.completion", "choices": [choice], "usage": _usage(tokens)}


def streamed(*deltas: Any, finish_reason: str | None = "stop", tokens: int = 3, **fields: Any) -> Reply:
    """Return the events of a chat: one for each delta, one with the reason for the end, and one with the usage.

    A delta is a text or the fields of a message. ``fields`` are lists of further fields for the choice of each event.
    """
    given: list[dict[str, Any]] = [{"content": each} if isinstance(each, str) else each for each in deltas]
    choices = [{"index": 0, "delta": delta, "finish_reason": None} for delta in given]
    choices.append({"index": 0, "delta": {}, "finish_reason": finish_reason})
    for place, choice in enumerate(choices):
        choice |= {name: values[place] for name, values in fields.items() if place < len(values)}
    events = [{**_COMMON, "choices": [choice], "usage": None} for choice in choices]
    return 200, iter([*events, {**_COMMON, "choices": [], "usage": _usage(tokens)}])


def last_words(request: Request) -> str:
    """Return the last events of a chat."""
    content: str = request.body["messages"][-1]["content"]
    return content


def in_turn(*replies: Reply) -> Callable[[Request], Reply]:
    """Make a script that sends the replies one after the other, and then repeats the last one."""
    left = iter(replies[:-1])
    return lambda request: next(left, replies[-1])


_COMMON: dict[str, Any] = {"id": "1", "created": 0, "model": "tiny"}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": tokens, "total_tokens": tokens + 1}


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # simultaneous connections; by default a sixth of them would be reset


@contextmanager
def serve(
    script: Callable[[Request], Reply], models: Sequence[dict[str, str]] = (), headers: Mapping[str, str] = _NONE
) -> Iterator[ScriptedEndpoint]:
    """Answer each request as the script says.

    Clients that try again after an error need not wait long. ``models`` is the answer to requests for the list of
    models, which are not recorded. ``headers`` are sent with each reply.
    """
    endpoint = ScriptedEndpoint()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_GET(self) -> None:
            if self.path == "/v1/models":
                self._send(200, {"object": "list", "data": models})
            else:
                self._answer({})

        def _answer(self, body: dict[str, Any]) -> None:
            request = Request(self.path, self.headers.get("Authorization", "").removeprefix("Bearer "), body)
            endpoint.requests.append(request)
            self._send(*script(request))

        def _send(self, status: int, content: Any) -> None:
            if (status, content) == DROPPED:
                self.close_connection = True
                return
            if isinstance(content, Iterator):
                self._stream(content)
                return
            encoded = (content if isinstance(content, str) else json.dumps(content)).encode()
            try:
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(encoded)))
                self.send_header("Retry-After-Ms", "1")
                for name, value in headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(encoded)
            except ConnectionError:  # the client stopped waiting
                self.close_connection = True

        def _stream(self, events: Iterator[Any]) -> None:
            self.close_connection = True
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Connection", "close")
            self.end_headers()
            with suppress(ConnectionError):  # the client stopped waiting, or the script ended the connection
                for event in events:
                    self.wfile.write(f"data: {json.dumps(event)}\n\n".encode())
                self.wfile.write(b"data: [DONE]\n\n")

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = Server(("127.0.0.1", 0), Handler)
    endpoint.address = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield endpoint
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
