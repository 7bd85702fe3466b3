"""Counts of speculation, read from a server's metrics page.

- vLLM 0.32 (``v1/spec_decode/metrics.py``): the counters ``vllm:spec_decode_num_drafts_total``,
  ``…_draft_tokens_total``, ``…_accepted_tokens_total`` and ``…_accepted_tokens_per_pos_total{position="0"}``;
- llama.cpp (server of 2026-10): the same counters with the prefix ``llamacpp:``;
- SGLang 0.5 (``observability/scheduler_metrics_mixin.py``): the gauge ``sglang:spec_accept_length``, measured only over
  the last interval. All servers define the acceptance length as 1 + accepted / passes with a draft.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from decoding.errors import UserError

_SERVERS = {"vllm": "vLLM", "llamacpp": "llama.cpp", "sglang": "SGLang"}
_COUNTERS = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
_LENGTH = "spec_accept_length"
_REMEDY = "start the server with speculation and metrics (SGLang --enable-metrics, llama.cpp --metrics)"


class NoCounts(UserError):
    """No counts of speculation could be read."""


@dataclass(frozen=True)
class Counts:
    """Counts of one server. Figures that the server does not report are None or empty.

    ``drafts`` counts the passes with a draft. ``reached[i]`` counts the passes that accepted at least i + 1 drafted
    tokens; the length of ``reached`` is the largest number of tokens that the server drafts at a time. ``length`` is
    the acceptance length of a server that reports no counts. ``cumulative`` means that the counts are totals since the
    server's start, so earlier counts can be subtracted.
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
        """1 + accepted / passes with a draft; NaN if unknown."""
        if self.drafts and self.accepted is not None:
            return 1 + self.accepted / self.drafts
        return math.nan if self.length is None else self.length

    @property
    def tokens(self) -> int | None:
        """Largest number of tokens that the server drafts at a time; None if the server does not count per position."""
        return len(self.reached) or None

    def since(self, before: "Counts | None") -> "Counts":
        """Return the counts since ``before``. Raises UserError if the server was restarted in between.

        Figures without counts are returned unchanged because they cannot be subtracted.
        """
        if before is None or not (self.cumulative and before.cumulative):
            return self
        now, then = ((counts.drafts or 0, counts.drafted or 0, counts.accepted or 0) for counts in (self, before))
        if now[0] < then[0]:
            raise UserError(
                f"the server was restarted during the replay: it counts {now[0]:g} drafts now and counted {then[0]:g} "
                "before",
                "run the same command again",
            )
        earlier = (*before.reached, *[0.0] * len(self.reached))
        reached = tuple(late - early for late, early in zip(self.reached, earlier, strict=False))
        drafts, drafted, accepted = (late - early for late, early in zip(now, then, strict=True))
        return Counts(self.server, drafts, drafted, accepted, reached, cumulative=True)


def parse_counts(text: str, model: str | None = None) -> Counts:
    """Parse one model's counts on a Prometheus page: add up counters of several engines, and average gauges.

    If the page counts several models, ``model`` is the server's name of the model to read. An acceptance length below 1
    is impossible: the gauge of an engine that has not drafted shows it, and this gauge is left out. Raises NoCounts, or
    UserError if the text has counts of several models and ``model`` is not one of them.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise NoCounts("reading metrics needs prometheus_client", "pip install 'headstart[endpoint]'") from None
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        raise NoCounts(f"this is not a metrics page ({str(error)[:60]!r})", _REMEDY) from None
    counted = [(name, sample) for sample in samples if (name := _counted(sample.name)) and math.isfinite(sample.value)]
    if not counted:
        raise NoCounts("these metrics contain no counts of speculation", _REMEDY)
    models = sorted({sample.labels.get("model_name", "") for _, sample in counted})
    if len(models) > 1 and model not in models:
        raise UserError(f"these metrics count {' and '.join(map(repr, models))}", "name one of them as --model")
    sums: defaultdict[str, float] = defaultdict(float)
    positions: defaultdict[int, float] = defaultdict(float)
    lengths = list[float]()
    for name, sample in counted:
        if len(models) > 1 and sample.labels.get("model_name") != model:
            continue
        if name == _LENGTH:
            lengths += [sample.value] if sample.value >= 1 else []
        elif name == "accepted_tokens_per_pos":
            positions[int(sample.labels["position"])] += sample.value
        else:
            sums[name] += sample.value
    if not sums:
        return Counts(_SERVERS["sglang"], length=sum(lengths) / len(lengths) if lengths else None)
    server = next(_SERVERS[sample.name.partition(":")[0]] for name, sample in counted if name in sums)
    reached = tuple(positions[index] for index in range(max(positions, default=-1) + 1))
    return Counts(server, sums["drafts"], sums["draft_tokens"], sums["accepted_tokens"], reached, cumulative=True)


def find_counts(page: str | None, model: str | None) -> Counts | None:
    """Return the model's counts on a metrics page; None if there is no page or it has no counts."""
    try:
        return None if page is None else parse_counts(page, model)
    except NoCounts:
        return None


def _counted(sample: str) -> str | None:
    """Return the short name of a sample with a count of speculation; None for any other sample."""
    program, _, name = sample.partition(":")
    name = name.removeprefix("spec_decode_num_").removesuffix("_total")
    known = (_LENGTH,) if program == "sglang" else _COUNTERS if program in _SERVERS else ()
    return name if name in known else None
