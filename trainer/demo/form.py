"""The controls of the page: their bounds for each drafter, and a race made of what was entered."""

import math
from dataclasses import dataclass

from decoding.drafters import Drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.loading import eos_token_ids
from decoding.policies import PLAIN, Budget, FixedPolicy
from decoding.prompts import encode_prompt
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import GREEDY, RULES
from decoding.speculation import named_rule
from trainer.demo.race import Models, Race

AUTOMATIC = "automatic"
"""The rule that `DecodingConfig` chooses: greedy at temperature 0, else the lossless rule that keeps the most."""
MOST_NEW_TOKENS = 2048
LONGEST_PROMPT = 100_000
"""Characters of the longest prompt that is tokenized."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """The entries of the page. A field that was emptied is None; a browser may send any other type, too."""

    prompt: str | None
    drafter: str
    depth: float | None
    nodes: float | None
    temperature: float | None = 0.0
    rule: str = AUTOMATIC
    max_new_tokens: float | None = 96
    seed: float | None = 0


def fitting_rules(drafter: Drafter, temperature: float | None) -> list[tuple[str, str]]:
    """Return (label, name) of the rules that take this drafter's proposals at this temperature, `AUTOMATIC` first."""
    greedy = not temperature or not number_of("temperature", temperature) > 0
    found = [("automatic (lossless)", AUTOMATIC)]
    for name, rule in RULES.items():
        if greedy == (rule is GREEDY):
            try:
                rule.check(drafter.kinds(SamplingConfig(0.0 if greedy else 1.0)), drafter.chains_only)
            except ValueError:
                continue
            found.append((f"{name} ({rule.label})", name))
    return found


def drafter_of(models: Models, name: str) -> Drafter:
    """Return the drafter of this name on the page."""
    if name not in models.drafters:
        raise ValueError(f"no drafter is called {name!r}: choose one of {', '.join(models.drafters)}")
    return models.drafters[name]


def chosen_budget(drafter: Drafter, depth: int, nodes: int) -> Budget:
    """Return the largest of the drafter's trees within these bounds, as the policy chooses it."""
    return FixedPolicy(depth, nodes).choose(drafter.budgets, 1)


def race_of(models: Models, form: Form) -> Race:
    """Make the race that was asked for; ValueError, one sentence, for an entry that does not fit."""
    prompt = "" if form.prompt is None else str(form.prompt)
    if not prompt.strip():
        raise ValueError("the prompt is empty: write one, or take an example")
    if len(prompt) > LONGEST_PROMPT:
        raise ValueError(f"the prompt has {len(prompt)} characters: give at most {LONGEST_PROMPT}")
    drafter = drafter_of(models, form.drafter)
    depth, nodes = whole("depth", form.depth, 1), whole("the tree's nodes", form.nodes, 2)
    if chosen_budget(drafter, depth, nodes) == PLAIN:
        raise ValueError(f"{form.drafter} has no tree within depth {depth} and {nodes} nodes: raise one of them")
    config = DecodingConfig(
        max_new_tokens=whole("max new tokens", form.max_new_tokens, 1, MOST_NEW_TOKENS),
        sampling=SamplingConfig(number_of("temperature", form.temperature)),
        rule=None if form.rule == AUTOMATIC else named_rule(form.rule),
        eos_token_ids=eos_token_ids(models.target.model, models.tokenizer),
        seed=whole("seed", form.seed, 0),
    )
    engine = Engine(models.target, drafter, FixedPolicy(depth, nodes), models.tokenizer)
    return Race(models, engine, encode_prompt(prompt, models.tokenizer, chat=True), config)


def number_of(name: str, value: float | None) -> float:
    """Return the number of an entry."""
    if value is None:
        raise ValueError(f"{name} is empty: give a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{name} is {value!s:.40}: give a number")
    return number


def whole(name: str, value: float | None, least: int, most: int | None = None) -> int:
    """Return the whole number of an entry, within its bounds."""
    number = number_of(name, value)
    if number != int(number) or number < least or (most is not None and number > most):
        wanted = f"a whole number from {least}" + ("" if most is None else f" to {most}")
        raise ValueError(f"{name} is {number:g}: give {wanted}")
    return int(number)
