"""Run another script as a process of accelerate's FSDP2, on a CPU.

accelerate supports FSDP only for devices with a separate backend: for two processes on a CPU it chooses MULTI_CPU and
ignores FSDP. Here the processes meet over gloo and are then marked as MULTI_GPU, which is all that accelerate checks.
From there on its own code chooses FSDP2, shards what is passed to `prepare`, and clips the gradients.

Usage, under accelerate launch with recipes/accelerate/fsdp.yaml: launched_fsdp2.py SCRIPT [ARGUMENT ...]
"""

import runpy
import sys
from datetime import timedelta

from accelerate import PartialState
from accelerate.utils import DistributedType


def be_a_device_without_one() -> None:
    """Make accelerate believe that this process has a device, before anything else uses accelerate."""
    state = PartialState(cpu=True, timeout=timedelta(hours=6))
    assert (state.distributed_type, state.backend) == (DistributedType.MULTI_CPU, "gloo")
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


if __name__ == "__main__":
    be_a_device_without_one()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")
