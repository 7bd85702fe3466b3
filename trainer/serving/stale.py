"""The verdict on a speculator whose target was tuned since: does it still fit, and what could realigning win back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decoding.drafters import Drafter
from decoding.drafters.spec import DrafterSpec
from decoding.generate import DecodingConfig
from decoding.measure.planning.choose import Candidate, Prediction, with_tokens
from decoding.measure.planning.step_costs import survey_steps
from decoding.metrics import Estimate
from decoding.model.causal_lm import CausalLM
from decoding.policies import PLAIN

_WORTH = 1.05
"""Gain below which realigning is not worth a training run."""
_NOTHING = 1.1
"""Upper end of the gain's interval below which a speculator still fits."""
_SAMPLES, _SECONDS = 12, 4.0
"""Steps of each length by which the costs are measured, and the longest time that they take."""
_Z95 = 1.959964


def predict_here(
    target: CausalLM,
    drafter: Drafter,
    spec: DrafterSpec,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    tokens_per_pass: float,
) -> Prediction:
    """Predict the speed-up of one text at a time by the seconds of the loop's own steps, as `headstart plan` does.

    ValueError where ``config`` has too few new tokens to measure a whole draft.
    """
    found = survey_steps(target, drafter, prompts, config, 1, _SAMPLES, _SECONDS)
    budget = drafter.budgets[-1]
    if budget not in found:
        raise ValueError(
            f"max_new_tokens is {config.max_new_tokens}, too few to measure drafts of {budget.depth} tokens: give more"
        )
    return Prediction(Candidate(spec, budget, tokens_per_pass), found[budget], found[PLAIN].total)


@dataclass(frozen=True)
class Fit:
    """Tokens per pass of a speculator on the tuned target and, where it was given, on the base target."""

    tuned: Estimate
    base: Estimate | None
    prediction: Prediction
    """The speed-up with ``tuned`` tokens per pass, and the costs that it follows from."""
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
        now = self.prediction.speedup
        value, low, high, _ = self.tuned
        told = f"{value:.2f} tokens per pass ({low:.2f} to {high:.2f}), predicted {now:.2f}× plain decoding"
        if self.gain is None or self.base is None:
            return f"{told}; give --base, the target before it was tuned, to tell what the tuning cost"
        value, low, high = self.gain
        after = with_tokens(self.prediction, self.base.value).speedup
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
            "seconds": {**self.prediction.step._asdict(), "plain": self.prediction.plain},
            "predicted_speedup": {
                "now": self.prediction.speedup,
                "after": None if self.base is None else with_tokens(self.prediction, self.base.value).speedup,
            },
        }
