"""A connection to a served model: its address and key checked, its errors in one line without the key."""

import os
from dataclasses import dataclass
from ipaddress import ip_address
from urllib.parse import urljoin, urlsplit

from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AsyncOpenAI,
    AuthenticationError,
    DefaultAsyncHttpxClient,
    NotFoundError,
    PermissionDeniedError,
)
from pydantic import HttpUrl, ValidationError

from decoding.model.loading import first_line


@dataclass(frozen=True, kw_only=True)
class Served:
    """A served model and how it is reached."""

    address: str
    """The server's base address, which mostly ends in /v1."""
    model: str
    """The server's name for the model."""
    concurrency: int = 16
    """Requests under way at a time."""
    retries: int = 5
    """Tries after the first."""
    timeout: float = 120.0
    """Seconds to wait for one answer."""
    api_key_variable: str = "OPENAI_API_KEY"
    """The environment variable with the key."""


class Connection:
    """`openai`'s client of a served model.

    The client repeats requests that may succeed later (429, 500 and above, timeouts), with growing delays, unless
    whoever asks ``repeats`` them.
    """

    def __init__(self, served: Served, repeats: bool = False) -> None:
        """Check the address, the key and the numbers; ValueError for those that cannot work. Sends nothing."""
        for name, least in (("concurrency", 1), ("retries", 0), ("timeout", 0.001)):
            if getattr(served, name) < least:
                raise ValueError(f"{name} is {getattr(served, name)}: give at least {least}")
        self.served = served
        self._key = os.environ.get(served.api_key_variable)
        if self._key and not all("!" <= character <= "~" for character in self._key):
            raise ValueError(
                f"the key in the environment variable {served.api_key_variable} has a blank, a line break or a "
                "character that is not ASCII in it: copy the key into it once more"
            )
        self.address = _checked(served.address)
        self.client = AsyncOpenAI(
            base_url=self.address,
            api_key=self._key or "none",
            timeout=served.timeout,
            max_retries=0 if repeats else served.retries,
            # A proxy of the environment would look for a server of this machine on its own. Neither the key nor a
            # prompt follows a redirect, which may lead to another host.
            http_client=DefaultAsyncHttpxClient(trust_env=not _is_here(self.address), follow_redirects=False),
        )

    @property
    def host(self) -> str:
        """The server's name and port, without what else the address may hold: a password."""
        return urlsplit(self.address).netloc.rpartition("@")[2]

    def fatal(self, error: APIError) -> ValueError | None:
        """Return the sentence for an error that no other request can escape: a wrong key, model or address; else None.

        A redirect is a wrong address.

        Raise it ``from None``: the server may repeat the key, which a traceback would show.
        """
        if isinstance(error, AuthenticationError | PermissionDeniedError):
            return ValueError(
                f"the endpoint {self.host} refuses the key (HTTP {error.status_code}): put the right one into the "
                f"environment variable {self.served.api_key_variable}"
            )
        if isinstance(error, APIStatusError) and 300 <= error.status_code < 400:
            there = urlsplit(urljoin(self.address, error.response.headers.get("location", "")))
            shown = self._without_key(f"{there.scheme}://{there.netloc.rpartition('@')[2]}{there.path}")
            return ValueError(
                f"the endpoint {self.host} redirects to {shown} (HTTP {error.status_code}), where neither the key nor "
                "prompts are sent: if that server is meant, give its base address as --endpoint"
            )
        if isinstance(error, NotFoundError):
            return ValueError(
                f"the endpoint {self.host} knows no model {self.served.model!r}, or has nothing at this address "
                "(HTTP 404): check --model, and that --endpoint is the server's base address, which mostly ends in /v1"
            )
        return None

    def explained(self, error: APIError) -> str:
        """Return the error in one short line, without the key in case the server repeats it."""
        if isinstance(error, APITimeoutError):
            return f"no answer within {self.served.timeout:g} s"
        if isinstance(error, APIConnectionError):
            return f"no connection to {self.host}, is a server running there? ({first_line(error.__cause__ or error)})"
        status, reason = "", first_line(error)
        if isinstance(error, APIStatusError):
            status, reason = f"HTTP {error.status_code}: ", reason.removeprefix(f"Error code: {error.status_code} - ")
        return f"{status}{self._without_key(reason)[:300]}"  # cut behind, which would not find half a key

    def _without_key(self, text: str) -> str:
        return text.replace(self._key, "[the key]") if self._key else text


def _checked(address: str) -> str:
    """Return the endpoint's address; ValueError for a wrong one, without repeating it: it may hold a password."""
    try:
        return str(HttpUrl(address))
    except ValidationError:
        raise ValueError(
            "--endpoint is not the address of a server: give one such as http://localhost:8000/v1"
        ) from None


def _is_here(address: str) -> bool:
    """Return True for an address of this machine alone."""
    host = urlsplit(address).hostname or ""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
