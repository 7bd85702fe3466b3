"""A connection to a served model, which checks address and key and explains errors without showing the key."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Mapping
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, TypeVar
from urllib.parse import urljoin, urlsplit

from httpx import HTTPError
from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
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

from decoding.errors import UserError, first_line
from trainer.servers.answers import Completion, completion_of, join_events, read_completion

News = TypeVar("News")
RETRIES = 5
"""How often `openai`'s client repeats a request that may succeed later; the delays grow."""
REFUSED = (BadRequestError, UnprocessableEntityError)
_KEY = "OPENAI_API_KEY"
_IDS = {"return_token_ids": True, "return_tokens": True, "verbose": True}
"""Fields that request token ids; the first is for vLLM and SGLang, the others are for llama.cpp."""
_STREAM = {"stream": True, "stream_options": {"include_usage": True}}
_WAYS: tuple[Mapping[str, Any], ...] = ({**_STREAM, **_IDS}, _IDS, _STREAM, {})
"""Fields to try, the best first. In streamed chats, SGLang rejects requests for ids, and llama.cpp omits the ids. Some
servers reject all these fields.
"""
_WITHOUT_IDS = _WAYS[2:]
_AGAIN = "check the endpoint, then run the same command again"
_PATIENCE = "check the endpoint; 'headstart regenerate' waits longer with --timeout"
_SECONDS_A_TOKEN = 1.0
"""For an answer that is not streamed, this many seconds are added to the time limit for each token that the answer may
have.
"""


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
    """After this many seconds of silence we stop waiting for an answer."""


class BrokenOff(UserError):
    """A connection was lost in the middle of an answer."""


class Connection:
    """An endpoint and its `openai` client, which retries after HTTP 429, server errors and lost connections."""

    def __init__(self, endpoint: Endpoint) -> None:
        """Check the address and the key without sending anything; raise UserError if either is invalid."""
        self.endpoint = endpoint
        self._ways = _WAYS
        self._accepted: Mapping[str, Any] | None = None
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
            # A proxy from the environment cannot see servers on this machine. Redirects may lead to another host, so we
            # send neither the key nor a prompt there.
            http_client=DefaultAsyncHttpxClient(trust_env=not _is_here(self.address), follow_redirects=False),
        )

    async def ask(self, body: Mapping[str, Any]) -> Completion:
        """Send a request with ``messages`` or a ``prompt``; return the answer, with token ids if the server has them.

        Answers are streamed, so that long answers do not time out, unless the server reports token ids only with whole
        answers. If a server rejects a request only because it asks for token ids or a stream, later requests do not ask
        for them. A request is repeated if the connection is lost, but not if the server is silent. Raises APIError, or
        UserError if the answer is not a completion or nothing came in time.
        """
        ways, accepted = self._ways, self._accepted  # other requests may change this list meanwhile
        for way in ways:
            try:
                answer = await self._again_if_lost({**body, **way})
            except REFUSED:
                if way in (accepted, ways[-1]):  # the server rejects something other than these fields
                    raise
                continue
            if answer.token_ids is not None or way in _WITHOUT_IDS:
                self._ways, self._accepted = ways[ways.index(way) :], way
            elif answer.streamed:
                continue  # ids may come with a whole answer
            elif answer.text and way is not ways[0]:
                self._ways = _WITHOUT_IDS
            return answer
        raise AssertionError("the last way returns or raises")

    async def _again_if_lost(self, body: Mapping[str, Any]) -> Completion:
        for left in reversed(range(RETRIES + 1)):
            try:
                stream = await self._open(body)
                if not stream.response.headers.get("content-type", "").startswith("text/event-stream"):
                    return read_completion(await self._news(stream.response.aread(), body))
                events = [event async for event in self._events(stream)]
                answer = completion_of(join_events(events), streamed=True)
                if answer.finish_reason is None:
                    raise BrokenOff(f"the endpoint {self.host} broke off its answer (the answer has no end)", _AGAIN)
                return answer
            except BrokenOff:
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")

    async def events(self, body: Mapping[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the events of a streamed answer as they arrive, without retries. Raises the errors of `ask`."""
        async for event in self._events(await self._open({**body, **_STREAM}, repeats=False)):
            yield event

    async def _open(self, body: Mapping[str, Any], repeats: bool = True) -> AsyncStream[object]:
        """Send a request, and wait until the response begins."""
        sent = self.client.post(
            "chat/completions" if "messages" in body else "completions",
            cast_to=object,
            body={"model": self.endpoint.model, **body},
            options={"timeout": None, "max_retries": RETRIES if repeats else 0},  # `_news` limits the time
            stream=True,
            stream_cls=AsyncStream[object],
        )
        return await self._news(sent, body)

    async def _events(self, stream: AsyncStream[object]) -> AsyncIterator[dict[str, Any]]:
        events = aiter(stream)
        try:
            while (event := await self._news(anext(events, None), _STREAM)) is not None:
                if isinstance(event, dict):
                    yield event
        finally:
            await stream.close()

    async def _news(self, news: Awaitable[News], body: Mapping[str, Any]) -> News:
        """Wait for the next part of an answer; raise UserError if it takes too long, and `BrokenOff` if the connection
        is lost.
        """
        patience = self.endpoint.timeout
        if "stream" not in body:
            patience += _SECONDS_A_TOKEN * body["max_tokens"]
        try:
            async with asyncio.timeout(patience):
                return await news
        except TimeoutError:
            raise UserError(f"{self.host} sent nothing for {patience:g} s", _PATIENCE) from None
        except (HTTPError, ValueError) as error:
            why = first_line(error) or type(error).__name__
            raise BrokenOff(f"the endpoint {self.host} broke off its answer ({why})", _AGAIN) from None

    @property
    def host(self) -> str:
        """The server's name and port, without any password in the address."""
        return urlsplit(self.address).netloc.rpartition("@")[2]

    def fatal(self, error: APIError) -> UserError | None:
        """Return the error if every request would fail (wrong key, model or address, or a redirect), and otherwise
        None.

        Raise the error ``from None``, because the server may echo the key, and a traceback would show the key.
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
        if isinstance(error, APIConnectionError):
            return f"cannot connect to {self.host}; is a server running there? ({first_line(error.__cause__ or error)})"
        status, reason = "", first_line(error)
        if isinstance(error, APIStatusError):
            status, reason = f"HTTP {error.status_code}: ", reason.removeprefix(f"Error code: {error.status_code} - ")
        if "--tool-call-parser" in reason:  # vLLM's message does not say that tools in a prompt need these options
            remedy = "start vLLM with --enable-auto-tool-choice --tool-call-parser NAME, or leave out rows with tools"
            return f"{self.host} rejects prompts with tools, because it has no parser for their calls: {remedy}"
        return f"{status}{self._without_key(reason)[:300]}"  # cut last, otherwise half a key might remain

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "[the key]") if self._key else text


def _checked(address: str) -> str:
    """Return the valid address. Raises UserError without repeating an invalid address, which may contain a password."""
    try:
        return str(HttpUrl(address))
    except ValidationError:
        message = "--endpoint is not a server's address"
        raise UserError(message, "pass an address such as http://localhost:8000/v1") from None


def _is_here(address: str) -> bool:
    """Return True if the address is on this machine."""
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
