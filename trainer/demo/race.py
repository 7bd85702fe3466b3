"""Races of plain against speculative decoding of one prompt, and the form that starts a race."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.errors import UserError
from decoding.generate import DecodingConfig, Engine
from decoding.measure.proof.greedy import is_near_tie, margin_of
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids
from decoding.policies import NO_DRAFT, FixedPolicy
from decoding.prompts import encode_prompt
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import common_length
from decoding.rules.verify import GREEDY, RULES
from decoding.speculation import named_rule
from decoding.text import Detokenizer, Piece, Step, Tally, step_pieces

AUTOMATIC = "automatic"
"""The rule that `DecodingConfig` chooses: greedy at temperature 0, otherwise the lossless rule that accepts the most
tokens.
"""
MOST_NEW_TOKENS = 2048
LONGEST_PROMPT = 100_000
"""Longest prompt in characters."""


@dataclass(frozen=True, eq=False)
class Models:
    """The target, its tokenizer, and the drafters by their names on the page.

    ``plain_target`` decodes plainly. It shares the target's weights, but has a separate cache if steps have fixed
    shapes.
    """

    target: CausalLM
    plain_target: CausalLM
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, Drafter]

    @staticmethod
    def of(target: CausalLM, tokenizer: PreTrainedTokenizerBase, drafters: dict[str, Drafter]) -> "Models":
        plain = (
            CausalLM(target.model, target.output_tokens, target.static, target.batch_invariant)
            if target.is_static
            else target
        )
        return Models(target, plain, tokenizer, drafters)

    def drafter(self, name: str) -> Drafter:
        """Return a drafter by its name on the page."""
        if name not in self.drafters:
            raise UserError(f"no drafter is called {name!r}: choose one of {', '.join(self.drafters)}")
        return self.drafters[name]

    def warm_up(self, tokens: int = 8) -> None:
        """Decode a few tokens plainly and with each drafter, because the first passes of a process take longer."""
        prompt, config = encode_prompt("The first", self.tokenizer, chat=True), DecodingConfig(max_new_tokens=tokens)
        for target, drafter in (
            (self.plain_target, None),
            *((self.target, loaded) for loaded in self.drafters.values()),
        ):
            Engine(target, drafter).decode(prompt, config)


class Side:
    """One side of a race: the steps that it has decoded, the pieces of text that each step completed, and running
    figures.
    """

    def __init__(self, engine: Engine, prompt: Sequence[int], config: DecodingConfig) -> None:
        """Raise the errors of `Engine.steps` for a prompt or a rule that does not fit."""
        assert engine.tokenizer is not None
        self.steps: list[Step] = []
        self.texts: list[tuple[Piece, ...]] = []
        self.tally = Tally()
        self.finished = False
        self._hidden = config.eos_token_ids
        self._detokenizer = Detokenizer(engine.tokenizer)
        self._steps = engine.steps(prompt, config)

    @property
    def seconds(self) -> float:
        """Seconds of decoding so far, including the prefill."""
        return self.tally.prefill_seconds + self.tally.total_seconds

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for step in self.steps for token in step.tokens)

    def advance(self) -> None:
        """Decode one step; the call after the last step finishes the text."""
        step = next(self._steps, None)
        if step is None:
            self.finished = True
            if self.texts and (rest := self._detokenizer.flush()):
                self.texts[-1] += (Piece(rest, drafted=False),)
            return
        self.tally.add(step)
        self.texts.append(tuple(step_pieces(step, self._detokenizer, self._hidden)))
        self.steps.append(step)  # set last, so that every visible step has its text

    def close(self) -> None:
        """End the text; free its cache and its drafter's session."""
        self._steps = iter(())


class Ending(NamedTuple):
    """The result of comparing two finished texts.

    ``alike``: number of equal leading tokens. ``conclusion``: "equal", or why the texts differ: "stopped" before the
    end; "sampled" tokens; a "near-tie", whose two logits are only ``margin`` apart, so that rounding can swap them; or
    an unexplained "fault".
    """

    alike: int
    conclusion: Literal["equal", "stopped", "sampled", "near-tie", "fault"]
    margin: float | None = None


