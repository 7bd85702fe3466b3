"""Medusa heads: how they start, and what is saved and refused."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model
from tiny_training import medusa_on, toy_examples, train_toy

from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.stored import CONFIG_NAME, WEIGHTS_NAME
from trainer.recipe.heads import HeadsSection

CONFIG = MedusaConfig(hidden_size=16, vocab_size=16, num_heads=3, tree=((0,), (1,), (0, 0), (0, 0, 2)))
SHARED = replace(CONFIG, shared_lm_head=True)


def random_heads(config: MedusaConfig = CONFIG) -> MedusaHeads:
    heads = MedusaHeads(config)
    with torch.no_grad():
        for parameter in heads.parameters():
            parameter.normal_()
    return heads


@pytest.mark.parametrize("config", [CONFIG, SHARED], ids=["own", "shared"])
def test_heads_start_as_the_targets_lm_head(tiny_llama: CausalLM, config: MedusaConfig) -> None:
    heads = MedusaHeads.for_target(tiny_llama.model, config)
    assert any("lm_head" in name for name in heads.state_dict()) != config.shared_lm_head
    output = tiny_llama.append([[1, 2, 3]], tiny_llama.new_cache(8))
    with torch.inference_mode():
        logits = heads(output.hidden, tiny_llama.model.get_output_embeddings())
    assert logits.shape == (3, 1, 16)
    for head in logits:
        torch.testing.assert_close(head, output.logits, rtol=0, atol=1e-6)  # sums in another order


@pytest.mark.parametrize("config", [CONFIG, SHARED], ids=["own", "shared"])
def test_saved_and_loaded_heads_are_bit_equal_and_no_pickle(tmp_path: Path, config: MedusaConfig) -> None:
    heads = random_heads(config).bfloat16()
    heads.save_pretrained(tmp_path / "new" / "folder")
    written = sorted(path.name for path in (tmp_path / "new" / "folder").iterdir())
    assert written == [CONFIG_NAME, WEIGHTS_NAME] == ["config.json", "model.safetensors"]
    read = MedusaHeads.from_pretrained(tmp_path / "new" / "folder")
    assert read.config == config and not read.training
    found, wanted = read.state_dict(), heads.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
    assert {tensor.dtype for tensor in found.values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("heads.1.lm_head.weight"), r"heads\.1\.lm_head\.weight is missing"),
        (lambda tensors: tensors.update({"heads.9.lm_head.weight": torch.ones(1)}), r"heads\.9.* is unknown"),
        (lambda tensors: tensors.update({"heads.0.lm_head.weight": torch.ones(4, 16)}), r"size mismatch.*heads\.0"),
    ],
    ids=["missing", "extra", "wrong shape"],
)
def test_weights_that_are_not_exactly_those_of_the_config_are_refused(tmp_path: Path, change, message: str) -> None:  # type: ignore[no-untyped-def]  # a lambda over a dict
    random_heads().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / WEIGHTS_NAME)
    change(tensors)
    save_file(tensors, tmp_path / WEIGHTS_NAME)
    with pytest.raises(ValueError, match=rf"(?s)model\.safetensors does not fit its config.*{message}"):
        MedusaHeads.from_pretrained(tmp_path)


@pytest.mark.parametrize("missing", [CONFIG_NAME, WEIGHTS_NAME])
def test_a_folder_without_heads_is_refused_by_what_is_missing(tmp_path: Path, missing: str) -> None:
    random_heads().save_pretrained(tmp_path)
    (tmp_path / missing).unlink()
    with pytest.raises(ValueError, match=f"does not contain Medusa heads, {missing} is missing"):
        MedusaHeads.from_pretrained(tmp_path)


def test_an_lm_head_with_a_bias_is_refused_for_the_heads_would_lose_it() -> None:
    model = tiny_model()
    model.get_output_embeddings().bias = torch.nn.Parameter(torch.ones(16))
    with pytest.raises(ValueError, match="has a bias, which heads do not support"):
        MedusaHeads.for_target(model, MedusaConfig(16, 16))


# --- heads that share the target's lm_head --------------------------------------------------------------------------


def test_two_steps_of_training_change_the_blocks_alone(tmp_path: Path) -> None:
    model = tiny_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    objective = medusa_on(CausalLM(model), HeadsSection(num_heads=3, shared_lm_head=True))
    train_toy(tmp_path / "checkpoints", objective, examples=toy_examples(), steps=2)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    trained = dict(objective.module.heads.named_parameters())
    assert len(trained) == 3 * 2 and all(parameter.abs().max() > 0 for parameter in trained.values())
    objective.save(tmp_path / "final")
    stored = load_file(tmp_path / "final" / WEIGHTS_NAME)
    assert stored.keys() == trained.keys() and not any("lm_head" in name for name in stored)
    assert MedusaHeads.from_pretrained(tmp_path / "final").config.shared_lm_head
