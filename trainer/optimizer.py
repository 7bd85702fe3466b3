"""Which optimizer steps which parameter."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer.recipe import TrainingSection


def build_optimizers(module: nn.Module, section: TrainingSection) -> list[Optimizer]:
    """AdamW for everything, or Muon (Jordan et al. 2024) for the matrices inside the network and AdamW for the rest.

    Muon's step is scaled to AdamW's size, so one learning rate serves both. Embeddings and output layers, whose rows
    are tokens, stay with AdamW.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if section.optimizer == "adamw":
        return [_adamw(trained.values(), section)]
    vocabulary = {id(parameter) for name, parameter in trained.items() if _is_over_vocabulary(name)}
    matrices = [p for p in trained.values() if p.ndim == 2 and id(p) not in vocabulary]
    others = [p for p in trained.values() if p.ndim != 2 or id(p) in vocabulary]
    muon = torch.optim.Muon(
        matrices, lr=section.learning_rate, weight_decay=section.weight_decay, adjust_lr_fn="match_rms_adamw"
    )
    return [muon, _adamw(others, section)]


def _is_over_vocabulary(name: str) -> bool:
    return any(part in name for part in ("embed", "wte", "wpe", "lm_head"))


def _adamw(parameters: Iterable[Tensor], section: TrainingSection) -> Optimizer:
    return torch.optim.AdamW(
        parameters, lr=section.learning_rate, betas=(0.9, section.adam_beta2), weight_decay=section.weight_decay
    )
