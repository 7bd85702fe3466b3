"""Common misreadings of a draft's folder, which make the draft guess badly here or in a server, and how to find them.

A misreading is found if the draft predicts the target's own texts better when its folder is read that way.
"""

import copy
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from decoding.errors import UserError
from decoding.measure.proof.finding import Finding, problem
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import DSparkConfig
from decoding.model.dspark_draft import DSparkDraft, PairedDSpark
from decoding.model.eagle3_config import Eagle3Config
from decoding.model.eagle3_draft import Eagle3Draft
from decoding.model.forward import unscaled_embeddings
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.vocabulary import over_vocabulary
from trainer.data.batch import Example, collate
from trainer.drafts.dspark_start import rotary_of
from trainer.drafts.dspark_training import block_logits
from trainer.drafts.eagle3_training import run_chains
from trainer.export.readback import heads_logits
from trainer.target.loading import OnlineTarget

Weights = MedusaHeads | CausalLM | DSparkDraft | Eagle3Draft
Draft = DSparkDraft | Eagle3Draft
Predictions = Iterator[tuple[int, Int[Tensor, " labels"], Float[Tensor, "labels vocab"]]]
"""For each depth (from 0): tokens of a text, and the logits that predict them."""

_TOKENS = 4
"""Number of depths to compare if the weights can draft any number of tokens."""
_Z = 4.0
"""Number of standard errors beyond which a misreading counts as a better fit; large, because many misreadings are
tried.
"""
_THETAS = (1e4, 5e5, 1e6)
_ROTARY = ("default", "linear", "llama3", "yarn")
_PARTS: Mapping[str, tuple[str, nn.Module | None]] = {
    "no Markov bias": ("markov", None),
    "no norm_before_fc": ("input_norm", None),
    "no fc_norm": ("fc_norm", nn.ModuleList()),
}
"""Maps each misreading to the part that it leaves out and to the value that takes the part's place."""
FP16, _FP32 = "fp16 arithmetic", "fp32 arithmetic"


def depths_of(weights: Weights) -> int | None:
    """Return the number of tokens that the weights draft at a time; None if they can draft any number."""
    if isinstance(weights, CausalLM | Eagle3Draft):
        return None
    config = weights.config
    return config.num_heads if isinstance(config, MedusaConfig) else config.block_size


@torch.inference_mode()
def guesses(
    weights: Weights, target: CausalLM, texts: Sequence[Sequence[int]]
) -> tuple[Int[Tensor, " places"], Int[Tensor, " places"]]:
    """Return tokens of the texts, and the tokens that the weights draft in their places. Each token of a text appears
    once for every depth at which the weights draft it.

    Raises UserError for a target whose states cannot be read.
    """
    online = OnlineTarget(target) if isinstance(weights, DSparkDraft | Eagle3Draft) else None
    predicted = (prediction for text in texts for prediction in _predicted(weights, target, online, text))
    labels, tokens = zip(*((labels, logits.argmax(-1)) for _, labels, logits in predicted), strict=True)
    return torch.cat(labels), torch.cat(tokens)


def _predicted(weights: Weights, target: CausalLM, online: OnlineTarget | None, text: Sequence[int]) -> Predictions:
    """Draft after each token of a text. Every draft reads the text's own tokens."""
    tokens = torch.tensor(list(text), device=target.device)
    if isinstance(weights, CausalLM):
        logits = weights.model(input_ids=tokens[None], use_cache=False).logits[0, :-1]
        yield 0, tokens[1:], over_vocabulary(logits, weights.output_tokens, target.vocab_size)
    elif isinstance(weights, MedusaHeads):
        count = len(text) - weights.config.num_heads - 1
        for head, logits in enumerate(heads_logits(weights, target, text, len(text))):
            yield head, tokens[head + 2 :][:count], logits[:count]
    elif online is not None and isinstance(weights, DSparkDraft):
        yield from block_logits(PairedDSpark(weights, target), online, text, 1)
    elif online is not None and isinstance(weights, Eagle3Draft):
        yield from continued_logits(weights, target, online, text)


