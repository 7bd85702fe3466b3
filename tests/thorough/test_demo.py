"""The web demo without its server: races, forms, answers to visitors, and the HTML of texts and figures."""

import json
import socket
import weakref
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from tiny_models import naive_greedy, tiny_model
from tiny_tokenizer import byte_tokenizer

from decoding.drafters import Drafter, DraftModelDrafter, DraftTreeDrafter, PromptLookupDrafter
from decoding.generate import Engine
from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM
from decoding.policies import FixedPolicy
from decoding.rules.tree import TokenTree, TreeShape
from decoding.text import Piece, Tally, decode_text
from trainer.commands.demo import imported_app
from trainer.demo.race import (
    AUTOMATIC,
    LONGEST_PROMPT,
    MOST_NEW_TOKENS,
    Ending,
    Form,
    Models,
    Race,
    fitting_rules,
    race_of,
)

pytestmark = pytest.mark.skipif(find_spec("gradio") is None, reason="the demo needs Gradio")


def app() -> Any:
    """Return the page's module; only the process that runs these tests imports it, and Gradio with it."""
    return import_module("trainer.demo.app")


TOKENIZER = byte_tokenizer()
FORM = Form("abcabcab", "tree", AUTOMATIC, depth=3, nodes=8, temperature=0.0, max_new_tokens=24, seed=0)


def models_of(target: CausalLM) -> Models:
    draft = CausalLM(tiny_model(vocab=128, seed=1))
    twin = DraftModelDrafter(target if not target.is_static else CausalLM(target.model), 3)
    drafters: dict[str, Drafter] = {
        "lookup": PromptLookupDrafter(),
        "tree": DraftTreeDrafter(draft, 3, 3, 8),
        "twin": twin,
    }
    return Models.of(target, TOKENIZER, drafters)


@pytest.fixture(scope="module")
def models() -> Models:
    return models_of(CausalLM(tiny_model(vocab=128)))


def finished(race: Race) -> Race:
    while race.advance(0.001):
        pass
    return race


@pytest.mark.parametrize("drafter", ["lookup", "tree", "twin"])
def test_both_texts_of_a_greedy_race_are_plain_decodings(models: Models, drafter: str) -> None:
    race = finished(race_of(models, FORM._replace(drafter=drafter, depth=3, nodes=4)))
    expected = naive_greedy(models.target.model, race.prompt, 24)
    assert race.plain.tokens == race.speculative.tokens == expected
    assert race.ending == Ending(24, "equal") and race.finished and not race.stopped


@pytest.mark.parametrize("drafter", ["lookup", "tree"])
def test_a_race_takes_the_steps_of_the_engine_and_their_figures(models: Models, drafter: str) -> None:
    race = finished(race_of(models, FORM._replace(drafter=drafter)))
    engine = Engine(models.target, models.drafters[drafter], FixedPolicy(3, 8), TOKENIZER)
    steps = engine.decode(race.prompt, replace(race.config, trees=True)).steps
    mine = race.speculative
    assert [(step.tokens, step.accepted, step.path) for step in mine.steps] == [
        (step.tokens, step.accepted, step.path) for step in steps
    ]
    assert any(step.tree is not None for step in mine.steps) and all(step.tree is None for step in race.plain.steps)
    assert mine.tally == Tally.of(mine.steps) and mine.tally.passes == len(steps) - 1
    assert len(mine.texts) == len(mine.steps)
    assert "".join(piece.text for pieces in mine.texts for piece in pieces) == decode_text(mine.tokens, TOKENIZER)


def test_every_tree_keeps_to_the_bounds_of_the_form(models: Models) -> None:
    def sizes(form: Form) -> tuple[int, int]:
        steps = finished(race_of(models, form)).speculative.steps
        trees = [step.tree for step in steps if step.tree is not None]
        return max(tree.shape.max_depth for tree in trees), max(map(len, trees))

    assert sizes(FORM)[1] == 8 and sizes(FORM._replace(nodes=7))[1] == 5, "it drafts trees of 3, 5 and 8 nodes"
    assert sizes(FORM._replace(depth=1)) == (1, 3)
    twin = FORM._replace(drafter="twin")
    assert (sizes(twin), sizes(twin._replace(depth=2))) == ((3, 4), (2, 3))


