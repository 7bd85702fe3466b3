"""A connection to a served model: checks address and key, and explains errors without the key."""

import os
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any
from urllib.parse import urljoin, urlsplit

from httpx import HTTPError
from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    AsyncStream,
    AuthenticationError,
    BadRequestError,
    DefaultAsyncHttpxClient,
    NotFoundError,
    PermissionDeniedError,
    UnprocessableEntityError,
)
from pydantic import HttpUrl, ValidationError

from decoding.errors import UserError
from decoding.model.loading import first_line
from trainer.servers.answers import Completion, read_completion

RETRIES = 5
"""How often `openai`'s client repeats a request that may succeed later, with growing delays."""
REFUSED = (BadRequestError, UnprocessableEntityError)
_KEY = "OPENAI_API_KEY"
_IDS: Mapping[str, bool] = {"return_token_ids": True, "return_tokens": True, "verbose": True}
"""Fields that request token ids: one of vLLM and SGLang, two of llama.cpp."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """The address of a served model. The key comes from the environment variable OPENAI_API_KEY, if set."""

    address: str
    """The server's base address, usually ending in /v1."""
    model: str
    """The server's name for the model."""
    concurrency: int = 16
    """Requests in flight at a time."""
    timeout: float = 120.0
    """Seconds to wait for one answer."""


class Connection:
    """An endpoint and its `openai` client, which retries after HTTP 429, server errors and lost connections."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Check the address and the key without sending anything; raise UserError if either is invalid."""
        self.endpoint = endpoint
        self._ids = _IDS
        self._key = os.environ.get(_KEY)
        if self._key and not all("!" <= character <= "~" for character in self._key):
            raise UserError(
                f"the environment variable {_KEY} contains a blank, a line break or a non-ASCII character",
                "copy the key again",
            )
        self.address = _checked(endpoint.address)
        self.client = AsyncOpenAI(
            base_url=self.address,
            api_key=self._key or "none",
            timeout=endpoint.timeout,
            max_retries=RETRIES,
            # A proxy set in the environment cannot see servers on this machine. Redirects may lead to another host, so
            # neither the key nor a prompt follows them.
            http_client=DefaultAsyncHttpxClient(trust_env=not _is_here(self.address), follow_redirects=False),
        )

    async def ask(self, body: Mapping[str, Any]) -> Completion:
        """Send a request with ``messages`` or a ``prompt``.

        Raises APIError, or UserError if the answer is not a completion.
        """
        whole = {"model": self.endpoint.model, **body}
        return read_completion(await self.client.post(_path(body), cast_to=str, body=whole))

    async def ask_ids(self, body: Mapping[str, Any]) -> Completion:
        """Send a request as `ask` does, and request token ids; if only they are rejected, never request them again."""
        wanted = self._ids
        try:
            return await self.ask({**body, **wanted})
        except REFUSED:
            if not wanted:
                raise
            found = await self.ask(body)
            self._ids = {}
            return found

    async def events(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a streamed answer as they arrive, without retries. Raises the errors of `ask`."""
        whole = {"model": self.endpoint.model, "stream": True, "stream_options": {"include_usage": True}, **body}
        try:
            stream = await self.client.post(
                _path(body),
                cast_to=object,
                body=whole,
                options={"max_retries": 0},
                stream=True,
                stream_cls=AsyncStream[object],
            )
            async for event in stream:
                if isinstance(event, dict):
                    yield event
        except (HTTPError, ValueError) as error:
            raise UserError(
                f"the endpoint {self.host} broke off its answer ({first_line(error) or type(error).__name__})",
                "check the endpoint, then run the same command again",
            ) from None

    @property
    def host(self) -> str:
        """The server's name and port, without any password in the address."""
        return urlsplit(self.address).netloc.rpartition("@")[2]

    def fatal(self, error: APIError) -> UserError | None:
        """Return the error if every request would fail too (wrong key, model or address, or a redirect); else None.

        Raise it ``from None``: the server may echo the key, and a traceback would show it.
        """
        if isinstance(error, AuthenticationError | PermissionDeniedError):
            return UserError(
                f"the endpoint {self.host} rejects the key (HTTP {error.status_code})",
                f"set the environment variable {_KEY} to a valid key",
            )
        if isinstance(error, APIStatusError) and 300 <= error.status_code < 400:
            there = urlsplit(urljoin(self.address, error.response.headers.get("location", "")))
            shown = self._without_key(f"{there.scheme}://{there.netloc.rpartition('@')[2]}{there.path}")
            return UserError(
                f"the endpoint {self.host} redirects to {shown} (HTTP {error.status_code}), but the key and prompts "
                "are not sent there",
                "if you trust that server, pass its base address as --endpoint",
            )
        if isinstance(error, NotFoundError):
            return UserError(
                f"the endpoint {self.host} does not know the model {self.endpoint.model!r}, or the address is wrong "
                "(HTTP 404)",
                "check --model, and check that --endpoint is the server's base address, usually ending in /v1",
            )
        return None

    def explained(self, error: APIError) -> str:
        """Return the error in one short line, without the key if the server echoes it."""
        if isinstance(error, APITimeoutError):
            return f"no answer within {self.endpoint.timeout:g} s"
        if isinstance(error, APIConnectionError):
            return f"cannot connect to {self.host}; is a server running there? ({first_line(error.__cause__ or error)})"
        status, reason = "", first_line(error)
        if isinstance(error, APIStatusError):
            status, reason = f"HTTP {error.status_code}: ", reason.removeprefix(f"Error code: {error.status_code} - ")
        return f"{status}{self._without_key(reason)[:300]}"  # cut last, else half a key would stay

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "[the key]") if self._key else text


def _path(body: Mapping[str, Any]) -> str:
    return "chat/completions" if "messages" in body else "completions"


def _checked(address: str) -> str:
    """Return the valid address. Raises UserError without repeating an invalid one: it may hold a password."""
    try:
        return str(HttpUrl(address))
    except ValidationError:
        message = "--endpoint is not a server's address"
        raise UserError(message, "pass one such as http://localhost:8000/v1") from None


def _is_here(address: str) -> bool:
    """Return True if the address is on this machine."""
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
