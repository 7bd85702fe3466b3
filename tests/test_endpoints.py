"""Several endpoints of one model: who is asked, what a failure of one costs, and when a run ends."""

import asyncio
import io
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import APIConnectionError, APIStatusError
from rich.console import Console
from scripted_endpoint import DROPPED, Endpoint, Reply, Request, chat, in_turn, last_words, serve
from test_endpoint import answers, host_of, options, regenerate, set_aside

from trainer.commands.regenerate import run_regenerate
from trainer.target import pool as pool_module
from trainer.target.connection import Connection, Served
from trainer.target.pool import LONGEST_REST, Member, Pool, pause_after

TWELVE = tuple(f"row {i}" for i in range(12))


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    monkeypatch.setattr(pool_module, "FIRST_REST", 1e-3)


def asked(*endpoints: Endpoint) -> Counter[str]:
    return Counter(last_words(request) for endpoint in endpoints for request in endpoint.requests)


def together(*endpoints: Endpoint) -> list[str]:
    return [endpoint.address for endpoint in endpoints]


def none_set_aside(folder: Path) -> bool:
    return not (folder / "answers.jsonl.failed.jsonl").exists()


def echo(request: Request) -> Reply:
    return chat(f"to {last_words(request)}")


def test_requests_are_dealt_over_the_endpoints_and_each_row_is_asked_once(tmp_path: Path) -> None:
    with serve(echo) as one, serve(echo) as other:
        changes = {"endpoint": [",".join(together(one, other))], "concurrency": 2}
        summary = regenerate(options(tmp_path, "", TWELVE, **changes))
    assert answers(tmp_path) == [f"to {row}" for row in TWELVE] and summary.answered == 12
    assert set(asked(one, other).values()) == {1} and min(len(one.requests), len(other.requests)) >= 4


def test_what_a_killed_server_had_is_answered_by_the_other_and_the_run_says_so(tmp_path: Path) -> None:
    """After two answers no connection holds any more."""
    said = Console(file=io.StringIO(), record=True, width=300)
    with serve(echo) as one, serve(in_turn(chat("A"), chat("A"), DROPPED)) as other:
        run_regenerate(options(tmp_path, "", TWELVE, endpoint=together(one, other), concurrency=3, retries=0), said)
    assert len(answers(tmp_path)) == 12 and answers(tmp_path).count("A") == 2 and none_set_aside(tmp_path)
    lines = said.export_text()
    gone = f"no connection to {host_of(other)}, is a server running there? ("
    assert lines.count(gone) == 1 and "its requests go to the other endpoints until it is back" in lines
    failed = len(other.requests) - 2
    assert f"{host_of(one)}: 10 requests answered, 0 failed" in lines
    assert f"{host_of(other)}: 2 requests answered, {failed} failed" in lines and failed >= 1


def test_a_server_that_comes_back_is_asked_again(tmp_path: Path) -> None:
    said = Console(file=io.StringIO(), record=True, width=300)
    with serve(in_turn(DROPPED, DROPPED, chat("back"))) as one:
        chosen = options(tmp_path, "", TWELVE, endpoint=[one.address], concurrency=1)
        run_regenerate(chosen, said)
    assert answers(tmp_path) == ["back"] * 12 and f"the endpoint {host_of(one)} answers again" in said.export_text()


def test_a_row_is_set_aside_only_if_every_endpoint_refuses_it(tmp_path: Path) -> None:
    def refusing(*refused: str) -> Callable[[Request], Reply]:
        long = 400, {"error": {"message": "prompt too long"}}
        return lambda request: long if last_words(request) in refused else echo(request)

    with serve(refusing("longer", "longest")) as small, serve(refusing("longest")) as large:
        prompts = ("short", "longer", "longest")
        said = Console(file=io.StringIO(), record=True, width=300)
        run_regenerate(options(tmp_path, "", prompts, endpoint=together(small, large), concurrency=1), said)
    assert answers(tmp_path) == ["to short", "to longer"]
    (row,) = set_aside(tmp_path)
    assert row["row"] == 3 and "prompt too long" in row["reason"] and asked(small, large)["longest"] == 2
    for server in (small, large):
        words = [last_words(request) for request in server.requests]
        refused = sum(word in ("longer", "longest") if server is small else word == "longest" for word in words)
        assert f"{host_of(server)}: {len(words) - refused} requests answered, {refused} refused (HTTP 400: " in (
            said.export_text(clear=False)
        ), "a refusal is no answer"


def test_a_row_that_one_refuses_does_not_wait_for_ever_for_one_that_is_gone(tmp_path: Path) -> None:
    with (
        serve(in_turn(chat("A"), DROPPED)) as gone,
        serve(lambda request: (400, {}) if last_words(request) == "bad" else echo(request)) as left,
    ):
        changes = {"endpoint": together(gone, left), "concurrency": 1, "retries": 1, "patience": 0.0}
        regenerate(options(tmp_path, "", ("one", "two", "three", "bad"), **changes))
    assert len(answers(tmp_path)) == 3 and "HTTP 400" in set_aside(tmp_path)[0]["reason"]


def test_a_row_has_the_same_seeds_whichever_endpoint_answers_it(tmp_path: Path) -> None:
    """The server errors and the lost connection cost tries, and change no seed; the empty answer does."""
    with serve(in_turn(DROPPED, (500, {}), chat(""), chat("fine"))) as one, serve(lambda request: (503, {})) as other:
        chosen = options(tmp_path, "", ("row",), endpoint=together(one, other), seed=7, retries=20)
        regenerate(chosen)
    seeds = [request.body["seed"] for request in one.requests]
    assert seeds == [7, 7, 7, 7 + 1_000_003] and {request.body["seed"] for request in other.requests} <= set(seeds)
    assert other.requests


