"""Trees drawn from heads' distributions: the controls, shapes and kinds of heads that the fast tests leave out."""

import itertools

import pytest
from test_generate_sampling import FALSE_ALARM, TARGET_SEED, TEXTS, decode_many, small_llama
from test_sampled_heads import (
    CONTROLS,
    FEW_CASES,
    FEW_KINDS,
    KINDS,
    LOOP_TREE,
    TREES,
    distance,
    nudged_heads,
)

from decoding.drafters import MedusaDrafter
from decoding.measure.proof.enumeration import LOSSLESS
from decoding.rules.sampling import SamplingConfig


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("controls", "tree"), [case for case in itertools.product(CONTROLS, TREES) if case not in FEW_CASES]
)
def test_drafting_and_verifying_as_a_whole_give_the_targets_distribution(
    kind: str, controls: str, tree: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert distance(kind, controls, tree, monkeypatch) < LOSSLESS


@pytest.mark.parametrize(
    ("kind", "sampling"),
    [(kind, SamplingConfig(1.0)) for kind in KINDS if kind not in FEW_KINDS]
    + [(kind, SamplingConfig(0.9, top_k=3, repetition_penalty=1.3)) for kind in KINDS],
)
def test_the_loop_writes_the_targets_distribution(kind: str, sampling: SamplingConfig) -> None:
    """Chi-square of texts with fixed seeds; were they not, it would fail by accident once in 10**6."""
    target = small_llama(TARGET_SEED)
    drafter = MedusaDrafter(nudged_heads(kind, target), LOOP_TREE, sampled=True)
    found, accepted = decode_many(target, drafter, sampling)
    assert found > FALSE_ALARM
    assert accepted > TEXTS / 10, "a draft that is never accepted proves little"
