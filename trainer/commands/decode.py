"""Models of every command that decodes with drafters, and the decoder of those that show their texts."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.drafters.registry import DrafterLoader
from decoding.drafters.spec import DrafterSpec
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.markdown import one_line
from decoding.measure.redact import published_name, without_local_paths
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import (
    eos_token_ids,
    load_tokenizer,
)
from decoding.policies import FixedPolicy, named_policy
from decoding.rules.sampling import SamplingConfig
from decoding.speculation import named_rule
from decoding.tally import Tally
from trainer.commands.drafters import asked_drafters
from trainer.commands.options import DecodingOptions
from trainer.commands.plan import asked_or_planned
from trainer.commands.shared_options import ModelOptions
from trainer.commands.target import read_target
from trainer.export.origin import read_stored_provenance
from trainer.quickstart import resolve
from trainer.run.train import ensure_built
from trainer.terminal.console import standard_error
from trainer.terminal.figures import PlainSpeed
from trainer.terminal.waiting import waiting

PLAIN_PASSES = 24
PLAIN_SECONDS = 2.0
"""Bounds of the measurement of plain decoding, in passes and in seconds of their own."""


class Models(NamedTuple):
    """A target, its tokenizer, and the drafters that were asked for, each with its spec, by their names in tables."""

    target: CausalLM
    tokenizer: PreTrainedTokenizerBase
    drafters: dict[str, Drafter]
    specs: dict[str, DrafterSpec]


def load_models(options: ModelOptions, asked: Sequence[str]) -> Models:
    """Read all that is to decode; a mistake in a spec is found before the target is read."""
    specs = asked_drafters(asked)
    target, trusted = read_target(options.target, options), options.trust_remote_code
    tokenizer = load_tokenizer(resolve(options.target), trusted)
    loader = DrafterLoader(target, tokenizer, trusted)
    drafters = [loader.load(spec) for spec in specs]
    labels = [drafter.label for drafter in drafters]
    names = _distinct(
        [
            f"{label} ({told})" if labels.count(label) > 1 else label
            for label, told in zip(labels, published_specs(specs), strict=True)
        ]
    )
    return Models(target, tokenizer, dict(zip(names, drafters, strict=True)), dict(zip(names, specs, strict=True)))


def published_specs(specs: Sequence[DrafterSpec]) -> list[str]:
    """Return a text of each spec, distinct from the others: its run's name, or what may be published, is its path."""
    return _distinct([spec.with_path(None if spec.path is None else _name_of(spec.path)) for spec in specs])


def _name_of(path: str) -> str:
    """Return the name of the run that made the weights, as the folder of every run is called final."""
    stored = read_stored_provenance(Path(path))
    name = stored["recipe"].get("name") if stored else None
    return one_line(without_local_paths(name)) if name else published_name(path)


def _distinct(names: Sequence[str]) -> list[str]:
    """Return the names; one that an earlier name has taken gets the first number from 2 that makes it new."""
    found: list[str] = []
    for name in names:
        tried = chain([name], (f"{name} ({number})" for number in count(2)))
        found.append(next(each for each in tried if each not in found))
    return found


@dataclass(frozen=True)
class Decoder:
    """Everything that `headstart generate` and `headstart chat` decode with. ``name`` is that of the drafter."""

    engine: Engine
    tokenizer: PreTrainedTokenizerBase
    config: DecodingConfig
    name: str

    @property
    def label(self) -> str:
        """Name of the drafter and label of the rule, lossless or lossy."""
        return f"{self.name} ({self.config.label})"

    @property
    def drafts(self) -> bool:
        """True if there is a drafter."""
        return self.engine.drafter is not None

    @property
    def plain(self) -> Engine:
        """Engine of the same target without the drafter."""
        return replace(self.engine, drafter=None)

    @property
    def plain_config(self) -> DecodingConfig:
        """Settings of the same texts without the drafter, which the rule is for."""
        return replace(self.config, rule=None)

    def warm_up(self, prompt: Sequence[int]) -> None:
        """Decode a few tokens, so that no measured text pays for what a process does once."""
        config = replace(self.config, max_new_tokens=min(8, self.config.max_new_tokens))
        replace(self.engine, policy=FixedPolicy()).decode(prompt, config)  # too short for another policy to learn from

    def plain_speed(self, prompt: Sequence[int]) -> PlainSpeed | None:
        """Measure plain decoding after this prompt, for up to `PLAIN_PASSES` passes and `PLAIN_SECONDS`.

        None without a drafter, or where not even one pass fits.
        """
        if not self.drafts:
            return None
        self.warm_up(prompt)
        tokens = min(PLAIN_PASSES + 1, self.config.max_new_tokens)
        config = replace(self.plain_config, max_new_tokens=tokens, eos_token_ids=(), stop_strings=())
        tally = Tally()
        for _ in tally.watch(self.plain.steps(prompt, config)):
            if tally.total_seconds > PLAIN_SECONDS:
                break
        return (
            PlainSpeed(tally.tokens_per_second, f", measured over {tally.tokens} tokens before")
            if tally.passes
            else None
        )


def read_decoder(options: DecodingOptions, context: int | None) -> Decoder:
    """Read target, drafter and policy as asked, else as planned for a prompt of ``context`` tokens (None: any)."""
    asked = asked_or_planned(
        [] if options.drafter is None else [options.drafter],
        options.plan,
        options,
        (options.temperature,),
        (1,),
        (context,),
        standard_error(),
    )
    ensure_built(options.target)
    with waiting(f"loading {options.target}"):
        target, tokenizer, drafters, _ = load_models(options, asked)
    name, drafter = next(iter(drafters.items()), ("plain decoding", None))
    config = _decoding_config(options, eos_token_ids(target.model, tokenizer))
    return Decoder(Engine(target, drafter, named_policy(options.policy), tokenizer), tokenizer, config, name)


def _decoding_config(options: DecodingOptions, eos: tuple[int, ...]) -> DecodingConfig:
    sampling = SamplingConfig(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        min_p=options.min_p,
        typical_p=options.typical_p,
        repetition_penalty=options.repetition_penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )
    return DecodingConfig(
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        rule=named_rule(options.rule) if options.rule else None,
        eos_token_ids=eos,
        stop_strings=tuple(options.stop or ()),
        seed=options.seed,
    )
