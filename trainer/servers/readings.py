"""Common misreadings of a DSpark draft's config, which make it draft badly here or in a server."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from decoding.errors import UserError
from decoding.measure.proof.finding import Finding, problem
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark import DSpark, DSparkDraft
from trainer.drafts.dspark import block_logits
from trainer.target.hidden import OnlineTarget

_Z = 3.29
"""Standard errors beyond which a difference is significant."""
_THETAS = (1e4, 5e5, 1e6)
CAUSAL = "a causal block"
"""Name of the misreading that hides the right keys only in a batch of one text."""


def other_readings(draft: DSparkDraft, target: CausalLM) -> Iterator[tuple[str, DSparkDraft]]:
    """Yield the copies of a draft that common misreadings produce, each with the name of its misreading."""
    config = draft.config
    changes: dict[str, dict[str, Any]] = {
        f"taps one layer {name}": {"target_layer_ids": tuple(tap + step for tap in config.target_layer_ids)}
        for name, step in (("lower", -1), ("higher", 1))
    }
    changes["sample_from_anchor the other way"] = {"sample_from_anchor": not config.sample_from_anchor}
    changes |= {f"rope_theta {theta:g}": {"rope_theta": theta} for theta in _THETAS if theta != config.rope_theta}
    for name, change in changes.items():
        try:
            config = replace(draft.config, **change)
            config.check_fits(target)
        except UserError:  # the layer does not exist, or a DFlash draft cannot be read that way
            continue
        changed = copy.deepcopy(draft)
        changed.config = config
        yield name, changed
    decoder: Any = target.model.get_decoder()
    if norms := [module for module in decoder.children() if "norm" in type(module).__name__.lower()]:
        changed = copy.deepcopy(draft)
        changed.fc.register_forward_pre_hook(
            lambda module, args: norms[-1](args[0].unflatten(-1, (-1, module.out_features))).flatten(-2)
        )
        yield "taps behind the final norm", changed
    changed = copy.deepcopy(draft)
    for layer in changed.layers:
        layer.self_attn.register_forward_pre_hook(_causal)  # type: ignore[union-attr]
    yield CAUSAL, changed
    if draft.markov is not None:
        changed = copy.deepcopy(draft)
        changed.markov = None
        yield "no Markov bias", changed


def _causal(module: nn.Module, args: Any) -> Any:
    """Mask the later slots from each slot; their keys come last.

    The batch holds one text, or blocks that are masked from each other.
    """
    x, rotary, keys, values, mask = args
    least, slots = torch.finfo(keys.dtype).min, x.shape[1]
    above = keys.new_full((slots, slots), least).triu(1)
    above = nn.functional.pad(above, (keys.shape[2] - slots, 0))
    return x, rotary, keys, values, above if mask is None else (mask + above).clamp(min=least)


def misread(check: str, target: CausalLM, draft: DSparkDraft, texts: Sequence[Sequence[int]]) -> Finding | None:
    """Return a problem if the target's texts fit a misreading of the draft better, or do not fit the draft at all."""
    online = OnlineTarget(target)
    labels, hits = _hits(target, online, draft, texts)
    told = f"the draft's top-1 is right for {hits.float().mean():.1%} of {len(labels):,} tokens of the target's texts"
    most_frequent, found = int(labels.bincount().max()), dict[str, float]()
    for name, other in other_readings(draft, target):
        theirs = _hits(target, online, other, texts)[1]
        better, worse = int((theirs & ~hits).sum()), int((hits & ~theirs).sum())
        if better - worse > _Z * (better + worse) ** 0.5 and int(theirs.sum()) > most_frequent:  # McNemar's test
            found[name] = float(theirs.float().mean())
    if found:
        best = max(found, key=lambda name: found[name])
        remedy = f"it was trained with {best}: write that in its config.json, or train it as its config says"
        return problem(check, f"{told}, but {found[best]:.1%} with {best}", remedy)
    if int(hits.sum()) <= most_frequent:
        remedy = "pass the target that it was trained on, or train it on this one"
        return problem(check, f"{told}, no better than the most frequent token: it fits another target", remedy)
    return None


def _hits(
    target: CausalLM, online: OnlineTarget, draft: DSparkDraft, texts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Return the tokens of the texts in all blocks, and for each whether it is the draft's top-1."""
    blocks = (block for text in texts for block in block_logits(DSpark(draft, target), online, text, 1))
    labels, hits = zip(*((labels, logits.argmax(-1) == labels) for _, labels, logits in blocks), strict=True)
    return torch.cat(labels), torch.cat(hits)
