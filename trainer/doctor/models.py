"""Checks that a target loads and that drafters fit the target. The first checks read configs, tokenizers and headers of
weights; the last check decodes a text.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import PreTrainedTokenizerBase

from decoding.drafters.registry import DrafterLoader, weights_of
from decoding.drafters.spec import DrafterSpec
from decoding.errors import UserError
from decoding.files.fingerprint import stored_fingerprint
from decoding.files.folder import UNREADABLE, adapted_model, check_model_folder, quantisation, reason
from decoding.files.gguf_file import source_of
from decoding.files.hub import hub_name, local_folder
from decoding.files.stored import CONFIG_NAME, check_tensors, read_object, weights_header
from decoding.generate import DecodingConfig, Engine
from decoding.measure.markdown import one_line
from decoding.measure.proof.finding import Finding, all_pass, note, ok, problem
from decoding.measure.proof.greedy import greedy_identity
from decoding.measure.proof.reference import EngineText, Reference
from decoding.model.architecture import abilities, why_no_chains
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import read_dspark_config
from decoding.model.dspark_draft import read_described
from decoding.model.eagle3_config import read_eagle3_config
from decoding.model.eagle3_draft import read_described as read_eagle3
from decoding.model.heads import read_config
from decoding.model.loading import (
    check_same_tokenizer,
    eos_token_ids,
    load_model,
    load_tokenizer,
    model_without_weights,
)
from decoding.prompts import encode_prompt
from decoding.rules.sampling import SamplingConfig
from trainer.doctor.machine import size
from trainer.export.companions import trained_for
from trainer.export.server_traps import lost_in_servers, lost_of_eagle3

SMALL = 2e9
"""If all weights in fp32 have at most this many bytes, the models are loaded and tested by default."""
_TOKENS = 16
_PROMPT = "Once upon a time there was"
_COPY = "copy the folder again from its source"
_TRAINED_ON_IT = "use weights that were trained on this target"


class Skeleton(NamedTuple):
    """A model without weights (on the meta device, in the dtype of later loading), and its tokenizer."""

    name: str
    folder: Path
    model: CausalLM
    tokenizer: PreTrainedTokenizerBase

    @property
    def bytes(self) -> int:
        """Bytes of the model's weights in memory."""
        return sum(parameter.nbytes for parameter in self.model.model.parameters())


def attempt(check: str, work: Callable[[], Finding], remedy: str) -> Finding:
    """Return the finding of ``work``; an error becomes a problem, with the remedy of the error if it has one."""
    try:
        return work()
    except UserError as error:
        return problem(check, one_line(error.message), error.remedy or remedy)
    except UNREADABLE as error:
        return problem(check, one_line(reason(error)), remedy)


def read_skeleton(name: str, dtype: torch.dtype, trusted: bool) -> tuple[list[Finding], Skeleton | None]:
    """Read a model without its weights; return None if there is a problem.

    Raises UserError if the name does not exist.
    """
    folder = local_folder(name, weights=False)
    built: list[Skeleton] = []

    def build() -> Finding:
        model = CausalLM(model_without_weights(folder, dtype, trusted))
        tokenizer = load_tokenizer(name, trusted)
        shapes = {key: tuple(tensor.shape) for key, tensor in model.model.state_dict().items()}
        method = quantisation(folder)
        for key, stored in weights_header(folder, _COPY).items() if any(folder.glob("*.safetensors")) else ():
            if method is not None:
                break  # packed weights have different shapes and additional scales
            if shapes.get(key, tuple(stored.shape)) != tuple(stored.shape):
                sentence = f"{key} has shape {tuple(stored.shape)}, but config.json says {shapes[key]}"
                raise UserError(sentence, _COPY)
        count = sum(parameter.numel() for parameter in model.model.parameters())
        kind = type(model.model).__name__
        sentence = f"{kind}, {count / 1e6:,.1f}M parameters, {model.num_layers} layers; works: {abilities(model.model)}"
        sentence += "" if model.no_trees is None else f" ({why_no_chains(model.model) or model.no_trees})"
        sentence += "" if method is None else f"; weights quantised by {method}"
        if (source := source_of(folder)) is not None:
            sentence += f"; read from {source['file']} (quantised: {source['quantisation'] or 'no'}), as {folder}"
        built.append(Skeleton(name, folder, model, tokenizer))
        return ok("architecture", sentence, parameters=count)

    findings = [attempt("files", lambda: _files(name, folder), _COPY)]
    if all_pass(findings):
        findings.append(attempt("architecture", build, "use a causal LM that transformers supports"))
    return findings, built[0] if built else None


