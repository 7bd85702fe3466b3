"""Answers of a served target other than plain text, and the requests to it: tools, reasoning, calls, other hosts."""

import io
import json
import resource
import threading
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scripted_endpoint import Reply, Request, chat, in_turn, last_words, serve, streamed
from test_endpoint import KEY, options, regenerate, rows, set_aside
from tiny_tokenizer import TOOL_TEMPLATE, byte_tokenizer
from tiny_training import write_rows

from trainer.commands.options import RegenerateOptions
from trainer.commands.regenerate import run_regenerate
from trainer.data.dataset import load_dataset
from trainer.recipe.common import DataSection

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}

SAID = {"role": "assistant", "content": "Well"}


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1,localhost")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def asking(folder: Path, address: str, *prompts: Any, **changes: Any) -> RegenerateOptions:
    """Return options for rows with several fields."""
    chosen = options(folder, address, **changes)
    return replace(chosen, prompts=write_rows(folder / "rows.jsonl", prompts))


def message(content: str | None, finish_reason: str = "stop", **fields: Any) -> Reply:
    """Return a chat completion whose message has further fields."""
    status, body = chat(content, finish_reason)
    body["choices"][0]["message"] |= fields
    return status, body


def answer_of(folder: Path) -> dict[str, Any]:
    (row,) = rows(folder / "answers.jsonl")
    answer: dict[str, Any] = row["messages"][-1]
    return answer


def printed(chosen: RegenerateOptions) -> str:
    said = io.StringIO()
    run_regenerate(chosen, Console(file=said, width=1000))
    return said.getvalue()


def trained(folder: Path) -> list[str]:
    section = DataSection(train="t", heldout="h")
    dataset = load_dataset(str(folder / "answers.jsonl"), section, byte_tokenizer(TOOL_TEMPLATE))
    pairs = [zip(example.tokens, example.trained, strict=True) for example in dataset.examples]
    return ["".join(chr(token) for token, counts in pair if counts) for pair in pairs]


# --- tools ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tools", [[TOOL], json.dumps([TOOL["function"]])], ids=["list", "text"])
def test_the_tools_of_a_row_are_sent_and_written_with_its_answer(tmp_path: Path, tools: Any) -> None:
    with serve(lambda request: chat("Yes")) as endpoint:
        regenerate(asking(tmp_path, endpoint.address, {"prompt": "a", "tools": tools}, {"prompt": "b"}, concurrency=1))
    first, second = (request.body for request in endpoint.requests)
    assert first["tools"] == [TOOL] and "tools" not in second
    having, without = rows(tmp_path / "answers.jsonl")
    assert having["tools"] == [TOOL] and "tools" not in without


def test_a_call_is_an_answer_which_training_reads_and_the_next_turn_sees(tmp_path: Path) -> None:
    talk: list[dict[str, Any]] = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": "9", "tool_call_id": "1", "name": "f"},
    ]
    with serve(in_turn(message(None, "tool_calls", tool_calls=[CALL]), chat("Yes"))) as endpoint:
        summary = regenerate(asking(tmp_path, endpoint.address, {"messages": talk, "tools": [TOOL]}))
    assert endpoint.requests[1].body["messages"] == [talk[0], {**talk[1], "content": ""}, talk[2]]
    assert (summary.answers, summary.empty) == (2, 0)
    assert trained(tmp_path) == ['!f{"x": 1};Yes;']


def called(*names: str, prefix: str = "") -> list[dict[str, Any]]:
    """Return calls of functions, with ids that consist of a prefix and 0, 1, …"""
    return [{**CALL, "id": f"{prefix}{i}", "function": {**CALL["function"], "name": f}} for i, f in enumerate(names)]


