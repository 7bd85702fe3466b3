"""Seven ordered comparisons that explain why a speculator works here but drafts badly in a server.

Held-out prompts are replayed on the server and in the real loop. Without a server, configs and weights are compared
through their folders, and acceptance through a saved metrics page. An earlier difference may cause a later one.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from transformers import AutoConfig, PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.files.fingerprint import stored_fingerprint
from decoding.files.folder import UNREADABLE, is_heads_folder, reason
from decoding.files.stored import read_object
from decoding.generate import DecodingConfig, Engine
from decoding.measure.measurement import count_steps
from decoding.measure.proof.finding import Finding, ok, problem, undecided
from decoding.measure.proof.reference import Reference
from decoding.metrics import acceptance
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import is_dspark_folder, read_dspark_config
from decoding.model.eagle3_config import is_eagle3_folder, read_eagle3_config
from decoding.model.loading import check_same_tokenizer, load_tokenizer
from decoding.rules.sampling import SamplingConfig
from trainer.export.companions import trained_for
from trainer.export.server_traps import misread_keys, other_size, taken_over, too_few_positions, trimmed
from trainer.servers.acceptance import (
    ACCEPTANCE,
    SAMPLING,
    LoopAcceptance,
    compare_acceptance,
    compare_sampling,
    distance,
    is_other,
)
from trainer.servers.answers import CONTROLS, Completion, CompletionRequest
from trainer.servers.counters import Counts, find_counts
from trainer.servers.misreadings import Draft, misread, other_readings, remedy_of
from trainer.servers.speculator import TOP_1, Speculator, compare_top_1
from trainer.servers.texts import TEMPLATE, TEXT, HeldOutPrompt, ask_rendered, compare_rendered, compare_texts

ROPE = "target, rope and window settings"
VOCABULARY = "vocabulary sizes"
_REMEDY = "export the speculator again, and point the server at the new folder"
_COMPARED = (
    *("rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("max_position_embeddings", "n_positions", "original_max_position_embeddings"),
)
Difference = tuple[str, str]
"""A difference in words and its remedy."""


def kind_of(folder: Path) -> Literal["heads", "dspark", "eagle3", "draft"]:
    """Return the kind of speculator in a folder."""
    if is_heads_folder(folder):
        return "heads"
    if is_eagle3_folder(folder):
        return "eagle3"
    return "dspark" if is_dspark_folder(folder) else "draft"


def _config_of(folder: Path) -> dict[str, Any]:
    """Return the content of config.json with the settings of its nested config, if there is one."""
    stored = read_object(folder / "config.json", _REMEDY)
    return {**(stored.get("text_config") or stored.get("transformer_layer_config") or {}), **stored}


def _of(check: str, differences: Sequence[Difference], otherwise: str, **figures: Any) -> Finding:
    """Combine differences and their remedies into one finding.

    If there are no differences, the finding says ``otherwise``.
    """
    if not differences:
        return ok(check, otherwise, **figures)
    remedies = "; ".join(dict.fromkeys(remedy for _, remedy in differences))
    return problem(check, "; ".join(difference for difference, _ in differences), remedies, **figures)


def compare_settings(target: CausalLM, target_folder: Path, served: Path, trained: Path, longest: int) -> Finding:
    """Compare rope, windows and positions in the configs of target and draft; heads lack these settings.

    ``target_folder`` contains the target, ``served`` is the folder that the server reads, and ``trained`` is the folder
    whose weights decode here. ``longest`` is the length of the longest text of the replay, in tokens.
    """
    kind, read = kind_of(served), ["the target's"]
    differences: list[Difference] = [*misread_keys(read[0], read_object(target_folder / "config.json", _REMEDY))]
    if kind_of(trained) != "draft":
        differences += _other_target(target_folder, trained)
    if kind == "draft":  # for other speculators, the serving command names the method
        differences += taken_over(str(served))
    if kind != "heads":
        read.append("the draft's")
        if trained != served:
            differences += _other_settings(target, served, trained)
        stored = read_object(served / "config.json", _REMEDY)
        differences += [*misread_keys("the draft's", stored), *too_few_positions(_config_of(served), longest)]
    return _of(ROPE, differences, f"all readers interpret {' and '.join(read)} config alike")


def _other_target(target_folder: Path, trained: Path) -> list[Difference]:
    """Return a difference if the speculator's folder records that it was trained on another target's states."""
    wanted = trained_for(trained)
    if wanted is None or (stored := stored_fingerprint(target_folder)) == wanted:
        return []
    remedy = "pass the target of that training, or train the speculator on this target"
    return [(f"the speculator was trained on another target ({wanted}; this one is {stored})", remedy)]


def _other_settings(target: CausalLM, served: Path, trained: Path) -> list[Difference]:
    """Compare the settings that the loader reads from the served and from the trained config; return those that differ.

    Trees of DSpark drafts are ignored, because servers draft chains. The target's depth is ignored, because no server
    reads it.
    """
    theirs, ours = dict[str, Any](), dict[str, Any]()
    try:
        for folder, settings in ((served, theirs), (trained, ours)):
            if is_dspark_folder(trained):
                settings |= asdict(replace(read_dspark_config(folder), tree=(), num_target_layers=None))
            elif is_eagle3_folder(trained):
                settings |= asdict(read_eagle3_config(folder).for_target(target))
            else:
                read = AutoConfig.from_pretrained(folder).get_text_config(decoder=True).to_dict()
                for key in _COMPARED:  # `type` is the older name of `rope_type`
                    value = read.get(key)
                    settings[key] = (
                        {k: v for k, v in value.items() if k != "type"} if isinstance(value, dict) else value
                    )
    except UNREADABLE as error:
        return [(f"the draft's config.json cannot be read: {reason(error)}", _REMEDY)]
    return [
        (f"the served draft has {key} {theirs[key]}, but was trained with {ours[key]}", _REMEDY)
        for key in ours
        if theirs[key] != ours[key]
    ]


def compare_vocabularies(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase, served: Path, trusted: bool = False
) -> Finding:
    """Compare the vocabulary size, tokenizer and trimmed lm_head of the served heads or draft with the target."""
    stored, known = _config_of(served), target.vocab_size
    size = stored.get("vocab_size")
    differences: list[Difference] = []
    if kind_of(served) != "draft":  # folders of other kinds have no tokenizer
        if size != known:
            told = f"the served weights predict {size} tokens, but the target has {known}"
            differences.append((told, "serve weights that were trained on this target"))
    else:
        differences += other_size(size, known)
        try:
            check_same_tokenizer(tokenizer, load_tokenizer(str(served), trusted))
        except UserError as error:
            differences.append((error.message, error.remedy or _REMEDY))
        differences += trimmed(stored)
    return _of(VOCABULARY, differences, f"target and speculator have {size} tokens", target=known, speculator=size)


if TYPE_CHECKING:
    from trainer.servers.client import ServedModel

_TEXTS = 16
"""Number of texts on which top-1 tokens are compared."""
_BATCH = 8
_NO_COUNTS = (
    "the server reports no counts of speculation: start it with speculation and metrics (SGLang --enable-metrics, "
    "llama.cpp --metrics), or pass the address or a file of the server's metrics page as --metrics"
)
_MISREAD = (
    "the server reads the draft with {}: compare the config.json that the server loads, or use another server version"
)

Page = Callable[[], str | None]
"""Function that reads the server's metrics page; it returns None if there is none."""


