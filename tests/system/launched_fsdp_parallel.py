"""Shards a parallel draft over two processes as FSDP2 does, and checks that steps train what one process trains.

As in launched_fsdp.py, `fully_shard` is called as accelerate calls it. Exits with 0 if every process finds it right.
"""

import torch
from launched_fsdp import SECTION, close, shard, step
from launched_heads import EXAMPLES
from parallel_training import objective_for
from tiny_models import tiny_model
from torch.distributed import destroy_process_group, get_rank, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trainer.data.batch import collate
from trainer.drafts.parallel import ParallelObjective
from trainer.run.distributed import sharded_precision
from trainer.run.optimizer import build_optimizers
from trainer.run.state import gather_weights


def objective() -> ParallelObjective:
    return objective_for(tiny_model("llama"))


def check_bf16(mine: slice) -> None:
    """In bf16 the masks of attention are as wide as before, and the losses come back in fp32 as a whole module's."""
    whole, sharded = objective(), objective()
    whole.module.to(torch.bfloat16)
    section = SECTION.model_copy(update={"mixed_precision": "bf16"})
    fully_shard(sharded.module, mesh=init_device_mesh("cpu", (2,)), mp_policy=sharded_precision(section))
    batch = collate(EXAMPLES[:8][mine])
    expected, found = (each.module(*each.inputs(batch, 0)).losses for each in (whole, sharded))
    assert torch.allclose(found, expected, rtol=1e-2), f"losses {found.tolist()} where {expected.tolist()} are right"
    found.sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in sharded.module.parameters())


def main() -> None:
    init_process_group("gloo")
    mine = slice(get_rank(), None, 2)
    check_bf16(mine)
    whole, sharded = objective(), objective()
    of_whole, of_sharded = build_optimizers(whole.module, SECTION), shard(sharded)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.module.parameters())
    for _ in range(2):
        step(whole, of_whole, slice(None), 1)
        step(sharded, of_sharded, mine, 2)
    weights = gather_weights(sharded.module)
    assert {"parts.reader.weight", "parts.markov.output.weight"} <= weights.keys()
    assert close(weights, gather_weights(whole.module)), "weights"
    destroy_process_group()


if __name__ == "__main__":
    main()
