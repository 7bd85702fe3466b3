"""`headstart regenerate`: the target answers prompts, as training data for heads or drafts.

Medusa-2 calls this self-distillation (2401.10774, section 2.3.2). It helps if the target's training data is unavailable
or the target was tuned by reinforcement learning. Answers from elsewhere would teach another distribution.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from decoding.controls import sampling_from_generation_config
from decoding.drafters.registry import DrafterLoader, parse_drafter
from decoding.errors import UserError
from decoding.generate import DecodingConfig
from decoding.measure.machine import commit, versions
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.loading import eos_token_ids, load_tokenizer
from decoding.prompts import read_variables, set_variables
from decoding.rules.sampling import SamplingConfig
from trainer.commands.models import check_endpoint, read_target
from trainer.commands.options import RegenerateOptions
from trainer.data.answers import AnswerFile, Backend, Summary, answer
from trainer.data.conversations import OpenConversation, read_conversations, report_unread
from trainer.data.rows import PRESETS, stream_prompts
from trainer.files.folders import sha256_of
from trainer.quickstart import resolve
from trainer.target.in_process import TargetBackend
from trainer.terminal.console import say, standard_error, standard_output

_SETTINGS = ("n", "seed", "keep_truncated")
"""Options that determine the answers."""
_MOST_TOKENS = 2048
_OF_THIS_PROCESS = ("drafter", "batch_size", "dtype", "trust_remote_code")
_OF_ENDPOINTS = ("concurrency", "timeout")
"""Options that only a target in this process uses, and options that only endpoints use."""


def run_regenerate(options: RegenerateOptions, console: Console | None = None) -> Summary:
    """Answer the prompts that lack an answer; print and return the counts."""
    watched, console = console or standard_error(), console or standard_output()
    backend, made_by = _backend(options)
    chat = made_by["chat"]
    preset = PRESETS.get(options.prompts)
    prompts, field = resolve(preset.source if preset else options.prompts), options.prompt_field
    if preset:
        field = field or preset.field
        say(watched, f"{options.prompts}: {prompts} on the Hub, licence {preset.licence}")
    is_file = "/" not in prompts or Path(prompts).exists() or Path(prompts).suffix in (".jsonl", ".parquet")
    source = None if is_file else stream_prompts(prompts)
    bad = _BadRows()
    rows, on_bad = (source.hub, bad) if source else (None, None)
    read = partial(read_conversations, prompts, field, options.limit, options.n, chat, rows, on_bad)
    unread = Counter[str]()
    if source is None:  # check every row before answering the first
        total: int | None = sum(1 for _ in _watched_for_tools(read(unread), backend, watched))
        conversations = read()
    else:
        total = options.limit and options.limit * options.n
        begun = _watched_for_tools(read(unread), backend, watched)
        conversations = chain([next(begun)], begun)  # an unreadable stream fails before a file is created
    settings = {
        "prompts_sha256": source.sha256 if source else sha256_of(Path(prompts)),
        "prompt_field": field,
        **made_by,
    }
    settings |= {name: getattr(options, name) for name in _SETTINGS}
    about = {"prompts": prompts if source else Path(prompts).name, "commit": commit(), "versions": versions()}
    with AnswerFile(options.output, settings, about, options.keep_truncated, backend.encoder) as answers:
        summary = answer(backend, conversations, answers, watched, total)
    if bad.count:
        say(watched, f"{bad.count} rows without a prompt are left out; the first: {bad.first}")
    if unread:
        say(watched, report_unread(options.prompts, unread))
    console.print(_table(summary))
    answers.check_not_empty()
    if cut := summary.truncated + summary.dropped:
        share = cut / (summary.answered + summary.dropped)
        most = made_by["max_new_tokens"]
        say(watched, f"warning: {share:.1%} of the answers were cut off at {most:,} tokens: raise --max-new-tokens")
    aside = f"; answers set aside, with reasons: {answers.set_aside_path}" if summary.set_aside else ""
    say(console, f"written: {options.output}{aside}")
    return summary


class _BadRows:
    """Counter of rows without a usable prompt; keeps the first error."""

    def __init__(self) -> None:
        self.count, self.first = 0, ""

    def __call__(self, error: UserError) -> None:
        self.count, self.first = self.count + 1, self.first or str(error)


def _watched_for_tools(
    conversations: Iterable[OpenConversation], backend: Backend, watched: Console
) -> Iterator[OpenConversation]:
    """Yield the conversations; warn once if the template ignores their tools. A server's template is unknown."""
    unwarned = backend.encoder
    for each in conversations:
        if each.tools and unwarned is not None and "tools" in unwarned.ignored(each.open_after(()), each.tools):
            say(watched, f"row {each.key.row} has tools, but the target's chat template does not show them")
            unwarned = None
        yield each


