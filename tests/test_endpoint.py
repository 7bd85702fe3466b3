"""Answers from a served target: what is asked, what is tried again, what is set aside."""

import asyncio
import gc
import importlib.util
import io
import json
import threading
from collections import defaultdict
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI
from rich.console import Console
from scripted_endpoint import Endpoint as ScriptedEndpoint
from scripted_endpoint import Reply, Request, chat, completion, in_turn, last_words, serve
from tiny_training import write_rows

from trainer.commands.guarded import guarded
from trainer.commands.regenerate import run_regenerate
from trainer.commands.training_options import RegenerateOptions
from trainer.data.answers import Answered, Outcome
from trainer.data.conversations import Conversation, read_conversations
from trainer.run.answering import Summary
from trainer.target import endpoint as endpoint_module
from trainer.target.connection import Served
from trainer.target.endpoint import Asked, EndpointBackend
from trainer.terminal.exit_codes import ExitCode

KEY = "sk-ThisIsNoRealKeyOnlyATest"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def options(folder: Path, address: str, prompts: Iterable[Any] = ("one",), **changes: Any) -> RegenerateOptions:
    source = write_rows(folder / "prompts.jsonl", [{"prompt": prompt} for prompt in prompts])
    defaults: dict[str, Any] = {"endpoint": [address], "model": "tiny", "retries": 2, "timeout": 30.0}
    return RegenerateOptions(prompts=source, output=folder / "answers.jsonl", **{**defaults, **changes})


def regenerate(chosen: RegenerateOptions) -> Summary:
    return run_regenerate(chosen, Console(file=io.StringIO()))


def answers_nothing(chosen: RegenerateOptions) -> str:
    """How a run complains of which nothing comes."""
    with pytest.raises(ValueError, match="nothing was answered") as caught:
        regenerate(chosen)
    return str(caught.value)


def host_of(endpoint: ScriptedEndpoint) -> str:
    return endpoint.address.removeprefix("http://").removesuffix("/v1")


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(folder: Path) -> list[str]:
    return [row["messages"][-1]["content"] for row in rows(folder / "answers.jsonl")]


def set_aside(folder: Path) -> list[dict[str, Any]]:
    return rows(folder / "answers.jsonl.failed.jsonl")


def test_an_answer_is_written_with_its_tokens_and_its_row(tmp_path: Path) -> None:
    with serve(lambda request: chat("two", tokens=5)) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address))
    assert rows(tmp_path / "answers.jsonl") == [
        {
            "row": 1,
            "sample": 0,
            "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}],
            "tokens": 5,
            "truncated": False,
        }
    ]
    assert (summary.answered, summary.tokens, summary.failed, summary.differing) == (1, 5, 0, None)


def test_a_request_carries_the_key_the_settings_and_a_seed_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TARGET_KEY", KEY)
    with serve(lambda request: chat("two")) as endpoint:
        regenerate(
            options(
                tmp_path, endpoint.address, ("one", "two"), n=2, seed=7, temperature=0.5, top_p=0.9, max_new_tokens=11,
                api_key_variable="TARGET_KEY",
            )
        )  # fmt: skip
    bodies = [request.body for request in endpoint.requests]
    assert {request.key for request in endpoint.requests} == {KEY}
    assert sorted(body["seed"] for body in bodies) == [7, 8, 9, 10]
    for body in bodies:
        settings = {name: body[name] for name in ("model", "temperature", "top_p", "max_tokens")}
        assert settings == {"model": "tiny", "temperature": 0.5, "top_p": 0.9, "max_tokens": 11}


def test_without_a_key_none_is_sent(tmp_path: Path) -> None:
    with serve(lambda request: chat("two")) as endpoint:
        regenerate(options(tmp_path, endpoint.address))
    assert endpoint.requests[0].key == "none"


def test_turns_are_asked_one_after_the_other_each_with_the_answers_before_it(tmp_path: Path) -> None:
    with serve(in_turn(chat("A"), chat("B"))) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, [["one", "two"]]))
    assert [[message["content"] for message in request.body["messages"]] for request in endpoint.requests] == [
        ["one"],
        ["one", "A", "two"],
    ]
    assert [message["content"] for message in rows(tmp_path / "answers.jsonl")[0]["messages"]] == [
        "one", "A", "two", "B",
    ]  # fmt: skip
    assert summary.answers == 2


