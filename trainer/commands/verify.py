"""The command `headstart verify`: tests whether decoding is lossless, in this process or on a server."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from rich.console import Console
from transformers import PreTrainedTokenizerBase

from decoding.drafters.spec import DrafterSpec, all_paths
from decoding.dtypes import parse_dtype
from decoding.errors import UserError
from decoding.files.fingerprint import prompts_fingerprint, stored_fingerprint
from decoding.files.gguf_file import source_of
from decoding.files.hub import local_folder, revisions
from decoding.generate import DecodingConfig, Engine
from decoding.measure.proof.finding import Finding, all_pass
from decoding.measure.proof.greedy import IDENTITY
from decoding.measure.proof.prove import Effort, EngineWriter, prove
from decoding.measure.proof.reference import Reference
from decoding.measure.questions import read_prompts
from decoding.measure.redact import published_name
from decoding.model.loading import eos_token_ids
from decoding.rules.sampling import SamplingConfig
from decoding.speculation import named_rule
from decoding.text import check_prompt
from trainer.commands.check_options import VerifyOptions
from trainer.commands.findings import PRINTED, report, say_findings, summary, write_findings, write_junit
from trainer.commands.models import LoadedModels, check_endpoint, connect, load_models, read_specs, read_tokenizer
from trainer.terminal.console import ProgressBar, say, standard_error, standard_output

if TYPE_CHECKING:
    from trainer.servers.writer import ServedWriter

_BATCH = 8
NamedFindings = Iterator[tuple[str, Finding]]


class ProofInput(NamedTuple):
    """The inputs of the tests. ``reference`` contains the target, the sampling controls and the end-of-text tokens."""

    reference: Reference
    tokenizer: PreTrainedTokenizerBase
    prompts: list[tuple[int, ...]]
    effort: Effort


def run_verify(options: VerifyOptions, console: Console | None = None) -> bool:
    """Run the tests, print each finding and write --json; return True for PASS."""
    watch = console or standard_error()
    console = watch if options.json == PRINTED else console or standard_output()
    specs = _check(options)
    tokenizer = read_tokenizer(options.target, options)
    prompts = read_prompts(options.prompts, tokenizer, options.limit, options.prompt_field)
    models = load_models(options, specs, tokenizer)
    given = _proof_input(options, models, prompts)
    engines: dict[str, list[Finding]] = {}
    findings = _served(options, given, watch) if options.endpoint else _in_process(options, given, models, watch)
    for name, finding in findings:
        if name not in engines:
            say(console, f"{name}:")
        engines.setdefault(name, []).append(finding)
        say_findings(console, [finding])
    every = [finding for findings in engines.values() for finding in findings]
    passed = all_pass(every)
    say(console, summary(every))
    if options.junit is not None:
        write_junit(options.junit, engines)
    if options.json is not None:
        fingerprint = stored_fingerprint(options.target, options.trust_remote_code)
        paths = {"target": options.target, **all_paths({str(spec): spec for spec in models.specs.values()})}
        about = {
            "verdict": "PASS" if passed else "FAIL",
            "dtype": str(parse_dtype(options.dtype)).removeprefix("torch."),
            "fingerprints": {"target": fingerprint, "prompts": prompts_fingerprint(given.prompts)},
            "revisions": revisions(paths),
        }
        write_findings(options.json, report(engines, **about))
    return passed


def _check(options: VerifyOptions) -> list[DrafterSpec]:
    """Reject contradictory options before anything is read; return the specs of the drafters."""
    check_endpoint(options.endpoint, options.model)
    if options.endpoint is not None and (options.drafter or options.rule):
        raise UserError("--drafter and --rule do nothing with --endpoint: omit them")
    if options.rule is not None:
        named_rule(options.rule)
        if options.temperature == 0:
            raise UserError(f"--rule {options.rule} needs sampling: use a --temperature above 0")
    return read_specs(options.drafter or ())


def _proof_input(options: VerifyOptions, models: LoadedModels, prompts: list[tuple[int, ...]]) -> ProofInput:
    """Return the inputs; raise UserError for a prompt that leaves too few positions for the new tokens."""
    target, tokenizer = models.target, models.tokenizer
    sampling = SamplingConfig(temperature=options.temperature, top_k=options.top_k, top_p=options.top_p)
    engines = max(1, len(models.drafters))
    effort = Effort(options.max_new_tokens, options.draws, seed=options.seed, engines=engines)
    for prompt in prompts:
        check_prompt(target, prompt, options.max_new_tokens)
    return ProofInput(Reference(target, sampling, eos_token_ids(target.model, tokenizer)), tokenizer, prompts, effort)


def _in_process(options: VerifyOptions, given: ProofInput, models: LoadedModels, watch: Console) -> NamedFindings:
    """Yield the findings on each drafter's engine, or on plain decoding if there is no drafter."""
    reference = given.reference
    rule = named_rule(options.rule) if options.rule else None
    ends = reference.eos_token_ids
    config = DecodingConfig(options.max_new_tokens, reference.sampling, rule, ends, seed=options.seed)
    for name, drafter in models.drafters.items() or [("plain decoding", None)]:
        engine = Engine(reference.target, drafter)
        with _progress(watch, name) as (on_texts, on_answer):
            writer = EngineWriter(engine, config, _BATCH, on_answer)
            for finding in prove(reference, writer, given.prompts, given.effort, on_texts):
                yield name, finding


def _served(options: VerifyOptions, given: ProofInput, watch: Console) -> NamedFindings:
    """Yield the findings on a served model."""
    from trainer.servers.texts import explained
    from trainer.servers.writer import ServedWriter

    name = f"{published_name(options.model or '')}, served"  # vLLM names models by their paths
    with connect(options.endpoint or "", options.model or "") as model:
        writer = ServedWriter(model, given.reference, given.tokenizer, given.prompts[0])
        with _progress(watch, name) as (on_texts, writer.on_answer):
            for finding in prove(given.reference, writer, given.prompts, given.effort, on_texts):
                if finding.check != IDENTITY or finding.passed:
                    yield name, finding
                    continue
                evidence = writer.rounding_or_rule(finding.figures["faulty_texts"])
                source = source_of(local_folder(str(options.target), weights=False)) or {}
                yield name, explained(finding, evidence, bool(source.get("quantisation")))
                yield name, evidence
        yield name, _tokens_of(writer)


def _tokens_of(writer: "ServedWriter") -> Finding:
    """Return a finding on how the server reports tokens. The finding is a problem if tokenizing the server's texts
    again changes these texts.
    """
    sentence = f"the server reports {writer.source}"
    if not writer.takes_ids:
        sentence += "; it does not accept token ids, so texts were sent"
    if writer.retold:
        sentence += f"; tokenizing again changed {writer.unlike} of {writer.retold} texts: their tokens are uncertain"
    if writer.refused_controls:
        sentence += f"; it does not accept {' or '.join(writer.refused_controls)}, so it may use its own values"
    figures = {name: getattr(writer, name) for name in ("source", "takes_ids", "refused_controls", "retold", "unlike")}
    return Finding("tokens", "problem" if writer.unlike else "ok", sentence, figures=figures)


@contextmanager
def _progress(watch: Console, name: str) -> Iterator[tuple[Callable[[str, int], None], Callable[[], None]]]:
    """Show a progress bar; yield the functions to call for each batch of texts and for each text."""
    with ProgressBar(watch, f"proving {name}", None) as bar:

        def on_texts(what: str, texts: int) -> None:
            bar.begin(0)
            bar.update(total=texts, note=f"{what} texts")

        yield on_texts, bar.advance
