"""Measurement of costs: a target's passes, and the decoding loop's steps with each drafter."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from decoding.drafters.base import Drafter
from decoding.errors import UserError
from decoding.generate import DecodingConfig
from decoding.measure.planning.forms import DEEPEST_CHAIN
from decoding.measure.planning.step_costs import StepCosts, survey_steps
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import measure_costs
from decoding.rules.sampling import SamplingConfig

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of tokens in the measured passes; all except 1 are also sizes of the tried trees, including the root."""


@dataclass(frozen=True)
class PlanConfig:
    """Settings of a plan.

    ``seconds`` limits each measurement of costs; there is one for each drafter and batch size.
    """

    batch_sizes: tuple[int, ...] = (1, 8)
    temperature: float = 0.0
    max_new_tokens: int = 96
    most_nodes: int = 64
    eos_token_ids: tuple[int, ...] = ()
    seconds: float = 2.0
    sizes: tuple[int, ...] = SIZES

    @property
    def deepest(self) -> int:
        """Depth of the longest chain tried with a draft model; a text must have room for two such chains."""
        return max(1, min(DEEPEST_CHAIN, self.max_new_tokens // 2))

    @property
    def decoding(self) -> DecodingConfig:
        sampling = SamplingConfig(temperature=self.temperature)
        return DecodingConfig(self.max_new_tokens, sampling, eos_token_ids=self.eos_token_ids)


class CostSurvey:
    """Measurement of costs with several drafters. It calls ``advance`` after the curve and after each drafter.

    Prompts that, together with their new tokens, are too long for the target or a drafter are left out.
    """

    def __init__(
        self, target: CausalLM, drafters: Sequence[Drafter], prompts: Sequence[Sequence[int]], config: PlanConfig
    ) -> None:
        """Raise UserError if no prompt fits."""
        self.target, self.drafters, self.config = target, drafters, config
        self.advance: Callable[[], Any] = lambda: None
        limits = [target.max_positions, *(drafter.max_positions for drafter in drafters)]
        longest = min((limit for limit in limits if limit is not None), default=None)
        self.prompts = [each for each in prompts if longest is None or len(each) + config.max_new_tokens <= longest]
        if not self.prompts:
            raise UserError(
                f"no prompt and {config.max_new_tokens} new tokens fit into the {longest} tokens that target and "
                "drafters support: use shorter prompts or lower --max-new-tokens"
            )
        self._text_tokens = round(fmean(map(len, self.prompts)) + config.max_new_tokens / 2)

    def about(self) -> dict[str, Any]:
        """Return the settings as JSON values."""
        return {
            "temperature": self.config.temperature,
            "max_new_tokens": self.config.max_new_tokens,
            "prompts": len(self.prompts),
            "seconds": self.config.seconds,
            "text_tokens": self._text_tokens,
        }

    def costs_at(self, rows: int) -> tuple[dict[str, Any], list[StepCosts]]:
        """Measure at a batch size; return the target's passes as JSON values, and the costs with each drafter."""
        curve = self._curve(rows)
        self.advance()
        costs = []
        for drafter in self.drafters:
            config, seconds = self.config.decoding, self.config.seconds
            steps = survey_steps(self.target, drafter, self.prompts, config, rows, seconds=seconds)
            costs.append(StepCosts(steps, curve))
            self.advance()
        return {"batch_size": rows, "seconds": {str(size): value for size, value in curve.items()}}, costs

    def _curve(self, rows: int) -> dict[int, float]:
        """Measure the seconds of a target pass by number of tokens, up to the largest draft of any drafter."""
        largest = max(drafter.max_nodes for drafter in self.drafters)
        sizes = self.config.sizes[: 1 + sum(size < largest for size in self.config.sizes)]
        seconds = self.config.seconds
        return measure_costs(self.target, sizes, prefix=self._text_tokens, rows=rows, repeats=9, seconds=seconds)
