"""Faults planted into an engine, each of which `verify` must catch: published faults, and faults of servers.

The target drafts for itself at a lower temperature, so any model can be used: its drafts are likely, but not all of
them are kept.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from decoding.drafters.base import Drafter, DraftRequest, DraftSession, TextStart
from decoding.drafters.draft_model import DraftModelDrafter
from decoding.generate import DecodingConfig, Engine
from decoding.measure.proof.prove import EngineWriter
from decoding.measure.proof.reference import Reference
from decoding.model.cache import PreallocatedCache
from decoding.model.causal_lm import CausalLM
from decoding.rules.drawing import RandomSource
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import Proposal, ProposalKind, TokenTree
from decoding.rules.verify import Rule, Verdict

_COLDER = 0.4
"""Temperature of the target's drafts divided by the temperature of its tokens. Drafts are more certain than the target,
as trained drafts are."""
_TOP_P = 0.7
_DEPTH = 3


@dataclass(frozen=True, eq=False)
class Planted:
    """An engine, correct or with a fault, and the reference with which its texts are compared."""

    name: str
    reference: Reference
    writer: EngineWriter
    is_right: bool = False


def planted(target: CausalLM, sampling: SamplingConfig, eos: tuple[int, ...], batch_size: int) -> list[Planted]:
    """Make the correct engines, followed by one engine for each fault.

    ``eos`` must end some texts; ``sampling`` must not be greedy.
    """
    config = DecodingConfig(sampling=sampling, eos_token_ids=eos)
    reference = Reference(target, sampling, eos)
    cut = replace(sampling, top_p=_TOP_P)

    def engine(
        name: str,
        drafter: Drafter | None,
        is_right: bool = False,
        config: DecodingConfig = config,
        target: CausalLM = target,
        reference: Reference = reference,
    ) -> Planted:
        return Planted(name, reference, EngineWriter(Engine(target, drafter), config, batch_size), is_right)

    return [
        engine("none: plain decoding", None, is_right=True),
        engine("none: a draft that is half right", Disturbed(target), is_right=True),
        engine(
            "a sampling temperature 1.3 times the one asked for",
            None,
            config=replace(config, sampling=replace(sampling, temperature=1.3 * sampling.temperature)),
        ),
        engine("argmax drafts accepted by a softmax q", Disturbed(target, argmax=True)),
        engine("q altered after sampling", Disturbed(target, altered=_flatter)),
        engine(
            "top-p on the draft's side only", Disturbed(target, top_p=_TOP_P), reference=Reference(target, cut, eos)
        ),
        engine("no residual after a refusal", Disturbed(target), config=replace(config, rule=_NO_RESIDUAL)),
        engine("a stale cache entry", Disturbed(target), target=_StaleTarget(target.model)),
        engine("the EOS is overrun", Disturbed(target), config=replace(config, eos_token_ids=())),
    ]


def _flatter(q: Tensor) -> Tensor:
    return q**0.25 / (q**0.25).sum(-1, keepdim=True)


# --- drafts -----------------------------------------------------------------------------------------------------------


class Disturbed(Drafter):
    """Chains drawn from the target at a lower temperature; in greedy chains every second token is wrong.

    ``altered`` changes the q that is recorded, and ``top_p`` cuts the q from which tokens are drawn. ``argmax`` drafts
    the best token but claims that it was drawn at the target's temperature, which is a fault of servers.
    """

    name = "disturbed"

    def __init__(
        self,
        target: CausalLM,
        altered: Callable[[Tensor], Tensor] | None = None,
        top_p: float = 1.0,
        argmax: bool = False,
    ) -> None:
        self._inner = DraftModelDrafter(target, _DEPTH)
        self.budgets = self._inner.budgets
        self.altered, self.argmax, self._top_p = altered, argmax, top_p

    def kinds(self, sampling: SamplingConfig) -> frozenset[ProposalKind]:
        return self._inner.kinds(sampling)

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> DraftSession:
        temperature = sampling.temperature * (1 if self.argmax else _COLDER)
        own = replace(sampling, temperature=temperature, top_p=min(sampling.top_p, self._top_p))
        return _DisturbedSession(self, self._inner.open(target, own, rows, max_length))


class _DisturbedSession(DraftSession):
    def __init__(self, drafter: Disturbed, inner: DraftSession) -> None:
        self._drafter, self._inner = drafter, inner

    def admit(self, row: int, start: TextStart) -> None:
        self._inner.admit(row, start)

    def move(self, row: int, to: int) -> None:
        self._inner.move(row, to)

    def propose(self, requests: Sequence[DraftRequest]) -> list[Proposal]:
        return [self._disturbed(proposal) for proposal in self._inner.propose(requests)]

    def _disturbed(self, proposal: Proposal) -> Proposal:
        tree, q = proposal.tree, proposal.q
        if len(tree) == 1:
            return proposal
        if q is None:
            vocab = self._drafter._inner.draft.vocab_size
            tokens = [(token + node % 2 * (node > 0)) % vocab for node, token in enumerate(reversed(tree.token_list))]
            tokens = [tree.token_list[0], *reversed(tokens[:-1])]
            return Proposal(TokenTree.chain(tokens, tree.tokens.device), proposal.kind)
        if self._drafter.argmax:
            chain = TokenTree.chain([tree.token_list[0], int(q[0].argmax())], tree.tokens.device)
            return Proposal(chain, proposal.kind, q[:1])
        return proposal if self._drafter.altered is None else replace(proposal, q=self._drafter.altered(q))


# --- rules and caches -------------------------------------------------------------------------------------------------


def _without_residual(proposal: Proposal, p: Tensor, source: RandomSource) -> Verdict:
    """Verify a chain like token rejection, but draw from p itself after a rejection."""
    assert proposal.q is not None
    for node, token in enumerate(proposal.tree.token_list[1:], start=1):
        if not source.accept(float(p[node - 1, token] / proposal.q[node - 1, token])):
            return Verdict(tuple(range(1, node)), source.draw(p[node - 1]))
    last = len(proposal.tree) - 1
    return Verdict(tuple(range(1, last + 1)), source.draw(p[last]))


_NO_RESIDUAL = Rule("no residual", False, frozenset({ProposalKind.SAMPLED}), _without_residual, chains_only=True)


class _StaleTarget(CausalLM):
    def new_cache(self, capacity: int, rows: int = 1, generation: object = None) -> PreallocatedCache:
        return _StaleCache(self.num_layers, capacity, rows)


class _StaleCache(PreallocatedCache):
    """A cache in which the key of a block's first rejected token replaces the key of its last kept token."""

    @torch.inference_mode()
    def commit(self, row: int, start: int, kept: Sequence[int]) -> None:
        refused = self.lengths[row] - start - len(kept)
        super().commit(row, start, kept)
        last = start + len(kept) - 1
        for layer in self._own_layers if refused > 0 else ():
            assert layer.keys is not None
            layer.keys[row, :, last] = layer.keys[row, :, last + 1]


