"""The verdict on a speculator whose target was tuned since: does it still fit, and what could realigning win back."""

import math
from typing import NamedTuple

from decoding.measure.proof.finding import Finding, ok, problem, undecided
from decoding.metrics import FEWEST, Estimate

FIT = "fit to the tuned target"
_WORTH = 1.05
"""Gain below which realigning is not worth a training run."""
_NOTHING = 1.1
"""Upper end of the gain's interval below which a speculator still fits."""
_Z95 = 1.959964


class TuningLoss(NamedTuple):
    """Tokens per pass of a speculator on the base target and on the tuned one, and the command that would mend it."""

    base: Estimate
    tuned: Estimate
    drafter: str
    remedy: str

    @property
    def gain(self) -> Estimate:
        """Base over tuned tokens per pass, all that realigning could win.

        Both intervals come from texts of their own, so their relative errors add in squares.
        """
        ratio = self.base.value / self.tuned.value
        error = math.hypot(*((each.high - each.low) / (2 * _Z95 * each.value) for each in (self.base, self.tuned)))
        texts = min(self.base.observations, self.tuned.observations)
        return Estimate(ratio, ratio * math.exp(-_Z95 * error), ratio * math.exp(_Z95 * error), texts)

    def finding(self) -> Finding:
        """Return a problem if the gap is real and worth a run, and an open finding if more prompts would tell."""
        gain = self.gain
        found = (
            f"{self.base.value:.2f} tokens per pass before tuning, {self.tuned.value:.2f} now ({self.drafter}); "
            f"realigning could win up to {gain.value:.2f}× [{gain.low:.2f}, {gain.high:.2f}]"
        )
        figures = {"base": self.base._asdict(), "tuned": self.tuned._asdict(), "gain": gain._asdict()}
        if gain.observations >= FEWEST and gain.low > 1 and gain.value >= _WORTH:
            return problem(FIT, found, self.remedy, **figures)
        if gain.observations >= FEWEST and gain.high < _NOTHING:
            return ok(FIT, found, **figures)
        return undecided(FIT, f"{found}; give more prompts (--limit)")
