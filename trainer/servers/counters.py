"""A server's own counts of its speculation, read from its metrics page.

- vLLM 0.32 (``v1/spec_decode/metrics.py``): the counters ``vllm:spec_decode_num_drafts_total``,
  ``…_draft_tokens_total``, ``…_accepted_tokens_total`` and ``…_accepted_tokens_per_pos_total{position="0"}``;
- llama.cpp (server of 2026-10): the same counters with the prefix ``llamacpp:``;
- SGLang 0.5 (``observability/scheduler_metrics_mixin.py``): the gauge ``sglang:spec_accept_length``, which is of the
  last interval alone.

All define the acceptance length as 1 + accepted / passes with a draft, as this project does.
"""

import math
from collections import defaultdict
from dataclasses import dataclass

from decoding.errors import UserError

_SERVERS = {"vllm": "vLLM", "llamacpp": "llama.cpp"}
_NO_COUNTS = "start the server with speculation and with its metrics (SGLang --enable-metrics, llama.cpp --metrics)"


@dataclass(frozen=True)
class Counts:
    """Counts of one server. A figure that the server does not give is None, or empty.

    ``drafts``: passes with a draft. ``reached``: of these, the passes whose draft was accepted at least to each
    position, from position 1 on; its length is the most tokens that the server drafts. ``length``: the acceptance
    length of a server that gives it without counts. ``cumulative``: counts since the server's start, which can be
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
        """1 + accepted / passes with a draft; NaN if neither is known."""
        if self.drafts and self.accepted is not None:
            return 1 + self.accepted / self.drafts
        return math.nan if self.length is None else self.length

    @property
    def tokens(self) -> int | None:
        """The most tokens that the server drafts at a time; None if it does not count by position."""
        return len(self.reached) or None

    def since(self, before: "Counts | None") -> "Counts":
        """Return the counts after ``before``. ValueError if the server was started again since.

        Figures without counts are returned unchanged: they cannot be subtracted.
        """
        if before is None or not (self.cumulative and before.cumulative):
            return self
        now, then = ((each.drafts or 0, each.drafted or 0, each.accepted or 0) for each in (self, before))
        if now[0] < then[0]:
            raise UserError(
                f"the server has counted {now[0]:g} drafts, fewer than the {then[0]:g} before the replay: it was "
                "started again",
                "run the same command once more",
            )
        earlier = (*before.reached, *[0.0] * len(self.reached))
        reached = tuple(late - early for late, early in zip(self.reached, earlier, strict=False))
        drafts, drafted, accepted = (late - early for late, early in zip(now, then, strict=True))
        return Counts(self.server, drafts, drafted, accepted, reached, cumulative=True)


def parse_counts(text: str) -> Counts:
    """Read the counts on a Prometheus page; counters of several engines are added up, gauges averaged.

    UserError for a text without any.
    """
    try:
        from prometheus_client.parser import text_string_to_metric_families
    except ImportError:
        raise UserError("metrics are read by prometheus_client", "pip install 'headstart[endpoint]'") from None
    try:
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except ValueError as error:
        raise UserError(f"what was given is no metrics page ({str(error)[:60]!r})", _NO_COUNTS) from None
    sums: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    positions: defaultdict[str, defaultdict[int, float]] = defaultdict(lambda: defaultdict(float))
    gauges = []
    for sample in samples:
        program, _, name = sample.name.partition(":")
        name = name.removeprefix("spec_decode_num_").removesuffix("_total")
        if not math.isfinite(sample.value):  # a gauge that has not been set
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
        raise UserError("there are no counts of speculation in these metrics", _NO_COUNTS)
    return Counts("SGLang", length=sum(gauges) / len(gauges))
