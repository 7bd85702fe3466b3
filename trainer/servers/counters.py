"""A server's own counts of its speculation, read from its metrics page, its log, or its answers.

Formats, as their sources write them:
- vLLM 0.32 (``v1/spec_decode/metrics.py``): the counters ``vllm:spec_decode_num_drafts_total``,
  ``…_draft_tokens_total``, ``…_accepted_tokens_total`` and ``…_accepted_tokens_per_pos_total{position="0"}``; the log
  line ``SpecDecoding metrics``;
- llama.cpp (server of 2026-10): the same counters with the prefix ``llamacpp:``; the log lines ``draft acceptance = R
  (A accepted / G generated), mean len = L`` and ``acc per pos = (…)``, before 2026 ``draft acceptance rate = R (…)``;
  ``draft_n`` and ``draft_n_accepted`` in the ``timings`` of an answer;
- SGLang 0.5 (``observability/scheduler_metrics_mixin.py``): the gauges ``sglang:spec_accept_length`` and
  ``sglang:spec_accept_rate``, and the same figures in the log line ``Decode batch``, both of the last interval.

Definitions differ. "Mean acceptance length" (vLLM), "mean len" (llama.cpp) and "accept len" (SGLang) are all
1 + accepted / passes with a draft: this project's acceptance length. SGLang's accept rate counted the target's token
too before 2026, so it is not read.
"""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_SAMPLE = re.compile(r"^(?P<name>[a-z_]+:[a-z_]+)(?:\{(?P<labels>[^}]*)\})? +(?P<value>\S+)", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_SERVERS = {"vllm": "vLLM", "llamacpp": "llama.cpp", "sglang": "SGLang"}
_VLLM_LINE = re.compile(r"SpecDecoding metrics:.*")
_LLAMA_LINE = re.compile(
    rf"draft acceptance(?: rate)? = *{_NUMBER} *\( *(\d+) accepted */ *(\d+) generated\)(?:, mean len = *{_NUMBER})?"
)
_LLAMA_POSITIONS = re.compile(r"acc per pos = \(([0-9., ]*)\)")
_LLAMA_TIMINGS = re.compile(r'"draft_n"\s*:\s*(\d+)')
_SGLANG_LINE = re.compile(rf"accept len: {_NUMBER}")
_KNOWN = (
    "vLLM (vllm:spec_decode_… or 'SpecDecoding metrics: …'), llama.cpp (llamacpp:spec_decode_…, 'draft acceptance = …' "
    "or an answer with timings.draft_n), SGLang (sglang:spec_accept_length or 'accept len: …')"
)

_Line = tuple[float | None, float, float, Sequence[float]]
"""Drafts, drafted and accepted tokens, and drafts accepted to each position, of one line."""


@dataclass(frozen=True)
class Counts:
    """Counts of one server. A figure that the server does not give is None, or empty.

    ``drafts``: passes with a draft. ``reached``: of these, the passes whose draft was accepted at least to each
    position, from position 1 on; its length is the most tokens that the server drafts. ``length``: the acceptance
    length where the server gives it without counts. ``cumulative``: counts since the server's start, which can be
    subtracted.
    """

    server: str
    drafts: float | None = None
    drafted: float | None = None
    accepted: float | None = None
    reached: tuple[float, ...] = ()
    length: float | None = None
    cumulative: bool = False

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / passes with a draft; NaN where neither is known."""
        if self.drafts and self.accepted is not None:
            return 1 + self.accepted / self.drafts
        return math.nan if self.length is None else self.length

    @property
    def per_drafted(self) -> float:
        """Accepted / drafted tokens; NaN where they are not counted."""
        return self.accepted / self.drafted if self.drafted and self.accepted is not None else math.nan

    @property
    def tokens(self) -> int | None:
        """The most tokens that the server drafts at a time; None where it does not count by position."""
        return len(self.reached) or None

    def since(self, before: "Counts | None") -> "Counts":
        """Return the counts after ``before``. ValueError where the server was started again since.

        Figures without counts are returned unchanged: they cannot be subtracted.
        """
        if before is None or not (self.cumulative and before.cumulative):
            return self
        if (self.drafts or 0) < (before.drafts or 0):
            raise ValueError(
                f"the server has counted {self.drafts:g} drafts, fewer than the {before.drafts:g} before the replay: "
                "it was started again; start the same command again"
            )
        earlier = (*before.reached, *[0.0] * len(self.reached))
        return Counts(
            self.server,
            _less(self.drafts, before.drafts),
            _less(self.drafted, before.drafted),
            _less(self.accepted, before.accepted),
            tuple(now - then for now, then in zip(self.reached, earlier, strict=False)),
            cumulative=True,
        )


def parse_counts(text: str) -> Counts:
    """Read the counts in a metrics page, lines of a log, or answers as JSON; several lines or engines are added up.

    ValueError where nothing is known, naming what is.
    """
    for read in (_metrics, _vllm_log, _llama_log, _llama_answers, _sglang_log):
        if (found := read(text)) is not None:
            return found
    if _SAMPLE.search(text):
        raise ValueError(
            "the metrics page holds no counts of speculation: the server runs without it, or without metrics of it "
            "(SGLang wants --enable-metrics, llama.cpp --metrics)"
        )
    begin = " ".join(text.split())[:60]
    raise ValueError(f"no counts of a known server are in {begin!r}: give those of {_KNOWN}")


def _metrics(text: str) -> Counts | None:
    """Read a Prometheus page; the counters of several engines are added up, gauges averaged."""
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    positions: defaultdict[str, Counter[int]] = defaultdict(Counter)
    gauges: list[float] = []
    for sample in _SAMPLE.finditer(text):
        program, _, name = sample["name"].partition(":")
        try:
            value = float(sample["value"])
        except ValueError:
            continue
        if not math.isfinite(value):  # a gauge that has not been set
            continue
        name = name.removeprefix("spec_decode_num_").removesuffix("_total")
        if program in ("vllm", "llamacpp") and name == "accepted_tokens_per_pos":
            if place := _POSITION.search(sample["labels"] or ""):
                positions[program][int(place[1])] += int(value)
        elif program in ("vllm", "llamacpp") and name in ("drafts", "draft_tokens", "accepted_tokens"):
            sums[program][name] += value
        elif sample["name"] == "sglang:spec_accept_length":
            gauges.append(value)
    for program, found in sums.items():
        most = max(positions[program], default=-1) + 1
        reached = tuple(float(positions[program][place]) for place in range(most))
        counts = found["drafts"], found["draft_tokens"], found["accepted_tokens"]
        return Counts(_SERVERS[program], *counts, reached, cumulative=True)
    return Counts("SGLang", length=sum(gauges) / len(gauges)) if gauges else None


def _vllm_log(text: str) -> Counts | None:
    """Add up vLLM's log lines, each of which tells of one interval.

    A line gives accepted and drafted tokens as counts, and passes only by ratios of two or three digits.
    """
    lines: list[_Line] = []
    for line in (found[0] for found in _VLLM_LINE.finditer(text)):
        numbers = {
            name: _after(label, line)
            for name, label in (("length", "Mean acceptance length"), ("accepted", "Accepted"), ("drafted", "Drafted"))
        }
        rates = re.search(r"Per-position acceptance rate: ([0-9., ]+)", line)
        shares = [float(share) for share in re.findall(r"[0-9]+\.[0-9]+", rates[1])] if rates else []
        if numbers["accepted"] is None or numbers["drafted"] is None or not shares:
            continue
        drafts = _passes(numbers["accepted"], numbers["drafted"], len(shares), numbers["length"])
        lines.append((drafts, numbers["drafted"], numbers["accepted"], [share * drafts for share in shares]))
    return _added("vLLM", lines)


def _passes(accepted: float, drafted: float, tokens: int, length: float | None) -> float:
    """Return the passes of a line: all drafts are of ``tokens`` tokens unless the printed length says otherwise."""
    whole = drafted / tokens
    if length is None or not whole or abs(1 + accepted / whole - length) <= 0.006:
        return whole
    return accepted / (length - 1) if length > 1 else whole


def _llama_log(text: str) -> Counts | None:
    """Add up llama.cpp's log lines, each of which tells of one answer."""
    shares = [[float(share) for share in found.split(",") if share.strip()] for found in _LLAMA_POSITIONS.findall(text)]
    found = _LLAMA_LINE.findall(text)
    lines: list[_Line] = []
    for place, (_, accepted, drafted, length) in enumerate(found):
        drafts = float(accepted) / (float(length) - 1) if length and float(length) > 1 else None
        rates = shares[place] if len(shares) == len(found) and drafts is not None else []
        lines.append((drafts, float(drafted), float(accepted), [share * (drafts or 0) for share in rates]))
    return _added("llama.cpp", lines)


def _llama_answers(text: str) -> Counts | None:
    """Add up the ``timings`` of llama.cpp's answers: one JSON object, a list, or one a line."""
    if not _LLAMA_TIMINGS.search(text):
        return None
    lines: list[_Line] = []
    for answer in _objects(text):
        timings = answer.get("timings", answer)
        if not isinstance(timings, dict):
            continue
        drafted, accepted = timings.get("draft_n"), timings.get("draft_n_accepted", 0)
        if type(drafted) is int and type(accepted) is int:
            lines.append((None, drafted, accepted, []))
    return _added("llama.cpp", lines)


def _objects(text: str) -> Iterable[Mapping[str, Any]]:
    """Return the JSON objects in a text; none for a line that is no JSON."""
    try:
        whole = json.loads(text)
        found = whole if isinstance(whole, list) else [whole]
    except ValueError:
        found = []
        for line in text.splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return [each for each in found if isinstance(each, dict)]


def _sglang_log(text: str) -> Counts | None:
    lengths = [float(length) for length in _SGLANG_LINE.findall(text)]
    return Counts("SGLang", length=sum(lengths) / len(lengths)) if lengths else None


def _added(server: str, lines: Sequence[_Line]) -> Counts | None:
    """Add up (drafts, drafted, accepted, reached) of several lines; drafts are None where a line lacks them."""
    if not lines:
        return None
    drafts = [line[0] for line in lines]
    most = max(len(line[3]) for line in lines) if all(line[3] for line in lines) else 0
    return Counts(
        server,
        None if None in drafts else sum(each for each in drafts if each is not None),
        sum(line[1] for line in lines),
        sum(line[2] for line in lines),
        tuple(sum(line[3][place] for line in lines if place < len(line[3])) for place in range(most)),
    )


def _after(label: str, line: str) -> float | None:
    found = re.search(rf"(?<![A-Za-z-] ){label}: {_NUMBER}", line)
    return float(found[1]) if found else None


def _less(now: float | None, then: float | None) -> float | None:
    return None if now is None or then is None else now - then
