"""The group of processes that run together: its launch, and its agreement on errors.

`accelerate launch` chooses a launcher. Combinations of launcher and devices that accelerate would silently replace by
others are refused here: such a run would train something else than was asked for.

No process waits for one that has stopped: every process calls `agreed` and its like in the same order. An error of one
process reaches the others at their next such call, so the work given to one may call another.
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
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it
from torch.distributed.fsdp import MixedPrecisionPolicy

from trainer.terminal.console import say, standard_error

TIMEOUT = timedelta(minutes=30)
"""Time after which processes give up one that they hear nothing of."""
_SIGN_EVERY = 60.0  # seconds
_AGREED = "every process has this error, or one that names it"

Result = TypeVar("Result")


@dataclass(frozen=True)
class Process:
    """One of the processes that run together: number ``rank`` (from 0) of ``world``."""

    rank: int = 0
    world: int = 1
    console: Console = field(default_factory=standard_error)

    @property
    def is_first(self) -> bool:
        """True on the process that writes and speaks for all."""
        return self.rank == 0

    def say(self, *lines: str) -> None:
        """Print each line once, on the first process."""
        if self.is_first:
            say(self.console, *lines)


ALONE = Process()
"""A single process that speaks on standard error."""


def any_process(flag: bool) -> bool:
    """Return True on every process if it is on one."""
    if _is_alone():
        return flag
    flags = torch.tensor(float(flag), device=PartialState().device)
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    return bool(flags)


def agreed(work: Callable[[], Result], patient: bool = False) -> Result:
    """Return what the work returns; an error on one process becomes an error on all.

    ``patient``: one process may take hours longer than another. Its work then sends nothing to the others.
    """
    if _is_alone():
        return work()
    if patient:
        _raise_on_all(None)  # a process that stopped before does not come here
    with _in_touch() if patient else nullcontext() as wait_for_all:
        result, error = None, None
        try:
            result = work()
        except Exception as raised:
            if _AGREED in getattr(raised, "__notes__", ()):
                raise
            error = raised
        if wait_for_all is not None:
            wait_for_all()
        _raise_on_all(error)
        return cast(Result, result)


def on_first(work: Callable[[], object]) -> None:
    """Do work on the first process alone, for which the others wait; its error becomes an error on all."""
    agreed(work if _is_first() else lambda: None, patient=True)


def from_first(work: Callable[[], Result]) -> Result:
    """Return on every process what the first one's work returns; its error becomes an error on all."""
    found = [agreed(cast(Callable[[], Result | None], work) if _is_first() else lambda: None, patient=True)]
    if not _is_alone():
        dist.broadcast_object_list(found)
    return cast(Result, found[0])


def _is_alone() -> bool:
    return not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1)


def _is_first() -> bool:
    return _is_alone() or dist.get_rank() == 0


def _raise_on_all(error: Exception | None) -> None:
    if any_process(error is not None):
        error = error or ValueError("another process cannot go on: its own message says why")
        error.add_note(_AGREED)
        raise error