@dataclass(frozen=True)
class Replay:
    """A speculator to diagnose, the prompts to replay, and what is known about the server.

    ``served`` is the speculator's folder that the server reads; ``target_folder`` is the target's folder.
    """

    target: CausalLM
    tokenizer: PreTrainedTokenizerBase
    speculator: Speculator
    heldout: Sequence[HeldOutPrompt]
    config: DecodingConfig
    temperature: float
    served: Path
    target_folder: Path
    trust_remote_code: bool = False

    @property
    def prompts(self) -> list[tuple[int, ...]]:
        """Token ids of all prompts."""
        return [prompt.ids for prompt in self.heldout]


class ServerCounts(NamedTuple):
    """Counts of a server at a temperature, with a note on how they were obtained."""

    counts: Counts
    temperature: float
    note: str = ""


def diagnose(
    replay: Replay,
    served: "ServedModel | None" = None,
    page: Page | None = None,
    given: Sequence[ServerCounts] = (),
    watch: Callable[[str], None] = lambda stage: None,
) -> Iterator[Finding]:
    """Make all comparisons and yield their findings in order.

    ``page`` reads the server's metrics page; the default is the page next to the server's address. ``given`` are counts
    from elsewhere, used if the server reports none. ``watch`` is called with the name of each stage.
    """
    if served is None:
        yield undecided(TEMPLATE, "no --endpoint was given")
    else:  # asked before decoding, so that a server that is down is noticed early
        watch("the server's prompts")
        yield compare_rendered(replay.heldout, ask_rendered(served, replay.heldout), replay.tokenizer)
    watch("the target's own texts")
    greedy = [text.tokens for text in Engine(replay.target).decode(replay.prompts, replay.config, batch_size=_BATCH)]
    counted: list[ServerCounts] = []
    if served is None:
        yield undecided(TEXT, "no --endpoint was given")
    else:
        watch("the server's texts")
        answers, counts = _ask(replay, served, page or served.metrics, 0.0)
        reference = Reference(replay.target, SamplingConfig(temperature=1.0), replay.config.eos_token_ids)
        limit = replay.config.max_new_tokens
        yield compare_texts(reference, replay.prompts, greedy, answers, replay.tokenizer, limit)
        counted += [] if counts is None else [counts]
        if replay.temperature > 0:
            _, counts = _ask(replay, served, page or served.metrics, replay.temperature)
            counted += [] if counts is None else [counts]
    watch("configs and weights")
    yield from _by_folders(replay, greedy)
    watch("acceptance here")
    yield from _by_counts(replay, [*counted, *given])


