"""The command `headstart diagnose`: a speculator that does well here and badly in a server, or on a tuned target."""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from decoding.drafters.spec import DrafterSpec
from decoding.generate import DecodingConfig
from decoding.measure.evaluate import measure_acceptance
from decoding.measure.markdown import one_line
from decoding.measure.redact import without_local_paths
from decoding.metrics import Estimate
from decoding.model.causal_lm import CausalLM
from decoding.model.hub import local_folder
from decoding.model.loading import eos_token_ids, load_tokenizer
from decoding.rules.sampling import SamplingConfig
from trainer.commands.findings import PRINTED, account, write_findings
from trainer.commands.models import read_target
from trainer.commands.proof_options import DiagnoseOptions
from trainer.commands.served import check_endpoint, connect
from trainer.data.conversations import read_conversations
from trainer.export.card import drafters_of, read_report
from trainer.quickstart import resolve
from trainer.run.acceptance import read_heldout
from trainer.servers.configs import is_vllm_heads
from trainer.servers.counters import parse_counts
from trainer.servers.diagnosis import Case, Counted, diagnose
from trainer.servers.finding import Diagnosis
from trainer.servers.rendered import Question
from trainer.servers.speculator import Named, Speculator, load_speculator, named_speculator
from trainer.servers.stale import Fit, predict_here
from trainer.terminal.console import say, standard_error, standard_output

if TYPE_CHECKING:
    from trainer.servers.client import ServedModel

_PAGE_SECONDS = 10.0
_NO_LIMIT = 1 << 30
_NOUNS = {"heads": "heads", "draft": "a draft", "parallel": "a parallel draft"}
_OF_SERVERS = ("endpoint", "metrics", "counters", "exported", "report")
"""Options that tell of a server."""


def run_diagnose(options: DiagnoseOptions, console: Console | None = None) -> bool:
    """Compare and print; return True if nothing differs, or with --stale if the speculator still fits."""
    console = console or standard_output()
    watch = standard_error()
    named = _check(options)
    return (_stale if options.stale else _diagnose)(options, named, console, watch)


def _check(options: DiagnoseOptions) -> Named:
    """Refuse what cannot be compared, before the target is read."""
    check_endpoint(options)
    if options.base is not None and not options.stale:
        raise ValueError(f"--base is {options.base}, which only --stale compares with: add --stale, or leave it out")
    of_servers = [f"--{name}" for name in _OF_SERVERS if getattr(options, name) is not None]
    if options.stale and of_servers:
        raise ValueError(f"--stale compares two targets, not a server: leave out {', '.join(of_servers)}")
    folder = options.exported
    if folder is not None and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no folder that a server reads (no config.json): name an exported folder")
    read_conversations(resolve(options.prompts), options.prompt_field, options.limit, 1, chat=True)
    named = named_speculator(options.speculator)
    if folder is not None and is_vllm_heads(folder) != (named.kind == "heads"):
        held = "heads as vLLM reads them" if is_vllm_heads(folder) else "a model, not heads as vLLM reads them"
        raise ValueError(
            f"--exported is {folder}, which holds {held}, but {options.speculator} is {_NOUNS[named.kind]}: give the "
            "folder that was exported of it"
        )
    compared = options.stale or set(of_servers) - {"--report"} or _read_by_servers(named)
    if not compared:
        raise ValueError(
            f"there is nothing to compare {options.speculator} with: give a server's --endpoint, --metrics or "
            "--counters, or --exported with the folder that it reads"
        )
    return named


# --- a server ---------------------------------------------------------------------------------------------------------


def _diagnose(options: DiagnoseOptions, named: Named, console: Console, watch: Console) -> bool:
    pasted, note = _pasted(options), _reported(options.report, named)
    page = None
    if options.endpoint is not None and _is_address(options.metrics):
        page = _reader(str(options.metrics))
        page()  # a wrong address is found before the target is read
    served = _served(options)
    tokenizer = load_tokenizer(resolve(options.target), options.trust_remote_code)
    target = read_target(options.target, options)
    speculator = load_speculator(named, target, tokenizer, options.trust_remote_code)
    questions = _questions(options, speculator, target, tokenizer, watch)
    case = _case(options, target, tokenizer, speculator, questions, note)
    with served as model:
        diagnosis = diagnose(case, model, page, pasted, lambda stage: say(watch, f"{stage} …", style="dim"))
    _write(options, diagnosis.as_json())
    if options.json != PRINTED:
        show(diagnosis, console)
    return diagnosis.first is None


