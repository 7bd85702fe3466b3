"""`headstart regenerate`: the target answers prompts, and the answers become training data for heads or drafts.

Medusa-2 calls this self-distillation (2401.10774, section 2.3.2). The method helps if the target's training data is
unavailable or the target was tuned by reinforcement learning. Answers by other authors would teach another
distribution. The target can also write the prompts (`trainer.data.self_written`).
"""

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from decoding.controls import sampling_from_generation_config
from decoding.drafters.registry import DrafterLoader, parse_drafter
from decoding.dtypes import parse_dtype
from decoding.errors import UserError
from decoding.files.fingerprint import stored_fingerprint
from decoding.generate import DecodingConfig
from decoding.measure.machine import commit, versions
from decoding.model.loading import eos_token_ids, stored_generation_config
from decoding.prompts import read_variables
from decoding.rules.sampling import SamplingConfig
from trainer.commands.models import check_endpoint, read_specs, read_target, read_tokenizer
from trainer.commands.options import RegenerateOptions
from trainer.data.answers import AnswerFile, Backend, Summary, answer, described_prompts
from trainer.data.conversations import OpenConversation, RowNotes, check_prompts, read_conversations
from trainer.data.self_written import LONGEST, WRITING, PromptDraws, SelfWritten, UserTurn, read_request
from trainer.data.sources import DRAWS, PRESETS, stream_prompts
from trainer.files.folders import fingerprint_of, sha256_of
from trainer.target.in_process import GROUP, TargetBackend
from trainer.terminal.console import say, standard_error, standard_output

_MOST_TOKENS = 2048
_OF_THIS_PROCESS = ("drafter", "batch_size", "dtype", "trust_remote_code")
_OF_ENDPOINTS = ("concurrency", "timeout")
"""Options that only a target in this process uses, and options that only endpoints use."""


def run_regenerate(options: RegenerateOptions, console: Console | None = None) -> Summary:
    """Answer the prompts that lack an answer; print and return the counts."""
    watched, console = console or standard_error(), console or standard_output()
    wanted = read_request(options.prompts, options.limit)
    sampling = _check(options, wanted)
    served = None if options.endpoint is None else _endpoints(options, wanted, sampling)  # sends nothing yet
    if wanted and wanted.without:
        check_prompts(wanted.without, None, None)
    given = None if wanted else _prompts(options, watched)  # read first, because loading a target may take minutes
    backend, made_by, writing = served or _target(options, wanted, sampling)
    if options.chat_template_kwargs is not None:
        made_by["chat_template_kwargs"] = options.chat_template_kwargs
    asked = given or _self_written(options, wanted, made_by, writing, watched)
    notes = RowNotes() if asked.is_stream else None
    read = partial(
        read_conversations, asked.name, asked.field, options.limit, options.n, made_by["chat"], asked.rows, notes
    )
    begun = _watched_for_tools(read(), backend, watched)
    if asked.is_stream:
        total = options.limit and options.limit * options.n
        # The first is read before a file is created, so that a stream that cannot be read leaves no file.
        conversations: Iterator[OpenConversation] = chain([next(begun)], begun)
    else:  # check every row before answering the first
        total = sum(1 for _ in begun)
        conversations = read()
    settings = {"prompts_sha256": asked.sha256, "prompt_field": asked.field, **made_by}
    settings |= {"n": options.n, "seed": options.seed}
    if wanted and wanted.turns > 1:
        settings["turns"] = wanted.turns
        later = ((),) * (wanted.turns - 1)
        conversations = (replace(conversation, turns=(*conversation.turns, *later)) for conversation in conversations)
    about = {"prompts": asked.about, "commit": commit(), "versions": versions()}
    with AnswerFile(options.output, settings, about, backend.encoder) as answers:
        summary = answer(backend, conversations, answers, watched, total)
    if notes and notes.bad:
        say(watched, f"left out: {notes.report_bad(asked.name)}")
    console.print(_table(summary))
    answers.check_not_empty()
    if summary.truncated:
        share, most = summary.truncated / summary.answered, made_by["max_new_tokens"]
        remedy = "raise --max-new-tokens, and use another --output"
        say(watched, f"warning: {share:.1%} of the answers were cut off at {most:,} tokens: {remedy}")
    aside = f"; answers set aside, with reasons: {answers.set_aside_path}" if summary.set_aside else ""
    say(console, f"written: {options.output}{aside}")
    return summary


class _Prompts(NamedTuple):
    """Prompts to answer.

    ``rows`` are the rows of a stream or a list (None for a file). ``about`` describes the prompts.
    """

    name: str
    field: str | None
    sha256: str
    about: Any
    rows: Iterable[dict[str, Any]] | None = None
    is_stream: bool = False


