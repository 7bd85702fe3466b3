"""The command `headstart diagnose`: a speculator that does well here and badly in a server, or on a tuned target."""

import json
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.request import urlopen

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from decoding.generate import DecodingConfig
from decoding.measure.evaluate import measure_acceptance
from decoding.measure.markdown import one_line
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import eos_token_ids, load_tokenizer
from trainer.commands.options import DiagnoseOptions
from trainer.commands.target import read_target
from trainer.data.conversations import read_conversations
from trainer.export.card import read_report
from trainer.export.match import drafters_of
from trainer.files.shards import write_text
from trainer.quickstart import resolve
from trainer.run.acceptance import read_heldout
from trainer.serving.configs import is_vllm_heads
from trainer.serving.counters import parse_counts
from trainer.serving.diagnosis import Case, Counted, diagnose
from trainer.serving.finding import Diagnosis
from trainer.serving.rendered import Question
from trainer.serving.speculator import Named, Speculator, load_speculator, named_speculator
from trainer.serving.stale import Fit, measure_step
from trainer.terminal.console import say, standard_error, standard_output

if TYPE_CHECKING:
    from trainer.serving.client import ServedModel

_PAGE_SECONDS = 10.0
_NO_LIMIT = 1 << 30
_DRAFT_TOKENS = 4


def run_diagnose(options: DiagnoseOptions, console: Console | None = None) -> bool:
    """Compare and print; return True if nothing differs, or with --stale if the speculator still fits."""
    console = console or standard_output()
    watch = standard_error()
    named = _check(options)
    return _stale(options, named, console) if options.stale else _diagnose(options, named, console, watch)


def _check(options: DiagnoseOptions) -> Named:
    """Refuse what cannot be compared, before the target is read."""
    if (options.endpoint is None) != (options.model is None):
        raise ValueError(
            "--endpoint and --model belong together: give the server's address and its name for the target"
        )
    if options.base is not None and not options.stale:
        raise ValueError(f"--base is {options.base}, which only --stale compares with: add --stale, or leave it out")
    if options.stale and (options.endpoint or options.metrics or options.counters):
        raise ValueError("--stale compares two targets, not a server: leave out --endpoint, --metrics and --counters")
    folder = options.exported
    if folder is not None and not (folder / "config.json").is_file():
        raise ValueError(f"{folder} is no folder that a server reads (no config.json): name an exported folder")
    read_conversations(resolve(options.prompts), options.prompt_field, options.limit, 1, chat=True)
    return named_speculator(options.speculator)


# --- a server ---------------------------------------------------------------------------------------------------------


def _diagnose(options: DiagnoseOptions, named: Named, console: Console, watch: Console) -> bool:
    pasted = _pasted(options)
    served = _served(options)
    tokenizer = load_tokenizer(resolve(options.target), options.trust_remote_code)
    target = read_target(options.target, options)
    speculator = load_speculator(named, target, tokenizer, options.trust_remote_code)
    questions = _questions(options, speculator, target, tokenizer)
    case = _case(options, target, tokenizer, speculator, questions)
    with served as model:
        page = None if not _is_address(options.metrics) else _reader(str(options.metrics))
        diagnosis = diagnose(case, model, page, pasted, lambda stage: say(watch, f"{stage} …", style="dim"))
    if not _wrote_json(options, diagnosis.as_json()):
        show(diagnosis, console)
    return diagnosis.first is None


def _case(
    options: DiagnoseOptions,
    target: CausalLM,
    tokenizer: PreTrainedTokenizerBase,
    speculator: Speculator,
    questions: Sequence[Question],
) -> Case:
    folder = Path(resolve(options.target))
    temperature = options.temperature if options.temperature is not None else 1.0
    return Case(
        target,
        tokenizer,
        speculator,
        questions,
        DecodingConfig(options.max_new_tokens, eos_token_ids=eos_token_ids(target.model, tokenizer)),
        temperature,
        options.exported or _read_by_servers(speculator.named),
        folder if folder.is_dir() else None,
        options.draft_tokens,
        options.batch_size,
        options.trust_remote_code,
        _reported(options.report, speculator.named),
    )


def _read_by_servers(named: Named) -> Path | None:
    """Return the speculator's own folder if a server can read it: heads in this project's format no server reads."""
    folder = named.folder
    return None if folder is None or (named.kind == "heads" and not is_vllm_heads(folder)) else folder


