"""Plain and speculative decoding of one prompt, side by side in turns; and a race made of what was entered."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig, Step
from decoding.measure.proof.greedy import is_near_tie, margin_of
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids
from decoding.policies import PLAIN, FixedPolicy
from decoding.prompts import encode_prompt
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import common_length
from decoding.rules.verify import GREEDY, RULES
from decoding.speculation import named_rule
from decoding.stream import Detokenizer, Piece, Tally, step_pieces

AUTOMATIC = "automatic"
"""The rule that `DecodingConfig` chooses: greedy at temperature 0, else the lossless rule that keeps the most."""
MOST_NEW_TOKENS = 2048
LONGEST_PROMPT = 100_000
"""Characters of the longest prompt that is tokenized."""


@dataclass(frozen=True, eq=False)
class Models:
    """The target, its tokenizer, and the drafters by their names on the page.

    ``plain_target`` decodes plainly. It has the target's weights, and a cache of its own when steps have fixed shapes.
    """

    target: CausalLM
    plain_target: CausalLM
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, Drafter]

    @staticmethod
    def of(target: CausalLM, tokenizer: PreTrainedTokenizerBase, drafters: dict[str, Drafter]) -> "Models":
        plain = CausalLM(target.model, target.output_tokens, target.static) if target.is_static else target
        return Models(target, plain, tokenizer, drafters)

    def drafter(self, name: str) -> Drafter:
        """Return the drafter of this name on the page."""
        if name not in self.drafters:
            raise ValueError(f"no drafter is called {name!r}: choose one of {', '.join(self.drafters)}")
        return self.drafters[name]

    def warm_up(self, tokens: int = 8) -> None:
        """Decode a few tokens plainly and with each drafter: the first passes of a process take longer."""
        prompt, config = encode_prompt("The first", self.tokenizer, chat=True), DecodingConfig(max_new_tokens=tokens)
        for target, drafter in ((self.plain_target, None), *((self.target, each) for each in self.drafters.values())):
            Engine(target, drafter).decode(prompt, config)


class Side:
    """One text being decoded: its steps so far, the pieces of text that each completed, and the running figures."""

    def __init__(self, engine: Engine, prompt: Sequence[int], config: DecodingConfig) -> None:
        """ValueError, as of `Engine.steps`, for a prompt or a rule that does not fit."""
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
        """Seconds of decoding so far, the prefill included."""
        return self.tally.prefill_seconds + self.tally.total_seconds

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for step in self.steps for token in step.tokens)

    def advance(self) -> None:
        """Decode one step; the one after the last finishes the text."""
        step = next(self._steps, None)
        if step is None:
            self.finished = True
            if self.texts and (rest := self._detokenizer.flush()):
                self.texts[-1] += (Piece(rest, drafted=False),)
            return
        self.tally.add(step)
        self.texts.append(tuple(step_pieces(step, self._detokenizer, self._hidden)))
        self.steps.append(step)  # last: a page that reads meanwhile finds the text of every step

    def close(self) -> None:
        """Give up the text: its cache and its drafter's session are free."""
        self._steps = iter(())


class Ending(NamedTuple):
    """The comparison of two finished texts.

    ``alike``: number of leading tokens that both have. ``verdict`` is "equal", or the reason why they part: "stopped"
    before their end; "sampled" tokens; a "near-tie", whose logits are ``margin`` apart, which rounding reverses; or a
    "fault", as nothing explains it.
    """

    alike: int
    verdict: Literal["equal", "stopped", "sampled", "near-tie", "fault"]
    margin: float | None = None


class Race:
    """A prompt decoded plainly and speculatively. The side that has spent less time takes the next step.

    So the two texts stand at each moment as they would at equal times on machines of their own. Seconds are the loop's,
    step by step: neither side counts the other's.
    """

    def __init__(self, models: Models, engine: Engine, prompt: Sequence[int], config: DecodingConfig) -> None:
        """``engine`` and ``config`` are those of the speculative side; ValueError if the prompt does not fit."""
        self.models, self.config, self.prompt = models, config, tuple(prompt)
        self.speculative = Side(engine, prompt, replace(config, trees=True))
        plain = Engine(models.plain_target, tokenizer=engine.tokenizer)
        # Plain decoding has no drafts to judge: the rule is that of its temperature.
        self.plain = Side(plain, prompt, replace(config, rule=None))
        self.stopped = False
        self.ending: Ending | None = None
        self.shown_step: int | None = None
        """Step (0 is the prefill) that the visitor looks at; None: the latest."""

    @property
    def finished(self) -> bool:
        return self.plain.finished and self.speculative.finished

    @property
    def speedup(self) -> float | None:
        """Tokens per second over those of plain decoding; None before either has passed its prefill."""
        plain, speculative = self.plain.tally.tokens_per_second, self.speculative.tally.tokens_per_second
        return speculative / plain if plain and speculative else None

    def advance(self, seconds: float) -> bool:
        """Decode steps in turn for at least ``seconds`` of decoding, or to the end; return False at the end."""
        until = self.plain.seconds + self.speculative.seconds + seconds
        while not (self.finished or self.stopped) and self.plain.seconds + self.speculative.seconds < until:
            min((side for side in (self.plain, self.speculative) if not side.finished), key=_spent).advance()
        if not (self.finished or self.stopped):
            return True
        self.close()
        self.ending = self._compare()
        return False

    def close(self) -> None:
        """Stop where the texts are; the caches of both are free. Another thread's step may be under way."""
        self.stopped = self.stopped or not self.finished
        self.plain.close()
        self.speculative.close()

    def _compare(self) -> Ending:
        """Compare the texts. In bf16 near-ties may fall either way: the margin where the texts part tells."""
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


def _spent(side: Side) -> float:
    return side.seconds


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


class Form(NamedTuple):
    """The entries of the page. A field that was emptied is None; a browser may send any other type, too."""

    prompt: Any
    drafter: Any
    rule: Any
    depth: Any
    nodes: Any
    temperature: Any
    max_new_tokens: Any
    seed: Any


def race_of(models: Models, form: Form) -> Race:
    """Make the race that was asked for; ValueError, one sentence, for an entry that does not fit."""
    prompt = "" if form.prompt is None else str(form.prompt)
    if not prompt.strip():
        raise ValueError("the prompt is empty: write one, or take an example")
    if len(prompt) > LONGEST_PROMPT:
        raise ValueError(f"the prompt has {len(prompt)} characters: give at most {LONGEST_PROMPT}")
    drafter = models.drafter(form.drafter)
    policy = FixedPolicy(whole("depth", form.depth, 1), whole("the tree's nodes", form.nodes, 2))
    if policy.choose(drafter.budgets) == PLAIN:
        raise ValueError(f"{form.drafter} has no tree of this depth and so few nodes: raise one of them")
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


def whole(name: str, value: Any, least: int, most: int | None = None) -> int:
    """Return the whole number of an entry, within its bounds."""
    number = number_of(name, value)
    if number != int(number) or number < least or (most is not None and number > most):
        wanted = f"a whole number from {least}" + ("" if most is None else f" to {most}")
        raise ValueError(f"{name} is {number:g}: give {wanted}")
    return int(number)
