"""Answers from OpenAI-compatible servers, for many conversations at a time.

The server applies the chat template and samples with its own generator, by default as the model's generation config
says. The server returns texts. It also returns token ids if its protocol has a field for them.
"""

import asyncio
import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

from openai import APIConnectionError, APIError

from decoding.errors import UserError, check_once
from decoding.generate import DecodingConfig
from decoding.rules.sampling import SamplingConfig
from trainer.data.answers import AnsweredConversation, FailedConversation, Outcome, Problem
from trainer.data.chat import whole_characters
from trainer.data.conversations import AnswerKey, Message, OpenConversation, answer_message, is_empty
from trainer.servers.answers import Completion
from trainer.servers.connection import REFUSED, Connection, Endpoint

HOPELESS = 50
"""After this many failures in a row the run ends, because either the endpoints are broken or every request is wrong."""
_TURNS_APART = 1_000_003  # distance between the seeds of two turns; servers take 31-bit seeds


class _Reply(NamedTuple):
    """One reply of an endpoint."""

    message: Message
    tokens: int
    """0 if the endpoint does not count tokens."""
    truncated: bool
    model: str | None
    ids: tuple[int, ...] | None
    prompt_ids: tuple[int, ...] | None


class _NoAnswer(Exception):
    """A reply that has no text to train on, or an error instead of a reply.

    ``too_long``: the prompt does not fit into the context of any endpoint.
    """

    def __init__(self, problem: Problem, reason: str, too_long: bool = False) -> None:
        super().__init__(reason)
        self.problem: Problem = problem
        self.too_long = too_long


