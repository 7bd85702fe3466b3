"""Checks of a drafter's weights against a target, by the same functions that loading calls. No weights are loaded."""

from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.drafters.registry import weights_of
from decoding.drafters.spec import DrafterSpec
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.heads import CONFIG_NAME, MedusaConfig, read_config
from decoding.model.hub import hub_name, local_folder
from decoding.model.loading import (
    UNREADABLE,
    check_same_tokenizer,
    check_trimmed,
    is_heads_folder,
    parallel_folder,
)
from decoding.model.parallel import WEIGHTS_NAME as PARALLEL_WEIGHTS
from decoding.model.parallel import read_config as read_parallel_config
from decoding.model.stored import check_tensors, read_header, weights_header
from trainer.doctor.finding import Finding, note, ok, problem
from trainer.doctor.reading import Skeleton, check_fetched, check_pickled, output_tokens_of, read_skeleton
from trainer.doctor.refusals import attempt, refused
from trainer.export.companions import is_adapted, read_provenance, target_name, trained_for
from trainer.export.task import HEADS, kind_held_in
from trainer.servers.configs import is_vllm_heads

_COPY = "copy the folder again from the training run"
_OWN = "give weights that were trained on this target"


class Examined(NamedTuple):
    """A drafter's findings, the bytes of its weights, its draft model if it has one, and the format to export it in.

    ``format``: the one that most programs load of those that have a place for these weights; None for weights that no
    training run of this project wrote into a folder here.
    """

    findings: list[Finding]
    bytes: int = 0
    draft: Skeleton | None = None
    format: str | None = None


def examine(spec: DrafterSpec, target: Skeleton, longest: int, trusted: bool = False) -> Examined:
    """Check one drafter against the target. ValueError where there is no such folder or repository."""
    weights = weights_of(spec)
    if weights is None or spec.path is None:
        return Examined([ok("weights", f"{spec.name} needs none: it drafts from the text, on any target")])
    folder = local_folder(spec.path, weights=False)
    if (pickled := check_pickled(spec.path, folder)) is not None:
        return Examined([pickled])
    if is_vllm_heads(folder):
        remedy = "give the folder of the training run that they are from"
        return Examined([problem("files", f"{spec.path} holds heads in vLLM's format", remedy)])
    if weights == "heads":
        return _examine_heads(spec.path, folder, target, trusted)
    try:
        misnamed = _misnamed(spec, folder, weights)
    except UNREADABLE as error:
        misnamed = refused("files", error, _COPY)
    if misnamed is not None:
        return Examined([misnamed])
    return _examine_draft(spec, target, longest, trusted)


# --- heads ------------------------------------------------------------------------------------------------------------


def _examine_heads(path: str, folder: Path, target: Skeleton, trusted: bool) -> Examined:
    if (missing := check_fetched(path, folder)) is not None:
        return Examined([missing])
    try:
        config = read_config(folder)
        header = weights_header(folder, _COPY)
        check_tensors(folder / CONFIG_NAME, header, config.shapes(), _COPY)
    except UNREADABLE as error:
        return Examined([refused("files", error, "give a folder of heads, such as runs/NAME/final")])
    itemsize = target.model.dtype.itemsize
    count = sum(prod(tensor.shape) for tensor in header.values()) * itemsize
    findings = [
        ok("files", f"{config.num_heads} heads, a tree of {len(config.tree)} nodes, {len(header)} tensors"),
        check_heads_fit(config, target),
        check_origin(folder, target, trusted, reads_target=True),
    ]
    return Examined(findings, count, format=_format(folder, path, plain=not config.markov_rank))


def check_heads_fit(config: MedusaConfig, target: Skeleton) -> Finding:
    """Compare the heads' sizes with the target's."""

    def check() -> Finding:
        config.check_fits(target.model.hidden_size, target.model.vocab_size)
        return ok("sizes", f"hidden states of {config.hidden_size}, {config.vocab_size} tokens, as the target")

    return attempt("sizes", check, _OWN)


# --- drafts -----------------------------------------------------------------------------------------------------------


