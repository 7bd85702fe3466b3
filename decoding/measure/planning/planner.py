"""The planner: it measures acceptance and costs, and then chooses a form of each drafter for every batch size."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any

from decoding.drafters.base import Drafter
from decoding.drafters.spec import DrafterSpec
from decoding.errors import UserError
from decoding.generate import DecodingConfig, Engine
from decoding.measure.planning.forms import DEEPEST_CHAIN, Family, Load, RankCounts, family_of
from decoding.measure.planning.step_costs import (
    Candidate,
    Prediction,
    StepCosts,
    best,
    depth_by_batch_size,
    survey_steps,
)
from decoding.metrics import StepCount, tokens_per_pass
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import measure_costs
from decoding.policies import Budget
from decoding.rules.best_tree import Paths, best_tree, expected_accepted
from decoding.rules.sampling import SamplingConfig

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Numbers of tokens in the measured passes. All numbers except 1 are also the sizes, including the root, of the trees
that are tried."""


@dataclass(frozen=True)
class PlanConfig:
    """Settings of a plan.

    ``seconds`` limits each measurement of costs; there is one measurement for each drafter and batch size.
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
    """A measurement of costs with several drafters. The survey calls ``advance`` after the cost curve and after each
    drafter.

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
        self.prompts = [
            prompt for prompt in prompts if longest is None or len(prompt) + config.max_new_tokens <= longest
        ]
        if not self.prompts:
            raise UserError(
                f"every prompt plus {config.max_new_tokens} new tokens exceeds the {longest} tokens that target and "
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
        """Measure costs at a batch size.

        Returns the seconds of target passes as JSON values, and the costs of the steps with each drafter.
        """
        # Only passes up to the size of the largest draft are measured.
        largest, seconds = max(drafter.max_nodes for drafter in self.drafters), self.config.seconds
        sizes = self.config.sizes[: 1 + sum(size < largest for size in self.config.sizes)]
        prefix = self._text_tokens
        curve = measure_costs(self.target, sizes, prefix=prefix, rows=rows, repeats=9, seconds=seconds)
        self.advance()
        costs = []
        for drafter in self.drafters:
            steps = survey_steps(self.target, drafter, self.prompts, self.config.decoding, rows, seconds=seconds)
            costs.append(StepCosts(steps, curve))
            self.advance()
        return {"batch_size": rows, "seconds": {str(size): value for size, value in curve.items()}}, costs


_LEAST_TO_SPLIT = 8
"""If there are at least this many prompts, trees are chosen on one half of the prompts and judged on the other half."""


@dataclass
class MeasuredFamily:
    """A family with its candidates, their measured tokens per pass, and the costs of its steps at every batch size."""

    family: Family
    candidates: list[Candidate]
    costs: dict[int, StepCosts] = field(default_factory=dict)

    @property
    def chains(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.is_chain]


class Planner(CostSurvey):
    """The measurements of one plan. The planner calls ``advance`` after each of `steps` pieces of work, for a progress
    bar.
    """

    def __init__(
        self,
        target: CausalLM,
        load: Load,
        specs: Sequence[DrafterSpec],
        prompts: Sequence[Sequence[int]],
        config: PlanConfig,
    ) -> None:
        """Load the drafters; raise UserError if no prompt fits."""
        self.load = load
        self.families = [family_of(spec, load, config.most_nodes, config.deepest) for spec in specs]
        super().__init__(target, [family.drafter for family in self.families], prompts, config)
        split = len(self.prompts) >= _LEAST_TO_SPLIT
        self._halves = (self.prompts[::2], self.prompts[1::2]) if split else (self.prompts, self.prompts)
        self._tokens: dict[str, float] = {}

    @property
    def steps(self) -> int:
        """Number of pieces of work: one for the acceptance of each family, and for each batch size one for the cost
        curve, one for the choices, and one for the costs of each family.
        """
        return len(self.families) + len(self.config.batch_sizes) * (2 + len(self.families))

    def run(self) -> dict[str, Any]:
        """Measure and choose; return the plan's figures as JSON values (see `decoding.measure.planning.plan_file`)."""
        measured = []
        for family in self.families:
            measured.append(self.measure(family))
            self.advance()
        curves, choices = [], []
        for rows in self.config.batch_sizes:
            curve, costs = self.costs_at(rows)
            curves.append(curve)
            for family_measured, family_costs in zip(measured, costs, strict=True):
                family_measured.costs[rows] = family_costs
            choices.append({"batch_size": rows, "choices": [self._choice(family, rows) for family in measured]})
            self.advance()
        return {
            **self.about(),
            "halves": [len(half) for half in self._halves],
            "curves": curves,
            "drafters": [_described(family) for family in measured],
            "cells": choices,
        }

    # --- acceptance ---------------------------------------------------------------------------------------------------

    def decode(self, family: Family, prompts: Sequence[Sequence[int]]) -> tuple[list[StepCount], RankCounts]:
        """Decode the prompts; return the counts of every step except prefills, and counts of accepted nodes by rank.

        Raises UserError if every text ended with its first token.
        """
        config = self.config.decoding
        rows, counts, children = min(max(self.config.batch_sizes), 8), [], RankCounts()
        for _, step in Engine(self.target, family.drafter).steps(prompts, replace(config, trees=True), batch_size=rows):
            if not step.is_prefill:
                counts.append(step.counts)
            if step.tree is not None and step.room >= family.drafter.max_depth:
                children.add(step.tree, step.path)
        if not counts:
            raise UserError("every text ended with its first token: use held-out prompts with longer answers")
        return counts, children

    def measure(self, family: Family) -> MeasuredFamily:
        """Return the family with its candidates and their tokens per pass; costs are added later."""
        if family.kind == "tree":
            _, children = self.decode(family, self._halves[0])
            return MeasuredFamily(family, self._trees(family, children))
        steps, _ = self.decode(family, self.prompts)
        if family.kind == "fixed":
            candidates = [Candidate(family.spec, family.drafter.budgets_on(self.target)[-1], tokens_per_pass(steps))]
        else:
            candidates = [
                Candidate(family.chain(depth), Budget(depth, depth + 1), tokens_per_pass(steps, depth))
                for depth in range(1, family.depth + 1)
            ]
        return MeasuredFamily(family, candidates)

    def _trees(self, family: Family, counts: RankCounts) -> list[Candidate]:
        """Return the chains, and for every depth and size the best tree.

        The best tree is computed as if acceptance at each depth did not depend on other depths.
        """
        shares = counts.shares()
        if not shares:  # every text ended at once
            raise UserError("every text was too short for a whole tree: raise --max-new-tokens or use other prompts")
        by_tree: dict[Paths, Candidate] = {}
        most = self.config.most_nodes
        tried = [size for size in sorted({*self.config.sizes, most}) if size <= most]
        for depth in range(1, len(shares) + 1):
            straight = tuple((0,) * length for length in range(1, depth + 1))
            sizes = [size - 1 for size in tried if size > depth]
            for paths in (straight, *(best_tree(shares[:depth], nodes) for nodes in sizes)):
                if paths and max(map(len, paths)) == depth:
                    tokens = 1 + expected_accepted(paths, shares)
                    by_tree[paths] = Candidate(family.of_tree(paths), Budget(depth, 1 + len(paths)), tokens, paths)
        return list(by_tree.values())

    def _judged(self, measured: MeasuredFamily, prediction: Prediction) -> Prediction:
        """Replace the predicted tokens per pass of a tree by the measured number.

        The number is measured on prompts that were not used to choose the tree.
        """
        if measured.family.kind != "tree":
            return prediction
        spec = prediction.candidate.spec
        if str(spec) not in self._tokens:
            steps, _ = self.decode(Family(spec, "tree", self.load(spec)), self._halves[1])
            self._tokens[str(spec)] = tokens_per_pass(steps)
        return replace(prediction, candidate=replace(prediction.candidate, tokens_per_pass=self._tokens[str(spec)]))

    # --- costs and choice ---------------------------------------------------------------------------------------------

    def _choice(self, measured: MeasuredFamily, rows: int) -> dict[str, Any]:
        costs = measured.costs[rows]
        prediction = self._judged(measured, best(measured.candidates, costs))
        straight = self._judged(measured, best(measured.chains, costs)) if measured.chains else None
        if straight is not None and straight.speedup > prediction.speedup:  # the judging prompts may favour a chain
            prediction = straight
        return {
            "drafter": str(measured.family.spec),
            "plain_seconds": costs.plain,
            "best": _form(prediction),
            "best_chain": None if straight is None else _form(straight),
        }


def _described(measured: MeasuredFamily) -> dict[str, Any]:
    family = measured.family
    chains = {candidate.budget.depth: candidate.tokens_per_pass for candidate in measured.chains}
    return {
        "drafter": str(family.spec),
        "kind": family.kind,
        "depth_by_batch_size": depth_by_batch_size(chains, measured.costs) if chains else None,
    }


def _form(prediction: Prediction) -> dict[str, Any]:
    candidate = prediction.candidate
    return {
        "spec": str(candidate.spec),
        **candidate.budget._asdict(),
        "tree": [list(path) for path in candidate.tree],
        "tokens_per_pass": candidate.tokens_per_pass,
        "seconds": prediction.step._asdict(),
        "cost": prediction.cost,
        "speedup": prediction.speedup,
    }
