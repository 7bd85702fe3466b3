"""The diagnosis of a speculator that does well here and badly in a server: seven comparisons, in order.

Held-out prompts are replayed on the server and by the real loop. What a server alone can tell is left out where there
is none: the configs and weights are compared by their folders, acceptance by counters from elsewhere.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.measure.evaluate import measure_acceptance
from decoding.measure.proof.reference import Reference
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig
from trainer.servers.answers import Asked, Completed
from trainer.servers.configs import compare_settings, compare_vocabularies
from trainer.servers.counted import Replayed, compare_acceptance, compare_lengths, compare_sampling
from trainer.servers.counters import Counts, parse_counts
from trainer.servers.finding import ACCEPTANCE, ROPE, SAMPLING, TEMPLATE, TEXT, TOP_1, Diagnosis, Finding, unknown
from trainer.servers.rendered import Question, ask_rendered, compare_rendered
from trainer.servers.speculator import Speculator
from trainer.servers.texts import compare_texts
from trainer.servers.weights import compare_top_1

if TYPE_CHECKING:
    from trainer.servers.client import ServedModel

_TEXTS = 16
"""Texts along which top-1 tokens are compared."""
_NO_COUNTS = (
    "the server shows no counts of speculation: start it with speculation and metrics (SGLang --enable-metrics, "
    "llama.cpp --metrics), name its page with --metrics, or paste its counters with --counters"
)

_CONTROLS = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""Controls that a server may have by default from the model's generation config, switched off above temperature 0.

vLLM, SGLang and llama.cpp all take -1 for no top-k; SGLang refuses 0. Greedy requests keep the server's own: its
penalties show in the greedy text.
"""

Page = Callable[[], str | None]
"""Function that reads the server's metrics page; None without one."""


@dataclass(frozen=True)
class Case:
    """A speculator to diagnose, with what is known of the server's side.

    ``served``: the folder of the speculator that the server reads, None where it is not known. ``target_folder``: the
    target's, None if it is not known. ``tokens``: drafted at a time; None takes the server's number, else the
    speculator's. ``note``: appended to the figures of acceptance.
    """

    target: CausalLM
    tokenizer: PreTrainedTokenizerBase
    speculator: Speculator
    questions: Sequence[Question]
    config: DecodingConfig
    temperature: float
    served: Path | None = None
    target_folder: Path | None = None
    tokens: int | None = None
    batch_size: int = 8
    trust_remote_code: bool = False
    note: str = ""

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """Token ids of all prompts."""
        return [question.ids for question in self.questions]


class Counted(NamedTuple):
    """Counts of a server at a temperature, and a remark on how they came about."""

    counts: Counts
    temperature: float
    note: str = ""


def diagnose(
    case: Case,
    served: "ServedModel | None" = None,
    page: Page | None = None,
    pasted: Sequence[Counted] = (),
    watch: Callable[[str], None] = lambda stage: None,
) -> Diagnosis:
    """Make all comparisons. ``page``: the server's metrics page, by default the one beside its address.

    ``pasted``: counters from elsewhere, compared where the server gives none. ``watch`` is told of each stage.
    """
    findings: list[Finding] = []
    if served is not None:  # before anything is decoded: a server that is down should end it soon
        watch("the server's prompts")
        findings.append(compare_rendered(case.questions, ask_rendered(served, case.questions), case.tokenizer))
    watch("the target's own texts")
    greedy = [text.tokens for text in Engine(case.target).decode(case.prompts, case.config, batch_size=case.batch_size)]
    counted: list[Counted] = []
    sampled_texts: Finding | None = None
    if served is None:
        findings += [unknown(step, "no --endpoint is given") for step in (TEMPLATE, TEXT)]
    else:
        watch("the server's texts")
        answers, found = _replay(case, served, page or served.metrics, 0.0)
        reference = Reference(case.target, SamplingConfig(temperature=1.0), case.config.eos_token_ids)
        findings.append(compare_texts(reference, case.prompts, greedy, answers, case.tokenizer))
        counted += [] if found is None else [found]
        if case.temperature > 0:
            answers, found = _replay(case, served, page or served.metrics, case.temperature)
            counted += [] if found is None else [found]
            sampled_texts = _compare_sampled(case, answers, "" if found is None else found.note)
    watch("configs and weights")
    findings += _by_folders(case, greedy)
    watch("acceptance here")
    findings += _by_counts(case, [*counted, *pasted], sampled_texts)
    return Diagnosis(tuple(findings))


def _by_folders(case: Case, greedy: Sequence[Sequence[int]]) -> list[Finding]:
    """Compare configs, vocabularies and weights in the folders that the server reads."""
    trained = case.speculator.named.folder
    longest = max(map(len, case.prompts)) + case.config.max_new_tokens
    settings = compare_settings(case.target, case.target_folder, case.served, trained, longest)
    found = [settings, compare_vocabularies(case.target, case.tokenizer, case.served, case.trust_remote_code)]
    assert settings.step == ROPE
    if case.served is None:
        return [*found, unknown(TOP_1, "no folder that a server reads is given: name it with --exported")]
    texts = [[*prompt, *text] for prompt, text in zip(case.prompts, greedy, strict=True)][:_TEXTS]
    weights, trusted = case.speculator.weights, case.trust_remote_code
    return [*found, compare_top_1(case.target, weights, case.served, trained, texts, trusted)]


