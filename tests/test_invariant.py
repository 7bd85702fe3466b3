"""Batch-invariant passes: even in bf16, texts equal plain decoding, alone and in batches."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from decoding.errors import UserError
from decoding.generate import DecodingConfig, Engine
from decoding.headstart_model import HeadstartModel
from decoding.model.causal_lm import CausalLM
from decoding.rules.sampling import SamplingConfig
from decoding.rules.tree import TokenTree, TreeShape
from decoding.rules.verify import SAMPLED_VERIFY
from tests.scripted_drafters import HostileDrafter
from tests.target_families import family_model
from tests.tiny_models import FEW_ATTENTIONS, tiny_model
from trainer.commands.models import read_target
from trainer.commands.shared_options import LoadingOptions

PROMPTS = [[1 + (7 * number + place * place) % 60 for place in range(3 + 2 * number)] for number in range(7)]
COUNT = 24
BUSHY = TreeShape((-1, 0, 0, 1, 0, 1, 2, 3, 3, 6))


def narrow(family: str, attention: str, static: str | None = None) -> CausalLM:
    """Make a tiny model in bf16, in which products of experts need rows of 16 bytes."""
    sizes = {"n_embd": 96} if family == "gpt2" else {"hidden_size": 96}
    if family == "qwen3-moe":
        sizes |= {"head_dim": 48, "moe_intermediate_size": 64}
    # Small weights make near-ties.
    model = tiny_model(family, vocab=64, attention=attention, initializer_range=0.1, **sizes)
    return CausalLM(model.to(torch.bfloat16), static=static, batch_invariant=True)


@pytest.mark.parametrize(("family", "attention"), FEW_ATTENTIONS)
def test_logits_of_a_tree_are_bit_equal_to_passes_over_single_tokens(family: str, attention: str) -> None:
    target = narrow(family, attention)
    tokens = torch.randint(64, (len(BUSHY),), generator=torch.Generator().manual_seed(1)).tolist()
    cache = target.new_cache(40)
    target.prefill(PROMPTS[:1], cache)
    whole = target.verify([TokenTree.of_list(tokens, BUSHY)], cache).logits[0]
    for node in range(len(BUSHY)):
        cache.truncate(0, len(PROMPTS[0]))
        for each in (0, *BUSHY.path(node)):
            alone = target.step(torch.tensor([tokens[each]]), cache).logits[0]
        assert torch.equal(alone, whole[node]), f"node {node}"


@pytest.mark.parametrize("static", [None, "eager"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_in_bf16_texts_of_a_batch_are_plain_decodings_of_each_alone(static: str | None, temperature: float) -> None:
    config = DecodingConfig(
        COUNT, SamplingConfig(temperature=temperature), rule=SAMPLED_VERIFY if temperature else None
    )
    target = narrow("llama", "sdpa", static)
    plain = [Engine(target).decode(prompt, replace(config, seed=seed)).tokens for seed, prompt in enumerate(PROMPTS)]
    right = [[*prompt, *text] for prompt, text in zip(PROMPTS, plain, strict=True)]
    drafter = HostileDrafter(0, right[0], vocab=64, others=right[1:])
    drafted = Engine(target, drafter).decode(PROMPTS, config, batch_size=3)
    assert [text.tokens for text in drafted] == plain
    assert any(step.accepted for text in drafted for step in text.steps)


def test_commands_and_from_pretrained_load_batch_invariant_targets(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    assert read_target(str(tmp_path), LoadingOptions(batch_invariant=True)).batch_invariant
    model = HeadstartModel.from_pretrained(str(tmp_path), batch_invariant=True)
    assert model.target.with_static("eager").batch_invariant


def test_a_model_that_runs_no_trees_cannot_be_batch_invariant() -> None:
    with pytest.raises(UserError, match="cannot be batch-invariant"):
        CausalLM(family_model("qwen3_next"), batch_invariant=True)
