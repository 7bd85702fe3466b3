"""Shards modules over two processes as FSDP2 does, in bf16, and checks what they round.

`fully_shard` is called as accelerate calls it under recipes/accelerate/fsdp.yaml: on the module as a whole, with our
policy. Exits with 0 if every process finds everything right.
"""

import torch
from launched_heads import EXAMPLES, heads_objective
from parallel_training import objective_for
from tiny_models import tiny_model
from torch.distributed import all_reduce, destroy_process_group, get_rank, init_process_group
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from trainer.data.batch import collate
from trainer.processes import sharded_precision

BF16 = sharded_precision("bf16")


def check_heads(mine: slice) -> None:
    """A loss and the sum of two processes' gradients come back as a whole module in bf16 gives them, in fp32.

    The loss is a sum over tokens, made large enough that bf16 has no number near it. The target is in bf16 already, to
    which FSDP2 would round its states otherwise.
    """
    whole, sharded = (heads_objective(0, torch.bfloat16) for _ in range(2))
    whole.module.to(torch.bfloat16)
    fully_shard(sharded.module, mesh=init_device_mesh("cpu", (2,)), mp_policy=BF16)
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


def check_parallel_draft(mine: slice) -> None:
    """Masks of attention are as wide as before, and the losses come back in fp32 as a whole module's."""
    whole, sharded = (objective_for(tiny_model("llama")) for _ in range(2))
    whole.module.to(torch.bfloat16)
    fully_shard(sharded.module, mesh=init_device_mesh("cpu", (2,)), mp_policy=BF16)
    batch = collate(EXAMPLES[:8][mine])
    expected, found = (each.module(*each.inputs(batch, 0)).losses for each in (whole, sharded))
    assert torch.allclose(found, expected, rtol=1e-2), f"losses {found.tolist()} where {expected.tolist()} are right"
    found.sum().backward()
    assert all(isinstance(parameter.grad, DTensor) for parameter in sharded.module.parameters())


def main() -> None:
    init_process_group("gloo")
    mine = slice(get_rank(), None, 2)
    check_heads(mine)
    check_parallel_draft(mine)
    destroy_process_group()


if __name__ == "__main__":
    main()
