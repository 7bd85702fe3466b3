"""A served model as `verify` uses it: prompts of token ids, token ids of answers, and servers that support neither."""

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest
from planted_faults import tiny_target
from scripted_endpoint import Reply, Request, ScriptedEndpoint, serve
from tiny_tokenizer import byte_tokenizer

from decoding.measure.proof.reference import Reference
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig
from trainer.servers.answers import Completion, CompletionRequest, Prompt
from trainer.servers.client import ServedModel
from trainer.servers.connection import Endpoint
from trainer.servers.writer import ServedWriter

KEY = "sk-ThisIsNoRealKeyOnlyATest"


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


@pytest.fixture(scope="module")
def target() -> CausalLM:
    return tiny_target()


def choice(text: str = "ab", reason: str = "length", **more: Any) -> Reply:
    return 200, {"choices": [{"index": 0, "text": text, "finish_reason": reason, **more}]}


@contextmanager
def asked(script: Callable[[Request], Reply]) -> Iterator[tuple[ServedModel, ScriptedEndpoint]]:
    with serve(script) as endpoint:
        served = Endpoint(address=endpoint.address, model="tiny", concurrency=4)
        with ServedModel(served) as model:
            yield model, endpoint


def one(model: ServedModel, prompt: Prompt, max_tokens: int = 1, **more: Any) -> Completion:
    return model.many([CompletionRequest(prompt, max_tokens, **more)])[0]


def refused_with(field: str, then: Reply) -> Callable[[Request], Reply]:
    """Answer requests, but reject those with the field, or with a prompt of token ids if the field is ``ids``."""

    def script(request: Request) -> Reply:
        has = isinstance(request.body.get("prompt"), list) if field == "ids" else field in request.body
        return (400, {"error": {"message": f"unknown field {field}"}}) if has else then

    return script


# --- the client -------------------------------------------------------------------------------------------------------


def test_a_request_has_the_prompts_ids_the_controls_and_its_seed() -> None:
    with asked(lambda request: choice(token_ids=[3, 4])) as (model, endpoint):
        model.many([CompletionRequest((1, 2), 7, 0.5, 0.9, seed=2**31 + 3, controls={"top_k": 0})])
    (request,) = endpoint.requests
    assert request.path == "/v1/completions" and request.key == KEY
    expected = {"model": "tiny", "prompt": [1, 2], "max_tokens": 7, "temperature": 0.5, "top_p": 0.9, "seed": 3}
    expected |= {"stream": True, "stream_options": {"include_usage": True}}
    assert request.body == {**expected, "top_k": 0, "return_token_ids": True, "return_tokens": True, "verbose": True}


@pytest.mark.parametrize(
    "told",
    [
        {"token_ids": [3, 4]},
        {"tokens": [3, 4]},
        {"logprobs": {"content": [{"id": 3, "token": "a", "logprob": -1}, {"id": 4, "token": "b", "logprob": -2}]}},
    ],
    ids=["vLLM", "llama.cpp", "llama.cpp, beside log-probabilities"],
)
def test_token_ids_are_read_under_every_name_that_servers_give_them(told: dict[str, Any]) -> None:
    with asked(lambda request: choice(**told)) as (model, _):
        answer = one(model, (1,), 2)
    assert answer.token_ids == (3, 4)


def test_the_prompt_that_the_server_read_is_told_beside_the_choice_or_above_it() -> None:
    for reply in (choice(prompt_token_ids=[1, 2]), (200, {**choice()[1], "prompt_token_ids": [1, 2]})):
        with asked(lambda request, reply=reply: reply) as (model, _):
            assert one(model, "x").prompt_ids == (1, 2)


def test_answers_come_in_the_order_of_the_requests() -> None:
    with asked(lambda request: choice(text=str(request.body["seed"]))) as (model, _):
        answers = model.many([CompletionRequest("x", 1, seed=seed) for seed in range(20)])
    assert [answer.text for answer in answers] == [str(seed) for seed in range(20)]


def test_a_chat_is_sent_as_messages() -> None:
    message = {"role": "assistant", "content": "hello"}
    reply = (200, {"choices": [{"message": message, "finish_reason": "stop", "token_ids": [5]}]})
    with asked(lambda request: reply) as (model, endpoint):
        answer = one(model, ({"role": "user", "content": "hi"},), 3, logprobs=2)
    assert (answer.text, answer.token_ids, answer.finish_reason) == ("hello", (5,), "stop")
    assert endpoint.requests[0].path == "/v1/chat/completions"
    assert endpoint.requests[0].body["messages"] == [{"role": "user", "content": "hi"}]
    assert endpoint.requests[0].body["top_logprobs"] == 2


@pytest.mark.parametrize(
    ("reply", "sentence"),
    [
        ((401, {"error": {"message": f"bad key {KEY}"}}), "rejects the key"),
        ((404, {"error": {"message": "no model"}}), "does not know the model 'tiny'"),
        ((500, {"error": {"message": f"out of memory, {KEY}"}}), "did not answer: HTTP 500"),
        ((200, "{half"), "not JSON"),
        ((200, {"choices": []}), "not a completion"),
    ],
)
def test_an_error_is_one_sentence_without_the_key(reply: Reply, sentence: str) -> None:
    with asked(lambda request: reply) as (model, _), pytest.raises(ValueError, match=sentence) as caught:
        one(model, "x")
    assert KEY not in str(caught.value)


