"""Several endpoints that serve one model: each request goes to one that answers, and one that fails rests a while."""

import asyncio
import random
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from openai import (
    APIConnectionError,
    APIError,
    APIStatusError,
    APITimeoutError,
    AuthenticationError,
    PermissionDeniedError,
)

from trainer.target.connection import Connection

FIRST_REST = 0.5
"""Seconds that an endpoint rests after a failure, at most; twice as long after each further one."""
LONGEST_REST = 30.0
"""Seconds of the longest rest."""


class Member:
    """An endpoint of a pool, and how it has done."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self.under_way = 0
        self.answered = 0
        """Requests that got a reply: an answer to read, or a refusal."""
        self.refused = 0
        """Replies that were refusals: errors which the same request would meet again."""
        self.refusal = ""
        """Sentence on the last refusal."""
        self.failed = 0
        """Requests that got none: no connection, no answer in time, or an error of the server."""
        self.failures = 0
        """Failures since the last reply."""
        self.rests_until = 0.0
        self.unreached = 0
        """Tries to connect since it was reached."""
        self.unreached_since: float | None = None
        self.reason = ""
        """Sentence on the last failure."""


class Pool:
    """Endpoints over which requests are dealt, at most ``concurrency`` at a time to each.

    An endpoint that fails rests as long as it asks for, or `FIRST_REST` seconds, doubled with each failure in a row up
    to `LONGEST_REST`, times a random factor of 1/2 to 1. Then one request tries it, and a reply ends the rest.
    """

    def __init__(
        self,
        connections: Sequence[Connection],
        concurrency: int,
        retries: int,
        patience: float,
        tell: Callable[[str], None] = lambda line: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``retries``: further tries to connect to endpoints none of which was reached yet; ``patience``: seconds that
        a run waits for endpoints that were reached before. ``tell`` is called with a line when one goes or comes back.
        """
        hosts = [connection.host for connection in connections]
        if again := next((host for place, host in enumerate(hosts) if host in hosts[:place]), None):
            raise ValueError(f"the endpoint {again} is given twice: give each server once")
        self.members = [Member(connection) for connection in connections]
        self._concurrency, self._retries, self._patience = concurrency, retries, patience
        self._tell, self._clock = tell, clock
        self._changed = asyncio.Condition()

    @property
    def size(self) -> int:
        """Requests under way at a time when all endpoints answer."""
        return self._concurrency * len(self.members)

    @property
    def health(self) -> str:
        """Words on the number of endpoints that answer, such as "1 of 2 endpoints"; empty where there is one."""
        up = sum(not member.failures for member in self.members)
        return f"{up} of {len(self.members)} endpoints" if len(self.members) > 1 else ""

    async def take(self, refused: Collection[Member] = ()) -> Member | None:
        """Wait for an endpoint with room that is not among those that ``refused``, and count a request to it.

        Of several one that did not fail last, then the one with the fewest requests under way, then the one that
        answered the fewest. None where no such endpoint can be reached any more.
        """
        async with self._changed:
            while True:
                now = self._clock()
                able = [member for member in self.members if member not in refused]
                if all(self._is_lost(member, now) for member in able):
                    return None
                ready = [member for member in able if self._has_room(member, now)]
                if ready:
                    chosen = min(ready, key=lambda member: (member.failures > 0, member.under_way, member.answered))
                    chosen.under_way += 1
                    return chosen
                resting = [member.rests_until - now for member in able if member.rests_until > now]
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._changed.wait(), min(resting, default=None))

    def _has_room(self, member: Member, now: float) -> bool:
        room = 1 if member.failures else self._concurrency
        return member.under_way < room and now >= member.rests_until

    async def refused(self, member: Member, error: APIError) -> None:
        """Note the end of a request that an endpoint refused."""
        member.refused += 1
        member.refusal = member.connection.explained(error)
        await self.replied(member)

    async def replied(self, member: Member) -> None:
        """Note the end of a request that an endpoint replied to, whatever the reply says."""
        if member.unreached:
            self._tell(f"the endpoint {member.connection.host} answers again")
        member.answered += 1
        member.failures = member.unreached = 0
        member.rests_until, member.unreached_since = 0.0, None
        await self._end(member)

    async def failed(self, member: Member, error: APIError) -> None:
        """Note the end of a request that failed; ValueError where no endpoint can be reached any more."""
        now = self._clock()
        member.failed += 1
        if now >= member.rests_until:  # else the request began before the rest, and failed as others did
            self._note(member, error, now)
        await self._end(member)
        if all(self._is_lost(each, now) for each in self.members):
            raise ValueError(
                f"{'; '.join(each.reason for each in self.members)}; what was answered is kept: see to the "
                f"{'endpoints' if self.members[1:] else 'endpoint'}, then start the same command again to resume"
            ) from None

    def _note(self, member: Member, error: APIError, now: float) -> None:
        """Note a failure, and begin the rest after it."""
        member.failures += 1
        member.reason = member.connection.explained(error)
        member.rests_until = now + pause_after(error, member.failures)
        if not is_unreached(error):
            member.unreached, member.unreached_since = 0, None
            return
        if not member.unreached and len(self.members) > 1:
            self._tell(f"{member.reason}: its requests go to the other endpoints until it is back")
        member.unreached += 1
        member.unreached_since = now if member.unreached_since is None else member.unreached_since

    async def _end(self, member: Member) -> None:
        member.under_way -= 1
        async with self._changed:
            self._changed.notify_all()

    def _is_lost(self, member: Member, now: float) -> bool:
        if member.unreached_since is None or member.unreached <= self._retries:
            return False
        return not member.answered or now - member.unreached_since >= self._patience

    async def check_same_model(self, model: str) -> None:
        """Compare what several endpoints tell of the model; ValueError where one lists models without it.

        A line tells where nothing can be compared: servers may list nothing, or not be there yet.
        """
        if len(self.members) == 1:
            return
        listed = await asyncio.gather(*(_models_of(member.connection) for member in self.members))
        found = {member.connection.host: models for member, models in zip(self.members, listed, strict=True) if models}
        serving = {host: models[model] for host, models in found.items() if model in models}
        if not serving:
            self._tell(f"no endpoint lists {model!r} among its models: nothing shows that all serve the same one")
        elif lacking := next((host for host in found if host not in serving), None):
            raise ValueError(
                f"the endpoint {lacking} serves {', '.join(sorted(found[lacking]))} and not {model!r}, which "
                f"{next(iter(serving))} serves: give endpoints of one model, under one name"
            )
        elif len(roots := {root for root in serving.values() if root}) > 1:
            self._tell(
                f"the endpoints name {' and '.join(sorted(roots))} as the root of {model!r}: see that all are one"
            )

    def account(self) -> list[str]:
        """Return a line on each of several endpoints: the requests that it answered, refused, and failed."""
        return [_account_of(member) for member in self.members] if len(self.members) > 1 else []

    async def close(self) -> None:
        """Close all connections."""
        for member in self.members:
            await member.connection.client.close()


