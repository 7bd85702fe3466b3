"""Completions of a served model, with their token ids where the server tells them: vLLM, llama.cpp, any other.

Servers differ in three ways that this module hides. Prompts of token ids are taken by vLLM and llama.cpp, not by all.
Token ids of an answer come under several names, or not at all. `/metrics` is next to `/v1`.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar

from openai import APIError, BadRequestError, UnprocessableEntityError

from decoding.model.loading import first_line
from trainer.servers.answers import Completion, CompletionRequest, Prompt
from trainer.servers.connection import Connection, Endpoint

Result = TypeVar("Result")
Messages = Sequence[Mapping[str, str]]

_IDS = {"return_token_ids": True, "return_tokens": True}
"""Requests for token ids: vLLM's name and llama.cpp's."""
_REFUSED = (BadRequestError, UnprocessableEntityError)


class ServedModel:
    """A served model, asked from synchronous code, many requests at a time. Use it as a context manager.

    Errors are ValueError in one sentence: a refused key, an unknown model, a server that is down or sends no answer.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        """Check the address and the key, and send nothing; ValueError for those that cannot work."""
        self.served = endpoint
        self._connection = Connection(endpoint)
        self._client = self._connection.client
        self._runner = asyncio.Runner()
        self._extra: dict[str, Any] = dict(_IDS)
        self.takes_ids = True
        """False once the server has refused a prompt of token ids."""

    def __enter__(self) -> "ServedModel":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._client.close())
        self._runner.close()

    # --- answers --------------------------------------------------------------------------------------------------

    def many(
        self, requests: Sequence[CompletionRequest], on_answer: Callable[[], None] = lambda: None
    ) -> list[Completion]:
        """Return the answers in the order of the requests, up to ``concurrency`` under way at a time."""

        async def all_of_them() -> list[Completion]:
            places = asyncio.Semaphore(self.served.concurrency)

            async def one(request: CompletionRequest) -> Completion:
                async with places:
                    answer = await self._answer(request)
                on_answer()
                return answer

            return await asyncio.gather(*map(one, requests))  # after an error `close` ends the others

        return self._run(all_of_them())

    async def _answer(self, request: CompletionRequest) -> Completion:
        """Return the answer; a server that refuses the wish for token ids is asked without it from then on."""
        asked_for = self._extra
        try:
            return _read(await self._send(request, asked_for))
        except _REFUSED:
            if not asked_for:
                raise
            found = _read(await self._send(request, {}))
            self._extra = {}
            return found

    async def _send(self, request: CompletionRequest, extra: Mapping[str, Any]) -> str:
        body: dict[str, Any] = {
            "model": self.served.model,
            "max_tokens": request.max_tokens,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "seed": request.seed % 2**31,
            **request.controls,
            **extra,
        }
        if _is_chat(request.prompt):
            if request.logprobs is not None:
                body |= {"logprobs": True, "top_logprobs": request.logprobs}
            return await self._post("chat/completions", {**body, "messages": list(request.prompt)})
        if request.logprobs is not None:
            body["logprobs"] = request.logprobs
        prompt = request.prompt if isinstance(request.prompt, str) else list(request.prompt)
        return await self._post("completions", {**body, "prompt": prompt})

    # --- what stands beside the answers ---------------------------------------------------------------------------

    def check_ids(self, prompt: Sequence[int]) -> bool:
        """Ask for one token after a prompt of token ids; return False, and remember it, if the server refuses."""
        if self.takes_ids:
            try:
                self._run(self._answer(CompletionRequest(tuple(prompt), 1)), raw=_REFUSED)
            except _REFUSED:
                self.takes_ids = False
        return self.takes_ids

    def taken_controls(self, prompt: Prompt, controls: Mapping[str, Any]) -> dict[str, Any]:
        """Ask for one token with further fields, all and then each alone; return those the server does not refuse."""
        if self._takes(prompt, controls):
            return dict(controls)
        return {name: value for name, value in controls.items() if self._takes(prompt, {name: value})}

    def _takes(self, prompt: Prompt, controls: Mapping[str, Any]) -> bool:
        try:
            self._run(self._answer(CompletionRequest(prompt, 1, controls=controls)), raw=_REFUSED)
        except _REFUSED:
            return False
        return True

    def metrics(self) -> str | None:
        """Return the text of the server's metrics page, which is next to /v1; None without one."""
        url = f"{self._connection.address.rstrip('/').removesuffix('/v1')}/metrics"
        try:
            return self._run(self._client.get(url, cast_to=str), raw=(APIError,))
        except APIError:
            return None

    def _post(self, path: str, body: Mapping[str, Any]) -> Coroutine[Any, Any, str]:
        return self._client.post(path, cast_to=str, body=body)

    def _run(self, work: Coroutine[Any, Any, Result], raw: tuple[type[APIError], ...] = ()) -> Result:
        """Run a coroutine; an error of the server becomes one sentence, unless it is one of ``raw``."""
        try:
            return self._runner.run(work)
        except raw:
            raise
        except APIError as error:
            explained = ValueError(f"the endpoint gave no answer: {self._connection.explained(error)}")
            raise self._connection.fatal(error) or explained from None


def _is_chat(prompt: Prompt) -> bool:
    return not isinstance(prompt, str) and bool(prompt) and isinstance(prompt[0], Mapping)


def _object_in(sent: str) -> dict[str, Any]:
    try:
        found = json.loads(sent)
    except json.JSONDecodeError as error:
        raise ValueError(f"the endpoint sent what is no JSON: {first_line(error)}") from None
    return found if isinstance(found, dict) else {}


def _read(sent: str) -> Completion:
    """Return the answer in what a server sent; ValueError for what is no completion."""
    found = _object_in(sent)
    choices = found.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    if not isinstance(choice, dict):
        raise ValueError("what the endpoint sent is no completion: check --endpoint and --model")
    message = choice.get("message")
    text = message.get("content") if isinstance(message, dict) else choice.get("text")
    told = choice.get("logprobs")
    logprobs = told if isinstance(told, dict) else {}
    content = [entry for entry in logprobs.get("content") or () if isinstance(entry, dict)]
    ids = _integers(choice.get("token_ids")) or _integers(choice.get("tokens"))
    ids = ids or _integers([entry.get("id") for entry in content])  # llama.cpp's place for them
    return Completion(
        text=text if isinstance(text, str) else "",
        token_ids=ids,
        prompt_ids=_integers(choice.get("prompt_token_ids")) or _integers(found.get("prompt_token_ids")),
        finish_reason=choice.get("finish_reason"),
        prompt_tokens=_count(found.get("usage"), "prompt_tokens"),
        tokens=_count(found.get("usage"), "completion_tokens") if ids is None else len(ids),
    )


def _count(usage: Any, name: str) -> int | None:
    """Return a number of tokens in an answer's usage."""
    tokens = usage.get(name) if isinstance(usage, dict) else None
    return tokens if type(tokens) is int else None


def _integers(values: Any) -> tuple[int, ...] | None:
    """Return a list of token ids as a tuple; None for anything else, an empty list included."""
    if not isinstance(values, list) or not values or not all(type(value) is int for value in values):
        return None
    return tuple(values)