def continued_logits(draft: Eagle3Draft, target: CausalLM, online: OnlineTarget, text: Sequence[int]) -> Predictions:
    """Yield an EAGLE-3 draft's logits at `_TOKENS` depths. At each depth the draft reads the text's own tokens in place
    of tokens that it drafted.
    """
    batch = collate([Example(text, [True] * len(text), 1)]).to(target.device)
    _, states = online.tapped(batch, draft.config.target_layer_ids)
    anchors = torch.arange(1, len(text) - 1, device=target.device)
    chains = run_chains(draft, states, unscaled_embeddings(target.model, batch.tokens), batch, anchors[None], _TOKENS)
    ran = chains[0].unflatten(0, (-1, _TOKENS))
    for depth in range(min(_TOKENS, len(anchors))):
        logits = draft.logits(ran[: len(anchors) - depth, depth])
        yield depth, batch.tokens[0, 2 + depth :], over_vocabulary(logits, draft.output_tokens, target.vocab_size)


# --- misreadings ------------------------------------------------------------------------------------------------------


def other_readings(draft: Draft, target: CausalLM) -> Iterator[tuple[str, Draft]]:
    """Yield the copies of a draft that common misreadings produce, each with the name of its misreading."""
    config = draft.config
    for name, change in {**_other_configs(config), **_other_ropes(config, target)}.items():
        try:
            yield name, _with_config(draft, target, **change)
        except UserError:  # the layer does not exist, or a DFlash draft cannot be read that way
            continue
    for name, edit in {**_other_states(config, target), **_other_parts(draft)}.items():
        changed = copy.deepcopy(draft)
        edit(changed)
        yield name, changed


def _other_configs(config: DSparkConfig | Eagle3Config) -> dict[str, dict[str, Any]]:
    """Return one change of the config per misreading, keyed by the name of the misreading. Each change imitates a
    program that ignores a setting or reads it in another way.
    """
    changes: dict[str, dict[str, Any]] = {
        f"taps one layer {name}": {"target_layer_ids": tuple(tap + step for tap in config.target_layer_ids)}
        for name, step in (("lower", -1), ("higher", 1))
    }
    if isinstance(config, Eagle3Config):
        flags = {"norm_before_residual": config.norm_before_residual, "norm_output": config.norm_output}
    else:
        flags = {"sample_from_anchor": config.sample_from_anchor}
        causal = {sight.causal for sight in config.sights}
        names = {True: "a causal block", False: "a bidirectional block"}
        changes |= {name: {"is_causal": is_causal} for is_causal, name in names.items() if causal != {is_causal}}
    return {**changes, **{f"{name} the other way": {name: not value} for name, value in flags.items()}}


def _other_states(config: DSparkConfig | Eagle3Config, target: CausalLM) -> dict[str, Callable[[Any], object]]:
    """Return one edit of the draft per misreading, keyed by the name of the misreading. After an edit, the draft reads
    other states of the target.
    """
    decoder: Any = target.model.get_decoder()
    norms = [module for module in decoder.children() if "norm" in type(module).__name__.lower()]
    taps, width = len(config.target_layer_ids), (-1, config.hidden_size)
    changes: dict[str, Callable[[Tensor], Tensor]] = {"taps after the final norm": norms[-1]} if norms else {}

    def only(tap: int, states: Tensor) -> Tensor:
        return states[..., [tap] * taps, :]

    for tap, layer in enumerate(config.target_layer_ids if taps > 1 else ()):
        changes[f"layer {layer} for all taps"] = partial(only, tap)

    def reads(change: Callable[[Tensor], Tensor], draft: Any) -> None:
        entry = "fused" if isinstance(draft, Eagle3Draft) else "text_keys"
        method = getattr(draft, entry)
        setattr(draft, entry, lambda states, *args: method(change(states.unflatten(-1, width)).flatten(-2), *args))

    return {name: partial(reads, change) for name, change in changes.items()}


def _other_parts(draft: Draft) -> dict[str, Callable[[Any], object]]:
    """Return one edit of the draft per misreading, keyed by the name of the misreading. Each edit imitates a program
    that ignores a part of the draft or takes one part for another.
    """
    config, others = draft.config, dict[str, tuple[str, Any]]()
    others |= {name: other for name, other in _PARTS.items() if getattr(draft, other[0], None)}
    if config.draft_vocab_size not in (None, config.vocab_size):
        outputs = torch.arange(len(draft.d2t), device=draft.d2t.device)
        last = config.vocab_size - 1 - outputs  # with a larger offset, the token would not exist
        others["no d2t"] = "d2t", 0 * outputs
        others["offsets in d2t as token ids"] = "d2t", draft.d2t - outputs
        others["token ids in d2t as offsets"] = "d2t", torch.minimum(draft.d2t + outputs, last)

    def put(part: str, value: Any, draft: Any) -> None:
        setattr(draft, part, value)

    half = draft.fc.weight.dtype == torch.float16
    edits: dict[str, Callable[[Any], object]] = {name: partial(put, *other) for name, other in others.items()}
    return {**edits, **({_FP32: nn.Module.float} if half else {FP16: nn.Module.half})}