@pytest.mark.parametrize("has_ids", [True, False])
@pytest.mark.parametrize(
    ("new", "recorded"),
    [("f", "f"), ("fg", "fg"), ("", "f"), ("f", "ff"), ("fg", "f"), ("g", "f"), ("gf", "fg"), ("f", "")],
)
def test_recorded_results_follow_the_new_calls_and_a_row_whose_calls_were_not_made_ends(
    tmp_path: Path, new: str, recorded: str, has_ids: bool
) -> None:
    goes_on = new == recorded
    old, results = called(*recorded), [{"role": "tool", "tool_call_id": f"{i}"} for i in range(len(recorded))]
    for each in () if has_ids else (*results, *old):
        del each["tool_call_id" if "role" in each else "id"]
    results = [{**each, "content": "9"} for each in results]
    made: list[dict[str, Any]] = [{"role": "assistant", "content": "", "tool_calls": old}] if recorded else [SAID]
    talk = [{"role": "user", "content": "a"}, *made, *results, *([] if recorded else [{**SAID, "role": "user"}])]
    calls = called(*new, prefix="new ")
    with serve(in_turn(message(None if new else "No", tool_calls=calls or None), chat("Yes"))) as endpoint:
        summary = regenerate(asking(tmp_path, endpoint.address, {"messages": talk, "tools": [TOOL]}))
    (row,) = rows(tmp_path / "answers.jsonl")
    sent = [each["tool_call_id"] for each in row["messages"] if each["role"] == "tool"]
    assert sent == ([call["id"] for call in calls] if goes_on else [])
    assert len(endpoint.requests) == summary.answers == 1 + goes_on and summary.unasked == 1 - goes_on
    assert endpoint.requests[-1].body["messages"] == row["messages"][:-1]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_under_the_name_that_templates_read_and_is_trained(tmp_path: Path, name: str) -> None:
    with serve(lambda request: message("Yes", **{name: "Hm"})) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address))
    assert answer_of(tmp_path) == {"role": "assistant", "content": "Yes", "reasoning_content": "Hm"}
    assert (summary.reasoned, summary.reasoned_only) == (1, 0)
    assert trained(tmp_path) == ["<think>Hm</think>Yes;"]


def test_reasoning_alone_is_an_answer_and_counted_as_such(tmp_path: Path) -> None:
    with serve(lambda request: message(None, reasoning="Hm")) as endpoint:
        said = printed(options(tmp_path, endpoint.address))
    assert answer_of(tmp_path) == {"role": "assistant", "content": "", "reasoning_content": "Hm"}
    assert [line.split("│")[2].strip() for line in said.splitlines() if "with reasoning" in line] == ["1", "1"]


def test_the_next_turn_is_asked_with_the_reasoning_before_it(tmp_path: Path) -> None:
    with serve(in_turn(message("A", reasoning_content="Hm"), chat("B"))) as endpoint:
        regenerate(options(tmp_path, endpoint.address, [["one", "two"]]))
    assert endpoint.requests[1].body["messages"][1]["reasoning_content"] == "Hm"


@pytest.mark.parametrize(
    "fields", [{"reasoning": " "}, {"reasoning_content": 3}, {"tool_calls": []}, {"tool_calls": 3}]
)
def test_what_is_neither_text_nor_reasoning_nor_calls_is_an_empty_answer(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    with serve(in_turn(message(None, **fields), chat("Yes"))) as endpoint:
        regenerate(options(tmp_path, endpoint.address, ("one", "two"), concurrency=1))
    assert set_aside(tmp_path)[0]["problem"] == "empty" and answer_of(tmp_path)["content"] == "Yes"


# --- the target's own tokens ------------------------------------------------------------------------------------------


def with_ids(reply: Reply, where: str, tokens: str, prompt: str | None = None) -> Reply:
    """Return the reply with the token ids of a byte tokenizer, in the field that one server uses."""
    status, body = reply
    if where == "vLLM":
        body["choices"][0]["token_ids"] = [*tokens.encode()]
        body["prompt_token_ids"] = None if prompt is None else [*prompt.encode()]
    else:
        body["__verbose"] = {"tokens": [*tokens.encode()]}
    return status, body


@pytest.mark.parametrize("where", ["vLLM", "llama.cpp"])
def test_training_reads_the_very_tokens_of_the_server(tmp_path: Path, where: str) -> None:
    replies = with_ids(chat("A"), where, "A\0", "<1>"), with_ids(chat("B"), where, "B\0", "<1>A;<2>")
    with serve(in_turn(*replies)) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, [["one", "two"]]))
    asked = endpoint.requests[0].body
    assert asked["return_token_ids"] and asked["return_tokens"] and asked["verbose"] and summary.texts_alone == 0
    (row,) = rows(tmp_path / "answers.jsonl")
    assert row["answer_tokens"] == [[*b"A\0"], [*b"B\0"]] and ("prompt_tokens" in row) == (where == "vLLM")
    assert trained(tmp_path) == ["A\0", "B\0"]
    section = DataSection(train="t", heldout="h")
    dataset = load_dataset(str(tmp_path / "answers.jsonl"), section, byte_tokenizer(TOOL_TEMPLATE))
    first = bytes(dataset.examples[0].tokens[:-2].tolist())
    assert (first == b"<1>") == (where == "vLLM"), "else the template's own"