# --- a target that costs nothing --------------------------------------------------------------------------------------


def tiny_target(seed: int = 5) -> CausalLM:
    """Make a random Llama of two layers and 16 tokens, in fp32, whose next tokens are neither certain nor equally
    likely.
    """
    config = LlamaConfig(
        vocab_size=16,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        initializer_range=0.6,
        max_position_embeddings=512,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(config)
    return CausalLM(model.eval())


def tiny_prompts(count: int = 16, seed: int = 0) -> list[tuple[int, ...]]:
    """Return random prompts of the tiny target, of 1 to 8 tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, 9, (count,), generator=generator).tolist()
    return [tuple(torch.randint(16, (length,), generator=generator).tolist()) for length in lengths]


def usual_end(target: CausalLM, sampling: SamplingConfig, prompts: Sequence[tuple[int, ...]], length: int) -> int:
    """Return the token that occurs in about half of the greedy and sampled texts, so that as an EOS it ends these
    texts.
    """
    writer = EngineWriter(Engine(target), DecodingConfig(sampling=sampling), batch_size=len(prompts))
    texts = [text for greedy in (True, False) for text in writer.write(prompts, length, greedy, seed=0)]
    holding = Counter(token for text in texts for token in set(text.tokens))
    return min(holding, key=lambda token: (abs(2 * holding[token] - len(texts)), token))