@contextmanager
def _in_touch() -> Iterator[Callable[[], None]]:
    """Send the others a sign every minute; yields a function that waits until all have called it."""
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
    """Return the accelerator of the launcher that runs this program; ``mixed_precision`` is ``no`` or ``bf16``.

    Raises ValueError if accelerate runs something else than the launcher asked for.
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
    precision = "no" if deepspeed else mixed_precision  # ZeRO's own would round what is trained: see `run.distributed`
    # DDP's gradients are views of what it sends: a copy of all of them less.
    handlers = [InitProcessGroupKwargs(**group), DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=handlers, **options)
    _check_type(accelerator, deepspeed, fsdp)
    if fsdp:
        accelerator.state.fsdp_plugin.mixed_precision_policy = sharded_precision(mixed_precision)
    if deepspeed:
        from transformers.integrations.deepspeed import unset_hf_deepspeed_config

        # Under ZeRO-3 transformers would shard whatever it loads, the frozen target too, which is used whole.
        unset_hf_deepspeed_config()
    return accelerator


def join_processes() -> Accelerator | None:
    """Return the accelerator of several launched processes that share work without training; None for one alone.

    Raises ValueError if the launcher asks for DeepSpeed or FSDP, or if accelerate runs something else than asked for.
    """
    if os.environ.get("WORLD_SIZE", "1") == "1":
        return None
    for name in ("DeepSpeed", "FSDP"):
        if _is_asked_for(f"ACCELERATE_USE_{name.upper()}"):
            raise ValueError(
                f"the launcher asks for {name}, which has nothing to train here: launch with "
                "recipes/accelerate/ddp.yaml"
            )
    _meet_apart_from_the_dead()
    accelerator = Accelerator(kwargs_handlers=[InitProcessGroupKwargs(timeout=TIMEOUT)])
    _check_type(accelerator, deepspeed=False, fsdp=False)
    return accelerator


def sharded_precision(mixed_precision: str) -> MixedPrecisionPolicy:
    """Return FSDP2's rounding: products in bf16 if the recipe asks for it, sums of gradients and losses in fp32.

    accelerate's own policy for bf16 rounds both: a loss sum of 16,700.1 would come back as 16,640.
    """
    if mixed_precision == "no":
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=None)


def describe(accelerator: Accelerator) -> dict[str, Any]:
    """Return the run's launch as plain JSON values."""
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
    """Let processes that torchrun has restarted meet at a port of their own, which it tells them.

    Left alone, they meet in the store of the attempts before, find the addresses of dead processes there, and wait for
    those (pytorch/pytorch#135712). ValueError for several machines, which may count their attempts differently; torch
    has a remedy for them alone.
    """
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True" or torch.distributed.is_initialized():
        return
    if int(os.environ["GROUP_WORLD_SIZE"]) > 1 and int(os.environ["TORCHELASTIC_MAX_RESTARTS"]) > 0:
        raise ValueError(
            f"torchrun is to restart processes of {os.environ['GROUP_WORLD_SIZE']} machines, which could not meet "
            "again: start it on each with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 and --rdzv-backend c10d"
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
        raise ValueError("the launcher asks for DeepSpeed, which is not installed: pip install 'headstart[deepspeed]'")
    if _is_asked_for("ACCELERATE_USE_CPU"):
        raise ValueError(
            "ACCELERATE_USE_CPU is set, under which accelerate passes DeepSpeed over: unset it (without a GPU, "
            "DeepSpeed runs on the CPU all the same), or launch with recipes/accelerate/cpu.yaml"
        )


def _leave_out_compiled_communication() -> None:
    """Keep DeepSpeed from compiling a shared-memory all-reduce for CPUs, which takes half a minute; gloo's will do."""
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _check_type(accelerator: Accelerator, deepspeed: bool, fsdp: bool) -> None:
    got = accelerator.distributed_type
    if deepspeed and got != DistributedType.DEEPSPEED:
        raise ValueError(f"the launcher asks for DeepSpeed but {got.value} runs: launch with several processes")
    if fsdp and (got != DistributedType.FSDP or not accelerator.is_fsdp2):
        fsdp1 = got == DistributedType.FSDP
        raise ValueError(
            f"the launcher asks for FSDP, but accelerate starts {'its version 1' if fsdp1 else 'none'} on "
            f"{accelerator.device}: FSDP needs a GPU for each process, and fsdp_version: 2, as in "
            "recipes/accelerate/fsdp.yaml; without GPUs launch with recipes/accelerate/ddp.yaml"
        )
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != accelerator.num_processes:
        raise ValueError(
            f"{world} processes were launched but this one runs as {accelerator.num_processes}: on a CPU launch with "
            "ACCELERATE_USE_CPU=true and recipes/accelerate/ddp.yaml"
        )
