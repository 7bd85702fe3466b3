"""A trained speculator: decoded with here as a server drafts, and compared with the weights that a server reads."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from decoding.drafters.parallel import ParallelDrafter
from decoding.model.parallel import ParallelDraft
from jaxtyping import Int
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.drafters.draft_model import DraftModelDrafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.drafters.registry import parse_drafter
from decoding.errors import UserError
from decoding.measure.proof.finding import Finding, ok, problem, undecided
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaHeads
from decoding.model.hub import local_folder
from decoding.model.lm_head import lm_head_input
from decoding.model.loading import load_draft, load_heads, load_model, load_parallel_draft
from decoding.model.stored import read_header, read_object
from trainer.export.vllm import read_vllm_heads
from trainer.servers.configs import is_vllm_heads

TOP_1 = "the draft's top-1"
_DRAFT_TOKENS = 4
_KINDS = {"heads": "heads", "draft": "draft", "draft-tree": "draft", "parallel": "parallel", "cascade": "draft"}
"""Drafter's name -> kind of the weights that draft."""
_LEAST = 0.98
"""Share of equal top-1 tokens below which weights are other weights: rounding to bf16 alone turns over fewer."""
_WEIGHTS = "model.safetensors"
_REMEDY = "export the speculator again, from the run that was measured, and point the server at the new folder"

Weights = MedusaHeads | CausalLM | ParallelDraft


class SpeculatorName(NamedTuple):
    """A speculator's kind and folder or hub id, and the chain's length in its spec; None if that has none."""

    kind: str
    path: str
    tokens: int | None

    @property
    def folder(self) -> Path:
        """Its folder; for a hub id that in the cache."""
        return local_folder(self.path)


class Speculator(NamedTuple):
    """The weights of a speculator, loaded for a target."""

    named: SpeculatorName
    weights: Weights

    @property
    def max_positions(self) -> int | None:
        """The longest text that it drafts for; None without a limit."""
        return self.chain(1).max_positions

    def chain_length(self, wanted: int | None) -> int:
        """Return the tokens of a chain: as many as wanted, but not more than there are; of a draft 4 if None."""
        if isinstance(self.weights, CausalLM):
            return wanted or _DRAFT_TOKENS
        most = self.weights.config.num_heads if isinstance(self.weights, MedusaHeads) else self.weights.tokens
        return min(wanted or most, most)

    def chain(self, tokens: int, sampled: bool = True) -> Drafter:
        """Make a drafter of chains; above temperature 0 they are drawn from q, or its argmax unless ``sampled``."""
        if isinstance(self.weights, MedusaHeads):
            return MedusaDrafter(self.weights, [(0,) * depth for depth in range(1, tokens + 1)], sampled=sampled)
        if isinstance(self.weights, ParallelDraft):
            return ParallelDrafter(self.weights, tokens=tokens, sampled=sampled)
        return DraftModelDrafter(self.weights, tokens, sampled)


def named_speculator(text: str) -> SpeculatorName:
    """Read a drafter's spec or a folder, of heads in vLLM's format too; no weights are read.

    ValueError for a drafter without trained weights.
    """
    spec = parse_drafter(text)
    kind = _KINDS.get(str(spec.options.get("of", spec.name)))
    if kind is None or spec.path is None:
        raise UserError(
            f"{text!r} has no trained weights that a server could read in another way",
            "give heads:PATH, draft:PATH, parallel:PATH or a folder",
        )
    if is_vllm_heads(local_folder(spec.path, weights=False)):
        return SpeculatorName("heads", spec.path, None)
    tokens = spec.options.get("tokens")
    return SpeculatorName(kind, spec.path, tokens if spec.name in ("draft", "parallel") else None)


def load_speculator(
    named: SpeculatorName, target: CausalLM, tokenizer: PreTrainedTokenizerBase, trusted: bool = False
) -> Speculator:
    """Load the weights for the target."""
    if named.kind == "heads":
        read = _read_served_heads if is_vllm_heads(named.folder) else load_heads
        return Speculator(named, read(named.folder, target))
    if named.kind == "parallel":
        return Speculator(named, load_parallel_draft(named.path, target, tokenizer, trusted))
    return Speculator(named, load_draft(named.path, target, None, trusted))


def _read_served_heads(folder: Path, target: CausalLM) -> MedusaHeads:
    heads = read_vllm_heads(folder)
    heads.config.check_fits(target.hidden_size, target.vocab_size)
    return heads.to(target.device, target.dtype).eval()


# --- the weights that a server reads ----------------------------------------------------------------------------------


def compare_top_1(
    target: CausalLM, trained: Weights, served: Path, texts: Sequence[Sequence[int]], trusted: bool
) -> Finding:
    """Compare the top-1 tokens of the trained weights with those that a server reads, at all positions of the texts."""
    heads = isinstance(trained, MedusaHeads)
    if isinstance(trained, MedusaHeads) and trained.markov is not None:
        return undecided(TOP_1, "these heads read tokens, which the heads of no server do: export plain Medusa heads")
    tied = False
    try:
        if heads:
            read: Any = _read_served_heads(served, target)
        else:
            read, tied = _read_served_draft(served, target, trusted)
    except ValueError as error:
        return problem(TOP_1, f"the served weights cannot be read: {error}", _REMEDY)
    if isinstance(trained, ParallelDraft) and any(trained.parts.config.shapes()):
        found = "the trained parallel draft has a bias by the token before or a reader of the target, read by no server"
        remedy = "train a parallel draft with draft.parallel.markov_rank=0 and draft.parallel.reads_target=false"
        return problem(TOP_1, found, remedy)
    own = trained.model if isinstance(trained, ParallelDraft) else trained
    top_1: Callable[[Any, Sequence[int]], Tensor] = _heads_top_1(target) if heads else _draft_top_1
    ours, theirs = (torch.cat([top_1(side, text).flatten() for text in texts]) for side in (own, read))
    share, count = float((ours == theirs).float().mean()), len(ours)
    told = f"{share:.1%} of {count:,} top-1 tokens are equal"
    figures = {"share": share, "positions": count}
    if share == 1 or (share >= _LEAST and not tied):  # with a known cause the fewest tokens are no rounding
        return ok(TOP_1, told, **figures)
    if tied:
        found = f"{told}: its lm_head.weight is not read, as tie_word_embeddings is true"
        return problem(TOP_1, found, "set tie_word_embeddings false in the served config.json", **figures)
    return problem(TOP_1, f"{told}: the served weights are other weights", _REMEDY, **figures)


def _read_served_draft(folder: Path, target: CausalLM, trusted: bool) -> tuple[CausalLM, bool]:
    """Read a draft as vLLM and transformers do; True if ``tie_word_embeddings`` hides another lm_head."""
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


def _heads_top_1(target: CausalLM) -> Callable[[MedusaHeads, Sequence[int]], Int[Tensor, "heads positions"]]:
    @torch.inference_mode()
    def top_1(heads: MedusaHeads, text: Sequence[int]) -> Tensor:
        hidden = lm_head_input(target.model, {"input_ids": torch.tensor([list(text)], device=target.device)})
        best: Tensor = heads(hidden[0], target.model.get_output_embeddings()).argmax(-1)
        return best

    return top_1