def test_tokens_of_an_answer_with_reasoning_hold_both(tmp_path: Path) -> None:
    reply = with_ids(message("Yes", reasoning="Hm"), "vLLM", "<think>Hm</think>Yes;")
    with serve(lambda request: reply) as endpoint:
        regenerate(options(tmp_path, endpoint.address))
    assert trained(tmp_path) == ["<think>Hm</think>Yes;"]


def test_a_server_without_a_field_for_ids_answers_in_texts_which_are_counted_and_cuts_too(tmp_path: Path) -> None:
    def script(request: Request) -> Reply:
        if "return_token_ids" in request.body:
            return 422, {"error": {"message": "unknown field"}}
        return chat("half", "length" if last_words(request) == "two" else "stop")

    with serve(script) as endpoint:
        said = printed(options(tmp_path, endpoint.address, ("one", "two", "three", "four"), concurrency=1))
    assert len(endpoint.requests) == 6, "asked for once, with a stream and without"
    assert [line.split("│")[2].strip() for line in said.splitlines() if "text only" in line] == ["4"]
    assert "warning: 25.0% of the answers were cut off at 2,048 tokens: raise --max-new-tokens" in said
    body = endpoint.requests[-1].body
    assert body["max_tokens"] == 2048 and "temperature" not in body, "the server's own sampling"


@pytest.mark.parametrize("rejected", [{"stream"}, {"stream_options", "return_tokens"}], ids=["stream", "options"])
def test_a_server_that_rejects_what_is_wished_for_is_asked_without_it(tmp_path: Path, rejected: set[str]) -> None:
    with serve(lambda request: (422, {}) if rejected & request.body.keys() else chat("Yes")) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, ("one", "two", "three"), concurrency=1))
    assert (summary.answered, summary.failed) == (3, 0)


def vllm(request: Request) -> Reply:
    """Return events with token ids, and with the prompt's ids in the first event; each token is one byte."""
    assert request.body["stream"]
    ids = [[*b"A"], [*"é".encode()], [0]]
    return streamed("A", "é", finish_reason="stop", tokens=4, token_ids=ids, prompt_token_ids=[[*b"<1>"]])


def sglang(request: Request) -> Reply:
    """Reject a stream with token ids, as SGLang does."""
    if request.body.get("stream"):
        assert request.body["return_token_ids"], "asked for once"
        return 400, {"error": {"message": "return_token_ids is not supported with streaming"}}
    status, body = chat("Aé")
    body["choices"][0] |= {"response_token_ids": [*"Aé\0".encode()], "prompt_token_ids": [*b"<1>"]}
    return status, body


def llama_cpp(request: Request) -> Reply:
    """Leave out token ids in the stream of a chat without saying so, as llama.cpp does."""
    if request.body.get("stream"):
        return streamed("A", "é", tokens=4)
    return with_ids(chat("Aé"), "llama.cpp", "Aé\0")


