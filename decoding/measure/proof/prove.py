"""All tests of an engine's greedy and sampled texts."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from decoding.errors import UserError
from decoding.generate import DecodingConfig, Engine
from decoding.measure.proof.distribution import DEPTH, TESTS, log_probability, next_tokens, open_beginnings
from decoding.measure.proof.finding import Finding
from decoding.measure.proof.greedy import cut_at_ends, ends, greedy_identity
from decoding.measure.proof.reference import EngineText, Reference

_DRAWN = 8
"""Length of a text whose first `DEPTH` tokens are counted; this length leaves room for a draft of usual depth."""


class EngineUnderTest(Protocol):
    """An engine, in this process or on a server, that writes the texts to test."""

    def write(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, greedy: bool, seed: int
    ) -> list[EngineText]:
        """Return a text per prompt, with the prompt as the engine read it. The seeds are ``seed``, ``seed + 1``, …"""


@dataclass(frozen=True, eq=False)
class EngineWriter:
    """A writer of the texts to test that uses an engine in this process; ``config`` is for temperatures above 0.

    The engine calls ``on_answer`` at the beginning of each text, for a progress bar.
    """

    engine: Engine
    config: DecodingConfig
    batch_size: int = 8
    on_answer: Callable[[], None] = lambda: None

    def write(
        self, prompts: Sequence[tuple[int, ...]], max_new_tokens: int, greedy: bool, seed: int
    ) -> list[EngineText]:
        config = replace(self.config, max_new_tokens=max_new_tokens, seed=seed)
        if greedy:
            config = replace(config, sampling=replace(config.sampling, temperature=0.0), rule=None)
        tokens: list[list[int]] = [[] for _ in prompts]
        for index, step in self.engine.steps(prompts, config, batch_size=self.batch_size):
            tokens[index] += step.tokens
            if step.is_prefill:
                self.on_answer()
        return [EngineText(tuple(prompt), tuple(text)) for prompt, text in zip(prompts, tokens, strict=True)]


@dataclass(frozen=True)
class Effort:
    """Sample sizes of the tests, and ``alpha``, a bound on the probability that they reject a correct engine."""

    max_new_tokens: int = 64
    draws: int = 500
    draw_prompts: int = 2
    alpha: float = 1e-6
    seed: int = 0
    rounds: int = 1
    """Number of sampled texts per prompt."""
    engines: int = 1
    """Number of tested engines; they share ``alpha``."""

    def __post_init__(self) -> None:
        if self.max_new_tokens < DEPTH:
            raise UserError(
                f"max_new_tokens is {self.max_new_tokens}: use at least {DEPTH}, because this many tokens are counted"
            )

    @property
    def alpha_of_a_test(self) -> float:
        """The share of ``alpha`` for each test with a p-value (Bonferroni)."""
        return self.alpha / (TESTS * self.engines)


def prove(
    reference: Reference,
    writer: EngineUnderTest,
    prompts: Sequence[tuple[int, ...]],
    effort: Effort,
    on_texts: Callable[[str, int], None] = lambda what, texts: None,
) -> Iterator[Finding]:
    """Have the engine write texts; yield each test's finding. ``on_texts`` is called before each batch of texts."""
    on_texts("greedy", len(prompts))
    greedy = writer.write(prompts, effort.max_new_tokens, True, effort.seed)
    yield ends(reference, greedy, effort.max_new_tokens)
    yield greedy_identity(reference, cut_at_ends(reference, greedy, effort.max_new_tokens))
    if reference.sampling.greedy:
        return
    repeated = [prompt for _ in range(effort.rounds) for prompt in prompts]
    on_texts("sampled", len(repeated))
    sampled = writer.write(repeated, effort.max_new_tokens, False, effort.seed)
    yield replace(ends(reference, sampled, effort.max_new_tokens), check="ends of sampled texts")
    alpha = effort.alpha_of_a_test
    yield log_probability(reference, cut_at_ends(reference, sampled, effort.max_new_tokens), alpha)
    length = min(_DRAWN, effort.max_new_tokens)
    # A draw must not be longer than the texts above, which are known to fit into the target's context.
    latest = effort.max_new_tokens - length + DEPTH
    contexts = open_beginnings(reference, cut_at_ends(reference, greedy, latest), effort.draw_prompts)
    asked = [context for context in contexts for _ in range(effort.draws)]
    on_texts("drawn", len(asked))
    drawn: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
    written = writer.write(asked, length, False, effort.seed + len(repeated))
    for text in cut_at_ends(reference, written, length):
        drawn.setdefault(text.prompt, []).append(text.tokens)
    yield from next_tokens(reference, drawn, alpha)
