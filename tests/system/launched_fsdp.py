"""Shards the heads' module over two processes as FSDP2 does, and checks what the loop would do with it.

accelerate has no way to FSDP on a CPU, so `fully_shard` is called here as accelerate calls it under
recipes/accelerate/fsdp.yaml: on the module as a whole. Exits with 0 if every process finds everything right.

Usage: launched_fsdp.py FOLDER. FOLDER/made_by.json has a recipe and its job's identity: a checkpoint of its heads after
one step, sharded, goes to FOLDER/checkpoints.
"""

import copy
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate.utils import DistributedType
from launched_heads import EXAMPLES, SECTION, heads_objective
from torch import nn
from torch.distributed import all_reduce, destroy_process_group, get_rank, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_model
from trainer.data.batch import collate
from trainer.heads.medusa import MedusaObjective
from trainer.recipe.heads import MedusaRecipe
from trainer.recipe.reading import parse_recipe
from trainer.run.checkpoint import Checkpoints, Progress, Saved
from trainer.run.distributed import sharded_precision, whole_parameters
from trainer.run.optimizer import build_optimizers
from trainer.run.state import gather_moments, gather_weights, load_moments, load_weights
from trainer.target.hidden import OnlineTarget

BOTH: Any = SimpleNamespace(distributed_type=DistributedType.FSDP)  # all that `whole_parameters` asks an accelerator


def shard(objective: MedusaObjective) -> list[Optimizer]:
    """Shard the module, as sharded parameters are what the optimizer must step."""
    fully_shard(objective.module, mesh=init_device_mesh("cpu", (2,)))
    return build_optimizers(objective.module, SECTION)


def step(objective: MedusaObjective, optimizers: list[Optimizer], rows: slice, processes: int) -> None:
    """One step on these rows of a batch of eight; gradients are averaged over processes, the sum is wanted."""
    batch = collate(EXAMPLES[:8][rows], range(8)[rows])
    losses, _ = objective.module(*objective.inputs(batch, 0))
    (losses.sum() / 100 * processes).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def close(some: dict[str, torch.Tensor], others: dict[str, torch.Tensor]) -> bool:
    assert some.keys() == others.keys()
    return all(torch.allclose(some[key], others[key], atol=1e-5) for key in some)


def check_rounding(mine: slice) -> None:
    """In bf16 a loss and the sum of two processes' gradients come back as a whole module in bf16 gives them, in fp32.

    The loss is a sum over tokens, made large enough that bf16 has no number near it. The target is in bf16 already, to
    which FSDP2 would round its states otherwise.
    """
    whole, sharded = (heads_objective(0, torch.bfloat16) for _ in range(2))
    whole.module.to(torch.bfloat16)
    section = SECTION.model_copy(update={"mixed_precision": "bf16"})
    fully_shard(sharded.module, mesh=init_device_mesh("cpu", (2,)), mp_policy=sharded_precision(section))
    batch = collate(EXAMPLES[:8][mine], range(8)[mine])
    expected, found = (of.module(*of.inputs(batch, 0)).losses * 97 for of in (whole, sharded))
    assert expected.dtype == torch.float32 and bool((expected != expected.bfloat16()).any())
    assert torch.equal(found, expected), f"losses {found.tolist()} where {expected.tolist()} are right"
    for losses in (expected, found):
        losses.sum().backward()
    named = dict(sharded.module.named_parameters())
    for name, parameter in whole.module.named_parameters():
        assert parameter.grad is not None
        mean, shard_of_it = parameter.grad.float() / 2, named[name].grad
        all_reduce(mean)
        assert isinstance(shard_of_it, DTensor) and shard_of_it.dtype == torch.float32
        assert torch.allclose(shard_of_it.full_tensor(), mean, rtol=1e-5, atol=0), f"gradient of {name}"


def save_checkpoint(folder: Path, mine: slice) -> None:
    """Train the recipe's heads for a step, sharded, and save them as the loop would."""
    made_by = json.loads((folder / "made_by.json").read_text())
    recipe = parse_recipe(made_by["recipe"])
    assert isinstance(recipe, MedusaRecipe)
    target = OnlineTarget(CausalLM(load_model(recipe.target, torch.float32)))
    objective = MedusaObjective(target, recipe.heads, recipe.training.steps, torch.float32)
    optimizers = shard(objective)
    step(objective, optimizers, mine, 2)
    saved = Saved(Progress(1, 100), gather_weights(objective.module), gather_moments(objective.module, optimizers))
    if get_rank() == 0:
        launch = {"recipe": made_by["recipe"], "launch": {"distributed_type": "FSDP", "num_processes": 2}}
        Checkpoints(folder / "checkpoints", 1, made_by["identity"], None, launch).save(saved)


def main(folder: Path) -> None:
    init_process_group("gloo")
    mine = slice(get_rank(), None, 2)
    save_checkpoint(folder, mine)
    check_rounding(mine)
    whole, sharded = heads_objective(0), heads_objective(0)
    of_whole, of_sharded = build_optimizers(whole.module, SECTION), shard(sharded)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.module.parameters())
    for _ in range(2):
        step(whole, of_whole, slice(None), 1)
        step(sharded, of_sharded, mine, 2)
    weights, moments = gather_weights(sharded.module), gather_moments(sharded.module, of_sharded)
    assert close(weights, gather_weights(whole.module)), "weights"
    assert close(moments, gather_moments(whole.module, of_whole)), "moments"

    resumed = heads_objective(1)
    load_weights(resumed.module, weights)
    of_resumed = shard(resumed)
    load_moments(resumed.module, of_resumed, moments)
    for objective, optimizers in ((sharded, of_sharded), (resumed, of_resumed)):
        step(objective, optimizers, mine, 2)
    ours, theirs = gather_weights(sharded.module), gather_weights(resumed.module)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours), "resumed"

    with whole_parameters(BOTH, sharded.module):
        if get_rank() == 0:  # as an evaluation keeps the best weights, and the end puts them back
            assert close(gather_weights(sharded.module), ours), "kept"
            load_weights(sharded.module, weights)
            assert close(gather_weights(sharded.module), weights), "put back"
            load_weights(sharded.module, ours)
        heads: nn.Module = copy.deepcopy(sharded.module.heads)
    assert not any(isinstance(parameter, DTensor) for parameter in heads.parameters())
    copied = {f"heads.{name}": tensor for name, tensor in heads.state_dict().items()}
    assert close(copied, {name: tensor for name, tensor in ours.items() if name.startswith("heads.")}), "copied"
    assert all(isinstance(parameter, DTensor) for parameter in sharded.module.parameters())
    destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
