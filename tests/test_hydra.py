"""Sequential heads (Hydra): what they read, how they are kept, and the trees that are grown of them."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafter_checks import paths, propose
from grown_trees import (
    BOTH_LAYOUTS,
    BOTH_TREES,
    PATHS,
    check_dynamic_tree,
    check_rows_alone,
    check_static_tree,
    with_random_weights,
)
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from tiny_models import counting_model, tiny_model
from torch import nn
from torch.nn import functional as F

from decoding.drafters import MedusaDrafter
from decoding.drafters.base import DraftRequest
from decoding.engine import Engine
from decoding.generate import DecodingConfig
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import CONFIG_NAME, WEIGHTS_NAME, MedusaConfig, MedusaHeads
from decoding.model.output_layer import OutputLayer
from decoding.rules.sampling import SamplingConfig

CONFIG = MedusaConfig(16, 16, num_heads=3, num_layers=2, tree=((0,), (1,), (0, 0)), sequential=True)


def random_heads(shared: bool = False, config: MedusaConfig = CONFIG) -> MedusaHeads:
    return with_random_weights(MedusaHeads(replace(config, shared_lm_head=shared)))


def counting_heads(count: int = 3) -> MedusaHeads:
    """Heads that follow the last token they read with the next one; their second best follows the hidden state's."""
    heads = MedusaHeads.for_target(counting_model(), replace(CONFIG, num_heads=count, num_layers=1))
    with torch.no_grad():
        for k, head in enumerate(heads.heads):
            head.blocks[0].embedded.weight[:16, 16 * k :] = 100 * torch.eye(16)
    return heads


@torch.no_grad()
def reference_logits(heads: MedusaHeads, target: CausalLM, hidden: torch.Tensor, tokens: Sequence[int]) -> torch.Tensor:
    """Of the head that reads these tokens, the root first, by the formulas alone."""
    head = heads.heads[len(tokens) - 1]
    first, second = head.blocks
    embedded = target.model.get_input_embeddings().weight[list(tokens)]
    embedded = (embedded / embedded.square().mean(1, keepdim=True).sqrt()).flatten()
    outer, inner = first.embedded.weight[:16] @ embedded, first.embedded.weight[16:] @ embedded
    x = hidden + outer + F.silu(first.linear.weight @ hidden + inner + first.linear.bias)
    x = x + F.silu(second.linear.weight @ x + second.linear.bias)
    writer = target.model.get_output_embeddings() if head.lm_head is None else head.lm_head
    logits: torch.Tensor = writer.weight @ x
    return logits


# --- the heads ------------------------------------------------------------------------------------------------------


def test_sequential_heads_start_as_the_targets_lm_head_whatever_they_read(tiny_llama: CausalLM) -> None:
    heads = MedusaHeads.for_target(tiny_llama.model, CONFIG)
    output = tiny_llama.append([[1, 2, 3]], tiny_llama.new_cache(8))
    with torch.inference_mode():
        for logits in heads(output.hidden, embedded=torch.randn(1, 3, 16)):
            torch.testing.assert_close(logits, output.logits, rtol=0, atol=1e-6)  # sums in another order