# --- the writer -------------------------------------------------------------------------------------------------------


@contextmanager
def writing(script: Callable[[Request], Reply], target: CausalLM, *eos: int) -> Iterator[ServedWriter]:
    with asked(script) as (model, _):
        yield ServedWriter(model, Reference(target, SamplingConfig(1.0), eos), byte_tokenizer(), (1, 2))


def test_the_end_that_a_server_leaves_out_is_put_back(target: CausalLM) -> None:
    for reason, told, tokens in (("stop", [3, 4], (3, 4, 9)), ("stop", [3, 9], (3, 9)), ("length", [3, 4], (3, 4))):
        reply = choice(reason=reason, token_ids=told)
        with writing(lambda request, reply=reply: reply, target, 9) as writer:
            assert writer.write([(1, 2)], 5, True, 0)[0].tokens == tokens


def test_ids_beside_the_log_probabilities_are_read(target: CausalLM) -> None:
    told = {"logprobs": {"content": [{"id": 3, "token": "a"}, {"id": 4, "token": "b"}]}}
    with writing(lambda request: choice(**(told if "logprobs" in request.body else {})), target) as writer:
        assert writer.source == "token ids with the log-probabilities"
        assert writer.write([(1, 2)], 2, False, 0)[0].tokens == (3, 4) and writer.retold == 0


def test_a_text_is_tokenized_again_where_ids_are_not_told_and_flagged_if_it_does_not_read_back(
    target: CausalLM,
) -> None:
    with writing(refused_with("ids", choice(text="\x03\x04")), target) as writer:
        assert not writer.takes_ids and writer.source == "only texts, which are tokenized again here"
        (text,) = writer.write([(1, 2)], 2, False, 0)
        assert text.tokens == (3, 4) and (writer.retold, writer.unlike) == (1, 0)
    with writing(lambda request: choice(text="é"), target) as writer:
        writer.write([(1, 2)], 2, False, 0)
        assert (writer.retold, writer.unlike) == (1, 1)


def test_another_prompt_and_an_unknown_token_are_refused(target: CausalLM) -> None:
    for reply, sentence in (
        (choice(token_ids=[3], prompt_token_ids=[0, 1, 2]), "prompt of 3 tokens"),
        ((200, {**choice(token_ids=[3])[1], "usage": {"prompt_tokens": 4}}), "prompt of 4 tokens"),
        (choice(token_ids=[16]), "wrote token 16"),
    ):
        with writing(lambda request, reply=reply: reply, target) as writer, pytest.raises(ValueError, match=sentence):
            writer.write([(1, 2)], 1, True, 0)


def test_controls_that_servers_have_of_their_own_are_switched_off(target: CausalLM) -> None:
    with serve(lambda request: choice(token_ids=[3])) as endpoint:
        with ServedModel(Endpoint(address=endpoint.address, model="tiny")) as model:
            writer = ServedWriter(model, Reference(target, SamplingConfig(0.7, top_k=5)), None, (1,))
            for greedy in (True, False):
                writer.write([(1,)], 1, greedy, 0)
        bodies = [request.body for request in endpoint.requests[-2:]]
    assert [(body["temperature"], body["top_k"], body["min_p"]) for body in bodies] == [(0.0, -1, 0.0), (0.7, 5, 0.0)]


def test_controls_that_a_server_does_not_take_are_left_out_unless_they_are_to_be_tested(target: CausalLM) -> None:
    with asked(refused_with("top_k", choice(token_ids=[3]))) as (model, endpoint):
        writer = ServedWriter(model, Reference(target, SamplingConfig(0.7)), None, (1,))
        assert writer.takes_ids and writer.refused_controls == ("top_k",)
        assert writer.write([(1,)], 1, False, 0)[0].tokens == (3,)
        assert "top_k" not in endpoint.requests[-1].body
        with pytest.raises(ValueError, match="rejects top_k"):
            ServedWriter(model, Reference(target, SamplingConfig(0.7, top_k=5)), None, (1,))


def test_a_server_on_this_machine_is_not_looked_for_through_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_PROXY")
    for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # where nobody listens
    with asked(lambda request: choice(token_ids=[3])) as (model, _):
        assert one(model, (1,)).token_ids == (3,)


# --- without the package ----------------------------------------------------------------------------------------------


@pytest.fixture
def no_openai(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the import of openai fail, and import the modules that may use it again; restore everything afterwards."""

    def drop() -> dict[str, ModuleType]:
        parts = ("trainer.servers.", "trainer.commands.")
        return {name: sys.modules.pop(name) for name in list(sys.modules) if name.startswith(parts)}

    monkeypatch.setitem(sys.modules, "openai", None)
    loaded = drop()
    yield
    drop()
    sys.modules.update(loaded)


def test_commands_that_may_ask_a_server_load_without_openai(no_openai: None) -> None:
    """Folders can be diagnosed and engines verified without openai."""
    for name in ("diagnose", "verify", "regenerate"):
        importlib.import_module(f"trainer.commands.{name}")
    with pytest.raises(ImportError):
        importlib.import_module("trainer.servers.client")
