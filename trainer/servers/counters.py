"""Counts of speculation, read from a server's metrics page.

- vLLM 0.32 (``v1/spec_decode/metrics.py``): the counters ``vllm:spec_decode_num_drafts_total``,
  ``…_draft_tokens_total``, ``…_accepted_tokens_total`` and ``…_accepted_tokens_per_pos_total{position="0"}``;
- llama.cpp (server of 2026-10): the same counters with the prefix ``llamacpp:``;
- SGLang 0.5 (``observability/scheduler_metrics_mixin.py``): the gauge ``sglang:spec_accept_length``, measured over the
  last interval only.

All define the acceptance length as 1 + accepted / passes with a draft.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from decoding.errors import UserError

_SERVERS = {"vllm": "vLLM", "llamacpp": "llama.cpp"}
_NO_COUNTS = "start the server with speculation and metrics (SGLang --enable-metrics, llama.cpp --metrics)"


@dataclass(frozen=True)
class Counts:
    """Counts of one server. Figures that the server does not report are None or empty.

    ``drafts`` counts the passes with a draft. ``reached[i]`` counts the passes that accepted at least i + 1 drafted
    tokens; its length is the most tokens that the server drafts. ``length`` is the acceptance length of a server that
    reports no counts. ``cumulative`` means counted since the server's start, so counts can be subtracted.
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
        """The most tokens that the server drafts at a time; None if it does not count per position."""
        return len(self.reached) or None

    def since(self, before: "Counts | None") -> "Counts":
        """Return the counts since ``before``. Raises UserError if the server was restarted in between.

        Figures without counts are returned unchanged because they cannot be subtracted.
        """
        if before is None or not (self.cumulative and before.cumulative):
            return self
        now, then = ((each.drafts or 0, each.drafted or 0, each.accepted or 0) for each in (self, before))
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


def parse_counts(text: str) -> Counts:
    """Parse the counts on a Prometheus page: adds up counters of several engines, and averages gauges.

    Raises UserError if the text contains none.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise UserError("reading metrics needs prometheus_client", "pip install 'headstart[endpoint]'") from None
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        raise UserError(f"this is not a metrics page ({str(error)[:60]!r})", _NO_COUNTS) from None
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    positions: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    gauges = []
    for sample in samples:
        program, _, name = sample.name.partition(":")
        name = name.removeprefix("spec_decode_num_").removesuffix("_total")
        if not math.isfinite(sample.value):  # an unset gauge
            continue
        if program in _SERVERS and name == "accepted_tokens_per_pos":
            positions[program][int(sample.labels["position"])] += sample.value
        elif program in _SERVERS and name in ("drafts", "draft_tokens", "accepted_tokens"):
            sums[program][name] += sample.value
        elif sample.name == "sglang:spec_accept_length":
            gauges.append(sample.value)
    for program, found in sums.items():
        most = max(positions[program], default=-1) + 1
        reached = tuple(positions[program][index] for index in range(most))
        counts = found["drafts"], found["draft_tokens"], found["accepted_tokens"]
        return Counts(_SERVERS[program], *counts, reached, cumulative=True)
    if not gauges:
        raise UserError("these metrics contain no counts of speculation", _NO_COUNTS)
    return Counts("SGLang", length=sum(gauges) / len(gauges))