def _other_ropes(config: DSparkConfig | Eagle3Config, target: CausalLM) -> dict[str, dict[str, Any]]:
    """Return changes of the rotary embeddings, keyed by the name of the misreading."""
    own: Mapping[str, Any]
    if isinstance(config, Eagle3Config):
        own = config.rope_parameters
    else:
        own = {"rope_type": "default", **config.rope_scaling, "rope_theta": config.rope_theta}
    of_target = rotary_of(target)
    readable = of_target.get("rope_type") in _ROTARY and of_target.get("partial_rotary_factor") in (None, 1)
    ropes: dict[str, Mapping[str, Any]] = {f"rope_theta {theta:g}": {**own, "rope_theta": theta} for theta in _THETAS}
    ropes["unscaled rotary embeddings"] = {"rope_theta": own["rope_theta"], "rope_type": "default"}
    ropes["the target's rotary embeddings"] = of_target if readable else own
    others = {name: dict(rope) for name, rope in ropes.items() if rope != own}
    if isinstance(config, Eagle3Config):
        return {name: {"rope_parameters": rope} for name, rope in others.items()}
    return {
        name: {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {} if rope["rope_type"] == "default" else rope}
        for name, rope in others.items()
    }


def _with_config(draft: Draft, target: CausalLM, **changes: Any) -> Draft:
    """Return a copy of a draft with other settings; raise UserError if these settings do not fit the target."""
    other: Draft
    if isinstance(draft, DSparkDraft):
        config = replace(draft.config, **changes)
        config.check_fits(target)
        other = DSparkDraft(config)
    else:
        other = Eagle3Draft(replace(draft.config, **changes).for_target(target))
    other.load_state_dict(draft.state_dict())
    return other.to(draft.fc.weight).requires_grad_(False).eval()


def remedy_of(names: Collection[str], otherwise: str) -> str:
    """Return the remedy of misreadings; ``otherwise`` is the remedy for a config that is read in another way."""
    narrow = "serve the draft in bf16 or fp32: its states exceed the range of fp16"
    return narrow if {FP16, _FP32} & set(names) else otherwise


def misread(check: str, target: CausalLM, weights: Weights, texts: Sequence[Sequence[int]]) -> Finding | None:
    """Return a problem if a misreading of the weights predicts the target's texts better, or if the weights do not
    predict them at all.

    Draft models are not checked, because they do not read the target.
    """
    if isinstance(weights, CausalLM):
        return None
    labels, tokens = guesses(weights, target, texts)
    hits, most_frequent, shares = labels == tokens, labels == labels.bincount().argmax(), dict[str, float]()
    told = f"the likeliest token is right in {hits.float().mean():.1%} of {len(labels):,} places of the target's texts"
    for name, other in () if isinstance(weights, MedusaHeads) else other_readings(weights, target):
        theirs = labels == guesses(other, target, texts)[1]
        if _fits_better(theirs, hits) and theirs.sum() > most_frequent.sum():
            shares[name] = float(theirs.float().mean())
    if shares:
        most = max(shares.values())
        best = [name for name in shares if shares[name] == most]
        named = " or ".join(best)
        remedy = f"the draft was trained with {named}: correct its config.json, or train the draft as its config says"
        return problem(check, f"{told}, but in {most:.1%} with {named}", remedy_of(best, remedy))
    if _fits_better(most_frequent, hits):
        remedy = "pass the target of the training, or train on this target"
        told += (
            ", fewer than the most frequent token alone: the weights are for another target or another order of tokens"
        )
        return problem(check, told, remedy)
    return None


def _fits_better(theirs: Bool[Tensor, " places"], ours: Bool[Tensor, " places"]) -> bool:
    """Return True if ``theirs`` is right significantly more often than ``ours`` (McNemar's test)."""
    better, worse = int((theirs & ~ours).sum()), int((ours & ~theirs).sum())
    return bool(better - worse > _Z * (better + worse) ** 0.5)
