"""A trained speculator: loads it, drafts as a server does, and compares it with the served weights.

For a DSpark draft there are also common misreadings of its config, which make it draft badly here or in a server.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from safetensors.torch import load_file
from torch import Tensor, nn

from decoding.drafters import Drafter
from decoding.drafters.draft_model import DraftModelDrafter
from decoding.drafters.dspark import DSparkDrafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.drafters.registry import parse_drafter
from decoding.errors import UserError
from decoding.measure.proof.finding import Finding, ok, problem, undecided
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark import DSpark, DSparkDraft
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.hub import local_folder
from decoding.model.loading import load_draft, load_dspark, load_heads, load_model
from decoding.model.stored import read_header, read_object
from trainer.drafts.dspark import block_logits
from trainer.export.readback import heads_logits
from trainer.target.loading import OnlineTarget

_Z = 3.29
"""Number of standard errors beyond which a difference counts as significant."""
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
        except UserError:  # the layer does not exist, or a DFlash draft cannot be misread in this way
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
    """Hide later slots from each slot; their keys come last.

    The batch contains one text, or blocks that are masked from each other.
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
        remedy = f"it was trained with {best}: write this in its config.json, or train it as its config says"
        return problem(check, f"{told}, but {found[best]:.1%} with {best}", remedy)
    if int(hits.sum()) <= most_frequent:
        remedy = "pass the target that it was trained on, or train it on this one"
        return problem(check, f"{told}, no better than the most frequent token: it fits another target", remedy)
    return None


def _hits(
    target: CausalLM, online: OnlineTarget, draft: DSparkDraft, texts: Sequence[Sequence[int]]
) -> tuple[Tensor, Tensor]:
    """Return the tokens of the texts in all blocks, and for each token whether it is the draft's top-1."""
    blocks = (block for text in texts for block in block_logits(DSpark(draft, target), online, text, 1))
    labels, hits = zip(*((labels, logits.argmax(-1) == labels) for _, labels, logits in blocks), strict=True)
    return torch.cat(labels), torch.cat(hits)


TOP_1 = "the draft's top-1"
_DRAFT_TOKENS = 4
_KINDS = {"heads": "heads", "draft": "draft", "draft-tree": "draft", "dspark": "dspark"}
"""Drafter's name -> kind of its weights."""
_LEAST = 0.98
"""If fewer top-1 tokens than this share are equal, the weights differ: rounding to bf16 changes fewer tokens."""
_WEIGHTS = "model.safetensors"
_REMEDY = "export the speculator again from the run that was measured, and point the server at the new folder"

_Top1 = Callable[[Any, Sequence[int]], Tensor]
"""Function from weights and a text to the top-1 tokens at all positions."""

Weights = MedusaHeads | CausalLM | DSparkDraft


class SpeculatorName(NamedTuple):
    """A speculator's kind, its folder or hub id, and the chain length in its spec (None if it does not set one)."""

    kind: str
    path: str
    tokens: int | None

    @property
    def folder(self) -> Path:
        """The local folder; for a hub id, the folder in the cache."""
        return local_folder(self.path)


class Speculator(NamedTuple):
    """The weights of a speculator, loaded for a target."""

    named: SpeculatorName
    weights: Weights

    @property
    def max_positions(self) -> int | None:
        """Length of the longest text for which it drafts; None if there is no limit."""
        return self.chain(1).max_positions

    def chain_length(self, wanted: int | None) -> int:
        """Return ``wanted``, but at most as many as the weights can draft.

        For None return this maximum (draft model: 4).
        """
        if isinstance(self.weights, CausalLM):
            return wanted or _DRAFT_TOKENS
        config = self.weights.config
        most = config.num_heads if isinstance(config, MedusaConfig) else config.block_size
        return min(wanted or most, most)

    def chain(self, tokens: int, sampled: bool = True) -> Drafter:
        """Make a drafter of chains.

        Above temperature 0 it samples from q if ``sampled``, and otherwise takes the argmax.
        """
        if isinstance(self.weights, CausalLM):
            return DraftModelDrafter(self.weights, tokens, sampled)
        drafter: MedusaDrafter | DSparkDrafter
        if isinstance(self.weights, MedusaHeads):
            drafter = MedusaDrafter(self.weights, [(0,) * depth for depth in range(1, tokens + 1)], sampled=sampled)
        else:
            drafter = DSparkDrafter(self.weights, tokens, sampled=sampled)
        return drafter


def named_speculator(text: str) -> SpeculatorName:
    """Parse a drafter's spec or a folder without reading weights.

    Raises UserError for a drafter without trained weights.
    """
    spec = parse_drafter(text)
    kind = _KINDS.get(str(spec.options.get("of", spec.name)))
    if kind is None or spec.path is None:
        raise UserError(
            f"{text!r} does not have trained weights that a server could misread",
            "pass heads:PATH, draft:PATH, dspark:PATH or a folder",
        )
    tokens = spec.options.get("tokens")
    return SpeculatorName(kind, spec.path, tokens if spec.name in ("draft", "dspark") else None)