def test_the_first_block_adds_a_linear_of_the_tokens_and_the_silu_of_all_it_reads() -> None:
    head = MedusaHeads(MedusaConfig(1, 1, num_heads=1, tree=((0,),), sequential=True)).heads[0]
    with torch.no_grad():
        head.blocks[0].linear.weight.fill_(2.0)
        head.blocks[0].linear.bias.fill_(-3.0)
        head.blocks[0].embedded.weight.copy_(torch.tensor([[10.0], [1.0]]))
        # x = 2, and an embedding of one number is brought to 1: 2 + 10 + silu(2*2 + 1 - 3), silu(2) = 1.761594
        assert head.features(torch.tensor([2.0]), torch.tensor([[0.02]])).item() == pytest.approx(13.761594)
        # ... or to -1: 2 - 10 + silu(4 - 1 - 3)
        assert head.features(torch.tensor([2.0]), torch.tensor([[-5.0]])).item() == pytest.approx(-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_size_of_the_targets_embeddings_makes_no_difference(dtype: torch.dtype) -> None:
    """Also where they are as small as a large model's; 1/256 is exact in either dtype."""
    head, hidden, embedded = random_heads().to(dtype).heads[1], torch.randn(4, 16).to(dtype), torch.randn(4, 2, 16)
    with torch.inference_mode():
        usual, small = head(hidden, embedded=embedded.to(dtype)), head(hidden, embedded=embedded.to(dtype) / 256)
    torch.testing.assert_close(small, usual)


def test_head_k_reads_the_first_k_plus_one_tokens() -> None:
    heads, hidden, embedded = random_heads(), torch.randn(16), torch.randn(3, 16)
    with torch.inference_mode():
        before = heads(hidden, embedded=embedded)
        for token in range(3):
            other = embedded.clone()
            other[token] = torch.randn(16)
            changed = heads(hidden, embedded=other)
            assert [torch.equal(*pair) for pair in zip(before, changed, strict=True)] == [k < token for k in range(3)]


def test_all_that_a_head_reads_gets_a_gradient_at_the_start() -> None:
    head = MedusaHeads(replace(CONFIG, num_layers=1)).heads[1]
    head(torch.randn(5, 16), embedded=torch.randn(5, 2, 16)).logsumexp(-1).sum().backward()
    gradients = {name: parameter.grad for name, parameter in head.named_parameters()}
    assert len(gradients) == 4 and all(gradient.abs().max() > 0 for gradient in gradients.values())
    assert all(part.abs().max() > 0 for half in gradients["blocks.0.embedded.weight"].split(16) for part in half.T)


def test_the_tokens_are_neither_forgotten_nor_given_to_heads_that_read_none() -> None:
    with pytest.raises(ValueError, match="sequential heads read the tokens before their own: give their embeddings"):
        random_heads()(torch.zeros(1, 16))
    plain = MedusaHeads(replace(CONFIG, sequential=False))
    with pytest.raises(ValueError, match="embedded is given, but these heads read no tokens: leave it out"):
        plain(torch.zeros(1, 16), embedded=torch.zeros(1, 3, 16))


def test_heads_without_a_block_cannot_be_sequential() -> None:
    with pytest.raises(ValueError, match="read tokens in their first block, but num_layers is 0: give at least 1"):
        replace(CONFIG, num_layers=0)


def test_an_output_layer_reads_its_weight_inside_its_own_forward() -> None:
    layer = OutputLayer(2, 3, bias=False)
    called: list[str] = []
    layer.register_forward_hook(lambda *_: called.append("forward"))
    hidden = torch.tensor([[1.0, 2.0]])
    assert torch.equal(layer(hidden), hidden @ layer.weight.T)
    loss, count = layer(hidden, read=lambda x, weight: ((x @ weight.T).sum(), len(weight)))
    assert count == 3 and called == ["forward", "forward"]
    loss.backward()
    assert torch.equal(layer.weight.grad, hidden.expand(3, 2))


# --- on disk --------------------------------------------------------------------------------------------------------


@BOTH_LAYOUTS
def test_sequential_heads_are_saved_whole_and_read_back_bit_equal(tmp_path: Path, shared: bool) -> None:
    heads = random_heads(shared)
    heads.save_pretrained(tmp_path)
    assert json.loads((tmp_path / CONFIG_NAME).read_text())["sequential"] is True
    stored = load_file(tmp_path / WEIGHTS_NAME)
    # Of each head two blocks with weight and bias, what reads the tokens, and an lm_head if it has one.
    assert len(stored) == 3 * (5 if shared else 6)
    assert [stored[f"heads.{k}.blocks.0.embedded.weight"].shape for k in range(3)] == [(32, 16), (32, 32), (32, 48)]
    read = MedusaHeads.from_pretrained(tmp_path)
    assert read.config == heads.config
    assert all(torch.equal(tensor, stored[name]) for name, tensor in read.state_dict().items())


@pytest.mark.parametrize("sequential", [True, False])
def test_weights_of_the_other_kind_of_heads_are_refused(tmp_path: Path, sequential: bool) -> None:
    MedusaHeads(replace(CONFIG, sequential=sequential)).save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG_NAME).read_text())
    (tmp_path / CONFIG_NAME).write_text(json.dumps({**config, "sequential": not sequential}))
    with pytest.raises(ValueError, match=r"(?s)does not fit its config.*blocks\.0\.embedded\.weight"):
        MedusaHeads.from_pretrained(tmp_path)


def test_a_config_with_an_unknown_key_is_refused(tmp_path: Path) -> None:
    random_heads().save_pretrained(tmp_path)
    config = json.loads((tmp_path / CONFIG_NAME).read_text())
    (tmp_path / CONFIG_NAME).write_text(json.dumps({**config, "prefix_attention": True}))
    with pytest.raises(ValueError, match=r"does not describe Medusa heads.*prefix_attention"):
        MedusaHeads.from_pretrained(tmp_path)


# --- trees ----------------------------------------------------------------------------------------------------------


@BOTH_LAYOUTS
def test_a_static_tree_is_grown_from_each_nodes_own_distribution(tiny_llama: CausalLM, shared: bool) -> None:
    check_static_tree(random_heads(shared), tiny_llama, reference_logits)


def test_two_parents_have_children_of_their_own() -> None:
    target = CausalLM(counting_model())
    hidden = target.prefill([[4, 5]], target.new_cache(8)).hidden[0]
    session = MedusaDrafter(counting_heads(), [[0], [1], [0, 0], [1, 0]]).open(target, SamplingConfig(), 1, 40)
    (proposal,) = session.propose([DraftRequest([4, 5, 9], hidden, 9, 99)])
    # Behind the root 9 comes 10, or 6, as the hidden state of 5 says; behind 10 comes 11, and behind 6 comes 7.
    assert proposal.tree.token_list == [9, 10, 6, 11, 7]