def _by_folders(replay: Replay, greedy: Sequence[Sequence[int]]) -> Iterator[Finding]:
    """Compare the configs, vocabularies and weights in the folders that the server reads."""
    trained, trusted = replay.speculator.named.folder, replay.trust_remote_code
    longest = max(map(len, replay.prompts)) + replay.config.max_new_tokens
    yield compare_settings(replay.target, replay.target_folder, replay.served, trained, longest)
    yield compare_vocabularies(replay.target, replay.tokenizer, replay.served, trusted)
    texts = [[*prompt, *text] for prompt, text in zip(replay.prompts, greedy, strict=True)][:_TEXTS]
    weights = replay.speculator.weights
    finding = compare_top_1(replay.target, weights, replay.served, texts, trusted)
    yield finding if finding.status != "ok" else misread(TOP_1, replay.target, weights, texts) or finding


def _ask(
    replay: Replay, served: "ServedModel", page: Page, temperature: float
) -> tuple[list[Completion], ServerCounts | None]:
    """Let the server answer all prompts; return the answers, and the server's counts for these answers if it reports
    any.

    Prompts are sent as token ids if possible, so that a different template affects only the check of templates.
    """
    as_ids = served.check_ids(replay.prompts[0])
    sent = [prompt.sent(as_ids) for prompt in replay.heldout]
    controls, note = dict[str, Any](), ""
    if temperature > 0:  # greedy requests keep the server's defaults, so that its penalties show in the text
        controls = served.taken_controls(sent[0][0])
        refused = [name for name in CONTROLS if name not in controls]
        note = f" (the server rejects {' and '.join(refused)}, so its defaults may apply)" if refused else ""
    before = find_counts(page(), served.served.model)
    requests = [
        CompletionRequest(prompt, replay.config.max_new_tokens, temperature, seed=seed, controls=controls | fields)
        for seed, (prompt, fields) in enumerate(sent, start=replay.config.seed)
    ]
    answers = served.many(requests)
    after = find_counts(page(), served.served.model)
    if after is None:
        return answers, None
    counts = after.since(before)
    note += "" if counts.cumulative else f" ({counts.server} reports only its last interval)"
    return answers, ServerCounts(counts, temperature, note) if counts.drafts != 0 else None


