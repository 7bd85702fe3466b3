"""Losslessness of parallel drafts, drafting included: every outcome enumerated, and the loop's texts counted."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from enumerated_rules import LOSSY
from test_generate_sampling import FALSE_ALARM, TARGET_SEED, TEXTS, decode_many, small_llama
from test_parallel_drafter import PARTS
from test_sampled_heads import TREES, Enumerated, by_traversal
from tiny_models import tiny_model
from tiny_parallel import states_before, tiny_parallel_draft

from decoding.drafters import Drafter, ParallelDrafter
from decoding.drafters.base import DraftRequest, TextStart
from decoding.drafters.draft_state import DraftState
from decoding.drafters.growth import ConditionalLogits
from decoding.drafters.parallel import Grow, ParallelSession
from decoding.measure.proof.enumeration import (
    LOSSLESS,
    ROOT_TOKEN,
    ContextModel,
    Draft,
    EnumeratingSource,
    distance_from_target,
)
from decoding.model.causal_lm import CausalLM
from decoding.model.parallel import ParallelDraft
from decoding.rules.drawing import RandomSource
from decoding.rules.proposal import Proposal
from decoding.rules.sampling import SamplingConfig, probabilities
from decoding.rules.verify import BLOCK_VERIFICATION, TOKEN_REJECTION, Rule

SMALL = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
FEW_PARTS, OTHER_PARTS = PARTS[-1:], PARTS[:-1]
TEXT = [1, 2, ROOT_TOKEN]


class Misrecording(ParallelDrafter):
    """A drafter that draws from q with the bias and records q without it."""

    def _growth(self, state: DraftState, sampling: SamplingConfig) -> Grow:
        grow = super()._growth(state, sampling)

        def misrecord(
            requests: Sequence[DraftRequest], depths: Sequence[int], nodes: ConditionalLogits
        ) -> list[Proposal]:
            rows, plain = torch.arange(len(requests)), replace(nodes, bias=None)
            paths = [torch.zeros(len(requests), depth + 1, dtype=torch.long) for depth in range(max(depths))]
            q = torch.stack([probabilities(plain.logits(rows, path), sampling) for path in paths], dim=1)
            return [
                replace(proposal, q=q[row, : len(proposal.tree) - 1])
                for row, proposal in enumerate(grow(requests, depths, nodes))
            ]

        return misrecord


class Late(ParallelDrafter):
    """A drafter that reads each token's state from the position before its own."""

    def open(self, target: CausalLM, sampling: SamplingConfig, rows: int, max_length: int) -> ParallelSession:
        session = super().open(target, sampling, rows, max_length)
        propose = session.propose

        def late(requests: Sequence[DraftRequest]) -> list[Proposal]:
            states = [None if request.states is None else request.states.roll(1, 0) for request in requests]
            return propose([replace(request, states=own) for request, own in zip(requests, states, strict=True)])

        session.propose = late  # type: ignore[method-assign]
        return session


# --- every outcome ----------------------------------------------------------------------------------------------------


@cache
def enumerated_draft(rank: int, reads_target: bool) -> tuple[CausalLM, ParallelDraft]:
    """Make a target of three tokens and a draft of three tokens ahead, both in float64."""
    target = CausalLM(tiny_model(vocab=3, **SMALL).double())
    draft = tiny_parallel_draft(target, 3, rank, reads_target, **SMALL)
    draft.model.model.double()
    draft.parts.double()
    return target, draft


class EveryDraw(Enumerated):
    """The draws of a parallel draft, which begins its text anew for each outcome."""

    def uniform(self) -> float:
        return 0.5

    def __call__(self, source: RandomSource) -> Proposal:
        self._session.admit(0, TextStart(1, self))  # type: ignore[arg-type]  # an enumerating source
        return super().__call__(source)


def every_draw(drafter: Drafter, target: CausalLM, sampling: SamplingConfig, monkeypatch: pytest.MonkeyPatch) -> Draft:
    """Make a draft by the drafter's own session, whose draws the random source makes one after the other."""
    request = DraftRequest(TEXT, torch.empty(0), 99, 99, states_before(target, TEXT))
    draft = EveryDraw(drafter.open(target, sampling, 1, 40), request)
    for module in ("drafters.chains", "rules.drawing"):
        monkeypatch.setattr(f"decoding.{module}.inverse_cdf", draft.inverse_cdf)
    return draft