def _served(options: DiagnoseOptions) -> "AbstractContextManager[ServedModel | None]":
    """Return the connection to the server, which sends nothing yet; nothing without an endpoint."""
    return nullcontext() if options.endpoint is None else connect(options)


def _case(
    options: DiagnoseOptions,
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    speculator: Speculator,
    questions: Sequence[Question],
    note: str,
) -> Case:
    temperature = options.temperature if options.temperature is not None else 1.0
    return Case(
        target,
        tokenizer,
        speculator,
        questions,
        DecodingConfig(options.max_new_tokens, eos_token_ids=eos_token_ids(target.model, tokenizer)),
        temperature,
        options.exported or _read_by_servers(speculator.named),
        local_folder(resolve(options.target), weights=False),
        options.draft_tokens,
        options.batch_size,
        options.trust_remote_code,
        note,
    )


def _read_by_servers(named: Named) -> Path | None:
    """Return the speculator's own folder if a server can read it: heads in this project's format no server reads."""
    folder = named.folder
    return None if named.kind == "heads" and not is_vllm_heads(folder) else folder


def _questions(
    options: DiagnoseOptions,
    speculator: Speculator,
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    watch: Console,
) -> list[Question]:
    limits = [limit for limit in (target.max_positions, speculator.max_positions) if limit is not None]
    holds = min(limits, default=_NO_LIMIT)
    path = resolve(options.prompts)
    heldout = read_heldout(path, options.prompt_field, options.limit, tokenizer, holds, options.max_new_tokens)
    asked = len(read_conversations(path, options.prompt_field, options.limit, 1, chat=True))
    if len(heldout) < asked:
        say(
            watch,
            f"{asked - len(heldout)} of {asked} prompts are left out: with {options.max_new_tokens} new tokens they "
            f"are longer than the {holds} that target and speculator hold",
        )
    return [Question(each.text, each.open_after(()) if each.chat else None, ids) for each, ids in heldout]


def _pasted(options: DiagnoseOptions) -> list[Counted]:
    """Read the counters that were pasted, and a metrics page that can be read only once."""
    temperature = options.temperature or 0.0
    found = []
    if options.counters is not None:
        note = "; the counters were pasted and may count other prompts"
        found.append(Counted(parse_counts(_given(options.counters)), temperature, note))
    if options.metrics is not None and (options.endpoint is None or not _is_address(options.metrics)):
        note = "; the page counts every prompt since the server's start"
        found.append(Counted(parse_counts(_page(options.metrics)), temperature, note))
    return found


def _given(counters: str) -> str:
    """Return pasted counters: the text itself, a file's, or standard input's."""
    if counters == "-":
        return sys.stdin.read()
    try:
        is_file = Path(counters).is_file()
    except OSError:  # a text that is too long for a name
        is_file = False
    return Path(counters).read_text(encoding="utf-8", errors="replace") if is_file else counters


def _is_address(metrics: str | None) -> bool:
    return metrics is not None and metrics.startswith(("http://", "https://"))


def _page(metrics: str) -> str:
    """Return the text of a metrics page, from a file or an address."""
    if _is_address(metrics):
        return _reader(metrics)()
    if not Path(metrics).is_file():
        raise ValueError(f"--metrics is {metrics}, which is no file and no address: give one")
    return Path(metrics).read_text(encoding="utf-8", errors="replace")


def _reader(address: str) -> Callable[[], str]:
    """Return a function that fetches the metrics page; ValueError where there is none."""

    def read() -> str:
        try:
            with urlopen(address, timeout=_PAGE_SECONDS) as page:
                return str(page.read().decode("utf-8", errors="replace"))
        except (HTTPException, OSError, ValueError) as error:
            # The first kind repeats parts of the address, in which a password may stand.
            told = type(error).__name__ if isinstance(error, HTTPException) else one_line(error)
            raise ValueError(f"--metrics cannot be read ({told}): give the address of a metrics page") from None

    return read


