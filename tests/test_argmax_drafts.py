"""Argmax drafts above temperature 0: a sampling drafter's twin proposes the likeliest tokens, and stays lossless."""

import pytest
import torch
from drafter_checks import opened
from test_parallel_lossless import enumerated_draft, every_draw, table
from tiny_models import tiny_model
from tiny_parallel import states_before, tiny_parallel_draft

from decoding.drafters import (
    CascadeDrafter,
    Drafter,
    DraftModelDrafter,
    DraftTreeDrafter,
    HybridDrafter,
    MedusaDrafter,
    ParallelDrafter,
    PromptLookupDrafter,
)
from decoding.drafters.base import DraftRequest
from decoding.measure.proof.enumeration import LOSSLESS, distance_from_target
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.rules.proposal import ProposalKind
from decoding.rules.sampling import SamplingConfig
from decoding.rules.verify import BLOCK_VERIFICATION, SAMPLED_VERIFY, TOP_K_CHILDREN, Rule

SAMPLED, GREEDY = SamplingConfig(1.0), SamplingConfig()
TEXT = [3, 1, 4]


def drafters(target: CausalLM, draft: CausalLM) -> dict[str, Drafter]:
    heads = MedusaHeads.for_target(target.model, MedusaConfig(target.hidden_size, 16, 2, tree=((0,), (1,), (0, 0))))
    parallel = tiny_parallel_draft(target)
    chain = DraftModelDrafter(draft, (1, 1, 1))
    return {
        "chain": chain,
        "tree": DraftModelDrafter(draft, (2, 2)),
        "parallel": ParallelDrafter(parallel),
        "parallel tree": ParallelDrafter(parallel, tree=[[0], [1], [0, 0]]),
        "heads": MedusaDrafter(heads),
        "hybrid": HybridDrafter(chain, PromptLookupDrafter(2)),
        "cascade": CascadeDrafter(draft, PromptLookupDrafter(2), 3),
    }


@pytest.mark.parametrize("name", ["chain", "tree", "parallel", "parallel tree", "cascade"])
def test_the_twin_drafts_at_any_temperature_what_its_drafter_drafts_at_temperature_0(
    name: str, tiny_llama: CausalLM, tiny_draft: CausalLM
) -> None:
    drafter = drafters(tiny_llama, tiny_draft)[name]
    twin = drafter.argmax_twin
    assert twin is not None and twin.budgets == drafter.budgets and twin.argmax_twin is None
    asked = DraftRequest(TEXT, torch.empty(0), 99, 99, states_before(tiny_llama, TEXT))
    (drawn,) = opened(twin, tiny_llama, SAMPLED).propose([asked])
    (best,) = opened(drafter, tiny_llama, GREEDY).propose([asked])
    assert drawn.tree.token_list == best.tree.token_list and drawn.tree.shape == best.tree.shape
    assert drawn.kind is ProposalKind.DETERMINISTIC and drawn.q is None


def test_only_drafters_that_sample_have_a_twin_and_it_never_samples(tiny_llama: CausalLM, tiny_draft: CausalLM) -> None:
    for name, drafter in drafters(tiny_llama, tiny_draft).items():
        twin = drafter.argmax_twin
        assert twin is not None and twin.kinds(SAMPLED) == {ProposalKind.DETERMINISTIC}, name
        assert drafter.kinds(SAMPLED) != twin.kinds(SAMPLED), f"the twin left the {name} unchanged"
    assert PromptLookupDrafter(2).argmax_twin is None and DraftTreeDrafter(tiny_draft).argmax_twin is None


@pytest.mark.parametrize("rule", [SAMPLED_VERIFY, TOP_K_CHILDREN, BLOCK_VERIFICATION])
def test_every_outcome_of_argmax_drafts_verified_has_the_targets_distribution(
    monkeypatch: pytest.MonkeyPatch, rule: Rule
) -> None:
    target, parallel = enumerated_draft(3, True)
    small = CausalLM(tiny_model(vocab=3, seed=1).double())
    for seed, sampling in enumerate((SamplingConfig(1.0), SamplingConfig(0.7, top_k=2))):
        for drafter in (DraftModelDrafter(small, (1, 1, 1)), ParallelDrafter(parallel)):
            twin = drafter.argmax_twin
            assert twin is not None
            draft = every_draw(twin, target, sampling, monkeypatch)
            assert distance_from_target(draft, rule, table(seed), 4) < LOSSLESS


def test_replacement_is_refused_where_nothing_is_drawn(tiny_draft: CausalLM) -> None:
    with pytest.raises(ValueError, match="with_replacement is a way to draw, and sampled is false"):
        DraftModelDrafter(tiny_draft, (2, 1), with_replacement=True, sampled=False)