def load_speculator(named: SpeculatorName, target: CausalLM, trusted: bool = False) -> Speculator:
    """Load the weights to run on the target."""
    if named.kind == "heads":
        return Speculator(named, load_heads(named.folder, target))
    if named.kind == "dspark":
        return Speculator(named, load_dspark(named.path, target))
    return Speculator(named, load_draft(named.path, target, None, trusted))


# --- the weights that a server reads ----------------------------------------------------------------------------------


def compare_top_1(
    target: CausalLM, trained: Weights, served: Path, texts: Sequence[Sequence[int]], trusted: bool
) -> Finding:
    """Compare the top-1 tokens of trained and served weights at all positions of the texts."""
    tied = False
    top_1: _Top1 = _draft_top_1
    read: Any
    try:
        if isinstance(trained, MedusaHeads):
            top_1, read = _heads_top_1(target), load_heads(served, target)
        elif isinstance(trained, DSparkDraft):
            read = load_dspark(served, target)
            try:
                online = OnlineTarget(target)
            except UserError as error:
                return undecided(TOP_1, str(error))
            top_1 = _dspark_top_1(target, online, min(trained.config.block_size, read.config.block_size))
        else:
            read, tied = _read_served_draft(served, target, trusted)
    except UserError as error:
        return problem(TOP_1, f"the served weights cannot be read: {error}", _REMEDY)
    ours, theirs = (torch.cat([top_1(side, text).flatten() for text in texts]) for side in (trained, read))
    share, count = float((ours == theirs).float().mean()), len(ours)
    told = f"{share:.1%} of {count:,} top-1 tokens are equal"
    figures = {"share": share, "positions": count}
    # if the lm_head is tied, even the smallest difference is not rounding
    if share == 1 or (share >= _LEAST and not tied):
        return ok(TOP_1, told, **figures)
    if tied:
        found = f"{told}: servers ignore its lm_head.weight because tie_word_embeddings is true"
        return problem(TOP_1, found, "set tie_word_embeddings to false in the served config.json", **figures)
    others = f"{told}: the served weights differ{_other_tensors(trained, read)}"
    return problem(TOP_1, others, _REMEDY, **figures)


def _other_tensors(trained: Weights, read: Weights) -> str:
    """Return in brackets which tensors differ, and whether the first one has the same rows in another order."""
    ours, theirs = ((side.model if isinstance(side, CausalLM) else side).state_dict() for side in (trained, read))
    names = [name for name in ours if name not in theirs or not torch.equal(ours[name], theirs[name])]
    if not names:
        return ""
    (first, *_), other = names, theirs.get(names[0])
    order = other is not None and torch.equal(ours[first].sort(0).values, other.sort(0).values)
    told = f"{first} has the same rows in another order, as if token ids were mapped differently" if order else first
    return f" ({told}; {len(names)} of {len(ours)} tensors)"


def _read_served_draft(folder: Path, target: CausalLM, trusted: bool) -> tuple[CausalLM, bool]:
    """Load a draft as vLLM and transformers do, and return True if ``tie_word_embeddings`` hides another lm_head."""
    model = load_model(str(folder), target.dtype, target.device, trusted)
    stored, path = read_object(folder / "config.json", _REMEDY), folder / _WEIGHTS
    embeddings: Any = model.get_input_embeddings()
    lm_head: Any = model.get_output_embeddings()
    tied = False
    if stored.get("tie_word_embeddings") and path.is_file() and "lm_head.weight" in read_header(path, _REMEDY):
        tied = not torch.equal(load_file(path)["lm_head.weight"].to(embeddings.weight), embeddings.weight)
        lm_head.weight = embeddings.weight
    return CausalLM(model), tied


@torch.inference_mode()
def _draft_top_1(draft: CausalLM, text: Sequence[int]) -> Int[Tensor, " positions"]:
    logits: Tensor = draft.model(input_ids=torch.tensor([list(text)], device=draft.device), use_cache=False).logits[0]
    best = logits.argmax(-1)
    return best if draft.output_tokens is None else draft.output_tokens[best]


def _dspark_top_1(target: CausalLM, online: OnlineTarget, depths: int) -> _Top1:
    """Return a function for the top-1 of the first ``depths`` tokens of each block; both drafts have so many."""

    def top_1(draft: DSparkDraft, text: Sequence[int]) -> Int[Tensor, " labels"]:
        """Draft each token after the text's own tokens."""
        found = block_logits(DSpark(draft, target), online, text, 1)
        return torch.cat([logits.argmax(-1) for depth, _, logits in found if depth < depths])

    return top_1


def _heads_top_1(target: CausalLM) -> _Top1:
    def top_1(heads: MedusaHeads, text: Sequence[int]) -> Tensor:
        """Draft each token after the text's own tokens."""
        return heads_logits(heads, target, text, len(text)).argmax(-1)

    return top_1
