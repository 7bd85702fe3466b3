"""The optimizers, and the groups of parameters with learning-rate factors of their own."""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.recipe.common import TrainingSection

_OVER_VOCABULARY = {
    *("embed_tokens", "embed_in", "embed_out", "embedding", "word_embeddings", "wte", "wpe", "lm_head"),
    "markov",
}
"""Names of embeddings and output layers in the families of transformers, and of the bias by the token before."""

PREFIX = "prefix"
"""The key of a parameter group that holds the common beginning of its parameters' names."""


def build_optimizers(module: nn.Module, section: TrainingSection, prefixes: Collection[str] = ("",)) -> list[Optimizer]:
    """Build AdamW for everything, or Muon (Jordan et al. 2024) for the network's inner matrices and AdamW for the rest.

    A parameter belongs to the group of the longest of ``prefixes`` that its name begins with; frozen ones to none.
    Muon's step is scaled to AdamW's size, so one learning rate serves both. Embeddings and output layers, whose rows
    are tokens, stay with AdamW.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if section.optimizer == "adamw":
        return [_adamw(_groups(trained, prefixes), section)]
    inside = {name for name, p in trained.items() if p.ndim == 2 and not _is_over_vocabulary(name)}
    matrices = {name: parameter for name, parameter in trained.items() if name in inside}
    others = {name: parameter for name, parameter in trained.items() if name not in inside}
    muon = torch.optim.Muon(
        _groups(matrices, prefixes),
        lr=section.learning_rate,
        weight_decay=section.weight_decay,
        adjust_lr_fn="match_rms_adamw",
    )
    return [muon, _adamw(_groups(others, prefixes), section)]


def set_learning_rates(optimizers: Iterable[Optimizer], learning_rate: float, rates: Mapping[str, float]) -> None:
    """Give each group the learning rate times its own factor."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = learning_rate * rates[group[PREFIX]]


def _groups(parameters: Mapping[str, Tensor], prefixes: Collection[str]) -> list[dict[str, Any]]:
    chosen: dict[str, list[Tensor]] = {prefix: [] for prefix in prefixes}
    for name, parameter in parameters.items():
        fitting = [prefix for prefix in prefixes if name.startswith(prefix)]
        assert fitting, f"no learning rate for {name}: the objective's rates need an entry for all others"
        chosen[max(fitting, key=len)].append(parameter)
    return [{"params": members, PREFIX: prefix} for prefix, members in chosen.items() if members]


def _is_over_vocabulary(name: str) -> bool:
    return not _OVER_VOCABULARY.isdisjoint(name.split("."))


def _adamw(groups: list[dict[str, Any]], section: TrainingSection) -> Optimizer:
    return torch.optim.AdamW(
        groups,
        lr=section.learning_rate,
        betas=(0.9, section.adam_beta2),
        weight_decay=section.weight_decay,
        fused=True,  # a fifth of the time on a CPU
    )
