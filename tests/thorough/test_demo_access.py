"""The web demo over HTTP: whom it answers, what it takes, and bad entries, which are sentences and no tracebacks."""

import json
import socket
from collections.abc import Iterator
from importlib.util import find_spec

import httpx
import pytest
from tiny_models import tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding.drafters import PromptLookupDrafter
from decoding.model.causal_lm import CausalLM
from trainer.commands.demo import imported_app
from trainer.demo.race import Models

pytestmark = pytest.mark.skipif(find_spec("gradio") is None, reason="the demo needs Gradio")
JSON = {"content-type": "application/json"}
ENTRY = {"prompt": "abcab", "drafter": "lookup", "rule": "automatic", "depth": 3, "nodes": 8, "temperature": 0.0}
ENTRY |= {"max_new_tokens": 4, "seed": 0}


def opened(host: str = "127.0.0.1") -> Iterator[httpx.Client]:
    app = imported_app()
    target = CausalLM(tiny_model(vocab=128))
    models = Models.of(target, byte_tokenizer(), {"lookup": PromptLookupDrafter()})
    page = app.build(models, app.Words("tiny", ("abc", "xyz")))
    with socket.create_server((host, 0)) as free:
        port = free.getsockname()[1]
    app.launch(page, host, port)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as client:
        yield client
    page.close(verbose=False)


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    yield from opened()


@pytest.fixture(scope="module")
def events(client: httpx.Client) -> dict[str, int]:
    """Numbers of the page's events by their names."""
    names = ("example", "run", "stop", "look", "rules", "bounds", "leave")
    return dict(zip(names, (each["id"] for each in client.get("/config").json()["dependencies"]), strict=True))


def asks(client: httpx.Client, event: int, *values: object, **headers: str) -> httpx.Response:
    body = {"data": values, "fn_index": event, "session_hash": "someone"}
    return client.post("/gradio_api/run/predict", json=body, headers=headers)


def test_no_file_can_be_uploaded(client: httpx.Client) -> None:
    assert client.post("/gradio_api/upload", files={"files": b"x"}).status_code == 403


@pytest.mark.parametrize("name", ["evil.example", "192.168.0.9", "localhost.evil.example", "[::1", ""])
def test_a_foreign_host_is_refused_with_a_sentence(client: httpx.Client, name: str) -> None:
    answer = client.get("/config", headers={"host": f"{name}:80"})
    assert answer.status_code == 403 and "headstart demo" in answer.text


def test_this_machine_is_answered_by_each_of_its_names(client: httpx.Client) -> None:
    for name in ("localhost", "127.0.0.1", "[::1]", "LOCALHOST"):
        assert client.get("/config", headers={"host": f"{name}:{client.base_url.port}"}).is_success


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:9"])
def test_another_page_may_not_ask(client: httpx.Client, events: dict[str, int], origin: str) -> None:
    assert asks(client, events["stop"], origin=origin).status_code == 403
    own = f"http://{client.base_url.netloc.decode()}"
    assert asks(client, events["stop"], origin=own).is_success


def ran(client: httpx.Client, event: int, **changed: object) -> str:
    """What the page shows of a run with this entry: its sentence, or the texts."""
    body = {"data": list((ENTRY | changed).values()), "fn_index": event, "session_hash": "runner"}
    assert client.post("/gradio_api/queue/join", content=json.dumps(body), headers=JSON).is_success
    with client.stream("GET", "/gradio_api/queue/data", params={"session_hash": "runner"}) as told:
        messages = (json.loads(line.removeprefix("data:")) for line in told.iter_lines() if line.startswith("data:"))
        ended = next(each for each in messages if each["msg"] == "process_completed")
    assert ended["success"], ended
    return str(ended["output"]["data"])


BAD = {"prompt": None, "drafter": 3, "rule": "nope", "depth": "x", "nodes": float("inf"), "temperature": "hot"}


def test_a_bad_entry_is_a_sentence_on_the_page_and_nothing_on_the_terminal(
    client: httpx.Client, events: dict[str, int], capfd: pytest.CaptureFixture[str]
) -> None:
    assert "notice bad" not in ran(client, events["run"])
    for field, value in BAD.items():
        assert "notice bad" in ran(client, events["run"], **{field: value}), (field, value)
    others = {"example": ("x", 99, None), "look": (None, "x"), "bounds": ("nope", None)}
    calls = [(event, [value]) for event, values in others.items() for value in values]
    for event, values in [*calls, ("rules", ["nope", 0, "automatic"]), ("rules", ["lookup", "hot", "automatic"])]:
        assert asks(client, events[event], *values).json()["error"].endswith("."), (event, values)
    assert capfd.readouterr() == ("", "")


REQUESTS = {
    "no JSON": "{",
    "no event": '{"data": []}',
    "an unknown event": '{"data": [], "fn_index": 99}',
    "too few values": '{"data": ["a"], "fn_index": 1}',
    "values that no field has": json.dumps({"data": [{"path": "x"}] * 8, "fn_index": 1}),
    "too many bytes": json.dumps({"data": ["a" * 2_000_000] * 8, "fn_index": 1}),
    "too deep": "[" * 500_000,
}


def test_a_request_of_no_event_of_the_page_is_refused_quietly(
    client: httpx.Client, capfd: pytest.CaptureFixture[str]
) -> None:
    for path in ("queue/join", "run/predict"):
        for case, content in REQUESTS.items():
            answer = client.post(f"/gradio_api/{path}", content=content)
            assert answer.status_code == 403 and answer.text, (path, case)
    assert capfd.readouterr() == ("", "")