def test_completions_continue_the_prompt_itself(tmp_path: Path) -> None:
    with serve(lambda request: completion(" upon a time")) as endpoint:
        regenerate(options(tmp_path, endpoint.address, ("Once",), completions=True))
    assert endpoint.requests[0].path == "/v1/completions" and endpoint.requests[0].body["prompt"] == "Once"
    row = rows(tmp_path / "answers.jsonl")[0]
    assert (row["prompt"], row["answer"]) == ("Once", " upon a time")


@pytest.mark.parametrize(
    "first",
    [
        (500, {"error": {"message": "out of memory"}}),
        (503, "overloaded"),
        (429, {"error": {"message": "slow down"}}),
        (200, "{half a json"),
        (200, {"unlike": "a completion"}),
        (200, {"choices": []}),
        (200, [1]),
        chat(""),
        chat(" \n"),
        chat(None),
    ],
    ids=str,
)
def test_what_may_pass_is_tried_again(tmp_path: Path, first: Reply) -> None:
    with serve(in_turn(first, chat("two"))) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address))
    assert len(endpoint.requests) == 2
    assert answers(tmp_path) == ["two"] and summary.failed == summary.empty == 0


def test_an_empty_answer_is_asked_for_with_another_seed(tmp_path: Path) -> None:
    with serve(in_turn(chat(""), chat("two"))) as endpoint:
        regenerate(options(tmp_path, endpoint.address))
    first, second = (request.body["seed"] for request in endpoint.requests)
    assert first != second


@pytest.mark.parametrize(
    ("reply", "problem", "reason"),
    [
        ((500, {"error": {"message": "out of memory"}}), "failed", "HTTP 500: "),
        ((429, {"error": {"message": "slow down"}}), "failed", "HTTP 429: "),
        ((200, "{half a json"), "failed", "the endpoint sent what is no JSON"),
        ((200, {"choices": None}), "failed", "no completion"),
        (chat(""), "empty", "the answer is empty"),
    ],
    ids=str,
)
def test_what_never_passes_is_set_aside_and_the_run_goes_on(
    tmp_path: Path, reply: Reply, problem: str, reason: str
) -> None:
    with serve(lambda request: reply if last_words(request) == "bad" else chat("fine")) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, ("bad", "good")))
    asked = [last_words(request) for request in endpoint.requests]
    assert asked.count("bad") == 3  # the first time, and two retries
    (row,) = set_aside(tmp_path)
    assert (row["row"], row["sample"], row["problem"]) == (1, 0, problem) and reason in row["reason"]
    assert answers(tmp_path) == ["fine"]
    assert (summary.answered, summary.failed + summary.empty) == (1, 1)


def test_a_request_that_is_wrong_in_itself_is_not_repeated(tmp_path: Path) -> None:
    with serve(lambda request: (400, {"error": {"message": "prompt too long"}})) as endpoint:
        assert "prompt too long" in answers_nothing(options(tmp_path, endpoint.address))
    assert len(endpoint.requests) == 1
    assert "HTTP 400" in set_aside(tmp_path)[0]["reason"] and "prompt too long" in set_aside(tmp_path)[0]["reason"]


def test_a_server_that_does_not_answer_in_time_is_given_up(tmp_path: Path) -> None:
    over = threading.Event()

    def silent(request: Request) -> Reply:
        over.wait()
        return chat("too late")

    with serve(silent) as endpoint:
        answers_nothing(options(tmp_path, endpoint.address, timeout=0.05, retries=0))
        over.set()
    assert set_aside(tmp_path)[0]["reason"] == "no answer within 0.05 s"


def test_a_server_that_is_not_there_ends_the_run(tmp_path: Path) -> None:
    with serve(lambda request: chat("two")) as endpoint:
        pass
    with pytest.raises(
        ValueError,
        match=f"^no connection to {host_of(endpoint)}, .*; what was answered is kept: see to the endpoint, then",
    ):
        regenerate(options(tmp_path, endpoint.address, retries=0))
    assert not (tmp_path / "answers.jsonl").exists() and not (tmp_path / "answers.jsonl.failed.jsonl").exists()


