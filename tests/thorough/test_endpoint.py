"""Answers from served targets: what is requested, what is set aside, and when a run ends."""

import asyncio
import gc
import io
import json
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scripted_endpoint import DROPPED, Reply, Request, ScriptedEndpoint, chat, in_turn, last_words, serve, streamed
from tiny_training import write_rows

from trainer.commands import regenerate as regenerate_module
from trainer.commands.options import RegenerateOptions
from trainer.commands.regenerate import run_regenerate
from trainer.commands.usage import guarded
from trainer.data.answers import Summary
from trainer.data.sources import RowSource
from trainer.servers import connection as connection_module
from trainer.servers import endpoint as endpoint_module
from trainer.servers.answers import Completion
from trainer.terminal.exit_codes import ExitCode

KEY = "sk-ThisIsNoRealKeyOnlyATest"
RETRIES = 2
ROWS, WINDOW = 3000, 16
BROKEN: Reply = (500, {"error": {"message": "out of memory"}})


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(connection_module, "RETRIES", RETRIES)
    monkeypatch.setattr("openai._base_client.INITIAL_RETRY_DELAY", 1e-3)


def options(folder: Path, address: str, prompts: Iterable[Any] = ("one",), **changes: Any) -> RegenerateOptions:
    source = write_rows(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
    defaults: dict[str, Any] = {"endpoint": [address], "model": "tiny", "timeout": 30.0}
    return RegenerateOptions(prompts=source, output=folder / "answers.jsonl", **{**defaults, **changes})


def regenerate(chosen: RegenerateOptions) -> Summary:
    return run_regenerate(chosen, Console(file=io.StringIO()))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(folder: Path) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows(folder / "answers.jsonl")]


def set_aside(folder: Path) -> list[dict[str, Any]]:
    return rows(folder / "answers.jsonl.failed.jsonl")


def asked(endpoint: ScriptedEndpoint) -> list[str]:
    return [last_words(request) for request in endpoint.requests]


def echo(request: Request) -> Reply:
    return chat(f"to {last_words(request)}")


# --- what is asked ----------------------------------------------------------------------------------------------------


def test_an_answer_is_written_with_its_tokens_and_its_row(tmp_path: Path) -> None:
    status, body = chat("two", tokens=5)
    with serve(in_turn((status, body), (status, {**body, "usage": None}))) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, ("one", "more"), concurrency=1))
    messages = [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]
    first, second = rows(tmp_path / "answers.jsonl")
    assert first == {"row": 1, "sample": 0, "messages": messages, "tokens": 5, "truncated": False}
    assert second["tokens"] == 0, "a server that counts no tokens is good enough"
    assert (summary.answered, summary.tokens, summary.failed) == (2, 5, 0)


def test_a_request_carries_the_key_the_settings_and_a_seed_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    settings = {"temperature": 0.5, "top_p": 0.9}
    with serve(lambda request: chat("two")) as endpoint:
        chosen = {**settings, "n": 2, "seed": 7, "max_new_tokens": 11}
        regenerate(options(tmp_path, endpoint.address, ("one", "two"), **chosen))
    assert {request.key for request in endpoint.requests} == {KEY}
    bodies = [request.body for request in endpoint.requests]
    assert sorted(body["seed"] for body in bodies) == [7, 8, 9, 10]
    assert all({**settings, "model": "tiny", "max_tokens": 11}.items() <= body.items() for body in bodies)


def test_turns_are_asked_one_after_the_other_each_with_the_answers_before_it(tmp_path: Path) -> None:
    with serve(in_turn(chat("A"), chat("B"))) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, [["one", "two"]]))
    sent = [[message["content"] for message in request.body["messages"]] for request in endpoint.requests]
    assert sent == [["one"], ["one", "A", "two"]] and answers(tmp_path) == ["B"] and summary.answers == 2
    assert [request.body["seed"] for request in endpoint.requests] == [0, 1_000_003]
    assert endpoint.requests[0].key == "none"


def test_requests_are_under_way_together_and_the_file_is_sorted_at_the_end(tmp_path: Path) -> None:
    second_came = threading.Event()

    def script(request: Request) -> Reply:
        if last_words(request) == "two":
            second_came.set()
        assert second_came.wait(20), "the second request does not come before the first is answered"
        return echo(request)

    with serve(script) as endpoint:
        regenerate(options(tmp_path, endpoint.address, ("one", "two", "three"), concurrency=2))
    assert answers(tmp_path) == ["to one", "to two", "to three"]