def _table(summary: Summary) -> Table:
    table = Table(title="regenerated", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    figures: dict[str, str | int | None] = {
        "conversations requested": summary.rows,
        "already answered": summary.before,
        "answered now": summary.answered,
        "answers": summary.answers,
        "mean tokens of an answer": f"{summary.tokens / summary.answers:.1f}" if summary.answers else None,
        "cut off, kept": summary.truncated,
        "later turns left out": summary.unasked or None,
        "text only, without token ids": summary.texts_alone or None,
        "with reasoning": summary.reasoned or None,
        "with reasoning only": summary.reasoned_only or None,
        "rows that name another model": summary.other_models or None,
        "cut off, set aside": summary.dropped,
        "empty, set aside": summary.empty,
        "failed, set aside": summary.failed,
        "answers/s": f"{summary.answers / summary.seconds:.1f}" if summary.answers else None,
        "tokens/s": f"{summary.tokens / summary.seconds:.0f}" if summary.tokens else None,
    }
    for name, value in figures.items():
        if value is not None:
            table.add_row(name, str(value))
    return table


def _backend(options: RegenerateOptions) -> tuple[Backend, dict[str, Any]]:
    """Return the requested backend and the settings that determine its answers."""
    if (options.target is None) == (options.endpoint is None):
        raise UserError("give one source of answers: --target to decode in this process, or --endpoint with --model")
    check_endpoint(options.endpoint, options.model)
    unread = _OF_ENDPOINTS if options.endpoint is None else _OF_THIS_PROCESS
    if changed := [name for name in unread if getattr(options, name) != getattr(RegenerateOptions, name)]:
        given = "without" if options.endpoint is None else "with"
        raise UserError(f"--{changed[0].replace('_', '-')} does nothing {given} --endpoint: omit it")
    asked = None
    if (options.temperature, options.top_p) != (None, None):
        top_p = 1.0 if options.top_p is None else options.top_p
        asked = _fitting(SamplingConfig(temperature=options.temperature or 0.0, top_p=top_p), options)
    if options.target is not None:
        return _target(options, options.target, asked)
    from trainer.servers.connection import Endpoint
    from trainer.servers.endpoint import EndpointBackend

    assert options.model is not None, "checked by check_endpoint"
    addresses = [address.strip() for given in options.endpoint or () for address in given.split(",")]
    settings: dict[str, Any] = {name: getattr(options, name) for name in ("model", "concurrency", "timeout")}
    config = DecodingConfig(options.max_new_tokens or _MOST_TOKENS, seed=options.seed)
    template = options.chat_template_kwargs
    variables = None if template is None else read_variables(template)
    backend = EndpointBackend(
        [Endpoint(address=address, **settings) for address in addresses], config, asked, variables
    )
    # Addresses are left out: they may change or contain secrets.
    own = {"model": options.model, **_controls(asked), "max_new_tokens": config.max_new_tokens}
    return backend, {"chat": True, **own, **({"chat_template_kwargs": template} if template is not None else {})}


def _fitting(sampling: SamplingConfig, options: RegenerateOptions) -> SamplingConfig:
    """Return the sampling; UserError for several greedy answers, which would all be equal."""
    if options.n > 1 and sampling.greedy:
        raise UserError(f"n is {options.n}, but at temperature 0 all answers are equal: give a temperature")
    return sampling


def _controls(sampling: SamplingConfig | None) -> dict[str, float | None]:
    """Return the controls by name; None if the server chooses."""
    return {name: getattr(sampling, name, None) for name in ("temperature", "top_k", "top_p", "min_p")}


def _target(
    options: RegenerateOptions, target_name: str, sampling: SamplingConfig | None
) -> tuple[Backend, dict[str, Any]]:
    """Return the backend of a target in this process, and the settings that determine its answers."""
    target = read_target(target_name, options)
    name, trusted = resolve(target_name), options.trust_remote_code
    tokenizer = load_tokenizer(name, trusted)
    set_variables(tokenizer, options.chat_template_kwargs)
    drafter = None
    if options.drafter is not None:
        drafter = DrafterLoader(target, tokenizer, trusted).load(parse_drafter(options.drafter))
    if sampling is None:
        own = target.model.generation_config
        sampling = _fitting(sampling_from_generation_config(own) if own else SamplingConfig(), options)
    most = options.max_new_tokens or min(_MOST_TOKENS, (target.max_positions or 2 * _MOST_TOKENS) // 2)
    config = DecodingConfig(most, sampling, eos_token_ids=eos_token_ids(target.model, tokenizer), seed=options.seed)
    backend = TargetBackend(target, tokenizer, drafter, config, options.batch_size)
    more = {} if target.shapes == "off" else {"static": target.shapes}  # other kernels may round differently
    if options.chat_template_kwargs is not None:
        more["chat_template_kwargs"] = options.chat_template_kwargs
    settings = {
        "dtype": str(target.dtype).removeprefix("torch."),
        **more,
        **_controls(sampling),
        "max_new_tokens": most,
        "target_fingerprint": stored_fingerprint(name, trusted),
    }
    return backend, {"chat": tokenizer.chat_template is not None, **settings}
