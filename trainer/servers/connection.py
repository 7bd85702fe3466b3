"""A connection to a served model: its address and key checked, its errors in one line without the key."""

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
"""Times that `openai`'s client repeats a request that may succeed later, with growing delays between them."""
REFUSED = (BadRequestError, UnprocessableEntityError)
_KEY = "OPENAI_API_KEY"
_IDS: Mapping[str, bool] = {"return_token_ids": True, "return_tokens": True, "verbose": True}
"""Requests for token ids: vLLM's and SGLang's name, and llama.cpp's two."""


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A served model and how it is reached. The key is that of the environment variable OPENAI_API_KEY, if set."""

    address: str
    """The server's base address, which mostly ends in /v1."""
    model: str
    """The server's name for the model."""
    concurrency: int = 16
    """Requests under way at a time."""
    timeout: float = 120.0
    """Seconds to wait for one answer."""


class Connection:
    """`openai`'s client of an endpoint, which repeats requests after 429, errors of the server and lost connections."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Check the address and the key, and send nothing; UserError for those that cannot work."""
        self.endpoint = endpoint
        self._ids = _IDS
        self._key = os.environ.get(_KEY)
        if self._key and not all("!" <= character <= "~" for character in self._key):
            raise UserError(
                f"the key in the environment variable {_KEY} has a blank, a line break or a non-ASCII character in it",
                "copy the key into it once more",
            )
        self.address = _checked(endpoint.address)
        self.client = AsyncOpenAI(
            base_url=self.address,
            api_key=self._key or "none",
            timeout=endpoint.timeout,
            max_retries=RETRIES,
            # A proxy of the environment would look for a server of this machine on its own. Neither the key nor a
            # prompt follows a redirect, which may lead to another host.
            http_client=DefaultAsyncHttpxClient(trust_env=not _is_here(self.address), follow_redirects=False),
        )

    async def ask(self, body: Mapping[str, Any]) -> Completion:
        """Send a request with ``messages`` or a ``prompt``; APIError, and UserError for an answer that is none."""
        whole = {"model": self.endpoint.model, **body}
        return read_completion(await self.client.post(_path(body), cast_to=str, body=whole))

    async def ask_ids(self, body: Mapping[str, Any]) -> Completion:
        """As `ask`, for token ids too; a server that refuses this wish alone is asked without it from then on."""
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
        """Yield the events of a streamed answer as they come, without any repetition; errors as of `ask`."""
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
                f"the endpoint {self.host} broke off an answer ({first_line(error) or type(error).__name__})",
                "see to the endpoint, then start the same command again",
            ) from None

    @property
    def host(self) -> str:
        """The server's name and port, without a password that the address may hold."""
        return urlsplit(self.address).netloc.rpartition("@")[2]

    def fatal(self, error: APIError) -> UserError | None:
        """Return the error that every request would meet: a wrong key, model or address (a redirect); else None.

        Raise it ``from None``: the server may repeat the key, which a traceback would show.
        """
        if isinstance(error, AuthenticationError | PermissionDeniedError):
            return UserError(
                f"the endpoint {self.host} refuses the key (HTTP {error.status_code})",
                f"put the right one into the environment variable {_KEY}",
            )
        if isinstance(error, APIStatusError) and 300 <= error.status_code < 400:
            there = urlsplit(urljoin(self.address, error.response.headers.get("location", "")))
            shown = self._without_key(f"{there.scheme}://{there.netloc.rpartition('@')[2]}{there.path}")
            return UserError(
                f"the endpoint {self.host} redirects to {shown} (HTTP {error.status_code}), where neither the key nor "
                "prompts are sent",
                "if that server is meant, give its base address as --endpoint",
            )
        if isinstance(error, NotFoundError):
            return UserError(
                f"the endpoint {self.host} knows no model {self.endpoint.model!r}, or has nothing at this address "
                "(HTTP 404)",
                "check --model, and that --endpoint is the server's base address, which mostly ends in /v1",
            )
        return None

    def explained(self, error: APIError) -> str:
        """Return the error in one short line, without the key in case the server repeats it."""
        if isinstance(error, APITimeoutError):
            return f"no answer within {self.endpoint.timeout:g} s"
        if isinstance(error, APIConnectionError):
            return f"no connection to {self.host}, is a server running there? ({first_line(error.__cause__ or error)})"
        status, reason = "", first_line(error)
        if isinstance(error, APIStatusError):
            status, reason = f"HTTP {error.status_code}: ", reason.removeprefix(f"Error code: {error.status_code} - ")
        return f"{status}{self._without_key(reason)[:300]}"  # cut behind, which would not find half a key

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "[the key]") if self._key else text


def _path(body: Mapping[str, Any]) -> str:
    return "chat/completions" if "messages" in body else "completions"


def _checked(address: str) -> str:
    """Return the endpoint's address; UserError for a wrong one, without repeating it: it may hold a password."""
    try:
        return str(HttpUrl(address))
    except ValidationError:
        message = "--endpoint is not the address of a server"
        raise UserError(message, "give one such as http://localhost:8000/v1") from None


def _is_here(address: str) -> bool:
    """Return True for an address of this machine alone."""
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
