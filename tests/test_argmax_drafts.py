"""Argmax drafts above temperature 0, by ``sampled=False``: the likeliest tokens, verified losslessly."""

import pytest
import torch
from drafter_checks import opened
from test_parallel_lossless import enumerated_draft, every_draw, table
from tiny_models import tiny_model
from tiny_parallel import states_before, tiny_parallel_draft

from decoding.drafters import (
    Drafter,
    DraftModelDrafter,
    HybridDrafter,
    MedusaDrafter,
    ParallelDrafter,
    PromptLookupDrafter,
)
from decoding.drafters.base import DraftRequest
from decoding.generate import DecodingConfig
from decoding.measure.methods import our_method
from decoding.measure.proof.enumeration import LOSSLESS, distance_from_target
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.rules.proposal import ProposalKind
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import BLOCK_VERIFICATION, SAMPLED_VERIFY, TOP_K_CHILDREN, Rule

SAMPLED, GREEDY = SamplingConfig(1.0), SamplingConfig()
TEXT = [3, 1, 4]


def drafters(target: CausalLM, draft: CausalLM, sampled: bool) -> dict[str, Drafter]:
    heads = MedusaHeads.for_target(target.model, MedusaConfig(target.hidden_size, 16, 2, tree=((0,), (1,), (0, 0))))
    parallel = tiny_parallel_draft(target)
    chain = DraftModelDrafter(draft, (1, 1, 1), sampled=sampled)
    return {
        "chain": chain,
        "tree": DraftModelDrafter(draft, (2, 2), sampled=sampled),
        "parallel": ParallelDrafter(parallel, sampled=sampled),
        "parallel tree": ParallelDrafter(parallel, tree=[[0], [1], [0, 0]], sampled=sampled),
        "heads": MedusaDrafter(heads, sampled=sampled),
        "hybrid": HybridDrafter(chain, PromptLookupDrafter(2)),
    }


@pytest.mark.parametrize("name", ["chain", "tree", "parallel", "parallel tree"])
def test_argmax_drafts_are_at_any_temperature_those_of_temperature_0(
    name: str, tiny_llama: CausalLM, tiny_draft: CausalLM
) -> None:
    sampling, argmax = (drafters(tiny_llama, tiny_draft, sampled)[name] for sampled in (True, False))
    assert argmax.budgets == sampling.budgets and argmax.label != sampling.label
    asked = DraftRequest(TEXT, torch.empty(0), 99, 99, states_before(tiny_llama, TEXT))
    (drawn,) = opened(argmax, tiny_llama, SAMPLED).propose([asked])
    (best,) = opened(sampling, tiny_llama, GREEDY).propose([asked])
    assert drawn.tree.token_list == best.tree.token_list and drawn.tree.shape == best.tree.shape
    assert drawn.kind is ProposalKind.DETERMINISTIC and drawn.q is None


def test_every_drafter_that_samples_can_draft_by_argmax(tiny_llama: CausalLM, tiny_draft: CausalLM) -> None:
    sampling, argmax = (drafters(tiny_llama, tiny_draft, sampled) for sampled in (True, False))
    for name, drafter in argmax.items():
        assert drafter.kinds(SAMPLED) == {ProposalKind.DETERMINISTIC} != sampling[name].kinds(SAMPLED), name
        method = our_method(tiny_llama, "T=1", name, drafter, DecodingConfig(8, SAMPLED))
        assert (method.drafts, method.label) == ("greedy", "lossless")


@pytest.mark.parametrize("rule", [SAMPLED_VERIFY, TOP_K_CHILDREN, BLOCK_VERIFICATION])
def test_every_outcome_of_argmax_drafts_verified_has_the_targets_distribution(
    monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    target, parallel = enumerated_draft(3, True)
    small = CausalLM(tiny_model(vocab=3, seed=1).double())
    for seed, sampling in enumerate((SamplingConfig(1.0), SamplingConfig(0.7, top_k=2))):
        for drafter in (DraftModelDrafter(small, (1, 1, 1), sampled=False), ParallelDrafter(parallel, sampled=False)):
            draft = every_draw(drafter, target, sampling, monkeypatch)
            assert distance_from_target(draft, rule, table(seed), 4) < LOSSLESS


def test_replacement_is_refused_where_nothing_is_drawn(tiny_draft: CausalLM) -> None:
    with pytest.raises(ValueError, match="with_replacement is a way to draw, and sampled is false"):
        DraftModelDrafter(tiny_draft, (2, 1), with_replacement=True, sampled=False)
