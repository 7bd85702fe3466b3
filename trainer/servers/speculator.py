"""Loads a trained speculator, drafts with it as a server does, and compares it with the served weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from decoding.drafters import Drafter
from decoding.drafters.draft_model import DraftModelDrafter
from decoding.drafters.dspark import DSparkDrafter
from decoding.drafters.eagle3 import Eagle3Drafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.drafters.registry import parse_drafter
from decoding.errors import UserError
from decoding.files.hub import local_folder
from decoding.files.stored import read_header, read_object
from decoding.measure.proof.finding import Finding, ok, problem, undecided
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_draft import DSparkDraft
from decoding.model.heads import MedusaHeads
from decoding.model.loading import load_draft, load_dspark, load_eagle3, load_heads, load_model
from trainer.servers.misreadings import Weights, depths_of, guesses

TOP_1 = "the draft's top-1"
_DRAFT_TOKENS = 4
_KINDS = {"heads": "heads", "draft": "draft", "draft-tree": "draft", "dspark": "dspark"}
_KINDS |= {"eagle3": "eagle3", "eagle3-tree": "eagle3"}
"""Maps names of drafters to the kinds of their weights."""
_LEAST = 0.98
"""If a smaller share of top-1 tokens is equal, the weights differ: rounding to bf16 changes fewer tokens than that."""
_WEIGHTS = "model.safetensors"
_REMEDY = "export the speculator again from the run that was measured, and point the server at the new folder"


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
        """Length of the longest text for which the speculator can draft; None if there is no limit."""
        return self.chain(1).max_positions

    def chain_length(self, wanted: int | None) -> int:
        """Return ``wanted``, or the number of tokens that the weights can draft if that is less. For None, return the
        number that the weights can draft, or 4 if there is no limit.
        """
        most = depths_of(self.weights)
        return wanted or _DRAFT_TOKENS if most is None else min(wanted or most, most)

    def chain(self, tokens: int, sampled: bool = True) -> Drafter:
        """Make a drafter of chains.

        Above temperature 0 the drafter samples from q if ``sampled`` is True, and otherwise takes the argmax.
        """
        if isinstance(self.weights, CausalLM):
            return DraftModelDrafter(self.weights, tokens, sampled)
        if isinstance(self.weights, MedusaHeads):
            return MedusaDrafter(self.weights, [(0,) * depth for depth in range(1, tokens + 1)], sampled=sampled)
        if isinstance(self.weights, DSparkDraft):
            return DSparkDrafter(self.weights, tokens, sampled=sampled)
        return Eagle3Drafter(self.weights, tokens, sampled=sampled)


def named_speculator(text: str) -> SpeculatorName:
    """Parse a drafter's spec or a folder without reading weights.

    Raises UserError for a drafter without trained weights.
    """
    spec = parse_drafter(text)
    kind = _KINDS.get(str(spec.options.get("of", spec.name)))
    if kind is None or spec.path is None:
        raise UserError(
            f"{text!r} does not have trained weights that a server could misread",
            "pass heads:PATH, draft:PATH, dspark:PATH, eagle3:PATH or a folder",
        )
    tokens = spec.options.get("tokens")
    return SpeculatorName(kind, spec.path, tokens if spec.name in ("draft", "dspark", "eagle3") else None)


def load_speculator(named: SpeculatorName, target: CausalLM, trusted: bool = False) -> Speculator:
    """Load the weights so that they can draft for the target."""
    if named.kind == "heads":
        return Speculator(named, load_heads(named.folder, target))
    if named.kind == "dspark":
        return Speculator(named, load_dspark(named.path, target))
    if named.kind == "eagle3":
        return Speculator(named, load_eagle3(named.path, target))
    return Speculator(named, load_draft(named.path, target, None, trusted))


# --- the weights that a server reads ----------------------------------------------------------------------------------


def compare_top_1(
    target: CausalLM, trained: Weights, served: Path, texts: Sequence[Sequence[int]], trusted: bool
) -> Finding:
    """Compare the top-1 tokens of trained and served weights at all positions of the texts."""
    read: Weights
    tied = False
    try:
        if isinstance(trained, CausalLM):
            read, tied = _read_served_draft(served, target, trusted)
        elif isinstance(trained, MedusaHeads):
            read = load_heads(served, target)
        else:
            read = load_dspark(served, target) if isinstance(trained, DSparkDraft) else load_eagle3(served, target)
    except UserError as error:
        return problem(TOP_1, f"the served weights cannot be read: {error}", _REMEDY)
    if (served_depths := depths_of(read)) != (depths := depths_of(trained)):
        return problem(TOP_1, f"the served weights draft {served_depths} tokens at a time, not {depths}", _REMEDY)
    try:
        ours, theirs = (guesses(side, target, texts)[1] for side in (trained, read))
    except UserError as error:
        return undecided(TOP_1, str(error))
    share, count = float((ours == theirs).float().mean()), len(ours)
    told = f"{share:.1%} of {count:,} top-1 tokens are equal"
    figures = {"share": share, "positions": count}
    # if the lm_head is tied, even the smallest difference is not rounding
    if share == 1 or (share >= _LEAST and not tied):
        return ok(TOP_1, told, **figures)
    if tied:
        ignored = f"{told}: servers ignore the draft's lm_head.weight because tie_word_embeddings is true"
        return problem(TOP_1, ignored, "set tie_word_embeddings to false in the served config.json", **figures)
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
    """Load a draft as vLLM and transformers do. Also return True if the folder has an lm_head of its own that
    ``tie_word_embeddings`` makes these programs ignore.
    """
    model = load_model(str(folder), target.dtype, target.device, trusted)
    stored, path = read_object(folder / "config.json", _REMEDY), folder / _WEIGHTS
    embeddings: Any = model.get_input_embeddings()
    lm_head: Any = model.get_output_embeddings()
    tied = False
    if stored.get("tie_word_embeddings") and path.is_file() and "lm_head.weight" in read_header(path, _REMEDY):
        tied = not torch.equal(load_file(path)["lm_head.weight"].to(embeddings.weight), embeddings.weight)
        lm_head.weight = embeddings.weight
    return CausalLM(model), tied
