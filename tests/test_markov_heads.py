"""Heads with a Markov bias: the bias by hand, and the artefact."""

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from drafter_checks import Follower
from safetensors.torch import load_file
from torch import Tensor

from decoding.drafters import MedusaDrafter
from decoding.drafters.growth import ConditionalLogits
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.markov import DecodingBias, MarkovBias
from decoding.model.stored import CONFIG_NAME, WEIGHTS_NAME

BOTH_LAYOUTS = pytest.mark.parametrize("shared", [False, True], ids=["own lm_heads", "shared lm_head"])
PATHS = ((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (2, 3), (0, 1, 0), (2, 0, 0))
CONFIG = MedusaConfig(16, 16, num_heads=3, num_layers=1, tree=((0,), (1,), (0, 0)), markov_rank=4)


def random_markov_heads(shared: bool = False, config: MedusaConfig = CONFIG) -> MedusaHeads:
    heads = MedusaHeads(replace(config, shared_lm_head=shared))
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator))
    return heads


@torch.no_grad()
def reference_logits(heads: MedusaHeads, target: CausalLM, hidden: Tensor, tokens: Sequence[int]) -> Tensor:
    """The logits after these tokens, the root first: the head's own, and W2 W1[the last of them]."""
    assert heads.markov is not None
    own = heads.heads[len(tokens) - 1](hidden, target.model.get_output_embeddings())
    logits: Tensor = own + heads.markov.output.weight @ heads.markov.embedding.weight[tokens[-1]]
    return logits


# --- the bias -------------------------------------------------------------------------------------------------------


@BOTH_LAYOUTS
def test_every_head_adds_one_shared_bias_of_the_token_before_its_own(tiny_llama: CausalLM, shared: bool) -> None:
    heads, hidden, before = random_markov_heads(shared), torch.randn(5, 16), torch.randint(16, (3, 5))
    with torch.inference_mode():
        logits = heads(hidden, tiny_llama.model.get_output_embeddings(), before=before)
    for k, row in itertools.product(range(3), range(5)):
        tokens = [15] * k + [int(before[k, row])]  # only the last of them matters
        torch.testing.assert_close(logits[k, row], reference_logits(heads, tiny_llama, hidden[row], tokens))


# --- on disk --------------------------------------------------------------------------------------------------------


@BOTH_LAYOUTS
def test_heads_with_a_bias_are_saved_whole_and_read_back_bit_equal(tmp_path: Path, shared: bool) -> None:
    heads = random_markov_heads(shared)
    heads.save_pretrained(tmp_path)
    assert json.loads((tmp_path / CONFIG_NAME).read_text())["markov_rank"] == 4
    stored = load_file(tmp_path / WEIGHTS_NAME)
    assert [stored[f"markov.{part}.weight"].shape for part in ("embedding", "output")] == [(16, 4), (16, 4)]
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == dict(heads.config.shapes())
    read = MedusaHeads.from_pretrained(tmp_path)
    assert read.config == heads.config
    assert all(torch.equal(tensor, stored[name]) for name, tensor in read.state_dict().items())


# --- as a table ---


@BOTH_LAYOUTS
def test_a_table_of_all_biases_drafts_what_the_product_drafts(
    tiny_llama: CausalLM, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = random_markov_heads(shared)
    tabulated = Follower(MedusaDrafter(heads, PATHS), tiny_llama, rows=2).propose([1, 2], [3, 4])
    monkeypatch.setattr("decoding.model.markov.LARGEST_TABLE", 16 * 16 * 4 - 1)  # a byte too small
    multiplied = Follower(MedusaDrafter(heads, PATHS), tiny_llama, rows=2).propose([1, 2], [3, 4])
    assert [each.tree.token_list for each in tabulated] == [each.tree.token_list for each in multiplied]


@pytest.mark.parametrize("largest", [0, 64])
def test_a_parent_that_only_the_target_knows_is_read_as_the_last_token_known(
    largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("decoding.model.markov.LARGEST_TABLE", largest)
    bias = MarkovBias(tokens=3, outputs=2, rank=1)
    with torch.no_grad():
        bias.embedding.weight.copy_(torch.tensor([[0.0], [1.0], [2.0]]))
        bias.output.weight.copy_(torch.tensor([[1.0], [10.0]]))
    base = torch.tensor([[[0.0, 0.0], [0.5, 0.5]], [[7.0, 7.0], [8.0, 8.0]]])  # two depths of two rows
    logits = ConditionalLogits(base, DecodingBias(bias), lambda outputs: torch.nn.functional.pad(outputs, (0, 1)))
    rows = torch.tensor([0, 1, 1])
    for depth, tokens, wanted in (
        (0, [1, 2, 4], [[1, 10, 0], [2.5, 20.5, 0], [2.5, 20.5, 0]]),
        (1, [0, 1, 2], [[7, 7, 0], [9, 18, 0], [10, 28, 0]]),
    ):
        found, index = logits(depth, rows, torch.tensor(tokens))
        assert found[index].tolist() == wanted