def table(seed: int) -> ContextModel:
    return ContextModel.random(3, 3, "mixed" if seed % 2 else "dense", torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("rank", "reads_target"), FEW_PARTS)
@pytest.mark.parametrize("rule", [TOKEN_REJECTION, BLOCK_VERIFICATION])
def test_every_draw_of_a_chain_verified_gives_the_targets_distribution(
    monkeypatch: pytest.MonkeyPatch, rule: Rule, rank: int, reads_target: bool
) -> None:
    target, parallel = enumerated_draft(rank, reads_target)
    for seed, sampling in enumerate((SamplingConfig(1.0), SamplingConfig(0.7, top_k=2))):
        draft = every_draw(ParallelDrafter(parallel), target, sampling, monkeypatch)
        assert distance_from_target(draft, rule, table(seed), 4) < LOSSLESS


@pytest.mark.parametrize(("rank", "reads_target"), FEW_PARTS)
@pytest.mark.parametrize("tree", TREES)
def test_every_draw_of_a_tree_verified_gives_the_targets_distribution(
    monkeypatch: pytest.MonkeyPatch, tree: str, rank: int, reads_target: bool
) -> None:
    target, parallel = enumerated_draft(rank, reads_target)
    for seed, sampling in enumerate((SamplingConfig(1.0), SamplingConfig(0.7, top_k=2))):
        draft = every_draw(ParallelDrafter(parallel, tree=TREES[tree]), target, sampling, monkeypatch)
        assert distance_from_target(draft, by_traversal, table(seed), 3) < LOSSLESS


def test_a_recorded_q_that_lacks_the_bias_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    target, parallel = enumerated_draft(3, True)
    draft = every_draw(Misrecording(parallel), target, SamplingConfig(1.0), monkeypatch)
    for rule in (TOKEN_REJECTION, BLOCK_VERIFICATION):
        assert distance_from_target(draft, rule, table(0), 4) > LOSSY


def test_states_of_the_position_before_change_q_and_stay_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    target, parallel = enumerated_draft(3, True)
    found = []
    for kind in (ParallelDrafter, Late):
        late = every_draw(kind(parallel), target, SamplingConfig(1.0), monkeypatch)
        found.append(late(EnumeratingSource()).q)
    assert found[0] is not None and found[1] is not None and (found[0][0] - found[1][0]).abs().max() > 0.01
    assert distance_from_target(late, BLOCK_VERIFICATION, table(0), 4) < LOSSLESS


# --- the loop's texts -------------------------------------------------------------------------------------------------


@cache
def small_draft() -> ParallelDraft:
    return tiny_parallel_draft(small_llama(TARGET_SEED), 2, spread=1.2, seed=5, initializer_range=0.7, **SMALL)


FEW_DRAFTERS: list[tuple[type[ParallelDrafter], dict[str, Any]]] = [
    (ParallelDrafter, {}),
    (ParallelDrafter, {"tree": [[0], [1], [0, 0], [0, 1], [1, 0]]}),
]
OTHER_DRAFTERS: list[tuple[type[ParallelDrafter], dict[str, Any]]] = [
    (ParallelDrafter, {"dynamic_nodes": 5}),
    (ParallelDrafter, {"sampled": False}),
    (Late, {}),
]


@pytest.mark.parametrize(("kind", "settings"), FEW_DRAFTERS)
def test_the_loop_writes_the_targets_distribution(kind: type[ParallelDrafter], settings: dict[str, Any]) -> None:
    chance, accepted = decode_many(small_llama(TARGET_SEED), kind(small_draft(), **settings), SamplingConfig(1.0))
    assert chance > FALSE_ALARM
    assert accepted > TEXTS / 10, "a draft that is never accepted proves little"


def test_the_chi_square_catches_a_recorded_q_that_lacks_the_bias() -> None:
    chance, _ = decode_many(small_llama(TARGET_SEED), Misrecording(small_draft()), SamplingConfig(1.0))
    assert chance < FALSE_ALARM / 100, "caught, and not only just"
