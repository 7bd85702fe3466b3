"""The command `headstart diagnose`: finds out why a speculator works well here but poorly in a server."""

from collections.abc import Callable
from contextlib import nullcontext
from http.client import HTTPException
from pathlib import Path
from urllib.request import urlopen

from rich.console import Console
from rich.text import Text

from decoding.errors import UserError
from decoding.files.hub import local_folder
from decoding.generate import DecodingConfig
from decoding.measure.markdown import one_line
from decoding.measure.proof.finding import Finding, all_pass
from decoding.model.loading import eos_token_ids, load_tokenizer
from trainer.commands.check_options import DiagnoseOptions
from trainer.commands.findings import PRINTED, report, say_findings, summary, write_findings
from trainer.commands.models import check_endpoint, connect, read_target
from trainer.data.conversations import check_prompts, read_heldout, short_enough
from trainer.servers.counters import parse_counts
from trainer.servers.diagnosis import Replay, ServerCounts, diagnose, kind_of
from trainer.servers.speculator import SpeculatorName, load_speculator, named_speculator
from trainer.servers.texts import HeldOutPrompt
from trainer.terminal.console import say, standard_error, standard_output

_PAGE_SECONDS = 10.0
_NO_LIMIT = 1 << 30
_HELD = {"heads": "heads", "dspark": "a DSpark draft", "eagle3": "an EAGLE-3 draft", "draft": "a model"}


def run_diagnose(options: DiagnoseOptions, console: Console | None = None) -> bool:
    """Make all comparisons and print their findings; return True if no difference was found."""
    console, watch = console or standard_output(), standard_error()
    named = _check(options)
    findings = _compare(options, named, watch)
    first = next((finding for finding in findings if not finding.passed), None)
    if options.json is not None:
        content = {str(options.speculator): findings}
        write_findings(options.json, report(content, first=None if first is None else first.check))
    if options.json != PRINTED:
        if first is not None:  # later differences may be consequences
            say(console, Text(f"first difference: {first.check}", style="bold red"))
            say(console, f"  {one_line(first.found)}", f"  remedy: {one_line(first.remedy)}")
        say_findings(console, findings)
        say(console, summary(findings))
    return all_pass(findings)


def _check(options: DiagnoseOptions) -> SpeculatorName:
    """Reject options that do not fit together, before the target is loaded."""
    if options.endpoint is not None or options.metrics is None:  # otherwise --model chooses a model of the saved page
        check_endpoint(options.endpoint, options.model)
    folder = options.exported
    if folder is not None and not (folder / "config.json").is_file():
        raise UserError(f"a server cannot load {folder} (config.json is missing)", "use an exported folder")
    named = named_speculator(options.speculator)
    for held in filter(None, (folder, named.folder)):
        if (kind := kind_of(held)) != named.kind:
            raise UserError(
                f"{held} contains {_HELD[kind]}, but {options.speculator} is of kind {named.kind}",
                f"use the exported folder, or write {kind}:{named.path}",
            )
    check_prompts(options.prompts, None, options.limit)
    return named


def _compare(options: DiagnoseOptions, named: SpeculatorName, watch: Console) -> list[Finding]:
    page, given = None, []
    if options.metrics is not None:
        page = _reader(options.metrics)
        text = page()  # report a wrong address before loading the target
        if options.endpoint is None or not _is_address(options.metrics):
            given = [ServerCounts(parse_counts(text, options.model), 0.0, "; these counts may include other prompts")]
            page = None
    tokenizer = load_tokenizer(options.target, options.trust_remote_code)
    heldout = read_heldout(options.prompts, None, options.limit, tokenizer)
    target = read_target(options.target, options)
    speculator = load_speculator(named, target, options.trust_remote_code)
    limits = [limit for limit in (target.max_positions, speculator.max_positions) if limit is not None]
    heldout = short_enough(heldout, min(limits, default=_NO_LIMIT), options.max_new_tokens)
    say(watch, f"{len(heldout)} prompts are short enough for target and speculator", style="dim")
    replay = Replay(
        target,
        tokenizer,
        speculator,
        [
            HeldOutPrompt(asked.text, asked.open_after(()) if asked.chat else None, ids, asked.tools)
            for asked, ids in heldout
        ],
        DecodingConfig(options.max_new_tokens, eos_token_ids=eos_token_ids(target.model, tokenizer)),
        options.temperature,
        options.exported or named.folder,
        local_folder(options.target, weights=False),
        options.trust_remote_code,
    )
    with connect(options.endpoint, options.model or "") if options.endpoint else nullcontext() as model:
        return list(diagnose(replay, model, page, given, lambda stage: say(watch, f"{stage} …", style="dim")))


def _is_address(metrics: str) -> bool:
    return metrics.startswith(("http://", "https://"))


def _reader(metrics: str) -> Callable[[], str]:
    """Return a function that reads a metrics page from a file or an address. This function raises UserError if reading
    fails.
    """

    def read() -> str:
        if not _is_address(metrics):
            if not Path(metrics).is_file():
                raise UserError(f"--metrics {metrics} is neither a file nor an address", "use a file or an address")
            return Path(metrics).read_text(encoding="utf-8", errors="replace")
        try:
            with urlopen(metrics, timeout=_PAGE_SECONDS) as page:
                return str(page.read().decode("utf-8", errors="replace"))
        except (HTTPException, OSError, ValueError) as error:
            # The text of an HTTPException repeats parts of the address, which may contain a password.
            told = type(error).__name__ if isinstance(error, HTTPException) else one_line(error)
            raise UserError(f"--metrics cannot be read ({told})", "use the address of a metrics page") from None

    return read
