"""Methods of an evaluation: plain decoding, transformers' peers and every drafter, each under each setting."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from decoding.drafters.base import Drafter
from decoding.drafters.draft_model import DraftModelDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig, Generation
from decoding.measure.baselines import transformers_generate
from decoding.measure.figures import PLAIN, TRANSFORMERS
from decoding.metrics import StepCount
from decoding.model.causal_lm import CausalLM
from decoding.rules.proposal import ProposalKind
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import Rule, lossless_rule_for, typical_acceptance

_ASSISTED = "transformers assisted"
SETTINGS = ("greedy", "sampling", "typical")

Drafts = Literal["sampled", "greedy", "deterministic"]


class Run(NamedTuple):
    """One decoded text: ``first_seconds`` to its first tokens, then ``decode_tokens`` in ``decode_seconds``.

    The seconds of a text of a batch are its share: those of each pass, divided by the rows of the pass.
    """

    tokens: tuple[int, ...]
    decode_tokens: int
    first_seconds: float
    decode_seconds: float
    counts: tuple[StepCount, ...] = ()
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


Decode = Callable[[Sequence[int], int], Run]
"""Function (prompt, seed) -> Run."""
DecodeBatch = Callable[[Sequence[Sequence[int]], Sequence[int], int], list[Run]]
"""Function (prompts, seeds, batch size) -> Runs in the prompts' order."""


@dataclass(frozen=True)
class Method:
    """A way to decode under a setting (greedy, T=1, ...), with its label, lossless or lossy."""

    setting: str
    name: str
    label: str
    decode: Decode
    decode_batch: DecodeBatch | None = None
    """None for a method that decodes one text at a time only."""
    artefact: str | None = None
    """Kind of the trained artefact that drafts: "heads", "draft", or None."""
    drafter: str | None = None
    """Name of the drafter among those measured (a peer's is the one whose draft it uses); None for plain decoding."""
    temperature: float = 0.0
    rule: str | None = None
    """Name of the acceptance rule; several with "or" between them where the kind of proposal decides; None unknown."""
    shape: Literal["chain", "tree"] | None = None
    drafts: Drafts | None = None
    """Way in which drafted tokens are chosen: drawn, the likeliest ones of a model, or found without a model."""
    max_positions: int | None = None
    """Length of the longest text that its drafter holds, in tokens; None for no limit of its own."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Settings of an evaluation. ``temperatures`` are those of sampling and of typical acceptance."""

    max_new_tokens: int = 96
    rounds: int = 1
    temperatures: tuple[float, ...] = (1.0,)
    eos_token_ids: tuple[int, ...] = ()
    settings: tuple[str, ...] = ("greedy", "sampling")
    seed: int = 0
    batch_sizes: tuple[int, ...] = (1,)
    contexts: tuple[int | None, ...] = (None,)
    """Longest prompts, in tokens, that the prompts' source is asked for; None for prompts of their own length."""

    def __post_init__(self) -> None:
        for setting in self.settings:
            if setting not in SETTINGS:
                raise ValueError(f"setting is {setting!r}: give greedy, sampling or typical")
        if not self.temperatures or min(self.temperatures) <= 0:
            given = ", ".join(f"{each:g}" for each in self.temperatures)
            raise ValueError(f"temperatures are {given or 'none'}: give numbers above 0 (0 is the setting greedy)")


class Setting(NamedTuple):
    """A setting by its name in tables: the sampling temperature, 0 for greedy, and True for typical acceptance."""

    name: str
    temperature: float
    typical: bool = False

    def decoding(self, config: EvaluationConfig) -> DecodingConfig:
        """Return the settings of decoding under it."""
        return DecodingConfig(
            max_new_tokens=config.max_new_tokens,
            sampling=SamplingConfig(temperature=self.temperature),
            rule=typical_acceptance() if self.typical else None,
            eos_token_ids=config.eos_token_ids,
        )


def settings_of(config: EvaluationConfig) -> list[Setting]:
    """Return the settings in the order asked for: greedy once, the others at each temperature."""
    found: list[Setting] = []
    for name in config.settings:
        if name == "greedy":
            found.append(Setting("greedy", 0.0))
        else:
            typical = name == "typical"
            suffix = ", typical" if typical else ""
            found += [Setting(f"T={each:g}{suffix}", each, typical) for each in config.temperatures]
    return found


