"""THE plan: measure acceptance and costs, choose at every batch size and context, and say what to expect."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

from decoding.drafters.spec import DrafterSpec
from decoding.generate import DecodingConfig, check_prompt
from decoding.measure.planning.acceptance import Passes, PathRecord, WatchedDrafter, decode_passes
from decoding.measure.planning.choose import Candidate, Prediction, best, depth_by_batch_size, with_tokens
from decoding.measure.planning.families import DEEPEST_CHAIN, Family, Load, family_of
from decoding.measure.planning.step_costs import StepCosts, survey_steps
from decoding.metrics import break_even
from decoding.model.causal_lm import CausalLM
from decoding.model.cost_curve import measure_cost_curve
from decoding.policies import Budget
from decoding.rules.best_tree import Paths, best_tree, grows, ordered_tree
from decoding.rules.sampling import SamplingConfig

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""New tokens of the measured passes; the sizes of the trees that are tried, the root included, but for the first."""
_LEAST_TO_SPLIT = 8
"""Prompts from which on trees are chosen on one half of them and judged on the other."""
_LEAST_ROOM = 48
"""New tokens that a context must leave room for."""

Context = int | None
"""Tokens before a step; None: prompts at their own lengths."""


@dataclass(frozen=True)
class PlanConfig:
    """Settings of a plan. ``contexts`` are measured beside the prompts' own lengths, where target and drafts hold them.

    ``seconds`` bounds each measurement of costs: one for every drafter, batch size and context.
    """

    batch_sizes: tuple[int, ...] = (1, 8)
    contexts: tuple[int, ...] = ()
    temperature: float = 0.0
    max_new_tokens: int = 96
    most_nodes: int = 64
    eos_token_ids: tuple[int, ...] = ()
    seed: int = 0
    seconds: float = 2.0
    sizes: tuple[int, ...] = SIZES

    def __post_init__(self) -> None:
        for name in ("batch_sizes", "contexts"):
            values = getattr(self, name)
            if min(values, default=1) < 1 or len(set(values)) < len(values):
                raise ValueError(f"{name} are {list(values)}: give whole numbers from 1, each once")
        if not self.batch_sizes:
            raise ValueError("there are no batch sizes: give at least one")
        if self.most_nodes < 2:
            raise ValueError(f"trees of at most {self.most_nodes} nodes, the root included: give at least 2")
        if self.max_new_tokens < 2:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}: give at least 2, so that something is drafted")

    @property
    def deepest(self) -> int:
        """Depth of the longest chain that is tried of a draft model: a text has room for two of them."""
        return max(1, min(DEEPEST_CHAIN, self.max_new_tokens // 2))

    @property
    def decoding(self) -> DecodingConfig:
        return DecodingConfig(
            max_new_tokens=self.max_new_tokens,
            sampling=SamplingConfig(temperature=self.temperature),
            eos_token_ids=self.eos_token_ids,
            seed=self.seed,
        )


class Place(NamedTuple):
    """One cell of the plan."""

    batch_size: int
    context: Context


@dataclass
class Measured:
    """A family with its measured acceptance, its candidates, and the costs of its steps in every cell."""

    family: Family
    passes: Passes
    candidates: list[Candidate]
    shares: list[list[float]] = field(default_factory=list)
    costs: dict[Place, StepCosts] = field(default_factory=dict)

    @property
    def chains(self) -> list[Candidate]:
        return [candidate for candidate in self.candidates if candidate.is_chain]


class Planner:
    """The measurements of one plan. ``advance`` is called after each of `steps` pieces of work, for a progress bar."""

    def __init__(
        self,
        target: CausalLM,
        load: Load,
        specs: Sequence[DrafterSpec],
        prompts: Sequence[Sequence[int]],
        config: PlanConfig,
        advance: Callable[[], Any] = lambda: None,
    ) -> None:
        """ValueError, before anything is measured, without drafters or prompts, and for prompts that are too long."""
        if not specs:
            raise ValueError("there is no drafter to plan with: give --drafter at least once")
        if not prompts:
            raise ValueError("there are no prompts to measure acceptance on: give at least one")
        self.target, self.load, self.prompts, self.config, self.advance = target, load, prompts, config, advance
        self.families = [family_of(spec, load, config.most_nodes, config.deepest) for spec in specs]
        self.check_prompts(prompts)
        self.contexts: list[Context] = [None, *(held for held in config.contexts if self._fits(held))]
        self._rows = min(max(config.batch_sizes), 8)
        self._tokens: dict[str, float] = {}

    def check_prompts(self, prompts: Sequence[Sequence[int]]) -> None:
        """Raise ValueError for a prompt that the target or a drafter cannot hold with its new tokens."""
        new = self.config.max_new_tokens
        for prompt in prompts:
            check_prompt(self.target, prompt, self.config.decoding)
            for family in self.families:
                limit = family.drafter.max_positions
                if limit is not None and len(prompt) + new > limit:
                    raise ValueError(
                        f"a prompt of {len(prompt)} tokens and {new} new ones do not fit into the {limit} that "
                        f"{family.spec} can hold: cut it with --prompt-tokens, or lower --max-new-tokens"
                    )

    @property
    def left_out(self) -> list[int]:
        """Contexts that target or drafts cannot hold."""
        return [context for context in self.config.contexts if context not in self.contexts]

    @property
    def places(self) -> list[Place]:
        return [Place(rows, context) for context in self.contexts for rows in self.config.batch_sizes]

    @property
    def steps(self) -> int:
        """Pieces of work: a family's acceptance, a cell's curve, a cell's steps with a family, a cell's choices."""
        return len(self.families) + len(self.places) * (2 + len(self.families))

    def run(self) -> dict[str, Any]:
        """Measure and choose; return the plan's figures as JSON values (see `decoding.measure.planning.plan_file`)."""
        measured = []
        for family in self.families:
            measured.append(self.measure(family))
            self.advance()
        curves = {}
        for place in self.places:
            curves[place] = self.curve(place)
            self.advance()
            for held in measured:
                held.costs[place] = self.costs(held.family, place, curves[place])
                self.advance()
        return {
            "temperature": self.config.temperature,
            "max_new_tokens": self.config.max_new_tokens,
            "prompts": len(self.prompts),
            "halves": [len(half) for half in self._halves()],
            "seconds": self.config.seconds,
            "text_tokens": self._text_tokens(),
            "contexts_left_out": self.left_out,
            "curves": [
                {**place._asdict(), "seconds": {str(size): value for size, value in curve.items()}}
                for place, curve in curves.items()
            ],
            "drafters": [self._described(held) for held in measured],
            "cells": [self._cell(place, measured) for place in self.places],
        }

    def _fits(self, context: int) -> bool:
        limits = [self.target.max_positions, *(family.drafter.max_positions for family in self.families)]
        return context + _LEAST_ROOM <= min((limit for limit in limits if limit is not None), default=context + 64)

    # --- acceptance ---------------------------------------------------------------------------------------------------

    def _halves(self) -> tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]]:
        """Return the prompts on which trees are chosen, and those on which they are judged."""
        if len(self.prompts) < _LEAST_TO_SPLIT:
            return self.prompts, self.prompts
        return self.prompts[::2], self.prompts[1::2]

    def measure(self, family: Family) -> Measured:
        """Return the family with its acceptance and candidates, its costs still empty."""
        config = self.config.decoding
        if family.kind == "tree":
            watched = WatchedDrafter(family.drafter)
            passes = decode_passes(self.target, watched, self._halves()[0], config, self._rows)
            return Measured(family, passes, self._trees(family, watched.record), watched.record.shares())
        passes = decode_passes(self.target, family.drafter, self.prompts, config, self._rows)
        if family.kind == "fixed":
            only = Candidate(family.spec, family.drafter.budgets[-1], passes.tokens_per_pass())
            return Measured(family, passes, [only])
        chains = [
            Candidate(family.chain(depth), Budget(depth, depth + 1), passes.tokens_per_pass(depth))
            for depth in range(1, family.depth + 1)
        ]
        return Measured(family, passes, chains)

    def _trees(self, family: Family, record: PathRecord) -> list[Candidate]:
        """Return the best tree of every depth and size, and the chains."""
        shares = record.shares()
        if not shares:  # every text ended at once
            raise ValueError("no text had room for a whole tree: raise --max-new-tokens, or give other prompts")
        drawn = any(kind.has_q for kind in family.drafter.kinds(self.config.decoding.sampling))
        choose = ordered_tree if drawn and grows(shares) else best_tree
        found: dict[Paths, Candidate] = {}
        most = self.config.most_nodes
        tried = [size for size in sorted({*self.config.sizes, most}) if size <= most]
        for depth in range(1, len(shares) + 1):
            chain = tuple((0,) * length for length in range(1, depth + 1))
            sizes = [size - 1 for size in tried if size > depth]
            for paths in (chain, *(choose(shares[:depth], nodes) for nodes in sizes)):
                if paths and max(map(len, paths)) == depth:
                    tokens = 1 + record.expected_accepted(paths)
                    found[paths] = Candidate(family.of_tree(paths), Budget(depth, 1 + len(paths)), tokens, paths)
        return list(found.values())

    def _judged(self, held: Measured, found: Prediction) -> Prediction:
        """Return a prediction of a tree with the tokens per pass of that very tree, on prompts it was not chosen on."""
        if held.family.kind != "tree":
            return found
        spec = found.candidate.spec
        if str(spec) not in self._tokens:
            judged = decode_passes(self.target, self.load(spec), self._halves()[1], self.config.decoding, self._rows)
            self._tokens[str(spec)] = judged.tokens_per_pass()
        return with_tokens(found, self._tokens[str(spec)])

    # --- costs --------------------------------------------------------------------------------------------------------

    def _text_tokens(self) -> int:
        """Return the mean tokens before a step, of prompts at their own lengths."""
        return round(fmean(map(len, self.prompts)) + self.config.max_new_tokens / 2)

    def curve(self, place: Place) -> dict[int, float]:
        """Measure the seconds of a target pass by its tokens, up to the largest draft of any family."""
        prefix = self._text_tokens() if place.context is None else place.context
        largest = max(family.drafter.max_nodes for family in self.families)
        below = sum(size < largest for size in self.config.sizes)
        sizes = self.config.sizes[: below + 1]
        return measure_cost_curve(self.target, sizes, prefix, 9, place.batch_size, self.config.seconds)

    def costs(self, family: Family, place: Place, curve: dict[int, float]) -> StepCosts:
        """Measure the seconds of the family's steps, beside the place's ``curve``."""
        config, prompts = self.config.decoding, self.prompts
        if place.context is not None:
            prompts = lengthened(self.prompts, place.context)
            limits = [self.target.max_positions, family.drafter.max_positions]
            room = min((limit - place.context for limit in limits if limit is not None), default=config.max_new_tokens)
            # No end: a text that follows no question of its own may end at once.
            config = DecodingConfig(min(config.max_new_tokens, room), config.sampling, seed=config.seed)
        found = survey_steps(
            self.target, family.drafter, prompts, config, place.batch_size, seconds=self.config.seconds
        )
        return StepCosts(found, curve)

    # --- choice -------------------------------------------------------------------------------------------------------

    def _cell(self, place: Place, measured: Sequence[Measured]) -> dict[str, Any]:
        cell = {**place._asdict(), "choices": [self._choice(held, place) for held in measured]}
        self.advance()
        return cell

    def _choice(self, held: Measured, place: Place) -> dict[str, Any]:
        costs = held.costs[place]
        found = self._judged(held, best(held.candidates, costs))
        chain = self._judged(held, best(held.chains, costs)) if held.chains else None
        if chain is not None and chain.speedup > found.speedup:  # on other prompts than it was chosen on
            found = chain
        trees = [candidate for candidate in held.candidates if not candidate.is_chain]
        tree = self._judged(held, best(trees, costs)) if trees else None
        return {
            "drafter": str(held.family.spec),
            "plain_seconds": costs.plain,
            "best": _described(found),
            "best_chain": None if chain is None else _described(chain),
            "best_tree": None if tree is None else _described(tree),
            "break_even": break_even(costs.of_chains(range(1, held.family.depth + 1))),
        }

    def _described(self, held: Measured) -> dict[str, Any]:
        own = {place: costs for place, costs in held.costs.items() if place.context is None}
        chains = {candidate.budget.depth: candidate.tokens for candidate in held.chains}
        longest = max(chains, default=0)
        return {
            "drafter": str(held.family.spec),
            "label": held.family.label,
            "kind": held.family.kind,
            "artefact": held.family.drafter.artefact,
            "reached": held.passes.reached(),
            "shares": held.shares,
            "tokens_per_pass_of_chains": {str(depth): tokens for depth, tokens in chains.items()},
            "depth_by_batch_size": depth_by_batch_size(
                chains, {place.batch_size: costs for place, costs in own.items()}, longest
            )
            if chains
            else None,
            "costs": [
                {
                    **place._asdict(),
                    "steps": [{**budget._asdict(), **seconds._asdict()} for budget, seconds in costs.found.items()],
                }
                for place, costs in held.costs.items()
            ],
        }


def _described(found: Prediction) -> dict[str, Any]:
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


def lengthened(prompts: Sequence[Sequence[int]], length: int) -> list[tuple[int, ...]]:
    """Return as many texts of ``length`` tokens as there are prompts: each one, and those after it, round and round."""
    texts = []
    for first in range(len(prompts)):
        text: list[int] = []
        place = first
        while len(text) < length:
            text += prompts[place % len(prompts)]
            place += 1
        texts.append(tuple(text[:length]))
    return texts
