"""A trained speculator, decoded with here as a server drafts: a chain of K tokens, sampled or by argmax."""

from pathlib import Path
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from decoding.drafters import Drafter
from decoding.drafters.draft_model import DraftModelDrafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.drafters.parallel import ParallelDrafter
from decoding.drafters.registry import parse_drafter
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaHeads
from decoding.model.hub import local_folder
from decoding.model.loading import load_draft, load_heads, load_parallel_draft
from decoding.model.parallel import ParallelDraft
from trainer.servers.configs import is_vllm_heads
from trainer.servers.weights import read_vllm_heads

_DRAFT_TOKENS = 4
_KINDS = {"heads": "heads", "draft": "draft", "draft-tree": "draft", "parallel": "parallel", "cascade": "draft"}
"""Drafter's name -> kind of the weights that draft."""


class Named(NamedTuple):
    """A speculator as it was asked for. ``tokens``: the chain's length in its spec; None if that says none."""

    kind: str
    path: str
    tokens: int | None

    @property
    def folder(self) -> Path:
        """Its folder; for a hub id that in the cache."""
        return local_folder(self.path)


class Speculator(NamedTuple):
    """The weights of a speculator, loaded for a target."""

    named: Named
    weights: MedusaHeads | CausalLM | ParallelDraft

    @property
    def most_tokens(self) -> int | None:
        """The most tokens that it drafts at a time; None for a draft, which has no limit."""
        if isinstance(self.weights, MedusaHeads):
            return self.weights.config.num_heads
        return self.weights.tokens if isinstance(self.weights, ParallelDraft) else None

    @property
    def max_positions(self) -> int | None:
        """The longest text that it drafts for; None without a limit."""
        return self.chain(1).max_positions

    def chain_length(self, asked: int | None) -> int:
        """Return the tokens of a chain: as many as asked, but not more than there are; of a draft 4 if None."""
        most = self.most_tokens
        wanted = asked or most or _DRAFT_TOKENS
        return wanted if most is None else min(wanted, most)

    def chain(self, tokens: int, sampled: bool = True) -> Drafter:
        """Make a drafter of chains; above temperature 0 they are drawn from q, or its argmax unless ``sampled``."""
        if isinstance(self.weights, MedusaHeads):
            return MedusaDrafter(self.weights, [(0,) * depth for depth in range(1, tokens + 1)], sampled=sampled)
        if isinstance(self.weights, ParallelDraft):
            return ParallelDrafter(self.weights, tokens=tokens, sampled=sampled)
        return DraftModelDrafter(self.weights, tokens, sampled)


def named_speculator(text: str) -> Named:
    """Read a drafter's spec or a folder, of heads in vLLM's format too; no weights are read.

    ValueError for a drafter without trained weights.
    """
    spec = parse_drafter(text)
    kind = _KINDS.get(str(spec.options.get("of", spec.name)))
    if kind is None or spec.path is None:
        raise ValueError(
            f"{text!r} has no trained weights that a server could read in another way: give heads:PATH, draft:PATH, "
            "parallel:PATH or a folder"
        )
    if is_vllm_heads(local_folder(spec.path, weights=False)):
        return Named("heads", spec.path, None)
    tokens = spec.options.get("tokens")
    return Named(kind, spec.path, tokens if spec.name in ("draft", "parallel") else None)


def load_speculator(
    named: Named, target: CausalLM, tokenizer: PreTrainedTokenizerBase, trusted: bool = False
) -> Speculator:
    """Load the weights for the target. Heads in vLLM's format are read whole, whatever their config says of biases."""
    if named.kind == "heads":
        folder = local_folder(named.path)
        if is_vllm_heads(folder):
            return Speculator(named, read_vllm_heads(folder, target, whole=True).heads)
        return Speculator(named, load_heads(folder, target))
    if named.kind == "parallel":
        return Speculator(named, load_parallel_draft(named.path, target, tokenizer, trusted))
    return Speculator(named, load_draft(named.path, target, None, trusted))