def test_a_run_ends_when_no_endpoint_can_be_reached_and_names_each_without_its_secret(tmp_path: Path) -> None:
    with serve(in_turn(chat("A"), DROPPED)) as one, serve(in_turn(chat("A"), DROPPED)) as other:
        secret = [address.replace("http://", "http://me:secret@") for address in together(one, other)]
        changes = {"endpoint": secret, "concurrency": 1, "retries": 1, "patience": 0.0}
        with pytest.raises(ValueError, match="see to the endpoints, then start the same command again") as caught:
            regenerate(options(tmp_path, "", TWELVE, **changes))
        sentence = str(caught.value)
        assert all(f"no connection to {host_of(each)}, is" in sentence for each in (one, other))
        assert "secret" not in sentence and len(answers(tmp_path)) == 2 and none_set_aside(tmp_path)
    with serve(echo) as one:  # the same command again, with the server elsewhere
        assert regenerate(options(tmp_path, one.address, TWELVE)).before == 2
    assert len(answers(tmp_path)) == 12 and len(one.requests) == 10


@pytest.mark.parametrize(
    ("listed", "expected"),
    [
        (([{"id": "tiny"}], [{"id": "large"}]), "serves large and not 'tiny', which 127"),
        (([{"id": "tiny", "root": "a"}], [{"id": "tiny", "root": "b"}]), "name a and b as the root of 'tiny'"),
        (([], []), "no endpoint lists 'tiny' among its models"),
        (([{"id": "tiny", "root": "a"}], [{"id": "tiny", "root": "a"}]), ""),
    ],
)
def test_endpoints_of_other_models_are_told_apart(
    tmp_path: Path, listed: tuple[list[dict[str, str]], ...], expected: str
) -> None:
    said = Console(file=io.StringIO(), record=True, width=300)
    with serve(echo, listed[0]) as one, serve(echo, listed[1]) as other:
        chosen = options(tmp_path, "", ("row",), endpoint=together(one, other))
        if "serves" in expected:
            with pytest.raises(ValueError, match=expected):
                run_regenerate(chosen, said)
        else:
            run_regenerate(chosen, said)
            lines = said.export_text()
            assert expected in lines and ("tiny" in lines) == bool(expected)


def test_an_endpoint_that_is_given_twice_is_refused_without_its_secret(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^the endpoint 127\.0\.0\.1:9 is given twice: give each server once$"):
        regenerate(options(tmp_path, "", endpoint=["http://me:secret@127.0.0.1:9/v1", "http://127.0.0.1:9/v1"]))


# --- the pool alone ---------------------------------------------------------------------------------------------------

NOWHERE = httpx.Request("POST", "http://127.0.0.1:9/v1")


def pool_of(*ports: int, clock: Callable[[], float], **settings: Any) -> Pool:
    connections = [
        Connection(Served(address=f"http://127.0.0.1:{port}/v1", model="tiny"), repeats=True) for port in ports
    ]
    return Pool(connections, **{"concurrency": 4, "retries": 5, "patience": 600.0, **settings}, clock=clock)


def test_an_endpoint_rests_longer_after_each_failure_in_a_row_and_the_server_may_say_how_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pool_module, "FIRST_REST", 0.5)
    error = APIConnectionError(request=NOWHERE)
    for failures, longest in ((1, 0.5), (2, 1.0), (3, 2.0), (20, LONGEST_REST), (5000, LONGEST_REST)):
        pauses = [pause_after(error, failures) for _ in range(50)]
        assert longest / 2 <= min(pauses) < max(pauses) <= longest
    for header, seconds in (("2", 2.0), ("7200", 60.0)):
        response = httpx.Response(429, headers={"Retry-After": header}, request=NOWHERE)
        assert pause_after(APIStatusError("slow down", response=response, body=None), 9) == seconds


def test_requests_that_fail_together_count_as_one_failure_and_one_request_tries_the_endpoint_after_its_rest() -> None:
    now = [0.0]
    pool = pool_of(9, clock=lambda: now[0])
    (member,) = pool.members

    async def story() -> None:
        assert [await pool.take() for _ in range(4)] == [member] * 4
        for _ in range(4):  # as all that a killed server had
            await pool.failed(member, APIConnectionError(request=NOWHERE))
        assert (member.failures, member.failed, member.under_way) == (1, 4, 0)
        now[0] = member.rests_until
        assert await pool.take() is member and not pool._has_room(member, now[0])
        await pool.replied(member)
        assert pool._has_room(member, now[0]) and member.failures == 0

    asyncio.run(story())


def test_the_least_busy_endpoint_is_taken_and_a_resting_one_is_passed_over() -> None:
    now = [0.0]
    pool = pool_of(8, 9, clock=lambda: now[0])

    async def story() -> list[Member | None]:
        taken = [await pool.take() for _ in range(4)]
        await pool.failed(pool.members[1], APIConnectionError(request=NOWHERE))
        assert pool.health == "1 of 2 endpoints"
        return [*taken, await pool.take(), await pool.take()]

    first, second = pool.members
    assert asyncio.run(story()) == [first, second, first, second, first, first]