def fitting_recipes(target: CausalLM) -> tuple[str, ...]:
    """Return the names in recipes/any that can train drafters for a target.

    The recipe ``draft`` makes a draft from layers of the target. A target that verifies only chains cannot provide such
    a draft.
    """
    if why_no_chains(target.model):
        return ()
    return ("medusa1", "draft") if target.no_trees is None else ("medusa1", "dspark")


def _files(name: str, folder: Path) -> Finding:
    """Compare a model's config with the headers of its weights."""
    if not any((folder / config).is_file() for config in ("config.json", "adapter_config.json")):
        raise UserError(f"{name} is not a model: config.json is missing", "use a complete model folder")
    if (missing := _not_fetched(name, folder)) is not None:
        return missing
    if not any(folder.glob("*.safetensors")):
        remedy = "load the model in a trusted environment, and save it again with save_pretrained"
        raise UserError(f"{name} lacks safetensors files, and pickled weights are never read", remedy)
    check_model_folder(folder)
    held = weights_header(folder, _COPY)
    return ok("files", f"{len(held)} tensors" if held else f"adapters of {adapted_model(folder)}")


def _not_fetched(name: str, folder: Path) -> Finding | None:
    """Return a note if a Hub model's weights are not in the cache; nothing is downloaded here."""
    if (named := hub_name(name)) is None or any(folder.glob("*.safetensors")):
        return None
    revision = f" --revision {named.revision}" if named.revision else ""
    remedy = f"hf download {named.repo_id}{revision}, or let the first command download them"
    return note("files", f"the weights of {name} are not in the cache and were not checked", remedy)


# --- the target -------------------------------------------------------------------------------------------------------


def target_findings(target: Skeleton) -> list[Finding]:
    """Check a target's vocabulary, end-of-text tokens and positions."""
    held = target.model.max_positions
    return [
        check_vocabulary(target),
        check_end(target),
        ok("positions", "no limit" if held is None else f"texts of up to {held} tokens", held=held),
    ]


def check_vocabulary(target: Skeleton) -> Finding:
    """Compare the numbers of tokens of the tokenizer and of the model. The model may have more tokens than the
    tokenizer, as padding.
    """
    known, named = target.model.vocab_size, len(target.tokenizer)
    sentence = f"the tokenizer has {named} tokens and the model has {known}"
    if target.tokenizer.vocab_size > known:
        return problem("vocabulary", sentence, "use the model's own tokenizer")
    if named > known:
        beyond = [token for token, index in target.tokenizer.get_added_vocab().items() if index >= known]
        return note("vocabulary", sentence, f"keep {', '.join(beyond)} out of prompts: the model cannot read them")
    return ok("vocabulary", f"{known} tokens, {known - named} of them padding")


def check_end(target: Skeleton) -> Finding:
    """Report the tokens that end a text."""
    ends = eos_token_ids(target.model.model, target.tokenizer)
    if not ends:
        remedy = "set eos_token_id in generation_config.json, or limit texts by --max-new-tokens and --stop"
        return note("end of text", "neither config nor tokenizer names a token that ends texts", remedy)
    if max(ends) >= target.model.vocab_size:
        sentence = f"the end-of-text token is {max(ends)}, but the model has tokens 0 to {target.model.vocab_size - 1}"
        return problem("end of text", sentence, "correct eos_token_id in generation_config.json")
    names = [f"{target.tokenizer.convert_ids_to_tokens(token)!r} ({token})" for token in ends]
    return ok("end of text", ", ".join(names))


def check_memory(weights: Mapping[str, int], free: int | None) -> Finding:
    """Compare free memory with the size of all weights; long texts need additional memory."""
    needed = sum(weights.values())
    sentence = f"{' + '.join(f'{name} {size(count)}' for name, count in weights.items())} of weights"
    if free is None:
        return ok("memory", sentence, needed=needed)
    if needed > free:
        return problem("memory", f"{sentence}; {size(free)} free", "use a smaller target, or more or larger GPUs")
    return ok("memory", f"{sentence}; {size(free)} free", needed=needed, free=free)


# --- drafters ---------------------------------------------------------------------------------------------------------


