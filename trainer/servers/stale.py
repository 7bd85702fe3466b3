"""The verdict on a speculator whose target was tuned since: does it still fit, and what could realigning win back."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from decoding.drafters import Drafter
from decoding.drafters.spec import DrafterSpec
from decoding.generate import DecodingConfig
from decoding.measure.figures import estimate, told
from decoding.measure.planning.step_costs import Candidate, Prediction, survey_steps, with_tokens
from decoding.metrics import FEWEST, Estimate
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
    drafter: str
    """The label of the drafter that both were measured with, its shape included."""
    realign: str
    """The command or the remedy that would win the gap back."""

    @property
    def gain(self) -> Estimate | None:
        """Base over tuned tokens per pass, all that realigning could win; None without base.

        Both intervals come from texts of their own, so their relative errors add in squares.
        """
        if self.base is None:
            return None
        ratio = self.base.value / self.tuned.value
        error = math.hypot(*((each.high - each.low) / (2 * _Z95 * each.value) for each in (self.base, self.tuned)))
        texts = min(self.base.observations, self.tuned.observations)
        return Estimate(ratio, ratio * math.exp(-_Z95 * error), ratio * math.exp(_Z95 * error), texts)

    @property
    def stale(self) -> bool | None:
        """True if the gap is real and worth a run; None where more prompts would tell."""
        gain = self.gain
        if gain is None or gain.observations < FEWEST:
            return None
        if gain.low > 1 and gain.value >= _WORTH:
            return True
        return False if gain.high < _NOTHING else None

    @property
    def verdict(self) -> str:
        """The verdict with its figures, in one sentence."""
        now, by = self.prediction.speedup, f"tokens per pass ({self.drafter})"
        if self.gain is None or self.base is None:
            figures = f"{estimate(told(self.tuned))} {by}, predicted {now:.2f}× plain decoding"
            return f"{figures}; give --base, the target before it was tuned, to tell what the tuning cost"
        after = with_tokens(self.prediction, self.base.value).speedup
        figures = (
            f"{self.base.value:.2f} → {self.tuned.value:.2f} {by}; predicted {now:.2f}× now, "
            f"{after:.2f}× at most after realigning, which would be worth up to {estimate(told(self.gain), '×')}"
        )
        if self.stale is None:
            return f"not clear: {figures}; give more prompts (--limit)"
        if not self.stale:
            return f"still fits: {figures}"
        loses = "; without speculation it is faster now" if now < 1 else ""
        return f"stale: {figures}{loses}; {self.realign}"

    def as_json(self) -> dict[str, Any]:
        """Return JSON values."""
        return {
            "stale": self.stale,
            "verdict": self.verdict,
            "drafter": self.drafter,
            "tuned": told(self.tuned),
            "base": None if self.base is None else told(self.base),
            "worth_up_to": None if self.gain is None else told(self.gain),
            "seconds": {**self.prediction.step._asdict(), "plain": self.prediction.plain},
            "predicted_speedup": {
                "now": self.prediction.speedup,
                "after": None if self.base is None else with_tokens(self.prediction, self.base.value).speedup,
            },
        }