class EndpointBackend:
    """A source of answers: endpoints that all serve the same target. Several conversations run at a time, each of them
    turn by turn.

    Conversations are dealt to the endpoints in rotation. If an endpoint rejects a request, or still fails after the
    client's retries, the next endpoint gets it. An endpoint that could not be reached is asked last from then on. If a
    request fails at all endpoints, its conversation is set aside; if a later turn is too long for all of them, the
    conversation ends with the answer before it. A wrong key, an unknown model, or a request that reaches no endpoint
    ends the run.
    """

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        config: DecodingConfig,
        sampling: SamplingConfig | None,
        variables: Mapping[str, Any] | None = None,
    ) -> None:
        """Check the endpoints without sending anything.

        If ``sampling`` is None, the servers choose how to sample. ``variables`` are sent for the chat template, unless
        they are None.
        """
        self._sampling: dict[str, Any] = {} if variables is None else {"chat_template_kwargs": variables}
        if sampling is not None:
            self._sampling |= {"temperature": sampling.temperature, "top_p": sampling.top_p}
        self._connections = [Connection(endpoint) for endpoint in endpoints]
        check_once("the endpoint", (connection.host for connection in self._connections))
        self._config = config
        self._unreached: set[Connection] = set()
        self._first: tuple[str, str] | None = None
        """Model and host of the first answer."""

    @property
    def encoder(self) -> None:
        """None: only the servers know the tokenizer."""

    def outcomes(
        self, conversations: Iterable[OpenConversation], done: Container[AnswerKey], on_tokens: Callable[[int], None]
    ) -> Iterator[list[Outcome]]:
        """Yield finished conversations. A fatal error is raised after the conversations that finished together with it.

        A conversation is read only when there is room for its request.
        """
        waiting = (conversation for conversation in conversations if conversation.key not in done)
        running: set[asyncio.Task[Outcome]] = set()
        failures = 0
        with asyncio.Runner() as runner:
            try:
                while ended := runner.run(self._some(waiting, running)):
                    finished = [task.result() for task in ended if task.exception() is None]
                    on_tokens(sum(outcome.tokens for outcome in finished if isinstance(outcome, AnsweredConversation)))
                    yield finished
                    for task in ended:
                        outcome = task.result()
                        failures = failures + 1 if isinstance(outcome, FailedConversation) else 0
                        if isinstance(outcome, FailedConversation) and failures == HOPELESS:
                            raise UserError(
                                f"{failures} conversations failed in a row",
                                f"check the endpoint and run the same command again; last failure: {outcome.reason}",
                            )
            finally:
                runner.run(self._close(running))

    async def _close(self, running: set[asyncio.Task[Outcome]]) -> None:
        """Cancel the running tasks and close the connections.

        Errors of the tasks are collected, so Python does not print them.
        """
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        for connection in self._connections:
            await connection.client.close()

    async def _some(
        self, waiting: Iterator[OpenConversation], running: set[asyncio.Task[Outcome]]
    ) -> set[asyncio.Task[Outcome]]:
        """Start conversations up to the total concurrency; return the first to finish, or none at the end."""
        size = sum(connection.endpoint.concurrency for connection in self._connections)
        for conversation in islice(waiting, size - len(running)):
            running.add(asyncio.create_task(self._converse(conversation)))
        if not running:
            return set()
        ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
        running -= ended
        return ended

    async def _converse(self, conversation: OpenConversation) -> Outcome:
        replies: list[_Reply] = []
        try:
            while conversation.goes_on(before := [reply.message for reply in replies]):
                replies.append(await self._reply(conversation, before))
                if replies[-1].truncated:
                    break
        except _NoAnswer as error:
            if not (replies and error.too_long):  # otherwise the answers before the turn that is too long are kept
                return FailedConversation(conversation, error.problem, str(error), again=True)
        answers, tokens = tuple(reply.message for reply in replies), sum(reply.tokens for reply in replies)
        ids, prompts = (
            _if_all(column) for column in zip(*((reply.ids, reply.prompt_ids) for reply in replies), strict=True)
        )
        last = replies[-1]
        return AnsweredConversation(conversation, answers, tokens, last.truncated, ids, prompts, last.model)

    async def _reply(self, conversation: OpenConversation, answers: Sequence[Message]) -> _Reply:
        """Return the next answer. Raises `_NoAnswer` if every endpoint fails, and UserError if none can be reached."""
        first = conversation.index % len(self._connections)
        in_turn = [*self._connections[first:], *self._connections[:first]]
        problems, unreached, too_long = list[str](), 0, 0
        for connection in sorted(in_turn, key=self._unreached.__contains__):
            try:
                completion = await connection.ask(self._request(conversation, answers))
            except UserError as error:
                problems.append(str(error))
            except APIError as error:
                if fatal := connection.fatal(error):
                    raise fatal from None
                problems.append(connection.explained(error))
                too_long += isinstance(error, REFUSED) and "context" in str(error).lower()
                if isinstance(error, APIConnectionError):
                    self._unreached.add(connection)
                    unreached += 1
            else:
                self._unreached.discard(connection)
                self._check_model(completion.model, connection.host)
                return _read(completion)
        if unreached == len(in_turn):
            raise UserError(
                f"{'; '.join(problems)}; finished answers are saved",
                "check the endpoint, then run the same command again to resume",
            ) from None
        raise _NoAnswer("failed", "; ".join(problems), too_long == len(in_turn))

    def _check_model(self, model: str | None, host: str) -> None:
        """Raise UserError if the answer comes from another model than the first one: rows must not mix two models."""
        if model is not None:
            first, there = self._first = self._first or (model, host)
            if model != first:
                raise UserError(
                    f"{host} serves {model!r}, but earlier {there} served {first!r}; finished answers are saved",
                    "pass endpoints that serve the same model",
                )

    def _request(self, conversation: OpenConversation, answers: Sequence[Message]) -> dict[str, Any]:
        """Return a request. Its seed depends on the conversation and the turn, not on the endpoint."""
        config, spelled = self._config, conversation.spelled
        body = {
            **self._sampling,
            **({"messages": conversation.open_after(answers)} if spelled is None else {"prompt": [*spelled]}),
            "max_tokens": config.max_new_tokens,
            "seed": (config.seed + conversation.index + _TURNS_APART * len(answers)) % 2**31,
        }
        return {**body, "tools": conversation.tools} if conversation.tools else body


def _read(completion: Completion) -> _Reply:
    """Return the reply in a completion. Its fields are checked because endpoints may break the schema."""
    truncated = completion.finish_reason == "length"

    def text(*names: str) -> str:
        held = (value for name in names if isinstance(value := completion.message.get(name), str) and value.strip())
        return whole_characters(next(held, ""), truncated)

    calls = called if isinstance(called := completion.message.get("tool_calls"), list) else []
    if not all(isinstance(call, dict) and "name" in (call.get("function") or ()) for call in calls):
        raise _NoAnswer("failed", "a tool call does not name its function")
    reasoning = text("reasoning_content", "reasoning")
    content = text("content") if completion.message else whole_characters(completion.text, truncated)
    answer = answer_message(content, reasoning_content=reasoning, tool_calls=calls)
    if is_empty(answer):
        raise _NoAnswer("empty", "the answer is empty")
    try:
        json.dumps(answer, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half a character cannot be in a request or in a training row
        raise _NoAnswer("failed", f"the answer contains half a character ({error.reason})") from error
    ids = completion.token_ids
    return _Reply(answer, completion.tokens or 0, truncated, completion.model, ids, completion.prompt_ids)


def _if_all(all_ids: tuple[tuple[int, ...] | None, ...]) -> tuple[tuple[int, ...], ...] | None:
    """Return the token ids of every answer; None if any answer lacks them."""
    return tuple(ids for ids in all_ids if ids is not None) if None not in all_ids else None