def _reported(report: Path | None, named: Named) -> str:
    """Return a remark on the figures of an evaluation, which may have drafted trees where servers draft chains."""
    if report is None:
        return ""
    stored = read_report(report)
    names = drafters_of(stored, named.folder)
    rows = [row for row in stored.get("rows") or () if row.get("drafter") in names and row.get("tokens_per_pass")]
    if not rows:
        raise ValueError(f"{report} has no row of the weights in {named.path}: give a report of this speculator")
    told = ", ".join(
        f"{one_line(row['method'])} ({one_line(row['setting'])}): {row['tokens_per_pass']['value']:.2f}" for row in rows
    )
    return f"; the report's tokens per pass, on its own prompts and with trees where it names them: {told}"


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Print the first difference with its remedy, then the others, then what is equal and what was not compared."""
    first = diagnosis.first
    if first is None:
        made = [finding for finding in diagnosis.findings if finding.differs is not None]
        whole = len(made) == len(diagnosis.findings)
        scope = "" if whole else f" in the {len(made)} of {len(diagnosis.findings)} comparisons that could be made"
        say(console, f"nothing differs{scope}", style="bold green")
    else:
        say(console, f"first difference: {first.step}", style="bold red")
        say(console, f"  {one_line(first.found)}")
        say(console, f"  remedy: {one_line(first.remedy)}", style="bold")
    if diagnosis.others:
        say(console, "further differences, which may follow from the first:")
        for finding in diagnosis.others:
            say(console, f"  {finding.step}: {one_line(finding.found)}")
            say(console, f"    remedy: {one_line(finding.remedy)}")
    for differs, title in ((False, "no difference:"), (None, "not compared:")):
        found = [finding for finding in diagnosis.findings if finding.differs is differs]
        if found:
            say(console, title)
        for finding in found:
            say(console, f"  {finding.step}: {one_line(finding.found)}", style="dim")


def _write(options: DiagnoseOptions, content: dict[str, Any]) -> None:
    """Write or print the findings if --json asks for them, with an account of the run and without local paths."""
    if options.json is None:
        return
    write_findings(options.json, {**account(), **without_local_paths(content)})


# --- a tuned target ---------------------------------------------------------------------------------------------------


def _stale(options: DiagnoseOptions, named: Named, console: Console, watch: Console) -> bool:
    """Measure the speculator on the tuned target and on the base target; return False if it is stale."""
    tokenizer = load_tokenizer(resolve(options.target), options.trust_remote_code)
    tuned = read_target(options.target, options)
    fit = _fit(options, named, tuned, tokenizer, watch)
    _write(options, fit.as_json())
    if options.json != PRINTED:
        say(console, fit.verdict)
    return not fit.stale


def _fit(
    options: DiagnoseOptions, named: Named, tuned: CausalLM, tokenizer: PreTrainedTokenizerBase, watch: Console
) -> Fit:
    """Decode the prompts with the tuned target, then with the base target, whose texts the speculator was made for."""
    speculator = load_speculator(named, tuned, tokenizer, options.trust_remote_code)
    prompts = [question.ids for question in _questions(options, speculator, tuned, tokenizer, watch)]
    tokens = speculator.chain_length(options.draft_tokens or named.tokens)
    sampling = SamplingConfig(temperature=options.temperature or 0.0)
    config = DecodingConfig(options.max_new_tokens, sampling, eos_token_ids=eos_token_ids(tuned.model, tokenizer))

    def tokens_per_pass(target: CausalLM, speculator: Speculator) -> Estimate:
        say(watch, f"measuring {options.target if target is tuned else options.base} …", style="dim")
        found = measure_acceptance(target, speculator.chain(tokens), prompts, config, options.batch_size)
        if not found.passes:
            raise ValueError("every text ended with its first token: give prompts to be answered")
        return found.tokens_per_pass

    now, chain = tokens_per_pass(tuned, speculator), speculator.chain(tokens)
    spec = DrafterSpec(named.kind, named.path, {"tokens": tokens})
    prediction = predict_here(tuned, chain, spec, prompts, config, now.value)
    before = None
    if options.base is not None:
        base = read_target(options.base, options)
        before = tokens_per_pass(base, load_speculator(named, base, tokenizer, options.trust_remote_code))
    return Fit(now, before, prediction, chain.label, _remedy(options, named))


def _remedy(options: DiagnoseOptions, named: Named) -> str:
    """Return how to fit the speculator to the tuned target."""
    if named.kind != "draft":
        return "train it again with the recipe it was trained by and target set to the tuned one"
    return (
        f"headstart realign --target {options.target} --draft {named.path} --prompts {options.prompts} --output FOLDER"
    )
