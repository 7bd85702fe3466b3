"""Access to the demo over HTTP: requests of other sites, and those that are no entry of the page, are refused."""

import json
import socket
from ipaddress import ip_address
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_ENTRIES = ("/gradio_api/queue/join", "/gradio_api/run/predict")
"""Addresses that the page sends its entries to. Gradio's others, uploads among them, are closed."""
_LONGEST = 1_000_000
"""Bytes of the longest request."""
_HEADERS = {
    "X-Frame-Options": "DENY",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


class AccessFilter:
    """ASGI middleware in front of a Gradio page.

    A request's host must be ``host``, this machine, or in ``shared``: another site's name may point here, too
    (DNS rebinding). ``shared`` takes the share address once it is known.
    """

    def __init__(self, app: ASGIApp, page: Any, host: str, shared: set[str]) -> None:
        self.app, self.page, self.shared = app, page, shared
        self.everywhere = host in ("0.0.0.0", "::")
        self.names = {"localhost", "127.0.0.1", "::1", host.lower()}
        if self.everywhere:
            self.names.add(socket.gethostname().lower())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse the request with a sentence, or hand it on."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(_HEADERS)
            await send(message)

        body = b""
        refused = self._refusal(scope)
        if refused is None and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            async for part in Request(scope, receive).stream():
                body += part
                if len(body) > _LONGEST:
                    break
            refused = self._refused_entry(body)
        if refused is not None:
            await PlainTextResponse(f"{refused}\n", 403)(scope, receive, send_with_headers)
            return
        messages: list[Message] = [{"type": "http.request", "body": body}] if body else []

        async def receive_again() -> Message:
            return messages.pop() if messages else await receive()

        await self.app(scope, receive_again, send_with_headers)

    def _refusal(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self._is_known(_name(f"//{host}")):
            return f"this page is not served as {host:.100}: open it by the address that 'headstart demo' printed"
        if origin is not None and _name(origin) not in self.shared and urlsplit(origin).netloc != host:
            return f"the page at {origin:.100} may not ask this one"
        if scope["method"] not in ("GET", "HEAD", "OPTIONS") and scope["path"] not in _ENTRIES:
            return f"this page takes nothing at {scope['path']:.100}"
        return None

    def _is_known(self, name: str) -> bool:
        if name in self.names or name in self.shared:
            return True
        try:
            return self.everywhere and bool(ip_address(name))  # no name, so no other site's
        except ValueError:
            return False

    def _refused_entry(self, body: bytes) -> str | None:
        """Return why a body is no entry of the page: plain values, as many as the event takes."""
        if len(body) > _LONGEST:
            return f"the request is longer than {_LONGEST} bytes: shorten the prompt"
        try:
            call = json.loads(body)
            inputs, values = self.page.fns[call["fn_index"]].inputs, call["data"]
            plain = all(value is None or isinstance(value, str | int | float) for value in values)
            return None if plain and len(values) == len(inputs) else "no event of this page takes these values"
        except (ValueError, KeyError, TypeError, RecursionError):
            return "this page has no such event"


def _name(address: str) -> str:
    try:
        return urlsplit(address).hostname or ""
    except ValueError:
        return ""