def test_what_failed_is_asked_again_by_the_next_run_and_nothing_else_is(tmp_path: Path) -> None:
    with serve(lambda request: (500, {}) if last_words(request) == "bad" else chat("fine")) as endpoint:
        chosen = options(tmp_path, endpoint.address, ("bad", "good"), retries=0)
        regenerate(chosen)
    with serve(lambda request: chat("at last")) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, ("bad", "good")))
    assert [last_words(request) for request in endpoint.requests] == ["bad"]
    assert answers(tmp_path) == ["at last", "fine"] and set_aside(tmp_path) == []
    assert (summary.before, summary.answered) == (1, 1)


@pytest.mark.parametrize("status", [401, 403])
def test_a_key_that_is_refused_ends_the_run_at_once_and_is_not_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, status: int
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with (
        serve(lambda request: (status, {"error": {"message": f"bad key {KEY}"}})) as endpoint,
        pytest.raises(ValueError, match=f"refuses the key .HTTP {status}.: .* OPENAI_API_KEY") as caught,
    ):
        regenerate(options(tmp_path, endpoint.address, ("one", "two"), concurrency=1))
    assert len(endpoint.requests) == 1
    assert KEY not in str(caught.value)


def test_a_model_that_is_not_served_ends_the_run_at_once(tmp_path: Path) -> None:
    with (
        serve(lambda request: (404, {"error": {"message": "no such model"}})) as endpoint,
        pytest.raises(ValueError, match="knows no model 'tiny'"),
    ):
        regenerate(options(tmp_path, endpoint.address, ("one", "two"), concurrency=1))
    assert len(endpoint.requests) == 1


def test_the_key_is_in_no_file_even_if_the_server_repeats_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    replies = in_turn(*((500, {"error": {"message": f"{'no room ' * length}{KEY}"}}) for length in (1, 31)))
    with serve(replies) as endpoint:
        complaint = answers_nothing(options(tmp_path, endpoint.address, ("one", "two"), retries=0, concurrency=1))
    assert "[the key]" in set_aside(tmp_path)[0]["reason"]
    written = [path.read_text() for path in tmp_path.iterdir()]
    # The second message is so long that it is cut off in the middle of the key.
    assert len(written) >= 3 and not any(KEY[:8] in text for text in (*written, complaint))


@pytest.mark.parametrize("debug", [False, True])
@pytest.mark.parametrize("status", [401, 404])
def test_the_key_is_not_printed_though_the_server_repeats_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
    debug: bool,
    status: int,
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serve(lambda request: (status, {"error": {"message": f"bad key {KEY}"}})) as endpoint:
        chosen = options(tmp_path, endpoint.address, map(str, range(12)), concurrency=6)
        assert guarded(partial(run_regenerate, chosen), debug) == ExitCode.BAD_INPUT
    gc.collect()  # Python tells of errors that nobody asked for when their tasks go
    printed = "".join(capfd.readouterr())
    assert f"HTTP {status}" in printed and KEY not in printed
    assert caplog.text == ""


@pytest.mark.parametrize("key", ["sk-tést", "sk-te st", "sk-test\n"])
def test_a_key_that_no_header_can_hold_is_refused_before_anything_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    with pytest.raises(ValueError, match="variable OPENAI_API_KEY has a blank, a line break or a character") as caught:
        regenerate(options(tmp_path, "http://127.0.0.1:9/v1"))
    assert "sk-" not in str(caught.value)


@pytest.mark.parametrize(
    "address",
    ["", "localhost:8000/v1", "http://", "http://me:secret@127.0.0.1:99999/v1", "http://[::1/v1", "http://999.1.1.1"],
)
def test_what_is_no_address_is_refused_without_repeating_it(tmp_path: Path, address: str) -> None:
    with pytest.raises(ValueError, match="not the address of a server: give one such as http://local") as caught:
        regenerate(options(tmp_path, address))
    assert "secret" not in str(caught.value) and not (tmp_path / "answers.jsonl.meta.json").exists()