def partial(request: Request) -> Reply:
    """Leave out the ids of tokens that end inside a character, as in llama.cpp's streams of completions."""
    if request.body.get("stream"):
        return streamed("A", "é", tokens=4, token_ids=[[*b"A"], [*"é".encode()[1:]], [0]])
    return with_ids(chat("Aé"), "llama.cpp", "Aé\0")


@pytest.mark.parametrize(("server", "requests"), [(vllm, 2), (sglang, 3), (llama_cpp, 3), (partial, 3)])
def test_ids_come_in_a_stream_or_with_a_whole_answer_as_the_server_can(
    tmp_path: Path, server: Any, requests: int
) -> None:
    with serve(server) as endpoint:
        regenerate(options(tmp_path, endpoint.address, ("one", "two"), concurrency=1))
    found = rows(tmp_path / "answers.jsonl")
    assert [row["answer_tokens"] for row in found] == [[[*"Aé\0".encode()]]] * 2
    assert [row["messages"][-1]["content"] for row in found] == ["Aé"] * 2
    assert [row.get("prompt_tokens") for row in found] == [[[*b"<1>"]] if server in (vllm, sglang) else None] * 2
    assert len(endpoint.requests) == requests, "a server without ids in its streams is asked for whole answers then"


@pytest.mark.parametrize("server", [sglang, llama_cpp])
def test_a_request_begun_before_a_server_was_known_gets_its_ids_too(tmp_path: Path, server: Any) -> None:
    """The second stream is answered once the first request has a whole answer and the third request has asked for
    one.
    """
    streams, wholes, known = count(), count(), threading.Event()

    def script(request: Request) -> Reply:
        if not request.body.get("stream"):
            if next(wholes) == 1:
                known.set()
        elif next(streams) == 1:
            assert known.wait(20)
        return server(request)  # type: ignore[no-any-return]

    with serve(script) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, map(str, range(8)), concurrency=2))
    assert (summary.answered, summary.texts_alone, len(endpoint.requests)) == (8, 0, 10)


def test_reasoning_text_and_calls_are_joined_from_the_events_of_a_stream(tmp_path: Path) -> None:
    def call(index: int, **function: str | None) -> dict[str, Any]:
        named = {"id": f"{index}", "type": "function"} if "name" in function else {}
        return {"tool_calls": [{"index": index, **named, "function": function}]}

    parts = [{"role": "assistant", "reasoning": "H"}, {"reasoning": "m"}, "Y", "es", call(1, name="g", arguments="")]
    parts += [call(0, name="f", arguments='{"x"'), call(0, arguments=": 1}"), call(1, arguments="{}"), {"role": ""}]
    with serve(lambda request: streamed(*parts, finish_reason="tool_calls", tokens=9)) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, ("one",)))
    answer, calls = answer_of(tmp_path), [{**CALL, "id": "0"}, {**CALL, "id": "1"}]
    calls[1]["function"] = {"name": "g", "arguments": "{}"}
    assert (answer["content"], answer["reasoning_content"], summary.tokens) == ("Yes", "Hm", 9)
    assert sorted(answer["tool_calls"], key=lambda each: str(each["id"])) == calls


# --- what is not written ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "reply", [chat("half \ud83d"), message("Yes", reasoning="half \ud83d")], ids=["text", "reasoning"]
)
def test_half_a_character_is_no_answer_and_neither_asked_on_nor_written(tmp_path: Path, reply: Reply) -> None:
    """Training rejects such a row, and no request can contain it."""
    with serve(lambda request: chat("Yes") if last_words(request) == "two" else reply) as endpoint:
        summary = regenerate(options(tmp_path, endpoint.address, (["one", "more"], "two")))
    (row,) = set_aside(tmp_path)
    assert row["problem"] == "failed" and "half a character" in row["reason"] and summary.failed == 1
    assert trained(tmp_path) == ["Yes;"]