def _account_of(member: Member) -> str:
    refused = f", {member.refused:,} refused ({member.refusal})" if member.refused else ""
    answered = member.answered - member.refused
    return f"{member.connection.host}: {answered:,} requests answered{refused}, {member.failed:,} failed"


def pause_after(error: APIError, failures: int) -> float:
    """Return the seconds to wait after the last of several failures in a row: those the server asks for, or a rest."""
    asked_for = _asked_for(error)
    if asked_for is not None:
        return asked_for
    return min(LONGEST_REST, FIRST_REST * 2.0 ** min(failures - 1, 30)) * random.uniform(0.5, 1)


def may_pass(error: APIError) -> bool:
    """Return True for an error that the same request may not meet again; False where the server refuses the request."""
    return not isinstance(error, APIStatusError) or error.status_code in (408, 409, 429) or error.status_code >= 500


def is_unreached(error: APIError) -> bool:
    """Return True where no server was there to fail: no connection, or one that broke off."""
    return isinstance(error, APIConnectionError) and not isinstance(error, APITimeoutError)


def _asked_for(error: APIError) -> float | None:
    """Return the seconds to wait that the server asks for, at most a minute; None where it does not."""
    if not isinstance(error, APIStatusError):
        return None
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        with suppress(KeyError, ValueError):
            return min(60.0, max(0.0, float(error.response.headers[name]) * unit))
    return None


async def _models_of(connection: Connection) -> dict[str, str | None]:
    """Return the models that an endpoint lists, each with its root where it is told; none where it lists nothing.

    ValueError for an endpoint that refuses the key.
    """
    try:
        page = await connection.client.models.list(timeout=10.0)
        return {each.id: getattr(each, "root", None) for each in page.data}
    except (AuthenticationError, PermissionDeniedError) as error:
        raise connection.fatal(error) or error from None
    except (APIError, ValueError, TypeError, AttributeError):  # no list, or nothing that could be one
        return {}