class Race:
    """Two decodings of the same prompt, one plain and one speculative.

    The side that has used less time takes the next step, and each side counts only the seconds of its own steps. So
    both texts always look as if each ran on a separate machine for the same time.
    """

    def __init__(self, models: Models, engine: Engine, prompt: Sequence[int], config: DecodingConfig) -> None:
        """Start both sides; the speculative side uses ``engine`` and ``config``.

        Raises UserError for a bad prompt or rule.
        """
        self.models, self.config, self.prompt = models, config, tuple(prompt)
        self.speculative = Side(engine, prompt, replace(config, trees=True))
        plain = Engine(models.plain_target, tokenizer=engine.tokenizer)
        # Plain decoding does not draft, so the temperature decides the rule.
        self.plain = Side(plain, prompt, replace(config, rule=None))
        self.stopped = False
        self.ending: Ending | None = None
        self.shown_step: int | None = None
        """Step (0: the prefill) that the visitor looks at; None for the latest."""

    @property
    def finished(self) -> bool:
        return self.plain.finished and self.speculative.finished

    @property
    def speedup(self) -> float | None:
        """Tokens per second of the speculative side, divided by the tokens per second of the plain side; None until
        both have finished the prefill.
        """
        plain, speculative = self.plain.tally.tokens_per_second, self.speculative.tally.tokens_per_second
        return speculative / plain if plain and speculative else None

    def advance(self, seconds: float) -> bool:
        """Decode for at least ``seconds``, or until the race ends; return False at the end."""
        until = self.plain.seconds + self.speculative.seconds + seconds
        while not (self.finished or self.stopped) and self.plain.seconds + self.speculative.seconds < until:
            racing = (side for side in (self.plain, self.speculative) if not side.finished)
            min(racing, key=lambda side: side.seconds).advance()
        if not (self.finished or self.stopped):
            return True
        self.close()
        self.ending = self._compare()
        return False

    def close(self) -> None:
        """Stop both texts and free their caches. Another thread may still be decoding a step."""
        self.stopped = self.stopped or not self.finished
        self.plain.close()
        self.speculative.close()

    def _compare(self) -> Ending:
        """Compare the texts.

        In bf16 a near-tie may be decided differently, so the margin at the first different token is checked.
        """
        plain, mine = self.plain.tokens, self.speculative.tokens
        alike = common_length(plain, mine)
        if plain == mine and self.finished:
            return Ending(alike, "equal")
        if alike == min(len(plain), len(mine)) and not self.finished:
            return Ending(alike, "stopped")
        if not self.config.sampling.greedy:
            return Ending(alike, "sampled")
        margin = margin_of(self.models.plain_target, self.prompt, mine, plain)
        near = is_near_tie(margin, self.models.target.dtype)
        return Ending(alike, "near-tie" if near else "fault", margin if isinstance(margin, float) else None)


def fitting_rules(drafter: Drafter, temperature: float | None) -> list[tuple[str, str]]:
    """Return (label, name) of each rule that can verify the drafter's proposals at this temperature. `AUTOMATIC` comes
    first.
    """
    greedy = not temperature or not number_of("temperature", temperature) > 0
    choices = [("automatic (lossless)", AUTOMATIC)]
    for name, rule in RULES.items():
        if greedy == (rule is GREEDY):
            try:
                rule.check(drafter.kinds(SamplingConfig(0.0 if greedy else 1.0)), drafter.chains_only)
            except UserError:
                continue
            choices.append((f"{name} ({rule.label})", name))
    return choices


class Form(NamedTuple):
    """The inputs of the page. An emptied field is None; a browser may send any type."""

    prompt: Any
    drafter: Any
    rule: Any
    depth: Any
    nodes: Any
    temperature: Any
    max_new_tokens: Any
    seed: Any


def race_of(models: Models, form: Form) -> Race:
    """Create the race that a form describes; raise UserError with one sentence for invalid input."""
    prompt = "" if form.prompt is None else str(form.prompt)
    if not prompt.strip():
        raise UserError("the prompt is empty: write a prompt, or choose an example")
    if len(prompt) > LONGEST_PROMPT:
        raise UserError(f"the prompt has {len(prompt)} characters: use at most {LONGEST_PROMPT}")
    drafter = models.drafter(form.drafter)
    policy = FixedPolicy(whole("depth", form.depth, 1), whole("the tree's nodes", form.nodes, 2))
    if policy.choose(drafter.budgets, 1) == NO_DRAFT:
        raise UserError(f"{form.drafter} cannot draft a tree with this depth and number of nodes: raise one of them")
    config = DecodingConfig(
        max_new_tokens=whole("max new tokens", form.max_new_tokens, 1, MOST_NEW_TOKENS),
        sampling=SamplingConfig(number_of("temperature", form.temperature)),
        rule=None if form.rule == AUTOMATIC else named_rule(form.rule),
        eos_token_ids=eos_token_ids(models.target.model, models.tokenizer),
        seed=whole("seed", form.seed, 0),
    )
    engine = Engine(models.target, drafter, policy, models.tokenizer)
    return Race(models, engine, encode_prompt(prompt, models.tokenizer, chat=True), config)


def number_of(name: str, value: Any) -> float:
    """Return the number that was entered in a field; raise UserError if it is not a finite number."""
    if value is None:
        raise UserError(f"{name} is empty: enter a number")
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{name} is {value!s:.40}: enter a number")
    return number


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return the whole number that was entered in a field; raise UserError if it is not whole, or is outside the
    bounds.
    """
    number = number_of(name, value)
    if number != int(number) or number < least or (most is not None and number > most):
        wanted = f"a whole number from {least}" + ("" if most is None else f" to {most}")
        raise UserError(f"{name} is {number:g}: enter {wanted}")
    return int(number)
