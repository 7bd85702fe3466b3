"""One model in several threads: every text is right, and a stream that nobody reads does not block other calls."""

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import pytest
import torch
from drafter_checks import DRAFTERS, PROMPTS
from tiny_models import naive_greedy, tiny_model

from decoding import DecodingConfig, Engine, HeadstartModel, SamplingConfig
from decoding.drafters import Drafter, DraftModelDrafter
from decoding.model import turns
from decoding.model.causal_lm import CausalLM

TOKENS = 12

FEW = ["chain", "lookahead", "Markov heads", "DSpark chain", "drawn hybrid"]
"""These represent all kinds of drafters."""
KINDS = [*((name, None) for name in FEW), ("plain", None), ("chain", "eager"), ("cascade", "eager")]


def drafter_of(name: str, target: CausalLM, draft: CausalLM) -> Drafter | None:
    return None if name == "plain" else DRAFTERS[name](target, draft)


@pytest.fixture(autouse=True)
def threads_switch_often() -> Iterator[None]:
    """Let Python switch threads 250 times as often as it does by default."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(2e-5)
    yield
    sys.setswitchinterval(usual)


def models(static: str | None = None) -> tuple[CausalLM, CausalLM]:
    """Make a separate target and draft for each test, so that threads of other tests share no hooks with them."""
    return CausalLM(tiny_model(), static=static), CausalLM(tiny_model(seed=1), static=static)


def in_threads(count: int, work: Callable[[int], list[object]]) -> list[list[object]]:
    """Run ``work`` with 0, 1, … in separate threads, which all start at the same time."""
    barrier = threading.Barrier(count)

    def begin(number: int) -> list[object]:
        barrier.wait()
        return work(number)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(begin, range(count)))


@pytest.mark.parametrize(("name", "static"), KINDS)
def test_calls_from_several_threads_write_the_texts_that_each_would_alone(name: str, static: str | None) -> None:
    target, draft = models(static)
    model = HeadstartModel(target, drafter_of(name, target, draft))
    right = [naive_greedy(target.model, prompt, TOKENS) for prompt in PROMPTS]

    def work(number: int) -> list[object]:
        places = [(number + turn) % len(PROMPTS) for turn in range(2)]
        texts = [model.generate(torch.tensor([PROMPTS[place]]), max_new_tokens=TOKENS) for place in places]
        return [tuple(text[0, len(PROMPTS[p]) :].tolist()) == right[p] for p, text in zip(places, texts, strict=True)]

    assert in_threads(4, work) == [[True] * 2] * 4


@pytest.mark.parametrize("name", ["chain", "DSpark chain"])
def test_batches_and_sampled_texts_of_several_threads_are_those_of_one(name: str) -> None:
    target, draft = models()
    engine = Engine(target, drafter_of(name, target, draft))
    configs = [DecodingConfig(TOKENS), DecodingConfig(TOKENS, SamplingConfig(1.0, repetition_penalty=1.2), seed=7)]

    def work(number: int) -> list[object]:
        return [text.tokens for text in engine.decode(PROMPTS, configs[number % 2], batch_size=1 + number // 2)]

    assert in_threads(4, work) == [work(number) for number in range(4)]


def test_transformers_own_generate_beside_ours_is_right() -> None:
    """A hook that a pass sets on the model acts only in the thread of that pass."""
    target, draft = models()
    model = HeadstartModel(target, DraftModelDrafter(draft, 3))
    right = [naive_greedy(target.model, prompt, TOKENS) for prompt in PROMPTS]

    def work(number: int) -> list[object]:
        found = []
        for prompt in PROMPTS:
            generate = model.generate if number % 2 else target.model.generate
            mask = torch.ones(1, len(prompt), dtype=torch.long)
            text = generate(torch.tensor([prompt]), attention_mask=mask, max_new_tokens=TOKENS, do_sample=False)
            found.append(tuple(text[0, len(prompt) :].tolist()))
        return found

    assert in_threads(4, work) == [right] * 4


@pytest.mark.parametrize(("name", "static"), [("chain", None), ("DSpark chain", None), ("chain", "eager")])
def test_streams_that_a_pool_of_threads_reads_step_by_step_are_right(name: str, static: str | None) -> None:
    """A web framework, for example, uses a different thread for each step of a stream."""
    target, draft = models(static)
    engine = Engine(target, drafter_of(name, target, draft))
    right = [naive_greedy(target.model, prompt, TOKENS) for prompt in PROMPTS[:3]]
    with ThreadPoolExecutor(4) as pool:

        def text(prompt: list[int]) -> tuple[int, ...]:
            steps = pool.submit(lambda: engine.steps(prompt, DecodingConfig(TOKENS))).result()
            found: tuple[int, ...] = ()
            while (step := pool.submit(lambda: next(steps, None)).result()) is not None:
                found += step.tokens
            return found

        with ThreadPoolExecutor(3) as readers:
            assert list(readers.map(text, PROMPTS[:3])) == right


def test_a_stream_that_nobody_reads_on_keeps_nobody_waiting_and_goes_on_where_it_was() -> None:
    target, draft = models()
    engine = Engine(target, DraftModelDrafter(draft, 3))
    right = [naive_greedy(target.model, prompt, TOKENS) for prompt in PROMPTS[:2]]
    stream = engine.steps(PROMPTS[0], DecodingConfig(TOKENS))
    first = in_threads(1, lambda number: [next(stream)])[0]
    assert in_threads(2, lambda number: [engine.decode(PROMPTS[1], DecodingConfig(TOKENS)).tokens]) == [[right[1]]] * 2
    assert tuple(token for step in [*first, *stream] for token in step.tokens) == right[0]


@pytest.mark.parametrize("rows", [1, 2], ids=["same buffers", "larger buffers"])
def test_a_static_model_ends_a_stream_that_nobody_reads_when_another_call_has_waited(
    rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = models("eager")
    engine = Engine(target, DraftModelDrafter(draft, 3))
    right = naive_greedy(target.model, PROMPTS[1], TOKENS)
    stream = engine.steps(PROMPTS[0], DecodingConfig(TOKENS))
    in_threads(1, lambda number: [next(stream), next(stream)])  # target and draft have their buffers
    monkeypatch.setattr(turns, "PATIENCE", 0.0)
    prompts = [PROMPTS[1]] * rows
    with pytest.warns(UserWarning, match="a stream was ended because nobody read it for 0 seconds"):
        found = in_threads(1, lambda number: [*engine.decode(prompts, DecodingConfig(TOKENS), batch_size=rows)])
    assert [text.tokens for text in found[0]] == [right] * rows
    with pytest.raises(ValueError, match="another generation has begun on this cache"):
        list(stream)


@pytest.mark.parametrize("left", ["dropped", "closed", "failed", "not begun", "not begun and kept"])
def test_a_static_models_cache_is_free_at_once_when_a_stream_is_left(
    left: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "PATIENCE", float("inf"))  # if this fails, the test waits forever
    target, draft = models("eager")
    engine = Engine(target, DraftModelDrafter(draft, 3))
    stream = engine.steps(PROMPTS[0], DecodingConfig(TOKENS))
    if not left.startswith("not begun"):
        next(stream)
    if left == "closed":
        stream.close()
    elif left == "failed":
        monkeypatch.setattr(target, "verify", None)
        with pytest.raises(TypeError):
            next(stream)
        monkeypatch.undo()
        monkeypatch.setattr(turns, "PATIENCE", float("inf"))
    elif left != "not begun and kept":
        del stream
    text = in_threads(1, lambda number: [engine.decode(PROMPTS[1], DecodingConfig(TOKENS)).tokens])
    assert text == [[naive_greedy(target.model, PROMPTS[1], TOKENS)]]


@pytest.mark.filterwarnings("error")
def test_a_slow_step_is_not_taken_for_a_stream_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "PATIENCE", 0.5)
    target, _ = models("eager")
    engine, reached, goes_on = Engine(target), threading.Event(), threading.Event()
    prefill = target.prefill

    def slow(*args: object, **options: object) -> object:
        reached.set()
        assert goes_on.wait(60)
        return prefill(*args, **options)  # type: ignore[arg-type]  # as given

    monkeypatch.setattr(target, "prefill", slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lambda: next(engine.steps(PROMPTS[0], DecodingConfig(1))).tokens)
        assert reached.wait(60)
        second = pool.submit(lambda: engine.decode(PROMPTS[1], DecodingConfig(1)).tokens)
        assert not wait([second], timeout=0.7).done  # longer than a stream may pause
        goes_on.set()
        assert [first.result(60), second.result(60)] == [naive_greedy(target.model, p, 1) for p in PROMPTS[:2]]