class DrafterCheck(NamedTuple):
    """The findings on a drafter, and the size of the drafter's weights in bytes."""

    findings: list[Finding]
    weights: int = 0


def check_drafter(spec: DrafterSpec, target: Skeleton, trusted: bool = False) -> DrafterCheck:
    """Compare a drafter's weights with the target. Raises UserError if the path does not exist."""
    weights = weights_of(spec)
    if weights is None or spec.path is None:
        return DrafterCheck([ok("weights", f"{spec.name} needs no weights: it drafts from the text, for any target")])
    folder = local_folder(spec.path, weights=False)
    if weights in ("heads", "dspark draft", "eagle3 draft"):
        bytes_of: list[int] = []
        compare = {"heads": _heads, "dspark draft": _dspark}.get(weights, _eagle3)
        name = "heads" if weights == "heads" else "draft"
        findings = [] if weights == "heads" else layout_findings(spec)
        findings += [attempt(name, lambda: compare(str(spec.path), folder, target, bytes_of), _TRAINED_ON_IT)]
        if all_pass(findings):
            findings.append(attempt("origin", lambda: _origin(folder, target, trusted, True), _TRAINED_ON_IT))
        return DrafterCheck(findings, sum(bytes_of))
    findings, draft = read_skeleton(spec.path, target.model.dtype, trusted)
    if draft is None:
        return DrafterCheck(findings)
    if weights != "draft and tokenizer":
        findings.append(attempt("tokens", lambda: _tokens(draft, target), _TRAINED_ON_IT))
        findings.append(attempt("origin", lambda: _origin(folder, target, trusted, False), _TRAINED_ON_IT))
    return DrafterCheck(findings, draft.bytes)


def layout_findings(spec: DrafterSpec) -> list[Finding]:
    """Read only the config.json of a DSpark or EAGLE-3 draft; say which layout it has and which servers run it as it
    was trained.

    Raises UserError for other drafters.
    """
    weights = weights_of(spec)
    if weights not in ("dspark draft", "eagle3 draft") or spec.path is None:
        raise UserError(f"--drafter {spec} can be checked only with a target: add --target")
    folder = local_folder(spec.path, weights=False)

    def layout() -> Finding:
        stored = read_object(folder / CONFIG_NAME, _COPY)
        remedy = "headstart export --format dspark or gguf writes, if possible, a draft that servers run as in training"
        if weights == "dspark draft":
            config = read_dspark_config(folder)
            kind, lost = "DFlash" if config.is_dflash else "DSpark", lost_in_servers(config, stored)
        else:
            kind, lost = "EAGLE-3", lost_of_eagle3(read_eagle3_config(folder), stored)
            remedy = (
                "headstart export --format eagle3 writes the flat form; in this form all three servers run a "
                "draft of a plain Llama layer that reads the default three layers and has no flags or window"
            )
        form = "speculators' nested form" if "speculators_model_type" in stored else "flat form"
        right = [server for server, problems in lost.items() if not problems]
        sentence = f"{kind} in {form}; run as in training by {', '.join(right) or 'no server'}"
        if len(right) == len(lost):
            return ok("layout", sentence)
        wrong = [f"{server} {', '.join(problems)}" for server, problems in lost.items() if problems]
        return note("layout", "; ".join([sentence, *wrong]), remedy)

    return [attempt("layout", layout, _COPY)]


def _heads(name: str, folder: Path, target: Skeleton, bytes_of: list[int]) -> Finding:
    if (missing := _not_fetched(name, folder)) is not None:
        return missing
    config = read_config(folder)
    header = weights_header(folder, _COPY)
    check_tensors(folder / CONFIG_NAME, header, config.shapes(), _COPY)
    config.check_fits(target.model.hidden_size, target.model.vocab_size)
    bytes_of.append(sum(prod(tensor.shape) for tensor in header.values()) * target.model.dtype.itemsize)
    sentence = (
        f"{config.num_heads} heads, a tree of {len(config.tree)} nodes, hidden states of size {config.hidden_size}"
    )
    return ok("heads", sentence)


def _tokens(draft: Skeleton, target: Skeleton) -> Finding:
    try:
        check_same_tokenizer(target.tokenizer, draft.tokenizer)
    except UserError as error:
        remedy = f"{error.remedy}, or use other-tokenizer:{draft.name}, which drafts text, not tokens"
        raise UserError(error.message, remedy) from error
    return ok("tokens", "the draft has the target's tokenizer")


