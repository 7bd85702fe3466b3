"""Which optimizer steps which parameter."""

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from decoding.model.heads import MedusaConfig, MedusaHeads
from trainer.recipe.common import TrainingSection
from trainer.run.distributed import PREFIX, build_optimizers, set_learning_rates

MUON = TrainingSection(steps=1, optimizer="muon", learning_rate=0.02, weight_decay=0.1)


def stepped_by(module: nn.Module, section: TrainingSection) -> list[set[str]]:
    """For each optimizer, the names of the parameters it steps."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    return [
        {names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]}
        for optimizer in build_optimizers(module, section)
    ]


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_muon_steps_the_matrices_inside_and_adamw_the_rest(family: str) -> None:
    model = tiny_model(family)
    muon, adamw = stepped_by(model, MUON)
    assert muon.isdisjoint(adamw) and muon | adamw == {name for name, _ in model.named_parameters()}
    by_name = dict(model.named_parameters())
    assert all(by_name[name].ndim == 2 for name in muon) and len(muon) >= 8
    assert {name for name in adamw if by_name[name].ndim == 2} == {
        "llama": {"model.embed_tokens.weight", "lm_head.weight"},
        "gpt2": {"transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"},
    }[family]


def test_a_muon_step_has_the_size_of_an_adamw_step() -> None:
    """One step moves every weight by about the learning rate (rms .2 of it for Muon), so that one rate serves both."""
    model = tiny_model("llama")
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    section = TrainingSection(steps=1, optimizer="muon", learning_rate=0.01)
    optimizers = build_optimizers(model, section)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    for optimizer in optimizers:
        optimizer.step()
    muon, _ = stepped_by(model, section)
    for name, parameter in model.named_parameters():
        moved = (parameter.detach() - before[name]).square().mean().sqrt().item()
        assert moved == pytest.approx(0.002 if name in muon else 0.01, rel=0.35)


def test_a_parameter_is_in_the_group_of_the_longest_beginning_of_its_name() -> None:
    model = tiny_model("llama")
    prefixes = ("model.layers.1.", "model.", "", "heads.")
    (optimizer,) = build_optimizers(model, TrainingSection(steps=1), prefixes)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {group[PREFIX]: {names[id(p)] for p in group["params"]} for group in optimizer.param_groups}
    assert groups.keys() == {"model.layers.1.", "model.", ""}  # one without parameters is none
    assert all(name.startswith("model.layers.1.") for name in groups["model.layers.1."])
    assert "model.layers.0.mlp.up_proj.weight" in groups["model."] and groups[""] == {"lm_head.weight"}
    assert sum(map(len, groups.values())) == len(names)


def test_the_learning_rates_are_the_groups_factors_times_the_recipes() -> None:
    optimizers = build_optimizers(tiny_model("llama"), MUON, ("model.layers.", ""))
    set_learning_rates(optimizers, 0.5, {"model.layers.": 4.0, "": 0.0})
    rates = {
        (type(optimizer).__name__, group[PREFIX]): group["lr"]
        for optimizer in optimizers
        for group in optimizer.param_groups
    }
    assert rates == {("Muon", "model.layers."): 2.0, ("AdamW", "model.layers."): 2.0, ("AdamW", ""): 0.0}


def test_adamw_steps_both_sides_of_the_bias_by_the_token_before() -> None:
    heads = MedusaHeads(MedusaConfig(16, 32, num_heads=1, markov_rank=4, tree=((0,),)))
    muon, _ = build_optimizers(heads, TrainingSection(steps=1, optimizer="muon"))
    assert [p is heads.heads[0].blocks[0].linear.weight for g in muon.param_groups for p in g["params"]] == [True]