def _prompts(options: RegenerateOptions, watched: Console) -> _Prompts:
    """Return the prompts of a file, of a set on the Hub, or of a known set.

    Raises UserError if any row of a file is not a prompt.
    """
    preset = PRESETS.get(options.prompts)
    name, field = preset.source if preset else options.prompts, options.prompt_field
    if preset:
        field = field or preset.field
        say(watched, f"{options.prompts}: {name} on the Hub, licence {preset.licence}")
    if "/" not in name or Path(name).exists() or Path(name).suffix in (".jsonl", ".parquet"):
        check_prompts(name, field, options.limit)
        return _Prompts(name, field, sha256_of(Path(name)), Path(name).name)
    source = stream_prompts(name)
    return _Prompts(name, field, source.sha256, name, source.hub, is_stream=True)


def _self_written(
    options: RegenerateOptions,
    wanted: SelfWritten | None,
    made_by: dict[str, Any],
    writing: tuple[UserTurn, Backend] | None,
    watched: Console,
) -> _Prompts:
    """Let the target write prompts, unless an earlier run did so; return the prompts that can be used."""
    assert wanted is not None and writing is not None, "made by _endpoints or _target"
    draws = PromptDraws(wanted, *writing, GROUP * options.batch_size)
    how = {**_controls(WRITING), "max_new_tokens": LONGEST, "seed": options.seed, "opening": writing[0].opening}
    with AnswerFile(options.output.with_name(options.output.name + DRAWS), {**made_by, **how}, {}) as file:
        draws.resume(file)
        answer(draws, draws.conversations(), file, watched, title="writing prompts")
    say(watched, f"{options.prompts}: {draws.told()}")
    for before in described_prompts(options.output):
        if isinstance(before, dict) and before.get("sha256") != fingerprint_of(draws.prompts[: before["prompts"]]):
            raise UserError(
                f"{options.output} has answers to {before['prompts']:,} prompts that are not the first of this run",
                "ask for at least as many, or use another output",
            )
    sha256 = fingerprint_of([how, sorted(draws.others)])  # not of the prompts: a larger number only adds prompts
    about = {"written_by": "the target", **how, **draws.counts(), "sha256": fingerprint_of(draws.prompts)}
    return _Prompts(options.prompts, None, sha256, about, [{"prompt": prompt} for prompt in draws.prompts])


def _watched_for_tools(
    conversations: Iterable[OpenConversation], backend: Backend, watched: Console
) -> Iterator[OpenConversation]:
    """Yield the conversations; warn once if the template ignores their tools. For a server there is no warning, because
    its template is not known.
    """
    unwarned = backend.encoder
    for conversation in conversations:
        tools = conversation.tools
        if tools and unwarned is not None and "tools" in unwarned.ignored(conversation.open_after(()), tools):
            say(watched, f"row {conversation.key.row} has tools, but the target's chat template does not show them")
            unwarned = None
        yield conversation


