"""Servers measured by a client: every figure follows from known delays,
on a clock that only the fake server advances.
"""

import io
import json
import threading
from collections.abc import Iterator
from dataclasses import astuple, dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from scripted_endpoint import Reply, Request, chat, serve
from tiny_training import write_rows

from decoding.measure.compare import compare, read_evaluation
from decoding.measure.figures import answers
from decoding.measure.results import ReportRow, as_json, report_from_json
from decoding.measure.served import Timing, latency, shares_of_time, with_counters
from trainer.commands.evaluate import run_evaluate
from trainer.commands.evaluate_served import run_evaluate_served
from trainer.commands.options import EvaluateOptions

PROMPTS = 10


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


class Clock:
    """A clock that the server sets; the server waits until the time is read, so that the machine's time does not
    matter.
    """

    def __init__(self) -> None:
        self.now, self._reads, self._read = 0.0, 0, threading.Condition()

    def __call__(self) -> float:
        with self._read:
            self._reads += 1
            self._read.notify_all()
            return self.now

    def after(self, seconds: float, event: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Yield the event this many seconds later, and return once it was read."""
        with self._read:
            self.now += seconds
            seen = self._reads
        yield event
        with self._read:
            assert self._read.wait_for(lambda: self._reads > seen, 20), "the event was not read"


@dataclass
class Fake:
    """A server that answers one request at a time: ``first`` seconds to the first of four events, and ``gap`` seconds
    to each further event. At the second concurrency, which is 2, it waits for two requests before it answers one, and
    needs ``crowded`` times the seconds.
    """

    clock: Clock
    first: float = 0.5
    gap: float = 0.1
    crowded: float = 1.0
    accepted: tuple[int, ...] = ()
    """Number of tokens accepted in each pass of an answer, of three drafted ones; empty if the server does not
    speculate.
    """
    by_request: bool = False
    has_page: bool = True
    names: tuple[str, ...] = ("tiny",)
    tokens: int | None = 7
    salted: bool = True
    bodies: list[dict[str, Any]] = field(default_factory=list)
    answered: int = 0
    queue: threading.Condition = field(default_factory=threading.Condition)

    def __call__(self, request: Request) -> Reply:
        if request.path == "/metrics":
            return (200, self.page()) if self.has_page else (404, "")
        if not self.salted and "cache_salt" in request.body:
            return 400, {"error": {"message": "unknown field"}}
        with self.queue:
            self.bodies.append(request.body)
            number = len(self.bodies)
            self.queue.notify_all()
        return 200, self.events(number)

    def page(self) -> str:
        if not self.accepted:
            return "other_total 3\n"
        times, name = len(self.bodies), "vllm:spec_decode_num"
        counts = {"drafts": len(self.accepted), "draft_tokens": 3 * len(self.accepted)}
        counts["accepted_tokens"] = sum(self.accepted)
        lines = [f"{name}_{which}_total {count * times}" for which, count in counts.items()]
        for place in range(3):
            reached = times * sum(each > place for each in self.accepted)
            lines.append(f'{name}_accepted_tokens_per_pos_total{{position="{place}"}} {reached}')
        return "\n".join(lines) + "\n"

    def events(self, number: int) -> Iterator[dict[str, Any]]:
        alone = number <= PROMPTS + 1  # one request is a warm-up
        wanted = number if alone else min(number + 1, 2 * PROMPTS + 1)
        with self.queue:
            came = self.queue.wait_for(lambda: len(self.bodies) >= wanted and self.answered == number - 1, 20)
        assert came, "two requests are not under way"
        slower = 1.0 if alone else self.crowded
        model = self.names[min(number, len(self.names)) - 1]
        role: dict[str, Any] = {"choices": [{"delta": {"role": "assistant", "content": ""}}], "model": model}
        yield from self.clock.after(0.0, role)
        for index, text in enumerate("abcd"):
            event = {"choices": [{"delta": {"content": text}}], "model": model}
            yield from self.clock.after(slower * (self.gap if index else self.first), event)
        last: dict[str, Any] = {"choices": [{"delta": {}, "finish_reason": "stop"}], "model": model}
        if self.tokens is not None:
            last["usage"] = {"completion_tokens": self.tokens}
        if self.by_request:
            histogram = [self.accepted.count(length) for length in range(4)]
            counted = {"acceptance_histogram": histogram, "num_spec_tokens": 3}
            last["metrics"] = {"speculative_decoding": counted}
        yield from self.clock.after(0.0, last)
        with self.queue:
            self.answered += 1
            self.queue.notify_all()


def options(folder: Path, **changes: Any) -> EvaluateOptions:
    rows = [{"prompt": f"prompt {index}"} for index in range(PROMPTS)]
    defaults: dict[str, Any] = {"model": "tiny", "concurrency": (1,), "settings": ("greedy",)}
    source = write_rows(folder / "prompts.jsonl", rows)
    return EvaluateOptions(output=folder / "out", **{"prompts": source, **defaults, **changes})


def measured(folder: Path, fake: Fake, baseline: Fake | None = None, **changes: Any) -> tuple[dict[str, Any], str]:
    """Return the report and what was printed."""
    printed = io.StringIO()
    console = Console(file=printed, width=250)
    with serve(fake) as one, serve(baseline or fake) as other:
        second = other.address if baseline else None
        chosen = options(folder, endpoint=one.address, baseline_endpoint=second, **changes)
        report = run_evaluate_served(chosen, console, fake.clock)
    return as_json(report), printed.getvalue()


def row(report: dict[str, Any], method: str = "served") -> dict[str, Any]:
    (found,) = [row for row in report["rows"] if row["method"] == method]
    return dict(found)


def test_every_figure_follows_from_the_delays_and_the_counters(tmp_path: Path) -> None:
    """An answer of 7 tokens takes 0.5 + 3 x 0.1 = 0.8 s; with the baseline it takes 1.0 + 3 x 0.2 = 1.6 s."""
    clock = Clock()
    fake = Fake(clock, accepted=(3, 1, 0))
    report, printed = measured(tmp_path, fake, Fake(clock, first=1.0, gap=0.2))
    mine, plain = row(report), row(report, "plain")
    assert mine["tokens_per_second"]["value"] == pytest.approx(7 / 0.8)
    assert mine["latency"]["tokens_per_second_of_a_request"]["value"] == pytest.approx(7 / 0.8)
    assert plain["tokens_per_second"]["value"] == pytest.approx(7 / 1.6)
    speedup = mine["speedup_of_totals"]
    assert [speedup[key] for key in ("value", "low", "high")] == pytest.approx([2, 2, 2])
    times = {name: mine["latency"][name] for name in ("ttft_ms", "tpot_ms", "itl_ms")}
    assert times["ttft_ms"] == {"p50": pytest.approx(500), "p90": pytest.approx(500), "p99": None, "observations": 10}
    assert times["tpot_ms"]["p50"] == pytest.approx(300 / 6) and times["itl_ms"]["observations"] == 30
    assert times["itl_ms"]["p90"] == pytest.approx(100) and mine["latency"]["under_way"] == pytest.approx(1)
    assert [share["value"] for share in mine["reached"]] == pytest.approx([2 / 3, 1 / 3, 1 / 3])
    assert mine["acceptance_length"] == pytest.approx(1 + 4 / 3) and mine["passes"] == 3 * PROMPTS
    assert mine["accepted_per_drafted"]["value"] == pytest.approx(4 / 9)
    assert mine["identical_to_plain"] == {
        "identical": 10,
        "of": 10,
        "largest_margin": 0.0,
        "ended_early": 0,
        "margins": [],
    }
    assert plain["passes"] is None and report["notes"] == []
    assert "Fastest: served, 2.00× [2.00, 2.00] plain decoding, greedy, concurrency 1." in printed
    assert "2.33: 0.67 0.33 0.33" in printed and "500.0 / 500.0 / –" in printed
    page = (tmp_path / "out" / "report.html").read_text()
    assert "Under load" in page and "TTFT ms, p50 / p90 / p99" in page and "Over batch size" not in page


def test_a_request_that_waits_counts_its_wait_and_the_crossover_is_told_in_words(tmp_path: Path) -> None:
    """A single request takes 0.8 s, and 1.6 s with the baseline; of two requests, all but the first wait for another
    answer.
    """
    clock = Clock()
    fake, plain = Fake(clock, crowded=3.0), Fake(clock, first=1.0, gap=0.2)
    report, printed = measured(tmp_path, fake, plain, concurrency=(1, 2))
    assert [row["batch_size"] for row in report["grid"]] == [2, 2]
    mine, other = ({**row, **row["latency"]} for row in report["grid"])
    assert other["tokens_per_second"]["value"] == pytest.approx(7 / 1.6), "no more in all than one at a time"
    assert other["tokens_per_second_of_a_request"]["value"] == pytest.approx(7 * 10 / (1.6 + 9 * 3.2))
    assert other["ttft_ms"]["p50"] == pytest.approx(1600 + 1000) and other["itl_ms"]["p90"] == pytest.approx(200)
    assert other["under_way"] == pytest.approx((1.6 + 9 * 3.2) / 16)
    assert mine["speedup_of_totals"]["value"] == pytest.approx(1.6 / 2.4)
    fastest = "Fastest: served, 2.00× [2.00, 2.00] plain decoding, greedy, concurrency 1"
    assert f"{fastest}; slower at concurrency 2 and above." in printed
    assert "10 prompts, up to 96 new tokens, concurrency 1, 2; commit" in printed
    for changed, speed in ((row(report), 0.5), (mine, 1.5)):
        changed["speedup_of_totals"] |= {"value": speed, "low": speed, "high": speed}
    assert answers(report_from_json(report))[0].endswith(
        "0.50× [0.50, 0.50] plain decoding, greedy, concurrency 1; faster at concurrency 2."
    )


def test_a_request_streams_without_an_earlier_requests_prefill(tmp_path: Path) -> None:
    fake = Fake(Clock())
    asked: dict[str, Any] = {"max_new_tokens": 9, "settings": ("sampling",), "temperature": (0.5,)}
    measured(tmp_path, fake, chat_template_kwargs='{"enable_thinking": false}', **asked)
    body = fake.bodies[-1]
    assert (body["stream"], body["max_tokens"], body["temperature"], body["seed"]) == (True, 9, 0.5, PROMPTS - 1)
    assert body["cache_prompt"] is False and body["cache_salt"]
    assert body["chat_template_kwargs"] == {"enable_thinking": False} and body["stream_options"] == {
        "include_usage": True
    }
    assert len(fake.bodies) == PROMPTS + 1, "one warms the server up"
    (tmp_path / "other").mkdir()
    other = Fake(Clock(), salted=False)
    measured(tmp_path / "other", other)
    assert len(other.bodies) == PROMPTS, "a server that refuses such fields is asked without them"


def test_a_text_to_continue_is_sent_with_its_system_message(tmp_path: Path) -> None:
    fake, texts = Fake(Clock()), [{"text": "Once", "system": "Stories."}] * PROMPTS
    measured(tmp_path, fake, prompts=write_rows(tmp_path / "texts.jsonl", texts))
    assert {body["prompt"] for body in fake.bodies} == {"Stories.\nOnce"}


def test_acceptance_by_request_has_intervals_over_prompts_and_compares(tmp_path: Path) -> None:
    fake = Fake(Clock(), accepted=(3, 1, 0), by_request=True, has_page=False)
    mine = row(measured(tmp_path, fake)[0])
    assert mine["tokens_per_pass"] == {"value": pytest.approx(7 / 3), "low": pytest.approx(7 / 3),
                                       "high": pytest.approx(7 / 3), "observations": PROMPTS}  # fmt: skip
    assert [share["value"] for share in mine["conditional_acceptance"]] == pytest.approx([2 / 3, 1 / 2, 1])
    assert mine["acceptance_length"] == pytest.approx(7 / 3)
    (tmp_path / "b").mkdir()
    measured(tmp_path / "b", Fake(Clock(), gap=0.05, accepted=(3, 3), by_request=True))
    a, b = (read_evaluation(folder / "out") for folder in (tmp_path, tmp_path / "b"))
    (found,) = compare(a, b).rows
    assert found.speed and found.speed.value == pytest.approx(0.8 / 0.65) and found.pairs == PROMPTS
    assert found.tokens_per_pass.value == pytest.approx(4 / (7 / 3))


def test_requests_are_under_way_together_and_a_finished_cell_is_not_asked_again(tmp_path: Path) -> None:
    both, came = threading.Barrier(2, timeout=20), threading.Lock()
    seen = []

    def script(request: Request) -> Reply:
        if request.path == "/metrics":
            return 404, ""
        with came:
            seen.append(request)
        if len(seen) > 1:  # the first request is a warm-up
            both.wait()
        return 200, iter([{"choices": [{"delta": {"content": "a"}}], "usage": {"completion_tokens": 1}}])

    with serve(script) as endpoint:
        chosen = options(tmp_path, endpoint=endpoint.address, concurrency=(2,))
        report = run_evaluate_served(chosen, Console(file=io.StringIO()))
        again = run_evaluate_served(chosen, Console(file=io.StringIO()))
        with pytest.raises(ValueError, match="contains runs with max_new_tokens 96, not 12"):
            run_evaluate_served(replace(chosen, max_new_tokens=12), Console(file=io.StringIO()))
    assert len(seen) == PROMPTS + 1 and again and report and again.rows == report.rows
    assert json.loads((tmp_path / "out" / "report.json").read_text())["served"]


# --- what cannot be had -----------------------------------------------------------------------------------------------


def test_without_counters_baseline_or_token_counts_figures_are_dashes_and_said_so(tmp_path: Path) -> None:
    report, printed = measured(tmp_path, Fake(Clock(), has_page=False, tokens=None))
    mine = row(report)
    assert mine["tokens_per_second"] is None and mine["speedup_of_totals"] is None
    assert mine["latency"]["tpot_ms"]["p50"] is None and mine["latency"]["ttft_ms"]["p50"] == pytest.approx(500)
    assert [note.split(":")[0] for note in report["notes"]] == [
        "Only one endpoint was measured, so the speed-up is unknown",
        "The server counted no drafts (greedy, concurrency 1)",
        "A server did not report how many tokens its answers have",
    ]
    assert "The speed-up is unknown (greedy)." in printed
    assert all(note in (tmp_path / "out" / "report.html").read_text() for note in report["notes"])


def test_answers_faster_than_the_clock_have_no_times_and_no_rates(tmp_path: Path) -> None:
    clock = Clock()
    report, printed = measured(tmp_path, Fake(clock, 0.0, 0.0, accepted=(1,)), Fake(clock, 0.0, 0.0))
    mine = row(report)
    assert mine["tokens_per_second"]["value"] is mine["speedup_of_totals"]["value"] is None
    assert {mine["latency"][name][key] for name in ("ttft_ms", "itl_ms") for key in ("p50", "p90")} == {None}
    note = "Answers were faster than the clock can measure (greedy, concurrency 1): times and rates are unknown."
    assert report["notes"] == [note] and note in printed and "nan" not in printed


def test_endpoints_of_two_models_are_named_and_one_that_changes_its_model_between_runs_is_refused(
    tmp_path: Path,
) -> None:
    clock = Clock()
    report, _ = measured(tmp_path, Fake(clock, accepted=(1,)), Fake(clock, names=("large",)))
    assert report["notes"] == ["The endpoints serve 'large' and 'tiny': compare servers of one target."]
    runs = tmp_path / "out" / "runs-0.jsonl"
    runs.write_text("".join(runs.read_text().splitlines(keepends=True)[:-1]))
    with pytest.raises(ValueError, match="first served 'large' and then 'small'"):
        measured(tmp_path, Fake(clock), Fake(clock, names=("small",)))


def test_a_baseline_that_counts_drafts_is_named(tmp_path: Path) -> None:
    clock = Clock()
    report, _ = measured(tmp_path, Fake(clock, accepted=(1,)), Fake(clock, accepted=(1,)))
    assert report["notes"] == ["The baseline server counted drafts: it speculates itself, or it served other clients."]


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (lambda request: chat("Yes"), "the endpoint does not stream: pass the address"),
        (Fake(Clock(), names=("tiny", "tiny", "large")), "first served 'tiny' and then 'large': measure a"),
        (lambda request: (200, iter([{"error": {"message": "out of memory"}}])), "out of memory"),
    ],
    ids=["no stream", "another model", "an error"],
)
def test_a_server_that_cannot_be_measured_is_one_sentence(tmp_path: Path, script: Any, complaint: str) -> None:
    clock = script.clock if isinstance(script, Fake) else Clock()
    console = Console(file=io.StringIO())
    with serve(script) as endpoint, pytest.raises(ValueError, match=complaint):
        run_evaluate_served(options(tmp_path, endpoint=endpoint.address), console, clock)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"drafter": ["lookup"]}, "--drafter does nothing with --endpoint: omit it"),
        ({"concurrency": (1, 16)}, "--concurrency 16 needs that many prompts, but there are 10: raise"),
        ({"settings": ("typical",)}, "--settings typical does not work with"),
        ({"baseline_endpoint": "http://127.0.0.1:9/v1"}, "--baseline-endpoint is the same as --endpoint"),
        ({"model": None}, "pass it as --model"),
        ({"endpoint": None, "model": None, "concurrency": (3,)}, "--concurrency does nothing without --endpoint"),
        ({"endpoint": None, "model": None, "concurrency": (1, 2, 4, 8, 16)}, "nothing to evaluate: use --target"),
    ],
    ids=str,
)
def test_options_that_do_not_go_together_are_refused(tmp_path: Path, change: dict[str, Any], complaint: str) -> None:
    chosen = options(tmp_path, **{"endpoint": "http://127.0.0.1:9/v1", **change})
    with pytest.raises(ValueError, match=complaint):
        (run_evaluate_served if chosen.endpoint else run_evaluate)(chosen)


# --- the arithmetic ---------------------------------------------------------------------------------------------------


def test_answers_share_the_time_in_which_they_are_under_way_together() -> None:
    """From 0 to 2 only one answer is in progress, from 2 to 4 two are, from 4 to 5 the other one is, and from 5 to 7
    none.
    """
    assert shares_of_time([(0, 4), (2, 5), (7, 8)]) == pytest.approx([3, 2, 1])


def test_events_that_all_come_at_the_end_give_no_times() -> None:
    late = [Timing(0.0, 10.0, (9.99, 9.995, 10.0), 8, "") for _ in range(3)]
    found = latency({"a": late}, 30.0)
    assert not found.streamed and found.ttft_ms.p50 is found.itl_ms.p50 is None
    assert found.tokens_per_second_of_a_request.value == pytest.approx(0.8)


def test_p99_is_known_from_a_hundred_answers_on() -> None:
    timings = [Timing(0.0, 2.0, (index / 100, index / 50), 3, "") for index in range(101)]
    found = latency({"a": timings}, 1.0)
    for each in (found.ttft_ms, found.itl_ms):
        assert list(astuple(each)) == pytest.approx([500, 900, 990, 101])
    assert latency({"a": timings[:99]}, 1.0).itl_ms.p99 is None


def test_counters_that_contradict_each_other_give_no_acceptance() -> None:
    counts = {"drafts": 10.0, "drafted": 30.0, "accepted": 9.0, "reached": [6.0, 2.0, 0.0], "length": None}
    none = ReportRow("greedy", "served", "unproved")
    assert with_counters(none, [counts]) == replace(none, counters_disagree=True)
    assert with_counters(none, [{**counts, "accepted": 8.0}]).acceptance_length == pytest.approx(1.8)
    assert with_counters(none, [{**counts, "drafts": None, "length": 2.5}]) == replace(none, acceptance_length=2.5)