class Timed:
    """A decoding whose steps take the given seconds and write its name."""

    def __init__(self, name: str, seconds_of_a_step: float, steps: int, log: list[str]) -> None:
        self.name, self.step, self.left, self.log = name, seconds_of_a_step, steps, log
        self.seconds, self.finished = 0.0, False

    def advance(self) -> None:
        self.seconds, self.left = self.seconds + self.step, self.left - 1
        self.finished = self.left == 0
        self.log.append(self.name)

    def close(self) -> None:
        pass


def test_the_decode_that_has_spent_less_time_takes_the_next_step(models: Models, monkeypatch: Any) -> None:
    race, log = race_of(models, FORM), list[str]()
    race.plain, race.speculative = Timed("p", 1.0, 6, log), Timed("s", 2.0, 2, log)  # type: ignore[assignment]
    monkeypatch.setattr(race, "_compare", lambda: Ending(0, "equal"))
    assert race.advance(3.5) and log == ["p", "s", "p"], "a look after 3.5 seconds of decoding or more"
    assert not race.advance(100.0) and log == ["p", "s", "p", "p", "s", "p", "p", "p"]


def test_texts_that_part_are_judged_by_the_targets_margin(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    race = finished(race_of(models, FORM))
    last = race.speculative.steps[-1]
    other = (last.tokens[-1] + 1) % 128
    race.speculative.steps[-1] = last._replace(tokens=(*last.tokens[:-1], other))
    ending = race._compare()
    assert ending.conclusion == "fault" and ending.alike == 23 and ending.margin is not None and ending.margin > 0.01
    monkeypatch.setattr("decoding.measure.proof.greedy.near_tie", lambda dtype: ending.margin)
    assert race._compare().conclusion == "near-tie"
    race.speculative.steps.pop()
    assert race._compare().conclusion == "fault", "no rounding ends a text"
    race.stopped, race.plain.finished = True, False
    assert race._compare().conclusion == "stopped"


def test_a_sampled_race_writes_the_text_of_its_seed_and_its_label(models: Models) -> None:
    sampled = FORM._replace(drafter="lookup", depth=10, nodes=11, temperature=1.0, seed=3)
    race = finished(race_of(models, sampled))
    assert race.ending == Ending(24, "equal"), "sampled verify draws as plain decoding does"
    assert race.plain.tokens != finished(race_of(models, sampled._replace(seed=4))).plain.tokens
    lossy = finished(race_of(models, sampled._replace(rule="typical")))
    assert lossy.config.label == "lossy" and lossy.plain.tokens == race.plain.tokens
    assert 'class="badge lossy">lossy' in app().HTML.texts(
        lossy
    ) and 'class="badge lossless">lossless' in app().HTML.texts(race)
    assert lossy.ending is not None and (
        lossy.ending.conclusion == "equal" or "do not follow the target" in app().HTML.summary(lossy)
    )


@pytest.mark.parametrize(
    ("entry", "sentence"),
    [
        ({"prompt": " \n"}, "the prompt is empty"),
        ({"prompt": "a" * 90}, "a prompt of 90 tokens and 24 new tokens exceed the target's context of 96"),
        ({"prompt": "a" * (LONGEST_PROMPT + 1)}, f"the prompt has {LONGEST_PROMPT + 1} characters"),
        ({"drafter": "owl"}, "no drafter is called 'owl': choose one of lookup, tree, twin"),
        ({"temperature": -1}, "temperature is -1"),
        ({"temperature": "warm"}, "temperature is warm: enter a number"),
        ({"max_new_tokens": 0}, f"max new tokens is 0: enter a whole number from 1 to {MOST_NEW_TOKENS}"),
        ({"seed": 1.5}, "seed is 1.5"),
        ({"depth": 0}, "depth is 0"),
        ({"rule": "typical"}, "the typical acceptance rule needs a temperature above 0, but the temperature is 0"),
        ({"rule": "greedy", "temperature": 1}, "the greedy rule needs temperature 0, but the temperature is 1"),
        ({"rule": "token", "temperature": 1}, "the token rejection rule takes"),
    ],
)
def test_a_bad_entry_is_one_sentence(models: Models, entry: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError) as error:
        race_of(models, FORM._replace(**entry))
    assert sentence in str(error.value) and "\n" not in str(error.value)


def test_only_rules_that_fit_are_offered_and_each_of_them_runs(models: Models) -> None:
    for name, drafter in models.drafters.items():
        assert [rule for _, rule in fitting_rules(drafter, 0.0)] == [AUTOMATIC, "greedy"]
        offered = dict(fitting_rules(drafter, 0.8))
        assert {"automatic (lossless)": AUTOMATIC, "typical (lossy)": "typical"}.items() <= offered.items()
        assert sum("lossy" in label for label in offered) == 1
        for rule in offered.values():
            form = FORM._replace(drafter=name, nodes=4, temperature=0.8, rule=rule, max_new_tokens=8)
            assert len(finished(race_of(models, form)).speculative.tokens) == 8
    assert "token" not in dict(fitting_rules(models.drafters["lookup"], 1.0)).values()
    assert "token" in dict(fitting_rules(models.drafters["twin"], 1.0)).values()


@pytest.fixture
def caches(monkeypatch: pytest.MonkeyPatch) -> "weakref.WeakSet[PreallocatedCache]":
    """Collect, by weak references, every cache that is made from now on."""
    made: weakref.WeakSet[PreallocatedCache] = weakref.WeakSet()
    new_cache = CausalLM.new_cache

    def counted(self: CausalLM, *args: Any, **kwargs: Any) -> PreallocatedCache:
        cache = new_cache(self, *args, **kwargs)
        made.add(cache)
        return cache

    monkeypatch.setattr(CausalLM, "new_cache", counted)
    return made


class Visit:
    """A visitor's run of a form, which advances by one step at each look."""

    def __init__(self, answers: Any, name: str = "a") -> None:
        self.answers, self.request = answers, SimpleNamespace(session_hash=name)

    def run(self, form: Form = FORM) -> Any:
        return self.answers.run(self.request, *form)

    @property
    def race(self) -> Race | None:
        return self.answers.races.get(str(self.request.session_hash))


@pytest.fixture
def answers(models: Models, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("trainer.demo.app.FRAME_SECONDS", 1e-9)
    return app().Answers(models, app().Shown(*app().Shown._fields))


@pytest.mark.parametrize("goes", ["closes the stream", "leaves", "both"])
def test_one_who_goes_in_mid_stream_leaves_no_cache(answers: Any, caches: Any, goes: str) -> None:
    visit = Visit(answers)
    frames = visit.run()
    for _ in range(4):
        next(frames)
    assert len(caches) == 3, "of the target twice, and of the draft"
    if goes != "closes the stream":
        answers.leave(visit.request)  # type: ignore[arg-type]
    if goes != "leaves":
        frames.close()
    assert len(caches) == 0 and (visit.race is None) == (goes != "closes the stream")
    assert list(visit.run()) and visit.race is not None and visit.race.ending == Ending(24, "equal"), (
        "the next is served"
    )


def test_a_bad_entry_is_a_notice_and_loses_nothing(answers: Any) -> None:
    visit = Visit(answers)
    list(visit.run())
    race = visit.race
    (frame,) = visit.run(FORM._replace(prompt="<i>", temperature="<b>"))
    assert "Temperature is &lt;b&gt;: enter a number." in frame["notice"] and visit.race is race


def test_text_is_marked_by_its_origin_and_escaped() -> None:
    pieces = [Piece("<b>", True), Piece("&", True), Piece(" own", False)]
    assert app().HTML.marked(pieces) == '<span class="drafted">&lt;b&gt;&amp;</span><span class="own"> own</span>'
    assert 'class="drafted now"' in app().HTML.marked(pieces, "now")
    assert app().HTML.marked([Piece("\u202eمی\u200cخواهم\x1b", False)]) == '<span class="own">می\u200cخواهم</span>'


# The tree is 1 ── 2 ── 4 ── 6; 5 is another child of 2, and 3 is another child of 1.
TREE = TokenTree.of_list([1, 2, 3, 4, 5, 6], TreeShape((-1, 0, 0, 1, 1, 3)))
NAMES = {1: "root", 2: "the", 3: " a", 4: "cat", 5: "<b>", 6: "\n\x1b", 7: "x" * 40}


def nested(node: Any) -> str:
    """Write a node as ``kind:label`` and its children in brackets."""
    below = " ".join(map(nested, node["children"]))
    return f"{node['kind']}:{node['label']}" + (f"[{below}]" if below else "")


# --- over HTTP: whom the demo answers, what it takes, and bad entries -------------------------------------------------


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
    """Return the numbers of the page's events by their names."""
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
    """Return what the page shows after a run with these inputs: its error, or the texts."""
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