def _misnamed(spec: DrafterSpec, folder: Path, weights: str) -> Finding | None:
    """Return a problem for a folder that holds another kind of weights than the drafter's name says."""
    if is_heads_folder(folder):
        return problem("files", f"{spec.path} holds heads, not a draft model", f"give heads:{spec.path}")
    is_parallel = parallel_folder(folder) is not None
    if weights == "parallel draft" and not is_parallel:
        return problem("files", f"{spec.path} holds no parallel draft", f"give draft:{spec.path}")
    if weights != "parallel draft" and is_parallel and any(read_parallel_config(folder).shapes()):
        found = f"{spec.path} is a parallel draft with parts that an ordinary draft would leave out"
        return problem("files", found, f"give parallel:{spec.path}")
    return None


def _examine_draft(spec: DrafterSpec, target: Skeleton, longest: int, trusted: bool) -> Examined:
    assert spec.path is not None
    findings, draft = read_skeleton(spec.path, target.model.dtype, trusted)
    if draft is None:
        return Examined(findings)
    by_text = weights_of(spec) == "draft and tokenizer"
    parts = check_parallel(draft, target) if weights_of(spec) == "parallel draft" else Parts()
    if parts.finding is not None:
        findings.append(parts.finding)
    if by_text:
        findings.append(ok("tokenizer", "its own: it drafts by text, for any target"))
    else:
        findings += _tokens_of(draft, target, trusted, parts.reads_target)
    findings.append(check_draft_positions(draft, target, longest))
    return Examined(findings, draft.bytes + parts.bytes, draft, _format(draft.folder, draft.name, parts.bytes == 0))


def _tokens_of(draft: Skeleton, target: Skeleton, trusted: bool, reads_target: bool) -> list[Finding]:
    """Compare tokenizers and vocabularies; where the tokens are equal, also their ends and the origin."""
    found = [check_tokenizer(draft, target), check_draft_vocabulary(draft, target)]
    if found[0].status != "ok":  # such a draft was made for another target in any case
        return found
    origin = check_origin(draft.folder, target, trusted, reads_target, draft.name)
    return [*found, check_special_tokens(draft, target), origin]


class Parts(NamedTuple):
    """Parts of a parallel draft beside its model: their finding, their bytes, and if they read hidden states."""

    finding: Finding | None = None
    bytes: int = 0
    reads_target: bool = False


def check_parallel(draft: Skeleton, target: Skeleton) -> Parts:
    """Compare a parallel draft's parts with their file and with the target."""
    try:
        config = read_parallel_config(draft.folder)
        config.check_fits(target.model.hidden_size)
        shapes = dict(config.shapes())
        if shapes:
            file = draft.folder / PARALLEL_WEIGHTS
            check_tensors(file, read_header(file, _COPY), shapes.items(), _COPY)
    except UNREADABLE as error:
        return Parts(refused("parts", error, _OWN))
    reads = "" if config.target_hidden_size is None else f", reads hidden states of {config.target_hidden_size}"
    count = sum(map(prod, shapes.values())) * target.model.dtype.itemsize
    return Parts(ok("parts", f"{config.tokens} tokens in one forward{reads}"), count, bool(reads))


def check_tokenizer(draft: Skeleton, target: Skeleton) -> Finding:
    """Compare the tokenizers: equal ids must mean equal texts."""

    def check() -> Finding:
        check_same_tokenizer(target.tokenizer, draft.tokenizer)
        return ok("tokenizer", f"{len(draft.tokenizer)} tokens, the target's own")

    found = attempt("tokenizer", check, _OWN)
    if found.status == "ok":
        return found
    return problem("tokenizer", found.found, f"{found.remedy}, or other-tokenizer:{draft.name}, which drafts by text")


def check_special_tokens(draft: Skeleton, target: Skeleton) -> Finding:
    """Compare the special tokens; the target's alone end a text, and a draft that expects others guesses them wrong."""
    own, wanted = (_special_tokens(each.tokenizer) for each in (draft, target))
    if differing := sorted(name for name in wanted if own.get(name) not in (None, wanted[name])):
        name = differing[0]
        found = f"{name} is {own[name]!r} in the draft and {wanted[name]!r} in the target, whose own decides"
        return note("special tokens", found, "train or realign the draft on the target's answers (headstart realign)")
    return ok("special tokens", "as the target's")


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    named = ("bos_token", "eos_token")
    return {name: str(token) for name in named if (token := getattr(tokenizer, name)) is not None}


def check_draft_vocabulary(draft: Skeleton, target: Skeleton) -> Finding:
    """Compare the tokens that the draft can write with the target's; trimmed and padded lm_heads are told."""

    def check() -> Finding:
        kept = output_tokens_of(draft)
        if kept is None:
            return _untrimmed(draft.model.vocab_size, target.model.vocab_size)
        check_trimmed(draft.name, kept, target.model.vocab_size)
        return ok("vocabulary", f"trimmed to {len(kept)} of {target.model.vocab_size} tokens", written=len(kept))

    return attempt("vocabulary", check, "trim it to tokens of the target")


