"""The planner: measures acceptance and costs, then chooses a form of each drafter at every batch size."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from decoding.drafters.spec import DrafterSpec
from decoding.errors import UserError
from decoding.generate import Engine
from decoding.measure.planning.forms import Family, Load, RankCounts, family_of
from decoding.measure.planning.step_costs import Candidate, Prediction, StepCosts, best, depth_by_batch_size
from decoding.measure.planning.survey import CostSurvey, PlanConfig
from decoding.metrics import StepCount, tokens_per_pass
from decoding.model.causal_lm import CausalLM
from decoding.policies import Budget
from decoding.rules.best_tree import Paths, best_tree, expected_accepted

_LEAST_TO_SPLIT = 8
"""If there are at least this many prompts, trees are chosen on one half of the prompts and judged on the other half."""


@dataclass
class MeasuredFamily:
    """A family with its candidates and their measured tokens per pass, and step costs at every batch size."""

    family: Family
    candidates: list[Candidate]
    costs: dict[int, StepCosts] = field(default_factory=dict)

    @property
    def chains(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.is_chain]


class Planner(CostSurvey):
    """The measurements of one plan. It calls ``advance`` after each of `steps` pieces of work, for a progress bar."""

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
        """Number of pieces of work: the acceptance of each family, and for each batch size the curve, the choices, and
        the costs of each family.
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
            for each, found in zip(measured, costs, strict=True):
                each.costs[rows] = found
            choices.append({"batch_size": rows, "choices": [self._choice(each, rows) for each in measured]})
            self.advance()
        return {
            **self.about(),
            "halves": [len(half) for half in self._halves],
            "curves": curves,
            "drafters": [_described(each) for each in measured],
            "cells": choices,
        }

    # --- acceptance ---------------------------------------------------------------------------------------------------

    def decode(self, family: Family, prompts: Sequence[Sequence[int]]) -> tuple[list[StepCount], RankCounts]:
        """Decode the prompts; return the counts of steps without prefills, and of accepted nodes by rank.

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
        """Return the chains, and the best tree for every depth and size if acceptance at each depth is independent."""
        shares = counts.shares()
        if not shares:  # every text ended at once
            raise UserError("every text was too short for a whole tree: raise --max-new-tokens or use other prompts")
        found: dict[Paths, Candidate] = {}
        most = self.config.most_nodes
        tried = [size for size in sorted({*self.config.sizes, most}) if size <= most]
        for depth in range(1, len(shares) + 1):
            straight = tuple((0,) * length for length in range(1, depth + 1))
            sizes = [size - 1 for size in tried if size > depth]
            for paths in (straight, *(best_tree(shares[:depth], nodes) for nodes in sizes)):
                if paths and max(map(len, paths)) == depth:
                    tokens = 1 + expected_accepted(paths, shares)
                    found[paths] = Candidate(family.of_tree(paths), Budget(depth, 1 + len(paths)), tokens, paths)
        return list(found.values())

    def _judged(self, measured: MeasuredFamily, found: Prediction) -> Prediction:
        """Replace a tree's predicted tokens per pass by its measured ones, on prompts not used to choose it."""
        if measured.family.kind != "tree":
            return found
        spec = found.candidate.spec
        if str(spec) not in self._tokens:
            steps, _ = self.decode(Family(spec, "tree", self.load(spec)), self._halves[1])
            self._tokens[str(spec)] = tokens_per_pass(steps)
        return replace(found, candidate=replace(found.candidate, tokens=self._tokens[str(spec)]))

    # --- costs and choice ---------------------------------------------------------------------------------------------

    def _choice(self, measured: MeasuredFamily, rows: int) -> dict[str, Any]:
        costs = measured.costs[rows]
        found = self._judged(measured, best(measured.candidates, costs))
        straight = self._judged(measured, best(measured.chains, costs)) if measured.chains else None
        if straight is not None and straight.speedup > found.speedup:  # possible: judged on other prompts
            found = straight
        return {
            "drafter": str(measured.family.spec),
            "plain_seconds": costs.plain,
            "best": _form(found),
            "best_chain": None if straight is None else _form(straight),
        }


def _described(measured: MeasuredFamily) -> dict[str, Any]:
    family = measured.family
    chains = {candidate.budget.depth: candidate.tokens for candidate in measured.chains}
    return {
        "drafter": str(family.spec),
        "kind": family.kind,
        "depth_by_batch_size": depth_by_batch_size(chains, measured.costs) if chains else None,
    }


def _form(found: Prediction) -> dict[str, Any]:
    candidate = found.candidate
    return {
        "spec": str(candidate.spec),
        **candidate.budget._asdict(),
        "tree": [list(path) for path in candidate.tree],
        "tokens_per_pass": candidate.tokens,
        "seconds": found.step._asdict(),
        "cost": found.cost,
        "speedup": found.speedup,
    }