def _table(summary: Summary) -> Table:
    table = Table(title="regenerated", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    figures: dict[str, str | int | None] = {
        "conversations requested": summary.rows,
        "already answered": summary.before,
        "answered now": summary.answered,
        "answers": summary.answers,
        "mean number of tokens per answer": f"{summary.tokens / summary.answers:.1f}" if summary.answers else None,
        "cut off": summary.truncated,
        "later turns left out": summary.unasked or None,
        "text only, without token ids": summary.texts_alone or None,
        "with reasoning": summary.reasoned or None,
        "with reasoning only": summary.reasoned_only or None,
        "rows that name another model": summary.other_models or None,
        "empty, set aside": summary.empty,
        "failed, set aside": summary.failed,
        "answers/s": f"{summary.answers / summary.seconds:.1f}" if summary.answers else None,
        "tokens/s": f"{summary.tokens / summary.seconds:.0f}" if summary.tokens else None,
    }
    for name, value in figures.items():
        if value is not None:
            table.add_row(name, str(value))
    return table


Backends = tuple[Backend, dict[str, Any], tuple[UserTurn, Backend] | None]
"""A source of answers, the settings that determine the answers, and, if the target writes the prompts, the source of
the prompts.
"""


def _check(options: RegenerateOptions, wanted: SelfWritten | None) -> SamplingConfig | None:
    """Reject options that do not fit together, before any file is read; return the requested sampling controls.

    With an endpoint, --target is needed only if the model writes the prompts itself, and then only for the chat
    template.
    """
    if options.target is None if wanted else (options.target is None) == (options.endpoint is None):
        more = "; in both cases self-written prompts need the chat template of a --target" if wanted else ""
        raise UserError(
            f"use one source of answers: --target to decode in this process, or --endpoint with --model{more}"
        )
    if wanted and options.prompt_field is not None:
        raise UserError("--prompt-field does nothing if the target writes the prompts: omit it")
    check_endpoint(options.endpoint, options.model)
    unread = _OF_ENDPOINTS if options.endpoint is None else _OF_THIS_PROCESS
    if changed := [name for name in unread if getattr(options, name) != getattr(RegenerateOptions, name)]:
        given = "without" if options.endpoint is None else "with"
        raise UserError(f"--{changed[0].replace('_', '-')} does nothing {given} --endpoint: omit it")
    if wanted and wanted.turns > 1 and options.endpoint is not None:
        raise UserError(f"{options.prompts}: a server writes first turns only; omit turns, or omit --endpoint")
    if options.output.is_dir():
        raise UserError(f"--output {options.output} is a folder: name a .jsonl file")
    parse_dtype(options.dtype)
    if options.drafter is not None:
        read_specs([options.drafter])
    if options.chat_template_kwargs is not None:
        read_variables(options.chat_template_kwargs)
    if options.temperature is None and options.top_p is None:
        return None
    top_p = 1.0 if options.top_p is None else options.top_p
    return _fitting(SamplingConfig(temperature=options.temperature or 0.0, top_p=top_p), options)


def _endpoints(options: RegenerateOptions, wanted: SelfWritten | None, asked: SamplingConfig | None) -> Backends:
    """Return the backends of servers."""
    from trainer.servers.connection import Endpoint
    from trainer.servers.endpoint import EndpointBackend

    settings: dict[str, Any] = {name: getattr(options, name) for name in ("model", "concurrency", "timeout")}
    config = DecodingConfig(options.max_new_tokens or _MOST_TOKENS, seed=options.seed)
    variables = None if options.chat_template_kwargs is None else read_variables(options.chat_template_kwargs)
    addresses = [address.strip() for given in options.endpoint or () for address in given.split(",")]
    endpoints = [Endpoint(address=address, **settings) for address in addresses]
    writing = None
    if wanted is not None:
        user = UserTurn(read_tokenizer(str(options.target), options))
        writing = user, EndpointBackend(endpoints, user.config(config, None), WRITING)
    backend = EndpointBackend(endpoints, config, asked, variables)
    # Addresses are left out: they may change or contain secrets.
    own = {"chat": True, "model": options.model, **_controls(asked), "max_new_tokens": config.max_new_tokens}
    return backend, own, writing


def _fitting(sampling: SamplingConfig, options: RegenerateOptions) -> SamplingConfig:
    """Return the sampling controls; raise UserError for several greedy answers, which would all be equal."""
    if options.n > 1 and sampling.greedy:
        raise UserError(f"n is {options.n}, but at temperature 0 all answers are equal: use a temperature above 0")
    return sampling


def _controls(sampling: SamplingConfig | None) -> dict[str, float | None]:
    """Return the controls by name; a control is None if the server chooses its value."""
    return {name: getattr(sampling, name, None) for name in ("temperature", "top_k", "top_p", "min_p")}


def _target(options: RegenerateOptions, wanted: SelfWritten | None, sampling: SamplingConfig | None) -> Backends:
    """Return the backends of a target in this process."""
    name, trusted = str(options.target), options.trust_remote_code
    tokenizer = read_tokenizer(name, options)
    user = None if wanted is None else UserTurn(tokenizer)
    if sampling is None:
        own = stored_generation_config(name, trusted)
        sampling = _fitting(sampling_from_generation_config(own) if own else SamplingConfig(), options)
    target = read_target(name, options)
    loader = DrafterLoader(target, tokenizer, trusted)
    drafter = None if options.drafter is None else loader.load(parse_drafter(options.drafter))
    most = options.max_new_tokens or min(_MOST_TOKENS, (target.max_positions or 2 * _MOST_TOKENS) // 2)
    config = DecodingConfig(most, sampling, eos_token_ids=eos_token_ids(target.model, tokenizer), seed=options.seed)
    backend = TargetBackend(target, tokenizer, drafter, config, options.batch_size, user)
    writing = None
    if user is not None:
        drawing = user.config(config, target.max_positions)
        writing = user, TargetBackend(target, tokenizer, drafter, drawing, options.batch_size)
    # Shapes and invariance are recorded because other kernels may round differently.
    settings = {
        "chat": tokenizer.chat_template is not None,
        "dtype": str(target.dtype).removeprefix("torch."),
        **({} if target.shapes == "off" else {"static": target.shapes}),
        **({"batch_invariant": True} if options.batch_invariant else {}),
        **_controls(sampling),
        "max_new_tokens": most,
        "target_fingerprint": stored_fingerprint(name, trusted),
    }
    return backend, settings, writing