def _dspark(name: str, folder: Path, target: Skeleton, bytes_of: list[int]) -> Finding:
    if (missing := _not_fetched(name, folder)) is not None:
        return missing
    config, header = read_described(folder)
    config.check_fits(target.model)
    bytes_of.append(sum(prod(tensor.shape) for tensor in header.values()) * target.model.dtype.itemsize)
    taps = ", ".join(map(str, config.target_layer_ids))
    return ok("draft", f"{config.block_size} tokens per forward pass; reads the target's states after layers {taps}")


def _eagle3(name: str, folder: Path, target: Skeleton, bytes_of: list[int]) -> Finding:
    if (missing := _not_fetched(name, folder)) is not None:
        return missing
    config, header = read_eagle3(folder)
    config = config.for_target(target.model)
    bytes_of.append(sum(prod(tensor.shape) for tensor in header.values()) * target.model.dtype.itemsize)
    taps, tokens = ", ".join(map(str, config.target_layer_ids)), config.draft_vocab_size
    return ok(
        "draft",
        f"can draft {tokens} of the target's {config.vocab_size} tokens; reads the target's states after layers {taps}",
    )


def _origin(folder: Path, target: Skeleton, trusted: bool, reads_target: bool) -> Finding:
    """Compare the fingerprints of this target and of the target on which the weights were trained.

    ``reads_target``: the weights read the target's hidden states, so another target is a problem.
    """
    wanted = trained_for(folder)
    if wanted is None:
        return note("origin", "no provenance.json names a target", "measure acceptance with headstart evaluate")
    if (missing := _not_fetched(target.name, target.folder)) is not None:
        return note("origin", f"trained on {wanted}; this target's weights are not downloaded", missing.remedy)
    fingerprint = stored_fingerprint(target.name, trusted)
    if fingerprint == wanted:
        return ok("origin", f"trained on this target ({fingerprint})")
    difference = f"trained on another target ({wanted}; this one is {fingerprint})"
    if reads_target:
        adapted = folder / "target"
        remedy = f"use --target {adapted}" if adapted.is_dir() else "train the weights again on this target"
        return problem("origin", f"{difference}: few drafted tokens would be accepted", remedy)
    return note("origin", f"{difference}: fewer drafted tokens are accepted", "align the draft with headstart realign")


# --- decoding ---------------------------------------------------------------------------------------------------------


def check_decoding(name: str, dtype: torch.dtype, specs: Sequence[DrafterSpec], trusted: bool) -> list[Finding]:
    """Load the models, decode a short greedy text plainly and with each drafter, and check every text with plain
    passes.
    """
    loaded: list[tuple[CausalLM, PreTrainedTokenizerBase]] = []

    def decode(spec: DrafterSpec | None) -> Finding:
        if not loaded:
            loaded.append((CausalLM(load_model(name, dtype, trust_remote_code=trusted)), load_tokenizer(name, trusted)))
        target, tokenizer = loaded[0]
        ends = eos_token_ids(target.model, tokenizer)
        drafter = None if spec is None else DrafterLoader(target, tokenizer, trusted).load(spec)
        prompt = encode_prompt(_PROMPT, tokenizer, chat=True)
        made = Engine(target, drafter).decode(prompt, DecodingConfig(_TOKENS, eos_token_ids=ends))
        reference = Reference(target, SamplingConfig(temperature=1.0), ends)
        proof = greedy_identity(reference, [EngineText(tuple(prompt), tuple(made.tokens))])
        passes, accepted = len(made.steps), sum(step.accepted for step in made.steps)
        told = f"{len(made.tokens)} tokens in {passes} target passes, {accepted} drafted tokens accepted; {proof.found}"
        remedy = "" if proof.passed else "check more text with headstart verify"
        return Finding("decoding", proof.status, told, remedy, proof.figures)

    findings = []
    for spec in (None, *specs):
        findings.append(attempt("decoding", partial(decode, spec), "download the model again, or use a wider dtype"))
        if not loaded:
            break
    return findings


def is_small(weights: Mapping[str, int], itemsize: int, free: int | None) -> bool:
    """Return True if all weights in fp32 are small enough to be loaded by default."""
    in_fp32 = sum(weights.values()) * 4 / itemsize
    return in_fp32 <= min(SMALL, (SMALL if free is None else free) / 2)
