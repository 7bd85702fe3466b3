"""Self-distillation's data: the target answers the prompts of a file itself, and its answers are what is trained on.

Medusa-2 calls it self-distillation (2401.10774, section 2.3.2): where the target's training data is not at hand, or it
was tuned by reinforcement, heads trained on other people's answers learn a distribution that is not the target's.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from decoding.drafters import Drafter, DraftModelDrafter, MedusaDrafter
from decoding.generate import DecodingConfig
from decoding.measure.machine import commit, versions
from decoding.model.causal_lm import CausalLM
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.loading import eos_token_ids, load_draft, load_heads, load_model, load_tokenizer, parse_dtype
from decoding.rules.sampling import SamplingConfig
from trainer.commands.options import RegenerateOptions
from trainer.data.answers import AnswerFile, Backend, Outcome, SetAside
from trainer.data.conversations import Conversation, read_conversations
from trainer.files.folders import sha256_of
from trainer.quickstart import resolve
from trainer.run.train import ensure_built
from trainer.target.answering import TargetBackend
from trainer.terminal.console import say, standard_error, standard_output
from trainer.terminal.progress import ProgressBar


@dataclass
class Summary:
    """What one run did. ``differing``: answers that give other tokens when tokenized again; only known in process."""

    rows: int
    before: int
    answered: int = 0
    answers: int = 0
    tokens: int = 0
    truncated: int = 0
    unasked: int = 0
    dropped: int = 0
    empty: int = 0
    failed: int = 0
    differing: int | None = None
    seconds: float = 0.0

    def count(self, outcome: Outcome) -> None:
        if isinstance(outcome, SetAside):
            self.empty += outcome.problem == "empty"
            self.dropped += outcome.problem == "truncated"
            self.failed += outcome.problem == "failed"
            return
        self.answered += 1
        self.answers += len(outcome.answers)
        self.tokens += outcome.tokens
        self.truncated += outcome.truncated
        self.unasked += len(outcome.conversation.turns) - len(outcome.answers)
        if outcome.differing is not None:
            self.differing = (self.differing or 0) + outcome.differing

    @property
    def set_aside(self) -> int:
        """Conversations without an answer to train on."""
        return self.dropped + self.empty + self.failed

    def table(self) -> Table:
        table = Table(title="regenerated", show_header=False)
        table.add_column()
        table.add_column(justify="right")
        figures: dict[str, str | int | None] = {
            "conversations asked for": self.rows,
            "answered before": self.before,
            "answered now": self.answered,
            "answers": self.answers,
            "mean tokens of an answer": f"{self.tokens / self.answers:.1f}" if self.answers else None,
            "cut off, kept": self.truncated,
            "later turns left out behind a cut-off answer": self.unasked or None,
            "cut off, set aside": self.dropped,
            "empty, set aside": self.empty,
            "failed, set aside": self.failed,
            "answers that tokenize differently": self.differing,
            "tokens/s": f"{self.tokens / self.seconds:.0f}" if self.tokens else None,
        }
        for name, value in figures.items():
            if value is not None:
                table.add_row(name, str(value))
        return table


def run_regenerate(options: RegenerateOptions, console: Console | None = None) -> Summary:
    """Answer what is not answered yet; prints and returns what was done."""
    watched, console = console or standard_error(), console or standard_output()
    sampling = SamplingConfig(temperature=options.temperature, top_p=options.top_p)
    _check(options, sampling)
    backend, made_by = _backend(options, sampling)
    chat = made_by.pop("chat")
    prompts = resolve(options.prompts)
    conversations = read_conversations(prompts, options.prompt_field, options.limit, options.n, chat)
    settings = {
        "prompts_sha256": sha256_of(Path(prompts)),
        "prompt_field": options.prompt_field,
        "chat": chat,
        **made_by,
        "n": options.n,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "max_new_tokens": options.max_new_tokens,
        "seed": options.seed,
        "keep_truncated": options.keep_truncated,
    }
    about = {"prompts": Path(prompts).name, "commit": commit(), "versions": versions()}
    with AnswerFile(options.output, settings, about, options.keep_truncated) as answers:
        summary = _run(backend, conversations, answers, watched)
    console.print(summary.table())
    answers.check_not_empty()
    aside = f"; why some were set aside: {answers.set_aside_path}" if summary.set_aside else ""
    say(console, f"written: {options.output}{aside}")
    return summary


def _run(backend: Backend, conversations: Sequence[Conversation], answers: AnswerFile, console: Console) -> Summary:
    wanted = {conversation.key for conversation in conversations}
    summary = Summary(len(conversations), len(wanted & answers.done))
    tokens = 0
    with ProgressBar(console, "answering", len(conversations), summary.before) as bar:

        def on_tokens(count: int) -> None:
            nonlocal tokens
            tokens += count
            bar.update(note=f"{tokens / bar.seconds:,.0f} tokens/s")

        for outcomes in backend.outcomes(conversations, answers.done, on_tokens):
            for outcome in answers.add(outcomes):
                summary.count(outcome)
                bar.advance()
        summary.seconds = bar.seconds
    answers.finish()
    return summary


def _backend(options: RegenerateOptions, sampling: SamplingConfig) -> tuple[Backend, dict[str, Any]]:
    """The backend that was asked for, and the settings that make its answers."""
    if options.target is not None and options.endpoint is None:
        return _target(options, options.target, sampling)
    if options.endpoint is None or options.target is not None:
        raise ValueError("give --target for a model in this process, or --endpoint with --model for one that is served")
    if options.model is None:
        raise ValueError("--endpoint serves models by name: say which with --model")
    return _endpoint(options, options.endpoint, options.model)


def _check(options: RegenerateOptions, sampling: SamplingConfig) -> None:
    if options.endpoint is not None and (options.heads or options.draft):
        raise ValueError("--heads and --draft speed up a --target in this process; an --endpoint decodes as it likes")
    if options.endpoint is not None and options.device_map:
        raise ValueError("--device-map spreads a --target in this process; an --endpoint places its model itself")
    if options.endpoint is None and options.completions:
        raise ValueError("--completions is the choice of an --endpoint; a --target goes by its chat template")
    if options.heads and options.draft:
        raise ValueError("--heads and --draft were asked for: give one of them")
    if options.n < 1:
        raise ValueError(f"n is {options.n}: give at least 1 answer for each prompt")
    if options.n > 1 and sampling.greedy:
        raise ValueError(f"n is {options.n} at temperature 0, where all answers are the same: give a temperature")


def _target(options: RegenerateOptions, named: str, sampling: SamplingConfig) -> tuple[Backend, dict[str, Any]]:
    """The target in this process."""
    ensure_built(named)
    name, trusted = resolve(named), options.trust_remote_code
    dtype = parse_dtype(options.dtype)
    target = CausalLM(load_model(name, dtype, trust_remote_code=trusted, device_map=options.device_map))
    tokenizer = load_tokenizer(name, trusted)
    drafter: Drafter | None = None
    if options.heads:
        drafter = MedusaDrafter(load_heads(options.heads, target))
    elif options.draft:
        drafter = DraftModelDrafter(load_draft(options.draft, target, tokenizer, trusted), (1,) * options.draft_tokens)
    config = DecodingConfig(
        max_new_tokens=options.max_new_tokens,
        sampling=sampling,
        eos_token_ids=eos_token_ids(target.model, tokenizer),
        seed=options.seed,
    )
    chat = tokenizer.chat_template is not None
    backend = TargetBackend(target, tokenizer, drafter, config, options.batch_size)
    fingerprint = stored_fingerprint(name, trusted)
    return backend, {"chat": chat, "dtype": options.dtype, "target_fingerprint": fingerprint}


def _endpoint(options: RegenerateOptions, address: str, model: str) -> tuple[Backend, dict[str, Any]]:
    """A served model; its address is not kept, for it may move, and may hold a secret."""
    if importlib.util.find_spec("openai") is None:
        raise ValueError("an --endpoint is asked by the openai package: pip install 'headstart[endpoint]'")
    from trainer.target.endpoint import Endpoint, EndpointBackend

    asked = Endpoint(
        address=address,
        model=model,
        temperature=options.temperature,
        top_p=options.top_p,
        max_new_tokens=options.max_new_tokens,
        seed=options.seed,
        concurrency=options.concurrency,
        retries=options.retries,
        timeout=options.timeout,
        api_key_variable=options.api_key_variable,
    )
    return EndpointBackend(asked), {"chat": not options.completions, "model": model}