def _replay(
    case: Case, served: "ServedModel", page: Page, temperature: float
) -> tuple[list[Completed], Counted | None]:
    """Let the server answer all prompts; return the answers, and its counts of this replay alone where it has any.

    Prompts are sent as token ids where the server takes them, so that a difference of templates shows nowhere else.
    """
    as_ids = served.check_ids(case.prompts[0])
    sent = [
        question.ids if as_ids else question.text if question.messages is None else tuple(question.messages)
        for question in case.questions
    ]
    controls, note = {}, ""
    if temperature > 0:
        controls = served.taken_controls(sent[0], _CONTROLS)
        refused = [name for name in _CONTROLS if name not in controls]
        note = f" (it takes no {' and no '.join(refused)}: its own may be in force)" if refused else ""
    before = _page_counts(page)
    seeds = range(case.config.seed, case.config.seed + len(sent))
    answers = served.many(
        [
            Asked(prompt, case.config.max_new_tokens, temperature, seed=seed, controls=controls)
            for prompt, seed in zip(sent, seeds, strict=True)
        ]
    )
    after = _page_counts(page)
    if after is not None:
        found = after.since(before)
        note += "" if found.cumulative else f" ({found.server} tells of its last interval alone)"
        return answers, Counted(found, temperature, note) if found.drafts != 0 else None
    timings = [dict(answer.timings) for answer in answers if answer.timings is not None]
    drafted = [each for each in timings if each.get("draft_n")]
    return answers, Counted(parse_counts(json.dumps(drafted)), temperature, note) if drafted else None


def _compare_sampled(case: Case, answers: Sequence[Completed], note: str) -> Finding | None:
    """Compare the lengths of the server's sampled texts with those of plain decoding here."""
    config = replace(case.config, sampling=SamplingConfig(temperature=case.temperature))
    here = Engine(case.target).decode(case.prompts, config, batch_size=case.batch_size)
    there = [
        len(case.tokenizer(answer.text, add_special_tokens=False)["input_ids"])
        if answer.tokens is None
        else answer.tokens
        for answer in answers
    ]
    return compare_lengths([len(text.tokens) for text in here], there, case.temperature, note)


def _page_counts(page: Page) -> Counts | None:
    """Return the counts on a metrics page; None without a page or without counts on it."""
    text = page()
    if text is None:
        return None
    try:
        return parse_counts(text)
    except ValueError:
        return None


def _by_counts(case: Case, counted: Sequence[Counted], sampled_texts: Finding | None) -> list[Finding]:
    """Compare acceptance with that of the real loop, greedy and above temperature 0.

    ``sampled_texts``: a difference of the sampled texts themselves, which explains that of their acceptance.
    """
    greedy = next((each for each in counted if each.temperature == 0), None)
    sampled = next((each for each in counted if each.temperature > 0), None)
    if greedy is not None:
        ours = _replayed(case, greedy, sampled=True)
        first = compare_acceptance(ours, greedy.counts, greedy.note + case.note)
    elif sampled is not None:
        first = unknown(ACCEPTANCE, f"the counters are of temperature {sampled.temperature:g}: see the next line")
    else:
        first = unknown(ACCEPTANCE, _NO_COUNTS)
    if sampled is None:
        reason = "no counts are of sampled texts" if greedy is not None else _NO_COUNTS
        return [first, sampled_texts or unknown(SAMPLING, reason)]
    drawn, best = (_replayed(case, sampled, sampled=each) for each in (True, False))
    last = compare_sampling(drawn, best, sampled.counts, sampled.temperature, sampled.note)
    if sampled_texts is not None:
        last = replace(sampled_texts, found=f"{sampled_texts.found}; {last.found}")
    return [first, last]


def _replayed(case: Case, counted: Counted, sampled: bool) -> Replayed:
    """Decode the prompts by the real loop with a chain as long as the server's."""
    tokens = _tokens(case, counted.counts)
    drafter = case.speculator.chain(tokens, sampled)
    config = replace(case.config, sampling=SamplingConfig(temperature=counted.temperature))
    found = measure_acceptance(case.target, drafter, case.prompts, config, case.batch_size)
    if not found.passes:
        raise ValueError("every text ended with its first token: give prompts to be answered")
    return Replayed(found, tokens, len(case.prompts))


def _tokens(case: Case, counts: Counts) -> int:
    """Return the tokens of a chain: as asked, as the server counts them, as in the spec, as many as there are."""
    per_draft = round(counts.drafted / counts.drafts) if counts.drafts and counts.drafted else None
    asked = case.tokens or counts.tokens or case.speculator.named.tokens or per_draft
    return case.speculator.chain_length(asked)