def test_a_disk_that_takes_no_more_is_named_and_loses_nothing(tmp_path: Path) -> None:
    """Half of the second answer is written, because files may grow by only nine more bytes."""
    free = resource.getrlimit(resource.RLIMIT_FSIZE)

    def script(request: Request) -> Reply:
        if last_words(request) == "two":
            size = (tmp_path / "answers.jsonl").stat().st_size
            resource.setrlimit(resource.RLIMIT_FSIZE, (size + 9, free[1]))
        return chat("Yes")

    with serve(script) as endpoint:
        try:
            with pytest.raises(
                OSError, match=r"answers\.jsonl cannot be written .*: free some disk space, then run the same"
            ):
                regenerate(options(tmp_path, endpoint.address, ("one", "two", "three"), concurrency=1))
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, free)
    with serve(lambda request: chat("Yes")) as endpoint:
        assert regenerate(options(tmp_path, endpoint.address, ("one", "two", "three"))).before == 1
    assert [row["row"] for row in rows(tmp_path / "answers.jsonl")] == [1, 2, 3]


# --- who answers ------------------------------------------------------------------------------------------------------


def test_a_redirect_is_refused_and_neither_key_nor_prompt_reaches_where_it_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    with serve(lambda request: chat("Yes")) as other:
        there = other.address.replace("127.0.0.1", "localhost")
        headers = {"Location": f"{there.replace('//', '//me:secret@')}/{KEY}/chat?key=secret"}
        with (
            serve(lambda request: (307, {}), headers=headers) as endpoint,
            pytest.raises(ValueError, match=f"redirects to {there}/.the key./chat .*--endpoint") as caught,
        ):
            regenerate(options(tmp_path, endpoint.address, ("one", "two"), concurrency=1))
    assert not other.requests and len(endpoint.requests) == 1
    assert KEY not in str(caught.value) and "secret" not in str(caught.value)


def test_rows_that_ask_for_another_model_than_answers_are_counted_once(tmp_path: Path) -> None:
    asked = [{"prompt": "a", "model": "large"}, {"prompt": "b", "model": "large"}, {"prompt": "c", "model": "tiny"}]
    with serve(lambda request: chat("Yes")) as endpoint:
        said = printed(asking(tmp_path, endpoint.address, *asked, {"prompt": "d"}, {"prompt": "e", "model": 3}))
    (line,) = (line for line in said.splitlines() if "another model" in line)
    assert line.split("│")[2].strip() == "2"


def test_answers_by_two_models_end_the_run_and_name_both(tmp_path: Path) -> None:
    def answering(model: str) -> Any:
        return lambda request: (200, {**chat("Yes")[1], "model": model})

    both = r"127\..* serves 'large', but earlier .* served 'tiny'; finished answers are saved"
    with serve(in_turn(answering("tiny")(None), answering("large")(None))) as endpoint:
        chosen = options(tmp_path, endpoint.address, ("one", "two"), concurrency=1)
        with pytest.raises(ValueError, match=both):
            regenerate(chosen)
    assert [row["row"] for row in rows(tmp_path / "answers.jsonl")] == [1]
    (tmp_path / "pair").mkdir()
    with serve(answering("tiny")) as one, serve(answering("large")) as other:
        chosen = options(tmp_path / "pair", "", ("one", "two"), endpoint=[one.address, other.address])
        with pytest.raises(ValueError, match="pass endpoints that serve the same model"):
            regenerate(chosen)


def test_variables_of_the_chat_template_go_with_every_turn_and_belong_to_the_answers(tmp_path: Path) -> None:
    given = '{"enable_thinking": false}'
    with serve(lambda request: chat("Yes")) as endpoint:
        chosen = options(tmp_path, endpoint.address, [["one", "two"]], chat_template_kwargs=given)
        regenerate(chosen)
        with pytest.raises(ValueError, match=r"was started with chat_template_kwargs '.*', not None"):
            regenerate(replace(chosen, chat_template_kwargs=None))
    sent = [request.body["chat_template_kwargs"] for request in endpoint.requests]
    assert sent == [json.loads(given)] * 2