def test_what_was_answered_is_handed_over_before_a_refusal_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two end in the same moment, one well; the third is still under way, the fourth never asked."""
    ended: list[str] = []

    async def converse(self: EndpointBackend, conversation: Conversation) -> Outcome:
        word = conversation.text
        if word == "refused":
            raise ValueError("the key is refused")
        if word == "slow":
            try:
                await asyncio.Event().wait()
            finally:
                ended.append(word)
        return Answered(conversation, ("fine",), 1, truncated=False)

    async def close(self: Any) -> None:
        ended.append("connections")

    monkeypatch.setattr(EndpointBackend, "_converse", converse)
    monkeypatch.setattr(AsyncOpenAI, "close", close)
    prompts = write_rows(tmp_path / "prompts.jsonl", [{"prompt": p} for p in ("refused", "good", "slow", "late")])
    conversations = read_conversations(prompts, None, None, 1, chat=True)
    served = Served(address="http://127.0.0.1:9/v1", model="tiny", concurrency=3, retries=2, timeout=30.0)
    asked = Asked(endpoints=(served,), temperature=0.0, top_p=1.0, max_new_tokens=256, seed=0)
    outcomes = EndpointBackend(asked).outcomes(conversations, (), lambda tokens: None)
    assert [outcome.conversation.text for outcome in next(outcomes)] == ["good"]
    with pytest.raises(ValueError, match="the key is refused"):
        next(outcomes)
    assert ended == ["slow", "connections"]


def test_an_answer_that_is_cut_off_is_kept_and_marked(tmp_path: Path) -> None:
    with serve(lambda request: chat("half a chara\N{REPLACEMENT CHARACTER}", "length")) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, [["one", "two"]]))
    row = rows(tmp_path / "answers.jsonl")[0]
    assert row["truncated"] and [message["content"] for message in row["messages"]] == ["one", "half a chara"]
    assert len(endpoint.requests) == 1  # the second turn would answer to half a sentence
    assert summary.truncated == 1


def test_an_answer_that_is_cut_off_can_be_dropped_and_is_not_asked_for_again(tmp_path: Path) -> None:
    with serve(lambda request: chat("half", "length")) as endpoint:
        chosen = options(tmp_path, endpoint.address, keep_truncated=False)
        for _ in range(2):
            assert "did not end within the tokens allowed" in answers_nothing(chosen)
    assert len(endpoint.requests) == 1
    assert not (tmp_path / "answers.jsonl").exists()
    assert set_aside(tmp_path)[0]["problem"] == "truncated"


def test_a_server_that_counts_no_tokens_is_good_enough(tmp_path: Path) -> None:
    status, body = chat("two")
    with serve(lambda request: (status, {**body, "usage": None})) as endpoint:
        regenerate(options(tmp_path, endpoint.address))
    assert rows(tmp_path / "answers.jsonl")[0]["tokens"] == 0


def test_requests_are_under_way_together_and_the_file_is_sorted_at_the_end(tmp_path: Path) -> None:
    second_came = threading.Event()

    def script(request: Request) -> Reply:
        if last_words(request) == "two":
            second_came.set()
        assert second_came.wait(20), "the second request does not come before the first is answered"
        return chat(f"to {last_words(request)}")

    with serve(script) as endpoint:
        regenerate(options(tmp_path, endpoint.address, ("one", "two", "three"), concurrency=2))
    assert answers(tmp_path) == ["to one", "to two", "to three"]


def test_no_more_requests_are_under_way_than_were_allowed(tmp_path: Path) -> None:
    under_way: dict[str, int] = defaultdict(int)
    lock = threading.Lock()

    def script(request: Request) -> Reply:
        with lock:
            under_way["now"] += 1
            under_way["most"] = max(under_way["most"], under_way["now"])
        with lock:
            under_way["now"] -= 1
        return chat("fine")

    with serve(script) as endpoint:
        regenerate(options(tmp_path, endpoint.address, map(str, range(12)), concurrency=1))
    assert under_way["most"] == 1 and len(endpoint.requests) == 12


def test_a_run_in_which_everything_fails_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint_module, "HOPELESS", 3)
    with (
        serve(lambda request: (500, {})) as endpoint,
        pytest.raises(ValueError, match="3 conversations failed one after the other, the last one so: HTTP 500"),
    ):
        regenerate(options(tmp_path, endpoint.address, map(str, range(9)), concurrency=1, retries=0))
    assert len(endpoint.requests) < 9 and len(set_aside(tmp_path)) == 3


@pytest.mark.parametrize(("name", "value"), [("concurrency", 0), ("retries", -1), ("timeout", 0.0)])
def test_an_impossible_number_is_refused(tmp_path: Path, name: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}: give at least"):
        regenerate(options(tmp_path, "http://127.0.0.1:9/v1", **{name: value}))


def test_without_the_openai_package_the_remedy_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'headstart\[endpoint\]'"):
        regenerate(options(tmp_path, "http://127.0.0.1:9/v1"))