def _by_counts(replay: Replay, counted: Sequence[ServerCounts]) -> tuple[Finding, Finding]:
    """Compare the server's acceptance with the real loop, greedy and above temperature 0."""
    greedy = next((counts for counts in counted if counts.temperature == 0), None)
    sampled = next((counts for counts in counted if counts.temperature > 0), None)
    first = undecided(ACCEPTANCE, _NO_COUNTS)
    if greedy is not None:
        ours = _loop_acceptance(replay, greedy, sampled=True)
        first = compare_acceptance(ours, greedy.counts, greedy.note)
        if is_other(ours, greedy.counts) and isinstance(replay.speculator.weights, Draft):
            first = _explained(replay, replay.speculator.weights, greedy, first)
    if sampled is None:
        reason = "no counts of sampled texts" if greedy is not None else _NO_COUNTS
        return first, undecided(SAMPLING, reason)
    drawn, best = (_loop_acceptance(replay, sampled, sampled=draws) for draws in (True, False))
    return first, compare_sampling(drawn, best, sampled.counts, sampled.temperature, sampled.note)


def _explained(replay: Replay, draft: Draft, counted: ServerCounts, finding: Finding) -> Finding:
    """Name in the finding the misreadings of the draft that reproduce the server's acceptance, the closest first."""
    same = dict[str, float]()
    for name, other in other_readings(draft, replay.target):
        changed = replace(replay, speculator=replay.speculator._replace(weights=other))
        ours = _loop_acceptance(changed, counted, sampled=True)
        if not is_other(ours, counted.counts):
            same[name] = distance(ours, counted.counts)
    if not same:
        return finding
    nearest = [name for name in same if same[name] == min(same.values())]
    others = sorted(same.keys() - set(nearest), key=lambda name: (same[name], name))
    told = f"{finding.found}; our loop reproduces these counts with {' or '.join(nearest)}"
    told += f", less closely with {' or '.join(others)}" if others else ""
    return replace(finding, found=told, remedy=remedy_of(nearest, _MISREAD.format(" or ".join(nearest))))


def _loop_acceptance(replay: Replay, counted: ServerCounts, sampled: bool) -> LoopAcceptance:
    """Decode the prompts in the real loop, and count passes with a draft.

    The chain is as long as the server's chain or, if that is unknown, as the spec says. If all of the server's drafts
    are whole, as in vLLM, drafts here may also go beyond the longest text, and all accepted tokens count.
    """
    counts = counted.counts
    per_draft = round(counts.drafted / counts.drafts) if counts.drafts and counts.drafted else None
    tokens = replay.speculator.chain_length(counts.tokens or replay.speculator.named.tokens or per_draft)
    beyond, limits = 0, (replay.target.max_positions, replay.speculator.max_positions)
    if counts.drafted == tokens * (counts.drafts or 0):
        longest = max(map(len, replay.prompts)) + replay.config.max_new_tokens
        beyond = max(0, min([tokens, *(limit - longest for limit in limits if limit is not None)]))
    sampling = SamplingConfig(temperature=counted.temperature)
    config = replace(replay.config, sampling=sampling, max_new_tokens=replay.config.max_new_tokens + beyond)
    drafter = replay.speculator.chain(tokens, sampled)
    texts = count_steps(replay.target, drafter, replay.prompts, config, _BATCH)
    accepted = acceptance([[step for step in text if step.drafted and step.room >= beyond] for text in texts])
    if not accepted.passes:
        raise UserError("no text was long enough for a draft; pass prompts with longer answers")
    return LoopAcceptance(accepted, tokens, len(replay.prompts))
