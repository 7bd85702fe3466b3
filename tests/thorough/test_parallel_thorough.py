"""Parallel drafts of every kind: the cases that the tests of `make check` leave out."""

from typing import Any

import pytest
import test_parallel_drafter as drafter_tests
import test_parallel_lossless as lossless_tests
from test_parallel_drafter import OTHER_FAMILIES, PARTS, check_texts, draft_of
from test_parallel_lossless import OTHER_DRAFTERS, OTHER_PARTS

from decoding.drafters import ParallelDrafter
from decoding.model.causal_lm import CausalLM
from decoding.rules.verify import BLOCK_VERIFICATION, TOKEN_REJECTION, Rule


@pytest.mark.parametrize(("rank", "reads_target"), PARTS[:-1])
def test_greedy_is_plain_greedy(tiny_llama: CausalLM, rank: int, reads_target: bool) -> None:
    check_texts(tiny_llama, ParallelDrafter(draft_of(rank, reads_target)))


@pytest.mark.parametrize("family", OTHER_FAMILIES)
def test_drafts_of_other_families_write_plain_greedy_too(tiny_llama: CausalLM, family: str) -> None:
    drafter_tests.test_drafts_of_other_families_write_plain_greedy_too(tiny_llama, family)


@pytest.mark.parametrize("settings", drafter_tests.TREES)
def test_trees_write_plain_greedy_within_every_bound(tiny_llama: CausalLM, settings: dict[str, Any]) -> None:
    check_texts(tiny_llama, ParallelDrafter(draft_of(), **settings))


@pytest.mark.parametrize(("rank", "reads_target"), OTHER_PARTS)
@pytest.mark.parametrize("rule", [TOKEN_REJECTION, BLOCK_VERIFICATION])
def test_every_draw_of_a_chain_verified_gives_the_targets_distribution(
    monkeypatch: pytest.MonkeyPatch, rule: Rule, rank: int, reads_target: bool
) -> None:
    lossless_tests.test_every_draw_of_a_chain_verified_gives_the_targets_distribution(
        monkeypatch, rule, rank, reads_target
    )


@pytest.mark.parametrize(("rank", "reads_target"), OTHER_PARTS)
@pytest.mark.parametrize("tree", lossless_tests.TREES)
def test_every_draw_of_a_tree_verified_gives_the_targets_distribution(
    monkeypatch: pytest.MonkeyPatch, tree: str, rank: int, reads_target: bool
) -> None:
    lossless_tests.test_every_draw_of_a_tree_verified_gives_the_targets_distribution(
        monkeypatch, tree, rank, reads_target
    )


@pytest.mark.parametrize(("kind", "settings"), OTHER_DRAFTERS)
def test_the_loop_writes_the_targets_distribution(kind: type[ParallelDrafter], settings: dict[str, Any]) -> None:
    lossless_tests.test_the_loop_writes_the_targets_distribution(kind, settings)
