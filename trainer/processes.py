"""The processes of a run: how they are launched, and how an error on one process reaches all other processes.

For some combinations of launcher and devices, accelerate silently starts something else. This module rejects such
combinations.

Every process calls `agreed`, `on_first` and similar functions in the same order; calls may be nested. An error on one
process reaches the other processes at their next call of such a function, and no process waits for a process that has
stopped.
"""

import importlib.util
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from threading import Event, Thread
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs, PartialState
from accelerate.utils import DistributedType
from rich.console import Console
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # not in torch's list of names
from torch.distributed.fsdp import MixedPrecisionPolicy

from decoding.errors import UserError
from trainer.terminal.console import say, standard_error

TIMEOUT = timedelta(minutes=30)
"""If a process sends nothing for this time, the others stop waiting for it."""
_SIGN_EVERY = 60.0  # seconds
_AGREED = "every process fails, with this error or with one that refers to it"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Process:
    """One process of the group: number ``rank`` (from 0) of ``world``."""

    rank: int = 0
    world: int = 1
    console: Console = field(default_factory=standard_error)

    @property
    def is_first(self) -> bool:
        """True on the process that writes files and prints for all."""
        return self.rank == 0

    def say(self, *lines: str) -> None:
        """Print each line once, on the first process."""
        if self.is_first:
            say(self.console, *lines)


ALONE = Process()
"""A single process, printing to standard error."""