def test_rows_are_read_as_they_are_asked_and_written_once_each_in_order_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are 3,000 rows, every third with two turns.

    At no time have more rows been read than are answered or in progress.
    """
    before, answered, leads = 0, 0, list[int]()

    class Rows:
        def __iter__(self) -> Iterator[dict[str, Any]]:
            for number in range(1, ROWS + 1):
                leads.append(number - before - answered)
                yield {"turns": [f"{number}", "more"] if number % 3 == 0 else [f"{number}"]}

    async def ask(connection: Any, body: dict[str, Any]) -> Completion:
        nonlocal answered
        words = body["messages"][-1]["content"]
        for _ in range(body["seed"] * 7 % 5):  # answers arrive in a different order
            await asyncio.sleep(0)
        answered += words == "more" or int(words) % 3 > 0
        return Completion("", None, None, "stop", message={"content": f"to {words}"})

    source = RowSource("org/rows", "0" * 64, hub=Rows())
    monkeypatch.setattr(regenerate_module, "stream_prompts", lambda name: source)
    monkeypatch.setattr(connection_module.Connection, "ask", ask)
    monkeypatch.setattr("os.fsync", lambda file: None)
    chosen = replace(options(tmp_path, "http://127.0.0.1:9/v1", concurrency=WINDOW), prompts="org/rows")
    regenerate(replace(chosen, limit=ROWS // 2))
    whole = chosen.output.read_bytes()
    chosen.output.write_bytes(whole[:-1000])  # cut in the middle of a line, as after a kill
    before, answered = whole[:-1000].count(b"\n"), 0
    summary = regenerate(chosen)
    assert (summary.rows, summary.before, summary.answered) == (ROWS, before, ROWS - before) and before > 1000
    assert [(row["row"], row["sample"]) for row in rows(chosen.output)] == [(row, 0) for row in range(1, ROWS + 1)]
    assert max(leads) == WINDOW


# --- what is set aside ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [BROKEN, (429, {}), DROPPED], ids=str)
def test_the_client_repeats_what_may_pass_with_the_same_seed(tmp_path: Path, first: Reply) -> None:
    with serve(in_turn(first, chat("two"))) as endpoint:
        regenerate(options(tmp_path, endpoint.address, seed=7))
    assert [request.body["seed"] for request in endpoint.requests] == [7, 7] and answers(tmp_path) == ["two"]


@pytest.mark.parametrize(
    ("reply", "requests", "problem", "reason"),
    [
        (BROKEN, 1 + RETRIES, "failed", "HTTP 500: "),
        ((400, {"error": {"message": "prompt too long"}}), 4, "failed", "prompt too long"),
        ((200, "{half a json"), 1, "failed", "the endpoint's response is not JSON"),
        ((200, [1]), 1, "failed", "not a completion"),
        ((200, {"choices": []}), 1, "failed", "not a completion"),
        (chat(" \n"), 1, "empty", "the answer is empty"),
    ],
    ids=str,
)
def test_what_cannot_be_used_is_set_aside_and_asked_again_by_the_next_run_alone(
    tmp_path: Path, reply: Reply, requests: int, problem: str, reason: str
) -> None:
    with serve(lambda request: reply if last_words(request) == "bad" else chat("fine")) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, ("bad", "good"), concurrency=1))
    assert asked(endpoint).count("bad") == requests and answers(tmp_path) == ["fine"]
    (row,) = set_aside(tmp_path)
    assert (row["row"], row["sample"], row["problem"]) == (1, 0, problem) and reason in row["reason"]
    assert (summary.answered, summary.failed + summary.empty) == (1, 1)
    with serve(lambda request: chat("at last")) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, ("bad", "good")))
    assert asked(endpoint) == ["bad"] and answers(tmp_path) == ["at last", "fine"] and set_aside(tmp_path) == []
    assert (summary.before, summary.answered) == (1, 1)


@pytest.mark.parametrize("events", [0, 2])
def test_a_server_that_falls_silent_is_given_up_and_not_asked_again(tmp_path: Path, events: int) -> None:
    over = threading.Event()

    def silent(request: Request) -> Reply:
        status, answer = streamed("too", " late")

        def until_over() -> Iterator[Any]:
            yield from islice(answer, events)
            over.wait()

        return status, until_over()

    with serve(silent) as endpoint:
        with pytest.raises(ValueError, match="nothing was answered"):
            regenerate(options(tmp_path, endpoint.address, timeout=0.05))
        over.set()
    (row,) = set_aside(tmp_path)
    assert row["reason"].endswith(
        "sent nothing for 0.05 s: check the endpoint; 'headstart regenerate' waits longer with --timeout"
    )
    assert len(endpoint.requests) == 1 and row["again"]


def test_each_event_has_its_own_time_and_a_whole_answer_more_by_its_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given, timeout = list[float](), asyncio.timeout

    def spied(seconds: float) -> Any:
        given.append(seconds)
        return timeout(None)

    monkeypatch.setattr(connection_module.asyncio, "timeout", spied)

    def script(request: Request) -> Reply:
        return streamed("a", "b", "c") if request.body.get("stream") else chat("abc")

    with serve(script) as endpoint:
        regenerate(options(tmp_path, endpoint.address, max_new_tokens=11))
    assert [seconds for seconds in given if seconds != 30] == [41.0, 41.0] and given.count(30) > 5


@pytest.mark.parametrize("finish_reason", [None, "stop"])
def test_an_answer_that_breaks_off_is_asked_for_again(tmp_path: Path, finish_reason: str | None) -> None:
    def broken(events: Iterator[Any]) -> Iterator[Any]:
        yield next(events)
        if finish_reason is not None:
            raise ConnectionError
        yield from events

    first = broken(streamed("ha", "lf", finish_reason=finish_reason)[1])
    replies = in_turn((200, first), streamed("whole", token_ids=[[1], [2]], tokens=2))
    with serve(replies) as endpoint:
        regenerate(options(tmp_path, endpoint.address))
    assert answers(tmp_path) == ["whole"] and len(endpoint.requests) == 2


def test_an_answer_that_is_cut_off_is_kept_and_marked(tmp_path: Path) -> None:
    with serve(lambda request: chat("half a chara\N{REPLACEMENT CHARACTER}", "length")) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, [["one", "two"]]))
    row = rows(tmp_path / "answers.jsonl")[0]
    assert row["truncated"] and [message["content"] for message in row["messages"]] == ["one", "half a chara"]
    assert len(endpoint.requests) == 1  # the second turn would answer half a sentence
    assert summary.truncated == 1


# --- what ends a run --------------------------------------------------------------------------------------------------


def test_a_run_ends_when_no_endpoint_is_reached_and_goes_on_where_it_was(tmp_path: Path) -> None:
    twelve = tuple(f"row {i}" for i in range(12))
    with serve(in_turn(chat("A"), DROPPED)) as one, serve(in_turn(chat("A"), DROPPED)) as other:
        secret = [each.address.replace("http://", "http://me:secret@") for each in (one, other)]
        with pytest.raises(ValueError, match=r"finished answers are saved.*run the same command again") as caught:
            regenerate(options(tmp_path, "", twelve, endpoint=secret, concurrency=1))
    hosts = [each.address.removeprefix("http://").removesuffix("/v1") for each in (one, other)]
    assert all(f"cannot connect to {host}; is" in str(caught.value) for host in hosts)
    assert "secret" not in str(caught.value) and answers(tmp_path) == ["A", "A"]
    assert not (tmp_path / "answers.jsonl.failed.jsonl").exists()
    with serve(echo) as elsewhere:
        assert regenerate(options(tmp_path, elsewhere.address, twelve)).before == 2
    assert len(answers(tmp_path)) == 12 and len(elsewhere.requests) == 10


@pytest.mark.parametrize(
    ("status", "sentence", "debug"), [(401, "rejects the key", False), (404, "does not know the model 'tiny'", True)]
)
def test_a_wrong_key_or_model_ends_the_run_at_once_and_the_key_is_not_printed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    status: int,
    sentence: str,
    debug: bool,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serve(lambda request: (status, {"error": {"message": f"bad key {KEY}"}})) as endpoint:
        chosen = options(tmp_path, endpoint.address, map(str, range(12)), concurrency=6)
        assert guarded(partial(run_regenerate, chosen), debug) == ExitCode.BAD_INPUT
    gc.collect()  # Python prints errors that nobody has read when their tasks are deleted
    printed = "".join(capfd.readouterr())
    assert len(endpoint.requests) <= 6
    assert f"HTTP {status}" in printed and sentence in " ".join(printed.split()) and KEY not in printed
    assert caplog.text == ""


def test_the_key_is_in_no_file_even_if_the_server_repeats_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    replies = in_turn(*((400, {"error": {"message": f"{'no room ' * length}{KEY}"}}) for length in (1, 31)))
    with serve(replies) as endpoint, pytest.raises(ValueError, match="nothing was answered") as caught:
        regenerate(options(tmp_path, endpoint.address, ("one", "two"), concurrency=1))
    assert "[the key]" in set_aside(tmp_path)[0]["reason"]
    written = [path.read_text() for path in tmp_path.iterdir()]
    # The second message is so long that it is cut in the middle of the key.
    assert len(written) >= 3 and not any(KEY[:8] in text for text in (*written, str(caught.value)))


@pytest.mark.parametrize("address", ["localhost:8000/v1", "http://me:secret@127.0.0.1:99999/v1"])
def test_what_is_no_address_is_refused_without_repeating_it(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match="not a server's address: pass an address such as http://local") as caught:
        regenerate(options(tmp_path, address))
    assert "secret" not in str(caught.value) and not (tmp_path / "answers.jsonl.meta.json").exists()


def test_a_run_in_which_everything_fails_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "HOPELESS", 3)
    with (
        serve(lambda request: BROKEN) as endpoint,
        pytest.raises(ValueError, match=r"3 conversations failed in a row: check .*; last failure: HTTP 500"),
    ):
        regenerate(options(tmp_path, endpoint.address, map(str, range(9)), concurrency=1))
    assert len(endpoint.requests) < 9 * (1 + RETRIES) and len(set_aside(tmp_path)) == 3


# --- several endpoints of one target ----------------------------------------------------------------------------------


def test_what_a_killed_server_had_is_answered_by_the_other_with_the_same_seeds(tmp_path: Path) -> None:
    twelve = tuple(f"row {i}" for i in range(12))
    with serve(echo) as one, serve(in_turn(chat("A"), chat("A"), DROPPED)) as other:
        chosen = options(tmp_path, "", twelve, endpoint=[one.address, other.address], concurrency=1, seed=7)
        regenerate(chosen)
    assert len(answers(tmp_path)) == 12 and answers(tmp_path).count("A") == 2
    assert not (tmp_path / "answers.jsonl.failed.jsonl").exists()
    assert all(request.body["seed"] == 7 + twelve.index(last_words(request)) for request in one.requests)
    assert len(other.requests) <= 2 + 2 * (1 + RETRIES), "one that was not reached is asked last from then on"


def test_a_later_turn_that_is_too_long_ends_the_conversation_and_the_answers_before_it_stay(tmp_path: Path) -> None:
    """A turn that is refused for another reason is set aside with the whole conversation."""
    replies = {"longer": "the maximum context length is 8192 tokens", "tool": "unknown role"}

    def reply(request: Any) -> Any:
        reason = replies.get(last_words(request))
        return echo(request) if reason is None else (400, {"error": {"message": reason}})

    with serve(reply) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, [["short", "longer"], ["brief", "tool"]]))
    assert answers(tmp_path) == ["to short"] and (summary.answered, summary.unasked, summary.failed) == (1, 1, 1)
    assert "unknown role" in set_aside(tmp_path)[0]["reason"]


def test_a_row_is_set_aside_only_if_every_endpoint_refuses_it(tmp_path: Path) -> None:
    def refusing(*refused: str) -> Any:
        return lambda request: (400, {}) if last_words(request) in refused else echo(request)

    with serve(refusing("longer", "longest")) as small, serve(refusing("longest")) as large:
        prompts, addresses = ("longer", "longest"), [small.address, large.address]
        regenerate(options(tmp_path, "", prompts, endpoint=addresses, concurrency=1))
    assert answers(tmp_path) == ["to longer"] and set_aside(tmp_path)[0]["row"] == 2
    # Up to four requests: the server may have rejected the stream or the token ids, so these are left out.
    assert all(1 <= asked(each).count("longest") <= 4 for each in (small, large))