def test_tokens_of_no_probability_are_not_drafted_to_fill_a_dynamic_tree() -> None:
    target = CausalLM(counting_model())
    hidden = target.prefill([[4, 5]], target.new_cache(8)).hidden[0]
    session = MedusaDrafter(counting_heads(), dynamic_nodes=9).open(target, SamplingConfig(), 1, 40)
    (proposal,) = session.propose([DraftRequest([4, 5, 9], hidden, 9, 99)])
    assert proposal.tree.token_list == [9, 10, 11, 12], "all others are 400 logits below, which is 0 in fp32"


@BOTH_TREES
def test_a_depth_is_one_pass_of_one_head_over_the_parents_of_all_rows(
    tiny_llama: CausalLM, dynamic: int | None
) -> None:
    heads = random_heads()
    drafter = MedusaDrafter(heads, None if dynamic else PATHS, dynamic)
    ran: list[tuple[int, int]] = []
    for k, head in enumerate(heads.heads):
        head.lm_head.register_forward_hook(lambda _, args, out, k=k: ran.append((k, len(out))))
    propose(drafter, tiny_llama, torch.randn(4, 16))
    assert [k for k, _ in ran] == [0, 1, 2] and ran[0] == (0, 4)
    if not dynamic:  # (0) and (2) have children, and so have (0, 1) and (2, 0)
        assert ran == [(0, 4), (1, 8), (2, 8)]
    ran.clear()
    propose(drafter, tiny_llama, torch.randn(4, 16), [(1, 99), (2, 99), (0, 99), (9, 1)])
    assert [k for k, _ in ran] == [0, 1]
    ran.clear()
    assert [len(each.tree) for each in propose(drafter, tiny_llama, torch.randn(2, 16), [(0, 99), (0, 1)])] == [1, 1]
    assert not ran


@BOTH_LAYOUTS
@pytest.mark.parametrize("nodes", [2, 5, 12, 30])
def test_a_dynamic_tree_is_the_best_of_all_trees_at_this_position(
    tiny_llama: CausalLM, shared: bool, nodes: int
) -> None:
    check_dynamic_tree(random_heads(shared), tiny_llama, reference_logits, nodes)


@given(depth=st.integers(0, 5), nodes=st.integers(1, 12), dynamic=st.sampled_from([None, 2, 7]))
def test_a_request_bounds_depth_and_nodes(tiny_llama: CausalLM, depth: int, nodes: int, dynamic: int | None) -> None:
    drafter = MedusaDrafter(random_heads(True), None if dynamic else PATHS, dynamic)
    (proposal,) = propose(drafter, tiny_llama, torch.randn(1, 16), [(depth, nodes)])
    assert proposal.tree.shape.max_depth <= depth and len(proposal.tree) <= min(nodes, drafter.max_nodes)
    assert len(proposal.tree) > 1 or depth == 0 or nodes == 1


@BOTH_TREES
def test_a_row_is_drafted_for_alike_whatever_stands_beside_it(tiny_llama: CausalLM, dynamic: int | None) -> None:
    check_rows_alone(random_heads(), tiny_llama, dynamic)


def test_a_smaller_budget_drafts_a_part_of_the_whole_static_tree(tiny_llama: CausalLM) -> None:
    drafter, hidden = MedusaDrafter(random_heads(), PATHS), torch.randn(1, 16)
    (whole,) = propose(drafter, tiny_llama, hidden)
    for budget in drafter.budgets:
        (proposal,) = propose(drafter, tiny_llama, hidden, [budget])
        assert (proposal.tree.shape.max_depth, len(proposal.tree)) == budget
        assert paths(proposal.tree) <= paths(whole.tree)


def test_sequential_heads_run_in_their_own_dtype(tiny_llama: CausalLM) -> None:
    for shared in (False, True):
        heads = random_heads(shared).bfloat16()
        (proposal,) = propose(MedusaDrafter(heads, PATHS), tiny_llama, torch.randn(1, 16))
        assert len(proposal.tree) == len(PATHS) + 1


def test_a_target_whose_embeddings_are_of_another_size_is_refused() -> None:
    target = CausalLM(tiny_model())
    target.model.set_input_embeddings(nn.Embedding(16, 8))
    with pytest.raises(ValueError, match=r"embeddings have size 8 and its hidden states 16.*sequential=false"):
        MedusaDrafter(random_heads(), PATHS).open(target, SamplingConfig(), 1, 40)


# --- through the loop -----------------------------------------------------------------------------------------------


def test_heads_that_know_how_to_count_are_accepted_whole() -> None:
    drafter = MedusaDrafter(counting_heads(), [[0], [0, 0], [0, 0, 0]])
    generation = Engine(CausalLM(counting_model()), drafter).decode([0], DecodingConfig(13))
    assert generation.tokens == tuple(range(1, 14))
    # The prefill writes one, then three times three drafted and one written.
    assert [(step.accepted, len(step.tokens)) for step in generation.steps] == [(0, 1), (3, 4), (3, 4), (3, 4)]
