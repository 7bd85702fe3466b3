"""Methods of an evaluation: plain decoding, every drafter and `transformers`' methods, in each setting."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from decoding.drafters.base import Drafter
from decoding.drafters.draft_model import DraftModelDrafter
from decoding.errors import UserError
from decoding.generate import DecodingConfig, Engine
from decoding.measure.figures import PLAIN, TRANSFORMERS
from decoding.metrics import StepCount
from decoding.model.causal_lm import CausalLM
from decoding.model.forward import in_eval_mode
from decoding.policies import FIXED, named_policy
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import ProposalKind
from decoding.rules.verify import lossless_rule_for, typical_acceptance
from decoding.text import Generation

_ASSISTED = "transformers assisted"
SETTINGS = ("greedy", "sampling", "typical")

Drafts = Literal["sampled", "greedy", "deterministic"]


class Run(NamedTuple):
    """One decoded text: its first tokens took ``first_seconds``, and ``decode_tokens`` further tokens took
    ``decode_seconds``.

    A draft's pass over the prompt counts as decoding, both in our loop and in assisted generation. In a batch the
    seconds of each pass are divided equally among its rows.
    """

    tokens: tuple[int, ...]
    decode_tokens: int
    first_seconds: float
    decode_seconds: float
    counts: tuple[StepCount, ...] = ()
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0


Decode = Callable[[Sequence[Sequence[int]], Sequence[int], int], list[Run]]
"""Function from (prompts, seeds, batch size) to a `Run` for each prompt, in the order of the prompts."""


@dataclass(frozen=True)
class Method:
    """A way to decode in one setting (greedy, T=1, ...), with its label: lossless or lossy."""

    setting: str
    name: str
    label: str
    decode: Decode | None
    """None if a server decodes."""
    batched: bool = True
    """False for a method that decodes only one text at a time."""
    artefact: str | None = None
    """Kind of the trained artefact used for drafting: "heads", "draft", or None."""
    drafter: str | None = None
    """Name of the measured drafter, or for a peer the name of our drafter with the same draft; None for plain decoding.
    """
    temperature: float = 0.0
    rule: str | None = None
    """Name of the acceptance rule, or several names joined by "or" if the rule depends on the proposal; None if
    unknown.
    """
    shape: Literal["chain", "tree"] | None = None
    drafts: Drafts | None = None
    """How drafted tokens are chosen: they are drawn from a model, are a model's likeliest tokens, or come without a
    model.
    """
    max_positions: int | None = None
    """Longest text that the method's drafter supports, in tokens; None if the drafter adds no limit."""
    policy: str | None = None
    """Name of the policy that chooses how much to draft; None if no drafter of this project is used."""


@dataclass(frozen=True)
class EvaluationConfig:
    """Options of an evaluation. ``temperatures`` apply to the settings ``sampling`` and ``typical``."""

    max_new_tokens: int = 96
    rounds: int = 1
    temperatures: tuple[float, ...] = (1.0,)
    eos_token_ids: tuple[int, ...] = ()
    settings: tuple[str, ...] = ("greedy", "sampling")
    seed: int = 0
    batch_sizes: tuple[int, ...] = (1,)
    contexts: tuple[int | None, ...] = (None,)
    """Prompt lengths, in tokens, requested from the source of prompts; None to use prompts as they are."""
    policies: tuple[str, ...] = (FIXED,)
    """Names of the policies with which each drafter is measured, such as "fixed" and the default of `generate`."""

    def __post_init__(self) -> None:
        for policy in self.policies:
            named_policy(policy)
        for setting in self.settings:
            if setting not in SETTINGS:
                raise UserError(f"setting is {setting!r}: use greedy, sampling or typical")
        if not self.temperatures or min(self.temperatures) <= 0:
            given = ", ".join(f"{temperature:g}" for temperature in self.temperatures)
            raise UserError(f"temperatures are {given or 'none'}: use numbers above 0 (0 is the setting greedy)")


class Setting(NamedTuple):
    """A setting: its name in tables, its temperature (0 is greedy), and whether acceptance is typical."""

    name: str
    temperature: float
    typical: bool = False

    def decoding(self, config: EvaluationConfig) -> DecodingConfig:
        """Return the decoding config of this setting."""
        return DecodingConfig(
            max_new_tokens=config.max_new_tokens,
            sampling=SamplingConfig(temperature=self.temperature),
            rule=typical_acceptance() if self.typical else None,
            eos_token_ids=config.eos_token_ids,
        )


def settings_of(config: EvaluationConfig) -> list[Setting]:
    """Return the settings in the order requested: greedy once, and the other settings at each temperature."""
    settings: list[Setting] = []
    for name in config.settings:
        if name == "greedy":
            settings.append(Setting("greedy", 0.0))
        else:
            typical = name == "typical"
            suffix = ", typical" if typical else ""
            settings += [Setting(f"T={value:g}{suffix}", value, typical) for value in config.temperatures]
    return settings


