"""The plan: measure acceptance and costs, choose at every batch size and context, and say what to expect."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, cycle, islice
from statistics import fmean
from typing import Any, NamedTuple

from decoding.drafters.spec import DrafterSpec
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.planning.forms import DEEPEST_CHAIN, Family, Load, RankCounts, family_of
from decoding.measure.planning.step_costs import (
    Candidate,
    Prediction,
    StepCosts,
    best,
    depth_by_batch_size,
    survey_steps,
    with_tokens,
)
from decoding.metrics import StepCount, tokens_per_pass
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import measure_costs
from decoding.policies import Budget
from decoding.rules.best_tree import Paths, best_tree, expected_accepted
from decoding.rules.sampling import SamplingConfig

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""New tokens of the measured passes; the sizes of the trees that are tried, the root included, but for the first."""
_LEAST_TO_SPLIT = 8
"""Prompts from which on trees are chosen on one half of them and judged on the other."""
_LEAST_ROOM = 48
"""New tokens that a context must leave room for."""


@dataclass(frozen=True)
class PlanConfig:
    """Settings of a plan. ``contexts`` are measured besides the prompts' own lengths, if target and drafts hold them.

    ``seconds`` bounds each measurement of costs: one for every drafter, batch size and context.
    """

    batch_sizes: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = ()
    temperature: float = 0.0
    max_new_tokens: int = 96
    most_nodes: int = 64
    eos_token_ids: tuple[int, ...] = ()
    seconds: float = 2.0
    sizes: tuple[int, ...] = SIZES

    @property
    def deepest(self) -> int:
        """Depth of the longest chain that is tried of a draft model: a text has room for two of them."""
        return max(1, min(DEEPEST_CHAIN, self.max_new_tokens // 2))

    @property
    def decoding(self) -> DecodingConfig:
        sampling = SamplingConfig(temperature=self.temperature)
        return DecodingConfig(self.max_new_tokens, sampling, eos_token_ids=self.eos_token_ids)


class PlanCell(NamedTuple):
    """A cell of the plan. ``context``: the tokens before a step; None: prompts at their own lengths."""

    batch_size: int
    context: int | None


@dataclass
class MeasuredFamily:
    """A family with its measured acceptance, its candidates, and the costs of its steps in every cell."""

    family: Family
    candidates: list[Candidate]
    costs: dict[PlanCell, StepCosts] = field(default_factory=dict)

    @property
    def chains(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.is_chain]


class Planner:
    """The measurements of one plan. ``advance`` is called after each of `steps` pieces of work, for a progress bar.

    Prompts that the target or a drafter cannot hold with their new tokens are left out, and so are such contexts.
    """

    def __init__(
        self,
        target: CausalLM,
        load: Load,
        specs: Sequence[DrafterSpec],
        prompts: Sequence[Sequence[int]],
        config: PlanConfig,
        advance: Callable[[], Any] = lambda: None,
    ) -> None:
        """ValueError, before anything is measured, if no prompt fits."""
        self.target, self.load, self.config, self.advance = target, load, config, advance
        self.families = [family_of(spec, load, config.most_nodes, config.deepest) for spec in specs]
        limits = [target.max_positions, *(family.drafter.max_positions for family in self.families)]
        self._longest = min((limit for limit in limits if limit is not None), default=None)
        self.prompts = self.fitting(prompts)
        if not self.prompts:
            raise ValueError(
                f"no prompt fits with {config.max_new_tokens} new tokens into the {self._longest} that target and "
                "drafters can hold: give shorter prompts, or lower --max-new-tokens"
            )
        contexts = [each for each in config.contexts if self._longest is None or each + _LEAST_ROOM <= self._longest]
        self.left_out = [context for context in config.contexts if context not in contexts]
        self.cells = [PlanCell(rows, context) for context in (None, *contexts) for rows in config.batch_sizes]
        split = len(self.prompts) >= _LEAST_TO_SPLIT
        self._halves = (self.prompts[::2], self.prompts[1::2]) if split else (self.prompts, self.prompts)
        self._text_tokens = round(fmean(map(len, self.prompts)) + config.max_new_tokens / 2)
        self._tokens: dict[str, float] = {}

    def fitting(self, prompts: Sequence[Sequence[int]]) -> list[Sequence[int]]:
        """Return the prompts that the target and every drafter hold with their new tokens."""
        longest, new = self._longest, self.config.max_new_tokens
        return [prompt for prompt in prompts if longest is None or len(prompt) + new <= longest]

    @property
    def steps(self) -> int:
        """Pieces of work: a family's acceptance, a cell's curve, a cell's steps with a family, a cell's choices."""
        return len(self.families) + len(self.cells) * (2 + len(self.families))

    def run(self) -> dict[str, Any]:
        """Measure and choose; return the plan's figures as JSON values (see `decoding.measure.planning.plan_file`)."""
        measured = []
        for family in self.families:
            measured.append(self.measure(family))
            self.advance()
        curves, choices = [], []
        for cell in self.cells:
            curve = self.curve(cell)
            curves.append({**cell._asdict(), "seconds": {str(size): value for size, value in curve.items()}})
            self.advance()
            for each in measured:
                each.costs[cell] = self.costs(each.family, cell, curve)
                self.advance()
            choices.append({**cell._asdict(), "choices": [self._choice(each, cell) for each in measured]})
            self.advance()
        return {
            "temperature": self.config.temperature,
            "max_new_tokens": self.config.max_new_tokens,
            "prompts": len(self.prompts),
            "halves": [len(half) for half in self._halves],
            "seconds": self.config.seconds,
            "text_tokens": self._text_tokens,
            "contexts_left_out": self.left_out,
            "curves": curves,
            "drafters": [_described(each) for each in measured],
            "cells": choices,
        }

    # --- acceptance ---------------------------------------------------------------------------------------------------

    def decode(self, family: Family, prompts: Sequence[Sequence[int]]) -> tuple[list[StepCount], RankCounts]:
        """Decode the prompts; return the counts of their steps without prefills, and of accepted children of trees.

        ValueError if every text ended with its first token.
        """
        config = self.config.decoding
        rows, counts, children = min(max(self.config.batch_sizes), 8), [], RankCounts()
        trees = DecodingConfig(config.max_new_tokens, config.sampling, eos_token_ids=config.eos_token_ids, trees=True)
        for _, step in Engine(self.target, family.drafter).steps(prompts, trees, batch_size=rows):
            if not step.is_prefill:
                counts.append(step.counts)
            if step.tree is not None and step.room >= family.drafter.max_depth:
                children.add(step.tree, step.path)
        if not counts:
            raise ValueError("every text ended with its first token: give held-out prompts that are answered at length")
        return counts, children

    def measure(self, family: Family) -> MeasuredFamily:
        """Return the family with its acceptance and candidates, its costs still empty."""
        if family.kind == "tree":
            _, children = self.decode(family, self._halves[0])
            return MeasuredFamily(family, self._trees(family, children))
        steps, _ = self.decode(family, self.prompts)
        if family.kind == "fixed":
            candidates = [Candidate(family.spec, family.drafter.budgets[-1], tokens_per_pass(steps))]
        else:
            candidates = [
                Candidate(family.chain(depth), Budget(depth, depth + 1), tokens_per_pass(steps, depth))
                for depth in range(1, family.depth + 1)
            ]
        return MeasuredFamily(family, candidates)

    def _trees(self, family: Family, counts: RankCounts) -> list[Candidate]:
        """Return the best tree of every depth and size, and the chains, as if acceptance were independent by depth."""
        shares = counts.shares()
        if not shares:  # every text ended at once
            raise ValueError("no text had room for a whole tree: raise --max-new-tokens, or give other prompts")
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
        """Return a prediction of a tree with the tokens per pass of that very tree, on prompts it was not chosen on."""
        if measured.family.kind != "tree":
            return found
        spec = found.candidate.spec
        if str(spec) not in self._tokens:
            steps, _ = self.decode(Family(spec, "tree", self.load(spec)), self._halves[1])
            self._tokens[str(spec)] = tokens_per_pass(steps)
        return with_tokens(found, self._tokens[str(spec)])

    # --- costs and choice ---------------------------------------------------------------------------------------------

    def curve(self, cell: PlanCell) -> dict[int, float]:
        """Measure the seconds of a target pass by its tokens, up to the largest draft of any family."""
        prefix = self._text_tokens if cell.context is None else cell.context
        largest = max(family.drafter.max_nodes for family in self.families)
        sizes = self.config.sizes[: 1 + sum(size < largest for size in self.config.sizes)]
        costs = measure_costs(
            self.target, sizes, prefix=prefix, rows=cell.batch_size, repeats=9, seconds=self.config.seconds
        )
        return dict(costs.target_pass)

    def costs(self, family: Family, cell: PlanCell, curve: dict[int, float]) -> StepCosts:
        """Measure the seconds of the family's steps, next to the cell's ``curve``."""
        config, prompts = self.config.decoding, self.prompts
        if (context := cell.context) is not None:
            # Each prompt and those after it, round and round, without an end: such a text may end at once.
            endless = (chain.from_iterable(islice(cycle(prompts), first, None)) for first in range(len(prompts)))
            prompts = [tuple(islice(tokens, context)) for tokens in endless]
            room = config.max_new_tokens if self._longest is None else self._longest - context
            config = DecodingConfig(min(config.max_new_tokens, room), config.sampling)
        seconds = self.config.seconds
        return StepCosts(
            survey_steps(self.target, family.drafter, prompts, config, cell.batch_size, seconds=seconds), curve
        )

    def _choice(self, measured: MeasuredFamily, cell: PlanCell) -> dict[str, Any]:
        costs = measured.costs[cell]
        found = self._judged(measured, best(measured.candidates, costs))
        straight = self._judged(measured, best(measured.chains, costs)) if measured.chains else None
        if straight is not None and straight.speedup > found.speedup:  # on other prompts than it was chosen on
            found = straight
        return {
            "drafter": str(measured.family.spec),
            "plain_seconds": costs.plain,
            "best": _form(found),
            "best_chain": None if straight is None else _form(straight),
        }


def _described(measured: MeasuredFamily) -> dict[str, Any]:
    family = measured.family
    own = {cell.batch_size: costs for cell, costs in measured.costs.items() if cell.context is None}
    chains = {candidate.budget.depth: candidate.tokens for candidate in measured.chains}
    return {
        "drafter": str(family.spec),
        "label": family.label,
        "kind": family.kind,
        "depth_by_batch_size": depth_by_batch_size(chains, own) if chains else None,
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
