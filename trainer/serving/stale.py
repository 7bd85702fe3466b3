"""The verdict on a speculator whose target was tuned since: does it still fit, and what could realigning win back."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from decoding.drafters import Drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.metrics import Estimate, predicted_speedup
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import measure_cost_curve

_WORTH = 1.05
"""Gain below which realigning is not worth a training run."""
_NOTHING = 1.1
"""Upper end of the gain's interval below which a speculator still fits."""
_TIMED = 4
"""Prompts by which the costs of a step are measured."""
_Z95 = 1.959964


@dataclass(frozen=True)
class StepCosts:
    """Costs of one step of the loop with its drafting, in units of a plain decoding step of the target."""

    draft: float
    verify: float
    overhead: float

    def speedup(self, tokens_per_pass: float) -> float:
        """Predict the speed-up over plain decoding."""
        return predicted_speedup(tokens_per_pass, self.draft, self.verify, self.overhead)


def measure_step(
    target: CausalLM, drafter: Drafter, prompts: Sequence[Sequence[int]], config: DecodingConfig
) -> StepCosts:
    """Measure the costs of a step of the loop on a few prompts, one at a time, the first once more to warm up."""
    engine = Engine(target, drafter)
    engine.decode(prompts[0], config)
    texts = [engine.decode(prompt, config) for prompt in prompts[:_TIMED]]
    steps = [step for text in texts for step in text.steps if not step.is_prefill]
    if not steps:
        raise ValueError("every text ended with its first token: give prompts to be answered")
    draft, verify, total = (
        sum(getattr(step, name) for step in steps) / len(steps)
        for name in ("draft_seconds", "verify_seconds", "total_seconds")
    )
    plain = measure_cost_curve(target, (1,), prefix=len(prompts[0]))[1]
    return StepCosts(draft / plain, verify / plain, (total - draft - verify) / plain)


@dataclass(frozen=True)
class Fit:
    """Tokens per pass of a speculator on the tuned target and, where it was given, on the base target."""

    tuned: Estimate
    base: Estimate | None
    costs: StepCosts
    realign: str
    """The command or the remedy that would win the gap back."""

    @property
    def gain(self) -> tuple[float, float, float] | None:
        """Base over tuned tokens per pass, all that realigning could win, with its 95% interval; None without base.

        Both intervals come from texts of their own, so their relative errors add in squares.
        """
        if self.base is None:
            return None
        ratio = self.base.value / self.tuned.value
        error = math.hypot(*((each.high - each.low) / (2 * _Z95 * each.value) for each in (self.base, self.tuned)))
        return ratio, ratio * math.exp(-_Z95 * error), ratio * math.exp(_Z95 * error)

    @property
    def stale(self) -> bool | None:
        """True if the gap is real and worth a run; None where more prompts would tell."""
        if self.gain is None:
            return None
        value, low, high = self.gain
        if low > 1 and value >= _WORTH:
            return True
        return False if high < _NOTHING else None

    @property
    def verdict(self) -> str:
        """The verdict with its figures, in one sentence."""
        now = self.costs.speedup(self.tuned.value)
        value, low, high, _ = self.tuned
        told = f"{value:.2f} tokens per pass ({low:.2f} to {high:.2f}), predicted {now:.2f}× plain decoding"
        if self.gain is None or self.base is None:
            return f"{told}; give --base, the target before it was tuned, to tell what the tuning cost"
        value, low, high = self.gain
        after = self.costs.speedup(self.base.value)
        told = (
            f"{self.base.value:.2f} → {self.tuned.value:.2f} tokens per pass; predicted {now:.2f}× now, {after:.2f}× "
            f"at most after realigning, which would be worth up to {value:.2f}× ({low:.2f} to {high:.2f})"
        )
        if self.stale is None:
            return f"not clear: {told}; give more prompts (--limit)"
        if not self.stale:
            return f"still fits: {told}"
        loses = "; without speculation it is faster now" if now < 1 else ""
        return f"stale: {told}{loses}; {self.realign}"

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        gain = None if self.gain is None else dict(zip(("value", "low", "high"), self.gain, strict=True))
        return {
            "stale": self.stale,
            "verdict": self.verdict,
            "tuned": self.tuned._asdict(),
            "base": None if self.base is None else self.base._asdict(),
            "worth_up_to": gain,
            "costs": asdict(self.costs),
            "predicted_speedup": {
                "now": self.costs.speedup(self.tuned.value),
                "after": None if self.base is None else self.costs.speedup(self.base.value),
            },
        }