def our_method(target: CausalLM, setting: str, name: str, drafter: Drafter | None, config: DecodingConfig) -> Method:
    """Make the method of a drafter (None: plain decoding) in this project's loop."""
    engine = Engine(target, drafter)

    def run(prompt: Sequence[int], seed: int) -> Run:
        return _run_of(engine.decode(prompt, replace(config, seed=seed)))

    def run_batch(prompts: Sequence[Sequence[int]], seeds: Sequence[int], batch_size: int) -> list[Run]:
        steps: list[list[Any]] = [[] for _ in prompts]
        for index, step in engine.steps(prompts, config, batch_size=batch_size, seeds=seeds):
            steps[index].append(step)
        return [_run_of(Generation.of(of_one)) for of_one in steps]

    label, temperature = config.label, config.sampling.temperature
    if drafter is None:
        return Method(setting, name, label, run, run_batch, temperature=temperature)
    return Method(
        setting,
        name,
        label,
        run,
        run_batch,
        artefact=drafter.artefact,
        temperature=temperature,
        rule=_rule_name(drafter, config.sampling, config.rule),
        shape="chain" if drafter.chains_only else "tree",
        drafts=_drafts(drafter, config.sampling),
        max_positions=drafter.max_positions,
    )


def _run_of(generation: Generation) -> Run:
    prefill, *steps = generation.steps
    return Run(
        tokens=generation.tokens,
        decode_tokens=len(generation.tokens) - 1,
        first_seconds=prefill.total_seconds,
        decode_seconds=sum(step.total_seconds for step in steps),
        counts=generation.counts,
        draft_seconds=sum(step.draft_seconds for step in steps),
        verify_seconds=sum(step.verify_seconds for step in steps),
    )


def _rule_name(drafter: Drafter, sampling: SamplingConfig, rule: Rule | None) -> str:
    if sampling.greedy:
        return "greedy"
    if rule is not None:
        return rule.name
    found = {lossless_rule_for(kind, drafter.chains_only).name for kind in drafter.kinds(sampling)}
    return " or ".join(sorted(found))


def _drafts(drafter: Drafter, sampling: SamplingConfig) -> Drafts:
    if drafter.kinds(sampling) != {ProposalKind.DETERMINISTIC}:
        return "sampled"
    return "greedy" if drafter.artefact is not None else "deterministic"


def transformers_method(
    target: CausalLM,
    setting: str,
    name: str,
    config: DecodingConfig,
    assistant: CausalLM | None = None,
    num_assistant_tokens: int | None = None,
) -> Method:
    """Make the method of `transformers`' generate, or of assisted generation, under the same controls."""

    def run_batch(prompts: Sequence[Sequence[int]], seeds: Sequence[int], batch_size: int) -> list[Run]:
        runs: list[Run] = []
        for first in range(0, len(prompts), batch_size):
            some, own = prompts[first : first + batch_size], replace(config, seed=seeds[first])
            for text in transformers_generate(target, some, own, assistant, num_assistant_tokens):
                after_first = len(text.tokens) - text.first_tokens
                runs.append(Run(text.tokens, after_first, text.first_seconds, text.decode_seconds))
        return runs

    assisted = assistant is not None
    return Method(
        setting,
        name,
        "lossless",
        lambda prompt, seed: run_batch([prompt], [seed], 1)[0],
        None if assisted else run_batch,
        artefact="draft" if assisted else None,
        temperature=config.sampling.temperature,
        max_positions=None if assistant is None else assistant.max_positions,
    )


def standard_methods(target: CausalLM, drafters: dict[str, Drafter], config: EvaluationConfig) -> list[Method]:
    """Make a method for plain decoding, for transformers' peers and for every drafter, under each setting."""
    methods: list[Method] = []
    for setting in settings_of(config):
        decoding = setting.decoding(config)
        methods.append(our_method(target, setting.name, PLAIN, None, replace(decoding, rule=None)))
        if not setting.typical:
            methods += _peers(target, setting.name, drafters, decoding)
        for name, drafter in drafters.items():
            methods.append(replace(our_method(target, setting.name, name, drafter, decoding), drafter=name))
    return methods


def _peers(target: CausalLM, setting: str, drafters: dict[str, Drafter], decoding: DecodingConfig) -> list[Method]:
    """Make transformers' generate, and assisted generation with the first draft, at its depth and by default."""
    peers = [transformers_method(target, setting, TRANSFORMERS, decoding)]
    for name, drafter in drafters.items():
        # transformers takes a vocabulary of another size for another tokenizer, so a padded draft has no peer.
        if isinstance(drafter, DraftModelDrafter) and drafter.draft.vocab_size == target.vocab_size:
            depth = drafter.max_depth
            assisted = [
                transformers_method(target, setting, f"{_ASSISTED}, {depth} tokens", decoding, drafter.draft, depth),
                transformers_method(target, setting, f"{_ASSISTED}, its defaults", decoding, drafter.draft),
            ]
            return [*peers, *(replace(peer, drafter=name) for peer in assisted)]
    return peers