def _untrimmed(own: int, wanted: int) -> Finding:
    if own == wanted:
        return ok("vocabulary", f"{own} tokens, as the target", written=own)
    if own < wanted:
        return ok("vocabulary", f"{own} of {wanted} tokens: it drafts no others", written=own)
    return ok("vocabulary", f"{own} tokens, {own - wanted} more than the target, which are never drafted", written=own)


def check_draft_positions(draft: Skeleton, target: Skeleton, longest: int) -> Finding:
    """Compare the text that the draft can follow with the ``longest`` to decode, then with the target's positions."""
    held, whole = draft.model.max_text, target.model.max_positions
    remedy = "give shorter texts, or train a draft with a window (draft.window)"
    if held is None:
        return ok("positions", "it follows texts of any length")
    if held < longest:
        found = f"the draft follows {held} tokens, and texts of {longest} are to be decoded"
        return problem("positions", found, f"{remedy}, or give --longest {held}", held=held)
    if whole is None or held < whole:
        told = f"the draft follows {held} tokens, the target {'any number' if whole is None else whole}"
        return note("positions", f"{told}: longer texts are refused with this draft", remedy, held=held)
    return ok("positions", f"texts of up to {held} tokens", held=held)


def _format(folder: Path, name: str, plain: bool) -> str | None:
    """Return `Examined.format`; ``plain`` weights have no part that is this project's own."""
    if hub_name(name) is not None or read_provenance(folder) is None:
        return None
    if not plain:
        return "headstart"
    return "vllm" if kind_held_in(folder) == HEADS else "draft"


# --- origin -----------------------------------------------------------------------------------------------------------


def check_origin(
    folder: Path, target: Skeleton, trusted: bool, reads_target: bool, draft: str | None = None
) -> Finding:
    """Compare the target that the weights were trained on, by its fingerprint, with this one.

    ``reads_target``: the weights read the target's hidden states, and fit no other. ``draft``: name of a draft model.
    """

    def check() -> Finding:
        wanted = trained_for(folder)
        if wanted is None:
            return _unknown_origin(reads_target)
        if check_fetched(target.name, target.folder) is not None:
            return note("origin", f"trained on {wanted}; the target's weights are not here", "fetch the target first")
        found = stored_fingerprint(target.name, trusted)
        if found == wanted:
            return ok("origin", f"trained on this very target ({found})", fingerprint=found)
        return _foreign(folder, wanted, found, target.asked, reads_target, draft)

    return attempt("origin", check, "give a target whose weights can be read")


def _unknown_origin(reads_target: bool) -> Finding:
    if not reads_target:
        return ok("origin", "no provenance.json: a model of its own, or trained elsewhere")
    remedy = "measure their acceptance with headstart evaluate before they are used"
    return note("origin", "no provenance.json tells the target that they were trained on", remedy)


def _foreign(folder: Path, wanted: str, found: str, target: str, reads_target: bool, draft: str | None) -> Finding:
    stored = read_provenance(folder)
    name = target_name(stored)
    told = f"trained on another target, {name} ({wanted}); this one is {found}"
    figures = {"trained_on": wanted, "target": found}
    if is_adapted(stored) and (folder / "target").is_dir():
        return problem(
            "origin", f"{told}: they belong to the target beside them", f"--target {folder / 'target'}", **figures
        )
    if reads_target:
        again = f"train again with target={target}: texts stay right, but few drafted tokens will be accepted"
        return problem("origin", told, again, **figures)
    remedy = f"headstart realign --target {target} --draft {draft} --prompts prompts.jsonl --output runs/realigned"
    return note("origin", f"{told}; the texts stay right, but more drafted tokens are refused", remedy, **figures)


def parts_of(specs: Sequence[DrafterSpec], examined: Sequence[Examined]) -> list[tuple[str, int]]:
    """Return names and bytes of the weights that drafters load; weights that several share are counted once."""
    found: dict[tuple[str | None, str | None], tuple[str, int]] = {}
    for spec, each in zip(specs, examined, strict=True):
        if each.bytes:
            found.setdefault((weights_of(spec), spec.path), (spec.name, each.bytes))
    return list(found.values())
