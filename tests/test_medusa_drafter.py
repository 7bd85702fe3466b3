"""Medusa heads as a drafter: trees of a fixed shape or chosen at each step, heads with an lm_head or without one."""

import itertools
from pathlib import Path

import pytest
import torch
from drafter_checks import paths, propose
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from decoding.drafters import MedusaDrafter
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads, StackedHeads
from decoding.rules.proposal import ProposalKind

PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0))
BOTH_LAYOUTS = pytest.mark.parametrize("shared", [False, True], ids=["own lm_heads", "shared lm_head"])


def random_heads(shared: bool, layers: int = 2, vocab: int = 16, width: int = 16, count: int = 3) -> MedusaHeads:
    heads = MedusaHeads(MedusaConfig(width, vocab, count, layers, tree=((0,),), shared_lm_head=shared))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return heads


def reference_logits(heads: MedusaHeads, target: CausalLM, hidden: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return heads(hidden, target.model.get_output_embeddings())


# --- heads in one go -----------------------------------------------------------------------------------------------


@BOTH_LAYOUTS
@pytest.mark.parametrize("count", [1, 3])
def test_stacked_heads_are_the_heads_one_by_one(tiny_llama: CausalLM, shared: bool, count: int) -> None:
    heads, hidden = random_heads(shared), torch.randn(5, 16)
    expected = reference_logits(heads, tiny_llama, hidden)
    with torch.inference_mode():
        stacked = StackedHeads(heads)(hidden, count, tiny_llama.model.get_output_embeddings())
    torch.testing.assert_close(stacked, expected[:count], rtol=1e-5, atol=1e-5)


@BOTH_LAYOUTS
def test_stacking_holds_no_weight_twice_and_leaves_the_heads_usable(
    tmp_path: Path, tiny_llama: CausalLM, shared: bool
) -> None:
    heads, hidden = random_heads(shared), torch.randn(2, 16)
    before, state = reference_logits(heads, tiny_llama, hidden), {k: v.clone() for k, v in heads.state_dict().items()}
    stacked = StackedHeads(heads)
    for layer, (weight, _) in enumerate(stacked._layers):
        for k, head in enumerate(heads.heads):
            assert head.blocks[layer].linear.weight.data_ptr() == weight[k].data_ptr()
    assert torch.equal(reference_logits(heads, tiny_llama, hidden), before)
    heads.save_pretrained(tmp_path)
    read = MedusaHeads.from_pretrained(tmp_path)
    assert read.config == heads.config
    assert all(torch.equal(tensor, state[name]) for name, tensor in read.state_dict().items())
    heads.heads[0].blocks[0].linear.weight.sum().backward()
    assert heads.heads[0].blocks[0].linear.weight.grad is not None


def test_heads_that_are_stacked_again_are_not_copied_again(tiny_llama: CausalLM) -> None:
    heads, hidden = random_heads(False), torch.randn(2, 16)
    first, second = MedusaDrafter(heads, PATHS), MedusaDrafter(heads, dynamic_nodes=6)
    for ours, theirs in zip(first._stacked._layers, second._stacked._layers, strict=True):
        assert [each.data_ptr() for each in ours] == [each.data_ptr() for each in theirs]
    before = paths(propose(first, tiny_llama, hidden)[0].tree)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.neg_()
    after = propose(first, tiny_llama, hidden)[0]
    assert paths(after.tree) != before, "the first drafter runs the heads as they are"
    assert paths(after.tree) == paths(propose(MedusaDrafter(heads, PATHS), tiny_llama, hidden)[0].tree)


def test_a_head_that_was_put_in_from_elsewhere_is_stacked_with_the_others(tiny_llama: CausalLM) -> None:
    heads, others, hidden = random_heads(False), random_heads(False), torch.randn(2, 16)
    with torch.no_grad():
        for parameter in others.parameters():
            parameter.neg_()
    for each in (heads, others):
        StackedHeads(each)
    heads.heads[1] = others.heads[1]
    expected = reference_logits(heads, tiny_llama, hidden)
    with torch.inference_mode():
        torch.testing.assert_close(StackedHeads(heads)(hidden, 3), expected, rtol=1e-5, atol=1e-5)


def test_heads_that_were_moved_since_are_stacked_anew(tiny_llama: CausalLM) -> None:
    heads, hidden = random_heads(True), torch.randn(3, 16, dtype=torch.float64)
    StackedHeads(heads)
    lm_head = tiny_llama.model.get_output_embeddings()
    expected = reference_logits(heads.double(), tiny_llama, hidden)
    with torch.inference_mode():
        torch.testing.assert_close(StackedHeads(heads)(hidden, 3, lm_head), expected, rtol=1e-5, atol=1e-5)


@BOTH_LAYOUTS
@pytest.mark.parametrize("dynamic", [None, 6])
def test_the_heads_run_at_one_position_of_each_row_and_no_deeper_than_the_room(
    tiny_llama: CausalLM, shared: bool, dynamic: int | None
) -> None:
    heads = random_heads(shared)
    drafter = MedusaDrafter(heads, None if dynamic else [[0], [0, 0], [0, 0, 0]], dynamic)
    counted: list[int] = []
    lm_heads = [tiny_llama.model.get_output_embeddings()] if shared else [head.lm_head for head in heads.heads]
    hooks = [
        lm_head.register_forward_hook(lambda module, args, out: counted.append(out.shape[:-1].numel()))
        for lm_head in lm_heads
    ]
    try:
        propose(drafter, tiny_llama, torch.randn(4, 16))
        assert counted == ([3 * 4] if shared else [4, 4, 4]), "one product for a shared lm_head, and no prefix"
        counted.clear()
        propose(drafter, tiny_llama, torch.randn(4, 16), [(1, 99), (2, 99), (0, 99), (1, 99)])
        assert counted == ([2 * 4] if shared else [4, 4])
        if not shared:  # a shared one counts the target's own passes too
            counted.clear()
            Engine(tiny_llama, drafter).decode([1] * 20, DecodingConfig(6))
            assert set(counted) == {1}, "the heads do not run over the prompt"
    finally:
        for hook in hooks:
            hook.remove()


# --- trees of a fixed shape ----------------------------------------------------------------------------------------


@BOTH_LAYOUTS
def test_a_static_tree_holds_the_heads_best_tokens_by_rank(tiny_llama: CausalLM, shared: bool) -> None:
    heads, hidden = random_heads(shared), torch.randn(3, 16)
    best = reference_logits(heads, tiny_llama, hidden).topk(3).indices.tolist()
    for row, proposal in enumerate(propose(MedusaDrafter(heads, PATHS), tiny_llama, hidden)):
        wanted = {tuple(best[depth][row][rank] for depth, rank in enumerate(path)) for path in PATHS}
        assert paths(proposal.tree) == wanted and proposal.tree.token_list[0] == row
        assert proposal.kind is ProposalKind.DETERMINISTIC and proposal.q is None


def test_static_budgets_are_the_tree_to_every_depth_its_chain_and_its_narrower_cuts() -> None:
    drafter = MedusaDrafter(random_heads(False), PATHS)
    # (0) | the chain (0) (0,0) | depth 1: (0) (1) (2) | ranks 0 and 1: (0) (1) (0,0) (0,1) (0,1,0) | depth 2 | all
    assert drafter.budgets == ((1, 2), (2, 3), (1, 4), (3, 6), (2, 7), (3, 8))
    assert (drafter.max_depth, drafter.max_nodes) == (3, 8)
    published = [path for length in (1, 2, 3) for path in itertools.product(range(5), repeat=length)]
    budgets = MedusaDrafter(random_heads(False), published).budgets
    assert budgets == ((1, 2), (2, 3), (3, 4), (1, 6), (3, 15), (2, 31), (3, 85), (3, 156))


def test_every_static_budget_gives_a_tree_of_just_that_size_that_holds_better_ranks_first(
    tiny_llama: CausalLM,
) -> None:
    drafter, hidden = MedusaDrafter(random_heads(False), PATHS), torch.randn(1, 16)
    (whole,) = propose(drafter, tiny_llama, hidden)
    for budget in drafter.budgets:
        (proposal,) = propose(drafter, tiny_llama, hidden, [budget])
        assert (proposal.tree.shape.max_depth, len(proposal.tree)) == budget
        assert paths(proposal.tree) <= paths(whole.tree)


@given(depth=st.integers(0, 5), nodes=st.integers(1, 12), dynamic=st.sampled_from([None, 2, 7]))
def test_a_request_bounds_depth_and_nodes(tiny_llama: CausalLM, depth: int, nodes: int, dynamic: int | None) -> None:
    drafter = MedusaDrafter(random_heads(True), None if dynamic else PATHS, dynamic)
    (proposal,) = propose(drafter, tiny_llama, torch.randn(1, 16), [(depth, nodes)])
    assert proposal.tree.shape.max_depth <= depth and len(proposal.tree) <= min(nodes, drafter.max_nodes)
    assert len(proposal.tree) > 1 or depth == 0 or nodes == 1


# --- trees chosen at each step -------------------------------------------------------------------------------------


@BOTH_LAYOUTS
@pytest.mark.parametrize("nodes", [2, 5, 12, 30])
def test_a_dynamic_tree_is_the_best_of_all_trees_at_this_position(
    tiny_llama: CausalLM, shared: bool, nodes: int
) -> None:
    """The paths with the largest products of probabilities, of all 16 + 256 + 4,096; another tree in every row."""
    heads, hidden = random_heads(shared), torch.randn(4, 16)
    shares = reference_logits(heads, tiny_llama, hidden).softmax(-1)
    proposals = propose(MedusaDrafter(heads, dynamic_nodes=nodes), tiny_llama, hidden)
    for row, proposal in enumerate(proposals):
        products: dict[tuple[int, ...], float] = {(): 1.0}
        for length in (1, 2, 3):
            for path in itertools.product(range(16), repeat=length):
                products[path] = products[path[:-1]] * float(shares[length - 1, row, path[-1]])
        best = sorted(products, key=products.__getitem__, reverse=True)[:nodes]
        assert paths(proposal.tree) == set(best[1:])
        assert proposal.kind is ProposalKind.DETERMINISTIC and proposal.q is None
        assert proposal.tree.token_list == proposal.tree.tokens.tolist()
    assert nodes < 5 or len({proposal.tree.shape for proposal in proposals}) > 1


def test_dynamic_budgets_grow_in_depth_and_nodes() -> None:
    assert MedusaDrafter(random_heads(True), dynamic_nodes=13).budgets == ((1, 5), (2, 9), (3, 13))
    assert MedusaDrafter(random_heads(True), dynamic_nodes=3).budgets == ((1, 2), (2, 3)), "no deeper than its nodes"


def test_settings_that_contradict_are_refused() -> None:
    with pytest.raises(ValueError, match="tree and dynamic_nodes are both given"):
        MedusaDrafter(random_heads(False), PATHS, 5)
    with pytest.raises(ValueError, match=r"dynamic_nodes is 1, the root included: give at least 2"):
        MedusaDrafter(random_heads(False), dynamic_nodes=1)
    with pytest.raises(ValueError, match="the tree asks for rank 16 but the heads know 16 tokens"):
        MedusaDrafter(random_heads(False), [[16]])


# --- through the loop ----------------------------------------------------------------------------------------------


def test_a_shared_lm_head_is_the_targets_own_also_in_another_dtype(tiny_llama: CausalLM) -> None:
    heads = random_heads(True).bfloat16()
    (proposal,) = propose(MedusaDrafter(heads, [[0]]), tiny_llama, torch.randn(1, 16))
    assert len(proposal.tree) == 2


def test_heads_that_share_an_lm_head_say_so_when_none_is_given() -> None:
    heads = random_heads(True)
    assert not any(isinstance(module, nn.Linear) and module.out_features != 16 for module in heads.modules())
    for run in (lambda: heads(torch.zeros(1, 16)), lambda: StackedHeads(heads)(torch.zeros(1, 16), 1)):
        with pytest.raises(ValueError, match="these heads share the target's lm_head: give it"):
            run()
