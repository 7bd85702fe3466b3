"""Each parameter is stepped by the right optimizer."""

import pytest
import torch
from tiny_models import tiny_model
from torch import nn

from trainer.recipe.common import TrainingSection
from trainer.run.distributed import PREFIX, Muon, build_optimizers, set_learning_rates

MUON = TrainingSection(steps=1, optimizer="muon", learning_rate=0.02, weight_decay=0.1)


def stepped_by(module: nn.Module, section: TrainingSection) -> list[set[str]]:
    """Return, for each optimizer, the names of the parameters that it steps."""
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


def test_a_parameter_is_in_the_group_of_the_longest_beginning_of_its_name() -> None:
    model = tiny_model("llama")
    prefixes = ("model.layers.1.", "model.", "", "heads.")
    (optimizer,) = build_optimizers(model, TrainingSection(steps=1), prefixes)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    groups = {group[PREFIX]: {names[id(p)] for p in group["params"]} for group in optimizer.param_groups}
    assert groups.keys() == {"model.layers.1.", "model.", ""}  # an optimizer without parameters is left out
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


def test_muon_in_bf16_is_the_one_of_torch_to_the_bit() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((8, 8), (5, 16), (16, 5))]
    theirs = [nn.Parameter(each.detach().clone()) for each in ours]
    optimizers = (
        Muon(ours, lr=0.02, weight_decay=0.1, dtype=torch.bfloat16),
        torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
    )
    for _ in range(3):
        for one, other in zip(ours, theirs, strict=True):
            one.grad = torch.randn_like(one)
            other.grad = one.grad.clone()
        for optimizer in optimizers:
            optimizer.step()
    assert all(map(torch.equal, ours, theirs))