def any_process(flag: bool) -> bool:
    """Return True on every process if ``flag`` is true on at least one process."""
    if _is_alone():
        return flag
    flags = torch.tensor(float(flag), device=PartialState().device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def agreed(work: Callable[[], Result], patient: bool = False) -> Result:
    """Return the result of ``work``; an error on one process becomes an error on all processes.

    With ``patient``, one process may take hours longer than another. In this case ``work`` must send nothing to other
    processes.
    """
    if _is_alone():
        return work()
    if patient:
        _raise_on_all(None)  # this call fails if another process failed before
    with _in_touch() if patient else nullcontext() as wait_for_all:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            if is_agreed(raised):
                raise
            error = raised
        if wait_for_all is not None:
            wait_for_all()
        _raise_on_all(error)
        return cast(Result, result)


def is_agreed(error: BaseException) -> bool:
    """Return True if every process raises this error or an error that refers to this error."""
    return _AGREED in getattr(error, "__notes__", ())


def on_first(work: Callable[[], object]) -> None:
    """Do the work on the first process while the others wait; an error there becomes an error on all processes."""
    agreed(work if _is_first() else lambda: None, patient=True)


def from_first(work: Callable[[], Result]) -> Result:
    """Do the work on the first process, and return its result or raise its error on all processes."""
    results = [agreed(cast(Callable[[], Result | None], work) if _is_first() else lambda: None, patient=True)]
    if not _is_alone():
        dist.broadcast_object_list(results)
    return cast(Result, results[0])


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def _is_first() -> bool:
    return _is_alone() or dist.get_rank() == 0


def _raise_on_all(error: Exception | None) -> None:
    if any_process(error is not None):
        error = error or UserError("another process failed: see its error message")
        error.add_note(_AGREED)
        raise error


@contextmanager
def _in_touch() -> Iterator[Callable[[], None]]:
    """Send the other processes a signal every minute; yield a function that waits until every process has called it."""
    group, ended = dist.new_group(backend="gloo", timeout=TIMEOUT), Event()

    def send_signs() -> None:
        busy = torch.ones(())
        while busy:
            busy.fill_(not ended.wait(_SIGN_EVERY))
            dist.all_reduce(busy, dist.ReduceOp.MAX, group)

    signs = Thread(target=send_signs, daemon=True)

    def wait_for_all() -> None:
        ended.set()
        signs.join()

    signs.start()
    yield wait_for_all
    dist.destroy_process_group(group)


# --- the launch -------------------------------------------------------------------------------------------------------


def build_accelerator(mixed_precision: str = "no", **options: Any) -> Accelerator:
    """Return the accelerator for the launcher that is used; ``mixed_precision`` is ``no`` or ``bf16``.

    Raises UserError if accelerate starts anything but what the launcher asked for.
    """
    _meet_apart_from_the_dead()
    deepspeed = _is_asked_for("ACCELERATE_USE_DEEPSPEED")
    fsdp = _is_asked_for("ACCELERATE_USE_FSDP")
    group: dict[str, Any] = {"timeout": TIMEOUT}
    if deepspeed:
        _check_deepspeed()
        if not torch.cuda.is_available():
            group["backend"] = "gloo"
            _leave_out_compiled_communication()
    precision = "no" if deepspeed else mixed_precision  # ZeRO would round the weights to bf16: see `run.distributed`
    # The gradients are views of DDP's buckets, so they take up memory only once.
    handlers = [InitProcessGroupKwargs(**group), DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=handlers, **options)
    _check_type(accelerator, deepspeed, fsdp)
    if fsdp:
        accelerator.state.fsdp_plugin.mixed_precision_policy = sharded_precision(mixed_precision)
    if deepspeed:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        # Under ZeRO-3 transformers would shard every model that it loads, but we need the whole frozen target.
        unset_hf_deepspeed_config()
    return accelerator


def join_processes() -> Accelerator | None:
    """Return the accelerator for processes that share work without training; None for a single process.

    Raises UserError for DeepSpeed or FSDP, and if accelerate starts anything but what the launcher asked for.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    for name in ("DeepSpeed", "FSDP"):
        if _is_asked_for(f"ACCELERATE_USE_{name.upper()}"):
            raise UserError(
                f"the launcher asks for {name}, but this command does not train: launch with "
                "recipes/accelerate/ddp.yaml"
            )
    _meet_apart_from_the_dead()
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT)])
    _check_type(accelerator, deepspeed=False, fsdp=False)
    return accelerator


def sharded_precision(mixed_precision: str) -> MixedPrecisionPolicy:
    """Return the precision that FSDP2 uses: products are computed in bf16 if the recipe asks for bf16, and gradients
    and losses are summed in fp32.

    accelerate's bf16 policy would also round the sums: 16,700.1 would come back as 16,640. It would also round inputs
    such as the logsumexp of stored logits, which would change the target's probabilities by up to 6%.
    """
    if mixed_precision == "no":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=None, cast_forward_inputs=False)


def describe(accelerator: Accelerator) -> dict[str, Any]:
    """Return how the run was launched, as plain JSON values."""
    return {
        "num_processes": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type.value,
        "zero_stage": zero_stage(accelerator),
    }


def zero_stage(accelerator: Accelerator) -> int:
    """Return DeepSpeed's ZeRO stage; 0 without DeepSpeed."""
    if accelerator.distributed_type != DistributedType.DEEPSPEED:
        return 0
    stage: int = accelerator.state.deepspeed_plugin.zero_stage
    return stage


def _meet_apart_from_the_dead() -> None:
    """Choose a new meeting port for processes that torchrun has restarted.

    Otherwise the processes would reuse the store of the previous attempt and wait for dead processes that the store
    still lists (pytorch/pytorch#135712). Raises UserError if there are several machines, because the machines may have
    counted different numbers of attempts.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or torch.distributed.is_initialized():
        return
    if int(os.environ["GROUP_WORLD_SIZE"]) > 1 and int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) > 0:
        raise UserError(
            f"torchrun cannot restart processes on {os.environ['GROUP_WORLD_SIZE']} machines this way. "
            "Start torchrun on each machine with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend c10d"
        )
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    if attempt == "0":
        return
    of_the_agent = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    key = f"headstart/attempt {attempt}"
    if os.environ["RANK"] == "0":
        with socket.create_server(("", 0)) as free:
            of_the_agent.set(key, str(free.getsockname()[1]))
    port = of_the_agent.get(key).decode()
    os.environ.update({"MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": "False"})


def _is_asked_for(variable: str) -> bool:
    return os.environ.get(variable, "false").lower() == "true"


def _check_deepspeed() -> None:
    if importlib.util.find_spec("deepspeed") is None:
        raise UserError("the launcher needs DeepSpeed, which is not installed: pip install 'headstart[deepspeed]'")
    if _is_asked_for("ACCELERATE_USE_CPU"):
        raise UserError(
            "accelerate ignores DeepSpeed while ACCELERATE_USE_CPU is set: unset this variable (without a GPU, "
            "DeepSpeed uses the CPU by itself), or launch with recipes/accelerate/cpu.yaml"
        )


def _leave_out_compiled_communication() -> None:
    """Use gloo's all-reduce on CPUs, because DeepSpeed would need half a minute to compile its own all-reduce."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _check_type(accelerator: Accelerator, deepspeed: bool, fsdp: bool) -> None:
    got = accelerator.distributed_type
    if deepspeed and got != DistributedType.DEEPSPEED:
        raise UserError(f"the launcher asks for DeepSpeed but accelerate starts {got.value}: launch several processes")
    if fsdp and (got != DistributedType.FSDP or not accelerator.is_fsdp2):
        fsdp1 = got == DistributedType.FSDP
        raise UserError(
            f"the launcher asks for FSDP, but accelerate starts {'FSDP version 1' if fsdp1 else 'no FSDP'} on "
            f"{accelerator.device}. On GPUs, use recipes/accelerate/fsdp.yaml (version 2, one GPU per process). "
            "Without GPUs, use recipes/accelerate/ddp.yaml"
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != accelerator.num_processes:
        raise UserError(
            f"{world} processes were launched, but accelerate sees {accelerator.num_processes}: on a CPU, launch with "
            "ACCELERATE_USE_CPU=true and recipes/accelerate/ddp.yaml"
        )