def our_method(
    target: CausalLM, setting: str, name: str, drafter: Drafter | None, config: DecodingConfig, policy: str = FIXED
) -> Method:
    """Make the method that runs a drafter (None: plain decoding) in this project's loop.

    A policy that learns is kept for the next text, as in `HeadstartModel`.
    """
    engine = Engine(target, drafter, named_policy(policy))

    def run(prompts: Sequence[Sequence[int]], seeds: Sequence[int], batch_size: int) -> list[Run]:
        return list(map(_run_of, engine.decode(prompts, config, batch_size=batch_size, seeds=seeds)))

    label, temperature = config.label, config.sampling.temperature
    if drafter is None:
        return Method(setting, name, label, run, temperature=temperature)
    is_chain, kinds = drafter.chains_only or target.no_trees is not None, drafter.kinds(config.sampling)
    rule = "greedy" if config.sampling.greedy else None if config.rule is None else config.rule.name
    drafts: Drafts = "deterministic" if drafter.artefact is None else "greedy"
    return Method(
        setting,
        name,
        label,
        run,
        artefact=drafter.artefact,
        temperature=temperature,
        rule=rule or " or ".join(sorted({lossless_rule_for(kind, is_chain).name for kind in kinds})),
        shape="chain" if is_chain else "tree",
        drafts=drafts if kinds == {ProposalKind.DETERMINISTIC} else "sampled",
        max_positions=drafter.max_positions,
        policy=policy,
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


def transformers_method(
    target: CausalLM,
    setting: str,
    name: str,
    config: DecodingConfig,
    assistant: CausalLM | None = None,
    num_assistant_tokens: int | None = None,
) -> Method:
    """Make the method that runs `transformers`' generate or assisted generation, with the same controls."""

    def run(prompts: Sequence[Sequence[int]], seeds: Sequence[int], batch_size: int) -> list[Run]:
        runs: list[Run] = []
        for first in range(0, len(prompts), batch_size):
            some, own = prompts[first : first + batch_size], replace(config, seed=seeds[first])
            runs += transformers_generate(target, some, own, assistant, num_assistant_tokens)
        return runs

    assisted = assistant is not None
    return Method(
        setting,
        name,
        "lossless",
        run,
        batched=not assisted,
        artefact="draft" if assisted else None,
        temperature=config.sampling.temperature,
        max_positions=None if assistant is None else assistant.max_positions,
    )


def standard_methods(target: CausalLM, drafters: dict[str, Drafter], config: EvaluationConfig) -> list[Method]:
    """Make methods for plain decoding, for every drafter and for `transformers`, in each setting."""
    methods: list[Method] = []
    for setting in settings_of(config):
        decoding = setting.decoding(config)
        methods.append(our_method(target, setting.name, PLAIN, None, replace(decoding, rule=None)))
        for name, drafter in drafters.items():
            for policy in config.policies:
                shown = name if policy == FIXED else f"{name}, {policy}"
                method = our_method(target, setting.name, shown, drafter, decoding, policy)
                methods.append(replace(method, drafter=name))
        if not setting.typical:
            methods += _peers(target, setting.name, drafters, decoding)
    return methods


def _peers(target: CausalLM, setting: str, drafters: dict[str, Drafter], decoding: DecodingConfig) -> list[Method]:
    """Make the methods of transformers: `generate`, and assisted generation by the first draft, once at our depth and
    once with the defaults of transformers.
    """
    peers = [transformers_method(target, setting, TRANSFORMERS, decoding)]
    for name, drafter in drafters.items():
        # There is no peer for a draft whose vocabulary is padded to another size: transformers would assume that the
        # draft has another tokenizer.
        same = isinstance(drafter, DraftModelDrafter) and drafter.draft.vocab_size == target.vocab_size
        if isinstance(drafter, DraftModelDrafter) and same and not getattr(target.model, "_is_stateful", False):
            depth = drafter.max_depth
            assisted = [
                transformers_method(target, setting, f"{_ASSISTED}, {depth} tokens", decoding, drafter.draft, depth),
                transformers_method(target, setting, f"{_ASSISTED}, its defaults", decoding, drafter.draft),
            ]
            return [*peers, *(replace(peer, drafter=name) for peer in assisted)]
    return peers


# --- decoding by transformers, timed like ours ------------------------------------------------------------------------


class _Clock(BaseStreamer):
    """Streamer that records when `generate` emits the first new tokens; `generate` streams the prompt before them."""

    def __init__(self) -> None:
        self.puts = 0
        self.first_at = 0.0
        self.first_tokens = 0

    def put(self, value: Tensor) -> None:
        self.puts += 1
        if self.puts == 2:
            self.first_at = time.perf_counter()
            self.first_tokens = value.numel()

    def end(self) -> None:
        pass


def transformers_generate(
    target: CausalLM,
    prompts: Sequence[Sequence[int]],
    config: DecodingConfig,
    assistant: CausalLM | None = None,
    num_assistant_tokens: int | None = None,
) -> list[Run]:
    """Decode left-padded prompts by `model.generate` with the same controls; each text is cut after its EOS.

    With ``assistant``, assisted generation decodes a single prompt. ``num_assistant_tokens`` fixes the draft length, as
    in our drafters. If it is None, `transformers`' defaults apply: an adaptive length, and a confidence threshold that
    ends drafts early.
    """
    longest = max(len(prompt) for prompt in prompts)
    generation_config = _generation_config(config)
    pad: int = generation_config.pad_token_id
    rows = [[pad] * (longest - len(prompt)) + list(prompt) for prompt in prompts]
    input_ids = torch.tensor(rows, device=target.device)
    lengths = torch.tensor([len(prompt) for prompt in prompts], device=target.device)
    attention_mask = (torch.arange(longest, device=target.device) >= longest - lengths[:, None]).long()
    models = [target.model] if assistant is None else [target.model, assistant.model]
    options: dict[str, Any] = {} if assistant is None else {"assistant_model": assistant.model}
    generate: Callable[..., Tensor] = target.model.generate  # type: ignore[assignment]  # the type lacks this method
    clock = _Clock()
    with (
        torch.random.fork_rng([target.device] if target.device.type == "cuda" else []),
        _bare_generation_configs(models, num_assistant_tokens),
        _first_pass(assistant) as passes,
    ):
        torch.manual_seed(config.seed)  # seeds the global generators, which `generate` uses
        begin = time.perf_counter()
        output = generate(
            input_ids, attention_mask=attention_mask, generation_config=generation_config, streamer=clock, **options
        )
        end = time.perf_counter()
    read = passes[1] - passes[0] if passes else 0.0
    # Assisted generation emits its first tokens after the draft has read the prompt; our loop emits its first tokens
    # before that.
    first_at = clock.first_at - read
    first, rest = (seconds / len(prompts) for seconds in (first_at - begin, end - first_at))
    runs: list[Run] = []
    for row in output[:, longest:].tolist():
        stop = next((index + 1 for index, token in enumerate(row) if token in config.eos_token_ids), len(row))
        runs.append(Run(tuple(row[:stop]), stop - clock.first_tokens // len(prompts), first, rest))
    return runs


@contextmanager
def _first_pass(draft: CausalLM | None) -> Iterator[list[float]]:
    """Yield a list that receives the times at which the draft's next pass, which reads the prompt, begins and ends."""
    times: list[float] = []

    def note(module: PreTrainedModel, *_: Any) -> None:
        if len(times) < 2:
            if module.device.type == "cuda":
                torch.cuda.synchronize(module.device)
            times.append(time.perf_counter())

    with ExitStack() as hooks:
        if draft is not None:
            hooks.callback(draft.model.register_forward_pre_hook(note).remove)
            hooks.callback(draft.model.register_forward_hook(note).remove)
        yield times


@contextmanager
def _bare_generation_configs(models: Sequence[PreTrainedModel], num_assistant_tokens: int | None) -> Iterator[None]:
    """Use default generation configs and eval mode within the block; restore both afterwards.

    Otherwise `generate` would take unset controls from the model's config. `generate` reads the draft length from the
    assistant's config, so it is set there to ``num_assistant_tokens`` or left at the default of `transformers`.
    """
    with ExitStack() as restored:
        for model in models:
            restored.enter_context(in_eval_mode(model))
            restored.callback(setattr, model, "generation_config", model.generation_config)
            model.generation_config = GenerationConfig()
            if num_assistant_tokens is not None:
                model.generation_config.num_assistant_tokens = num_assistant_tokens
                model.generation_config.num_assistant_tokens_schedule = "constant"
                model.generation_config.assistant_confidence_threshold = 0
        yield


def _generation_config(config: DecodingConfig) -> GenerationConfig:
    sampling = config.sampling
    controls: dict[str, Any] = {"do_sample": False}
    if not sampling.greedy:
        controls = {
            "do_sample": True,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p or None,  # `generate` rejects 0, and None switches min-p off
            "typical_p": sampling.typical_p,
        }
    return GenerationConfig(
        max_new_tokens=config.max_new_tokens,
        repetition_penalty=sampling.repetition_penalty,
        eos_token_id=list(config.eos_token_ids) or None,
        pad_token_id=config.eos_token_ids[0] if config.eos_token_ids else 0,
        **controls,
    )
