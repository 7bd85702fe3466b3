"""Plain and speculative decoding of one prompt, side by side in turns, with the text and the figures of each."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig, Step
from decoding.measure.evaluate import margin_of
from decoding.measure.proof.reference import near_tie
from decoding.model.causal_lm import CausalLM
from decoding.prompts import encode_prompt
from decoding.rules.tree import common_length
from decoding.stream import Detokenizer, Piece, Tally, step_pieces


@dataclass(frozen=True, eq=False)
class Models:
    """The models of a demo: the target, and the drafters by their names on the page.

    ``plain_target`` decodes plainly. It has the target's weights, and is another object where steps have fixed shapes:
    then each has a cache of its own, and one race runs at a time.
    """

    target: CausalLM
    plain_target: CausalLM
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, Drafter]

    @staticmethod
    def of(target: CausalLM, tokenizer: PreTrainedTokenizerBase, drafters: dict[str, Drafter]) -> "Models":
        plain = CausalLM(target.model, target.output_tokens, target.static) if target.is_static else target
        return Models(target, plain, tokenizer, drafters)

    def warm_up(self, tokens: int = 8) -> None:
        """Decode a few tokens plainly and with each drafter: the first passes of a process take longer."""
        prompt = encode_prompt("The first", self.tokenizer, chat=True)
        config = DecodingConfig(max_new_tokens=tokens)
        Engine(self.plain_target).decode(prompt, config)
        for drafter in self.drafters.values():
            Engine(self.target, drafter).decode(prompt, config)


class Decode:
    """One text being decoded: its steps so far, the text that each wrote, and the running figures."""

    def __init__(self, engine: Engine, prompt: Sequence[int], config: DecodingConfig) -> None:
        """ValueError, as of `Engine.steps`, for a prompt or a rule that does not fit."""
        assert engine.tokenizer is not None
        self.steps: list[Step] = []
        self.texts: list[tuple[Piece, ...]] = []
        """Pieces that each step completed."""
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


@dataclass(frozen=True)
class Ending:
    """The comparison of two finished texts.

    ``alike``: number of leading tokens that both have. ``verdict`` is "equal", or the reason why they part: "stopped"
    before their end; "sampled" tokens; a "near-tie", whose logits are ``margin`` apart, which rounding reverses; or a
    "fault", as nothing explains it.
    """

    alike: int
    verdict: Literal["equal", "stopped", "sampled", "near-tie", "fault"]
    margin: float | None = None


class Race:
    """A prompt decoded plainly and speculatively. The decode that has spent less time takes the next step.

    So the two texts stand at each moment as they would at equal times on machines of their own. Seconds are the loop's,
    step by step: neither decode counts the other's.
    """

    def __init__(self, models: Models, engine: Engine, prompt: Sequence[int], config: DecodingConfig) -> None:
        """``engine`` and ``config`` are those of the speculative side; ValueError if the prompt does not fit."""
        self.models, self.config, self.prompt = models, config, tuple(prompt)
        self.drafter = engine.drafter
        self.speculative = Decode(engine, prompt, replace(config, trees=True))
        plain = Engine(models.plain_target, tokenizer=engine.tokenizer)
        # Plain decoding has no drafts to judge: the rule is that of its temperature.
        self.plain = Decode(plain, prompt, replace(config, rule=None))
        self.stopped = False
        self.ending: Ending | None = None
        self.looked_at: int | None = None
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
            running = [decode for decode in (self.plain, self.speculative) if not decode.finished]
            min(running, key=lambda decode: decode.seconds).advance()
        if not (self.finished or self.stopped):
            return True
        self.close()
        self.ending = self._compare()
        return False

    def close(self) -> None:
        """Stop where the texts are; the caches of both are free."""
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
        if not isinstance(margin, float):
            return Ending(alike, "fault")
        return Ending(alike, "near-tie" if margin <= near_tie(self.models.target.dtype) else "fault", margin)