def _questions(
    options: DiagnoseOptions, speculator: Speculator, target: CausalLM, tokenizer: PreTrainedTokenizerBase
) -> list[Question]:
    limits = [limit for limit in (target.max_positions, speculator.max_positions) if limit is not None]
    heldout = read_heldout(
        resolve(options.prompts),
        options.prompt_field,
        options.limit,
        tokenizer,
        min(limits, default=_NO_LIMIT),
        options.max_new_tokens,
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
        except (URLError, OSError, ValueError) as error:
            raise ValueError(
                f"--metrics cannot be read ({one_line(error)}): give the address of a metrics page"
            ) from None

    return read


def _served(options: DiagnoseOptions) -> "AbstractContextManager[ServedModel | None]":
    """Return the connection to the server, which sends nothing yet; nothing without an endpoint."""
    if options.endpoint is None or options.model is None:
        return nullcontext()
    from trainer.serving.client import ServedModel
    from trainer.target.connection import Served

    return ServedModel(
        Served(
            address=options.endpoint,
            model=options.model,
            concurrency=options.concurrency,
            timeout=options.timeout,
            api_key_variable=options.api_key_variable,
        )
    )


def _reported(report: Path | None, named: Named) -> str:
    """Return a remark on the figures of an evaluation, which may have drafted trees where servers draft chains."""
    if report is None:
        return ""
    if named.folder is None:
        raise ValueError(f"--report is compared by the weights of {named.path}, which is no local folder: leave it out")
    stored = read_report(report)
    names = drafters_of(stored, named.folder)
    rows = [row for row in stored["rows"] if row.get("drafter") in names and row.get("tokens_per_pass")]
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


def _wrote_json(options: DiagnoseOptions, content: dict[str, Any]) -> bool:
    """Write the JSON if it was asked for; return True if it was printed in place of the text."""
    if options.json_file is None:
        return False
    text = json.dumps(content, indent=2) + "\n"
    if options.json_file == "-":
        print(text, end="")
        return True
    Path(options.json_file).parent.mkdir(parents=True, exist_ok=True)
    write_text(Path(options.json_file), text)
    return False


# --- a tuned target ---------------------------------------------------------------------------------------------------


def _stale(options: DiagnoseOptions, named: Named, console: Console) -> bool:
    """Measure the speculator on the tuned target and on the base target; return False if it is stale."""
    tokenizer = load_tokenizer(resolve(options.target), options.trust_remote_code)
    tuned = read_target(options.target, options)
    fit = _fit(options, named, tuned, tokenizer, console)
    say(console, fit.verdict)
    if options.json_file is not None:
        _wrote_json(options, fit.as_json())
    return not fit.stale


def _fit(
    options: DiagnoseOptions, named: Named, tuned: CausalLM, tokenizer: PreTrainedTokenizerBase, console: Console
) -> Fit:
    """Decode the prompts with the tuned target, then with the base target, whose texts the speculator was made for."""
    speculator = load_speculator(named, tuned, tokenizer, options.trust_remote_code)
    prompts = [question.ids for question in _questions(options, speculator, tuned, tokenizer)]
    most = speculator.most_tokens
    wanted = options.draft_tokens or named.tokens or most or _DRAFT_TOKENS
    tokens = wanted if most is None else min(wanted, most)
    config = DecodingConfig(options.max_new_tokens, eos_token_ids=eos_token_ids(tuned.model, tokenizer))
    drafter = speculator.chain(tokens)
    now = measure_acceptance(tuned, drafter, prompts, config, options.batch_size).tokens_per_pass
    costs = measure_step(tuned, drafter, prompts, config)
    before = None
    if options.base is not None:
        base = read_target(options.base, options)
        again = load_speculator(named, base, tokenizer, options.trust_remote_code)
        before = measure_acceptance(base, again.chain(tokens), prompts, config, options.batch_size).tokens_per_pass
    return Fit(now, before, costs, _remedy(options, named))


def _remedy(options: DiagnoseOptions, named: Named) -> str:
    """Return how to fit the speculator to the tuned target."""
    if named.kind != "draft":
        return "train it again with the recipe it was trained by and target set to the tuned one"
    return (
        f"headstart realign --target {options.target} --draft {named.path} --prompts {options.prompts} --output FOLDER"
    )
