"""Run another script as a process of accelerate's FSDP2, on a CPU.

accelerate knows FSDP for devices with a backend of their own alone: two processes on a CPU are MULTI_CPU to it, and
FSDP is passed over. Here the processes meet over gloo and are then called MULTI_GPU, which is all that accelerate asks
for: from there on its own code chooses FSDP2, shards what `prepare` is given and clips its gradients.

Usage, under accelerate launch with recipes/accelerate/fsdp.yaml: launched_fsdp2.py SCRIPT [ARGUMENT ...]
"""

import runpy
import sys
from datetime import timedelta

from accelerate import PartialState
from accelerate.utils import DistributedType


def be_a_device_without_one() -> None:
    """Let this process pass for one that has a device, before anything else asks accelerate."""
    state = PartialState(cpu=True, timeout=timedelta(hours=6))
    assert (state.distributed_type, state.backend) == (DistributedType.MULTI_CPU, "gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


if __name__ == "__main__":
    be_a_device_without_one()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
