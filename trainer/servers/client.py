"""Client for a served model, for completions that have token ids if the server reports them.

This module hides how servers differ. Only some servers, such as vLLM and llama.cpp, accept prompts of token ids. The
token ids of an answer come under several names, or not at all. The metrics page is not below the address ``…/v1``, but
next to it.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from openai import APIConnectionError, APIError

from decoding.errors import UserError
from trainer.servers.answers import CONTROLS, Completion, CompletionRequest, Prompt, StreamedAnswer, read_stream
from trainer.servers.connection import REFUSED, RETRIES, Connection, Endpoint

Item = TypeVar("Item")
Result = TypeVar("Result")
Messages = Sequence[Mapping[str, str]]


class ServedModel:
    """A served model, to which synchronous code can send many requests at a time. Use it as a context manager.

    Errors are one-sentence UserErrors: a rejected key, an unknown model, or a server that is down or does not answer.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        """Check the address and the key without sending anything; raise UserError if either is invalid."""
        self.served = endpoint
        self._connection = Connection(endpoint)
        self._client = self._connection.client
        self._runner = asyncio.Runner()
        self.takes_ids = True
        """False once the server has rejected a prompt of token ids."""

    def __enter__(self) -> "ServedModel":
        return self

    def __exit__(self, *error: object) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    # --- answers --------------------------------------------------------------------------------------------------

    def many(
        self, requests: Sequence[CompletionRequest], on_answer: Callable[[], None] = lambda: None
    ) -> list[Completion]:
        """Return the answers in the order of the requests. At most ``concurrency`` requests are in flight."""
        return self._run(_at_a_time(self.served.concurrency, self._answer, requests, on_answer))

    def streamed(
        self,
        bodies: Sequence[Mapping[str, Any]],
        concurrency: int,
        on_answer: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> list[StreamedAnswer]:
        """Send ``concurrency`` requests at a time; return the streamed answers in the order of the requests, with times
        from ``clock``.
        """
        return self._run(_at_a_time(concurrency, partial(self._streamed, clock=clock), bodies, on_answer))

    def takes(self, body: Mapping[str, Any], clock: Callable[[], float] = time.perf_counter) -> bool:
        """Request a streamed answer and discard it; return False if the server rejects the request."""
        try:
            self._run(self._streamed(body, clock), raw=REFUSED)
        except REFUSED:
            return False
        return True

    async def _streamed(self, body: Mapping[str, Any], clock: Callable[[], float]) -> StreamedAnswer:
        for left in reversed(range(RETRIES)):
            begin = clock()
            try:
                return read_stream(begin, [(clock(), event) async for event in self._connection.events(body)])
            except APIConnectionError:
                # llama.cpp closes idle connections by itself. Nothing has been answered yet, so the clock restarts.
                if not left:
                    raise
        raise AssertionError("the last try returns or raises")

    async def _answer(self, request: CompletionRequest) -> Completion:
        body: dict[str, Any] = {
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed % 2**31,
            **request.controls,
        }
        if request.prompt and isinstance(request.prompt[0], Mapping):
            if request.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": request.logprobs}
            return await self._connection.ask({**body, "messages": list(request.prompt)})
        if request.logprobs is not None:
            body["logprobs"] = request.logprobs
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        return await self._connection.ask({**body, "prompt": prompt})

    # --- what the server accepts ----------------------------------------------------------------------------------

    def check_ids(self, prompt: Sequence[int]) -> bool:
        """Request one token after a prompt of token ids; if the server rejects the request, remember this and return
        False.
        """
        self.takes_ids = self.takes_ids and self._takes(CompletionRequest(tuple(prompt), 1))
        return self.takes_ids

    def taken_controls(self, prompt: Prompt) -> dict[str, Any]:
        """Request one token with all `CONTROLS`, then with each one alone; return those that the server accepts."""
        if self._takes(CompletionRequest(prompt, 1, controls=CONTROLS)):
            return dict(CONTROLS)
        alone = {name: CompletionRequest(prompt, 1, controls={name: value}) for name, value in CONTROLS.items()}
        return {name: CONTROLS[name] for name, request in alone.items() if self._takes(request)}

    def _takes(self, request: CompletionRequest) -> bool:
        try:
            self._run(self._answer(request), raw=REFUSED)
        except REFUSED:
            return False
        return True

    def metrics(self) -> str | None:
        """Return the text of the server's metrics page (next to /v1), or None if there is none."""
        url = f"{self._connection.address.rstrip('/').removesuffix('/v1')}/metrics"
        try:
            return self._run(self._client.get(url, cast_to=str), raw=(APIError,))
        except APIError:
            return None

    def _run(self, work: Coroutine[Any, Any, Result], raw: tuple[type[APIError], ...] = ()) -> Result:
        """Run a coroutine. An error of the server becomes a one-sentence UserError, unless its type is in ``raw``."""
        try:
            return self._runner.run(work)
        except raw:
            raise
        except APIError as error:
            explained = UserError(f"the endpoint did not answer: {self._connection.explained(error)}")
            raise self._connection.fatal(error) or explained from None


async def _at_a_time(
    places: int, work: Callable[[Item], Coroutine[Any, Any, Result]], items: Sequence[Item], on_end: Callable[[], None]
) -> list[Result]:
    """Work on at most ``places`` items at a time; return the results in the order of the items."""
    free = asyncio.Semaphore(places)

    async def one(item: Item) -> Result:
        async with free:
            result = await work(item)
        on_end()
        return result

    return await asyncio.gather(*map(one, items))  # after an error, `close` cancels the other tasks
