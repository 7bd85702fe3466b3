"""Launchers of the training loop, one class each: one process, DDP and FSDP2; DeepSpeed's ZeRO.

`accelerate launch` chooses one. Combinations of launcher and devices that accelerate would silently replace by others
are refused here: such a run would train something else than was asked for.
"""

import importlib.util
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs, InitProcessGroupKwargs
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch does not list it
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.optim import Optimizer
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from trainer.processes import TIMEOUT
from trainer.recipe.common import TrainingSection


def build_accelerator(section: TrainingSection, **options: Any) -> Accelerator:
    """Return the accelerator of the launcher that runs this program, with the recipe's precision.

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
    precision = "no" if deepspeed else section.mixed_precision  # ZeRO's own would round what is trained: see `prepare`
    # DDP's gradients are views of what it sends: a copy of all of them less.
    handlers = [InitProcessGroupKwargs(**group), DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    accelerator = Accelerator(mixed_precision=precision, kwargs_handlers=handlers, **options)
    _check_type(accelerator, deepspeed, fsdp)
    if fsdp:
        accelerator.state.fsdp_plugin.mixed_precision_policy = sharded_precision(section)
    if deepspeed:
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


def sharded_precision(section: TrainingSection) -> MixedPrecisionPolicy:
    """Return FSDP2's rounding: products in bf16 if the recipe asks for it, sums of gradients and losses in fp32.

    accelerate's own policy for bf16 rounds both: a loss sum of 16,700.1 would come back as 16,640.
    """
    if section.mixed_precision == "no":
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


class Runner(Protocol):
    """A module and its optimizers in the hands of a launcher."""

    module: nn.Module
    """The wrapped module, called with the inputs; its gradients are averaged over the processes."""
    engine: Any
    """DeepSpeed's engine, or None."""

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context of a micro batch's forward and backward pass; the last one shares its gradients."""

    def backward(self, loss: Tensor) -> None:
        """Add to the gradients."""

    def clip(self) -> Tensor | None:
        """Clip the gradients; returns their norm before, on its device; None where that is known after `step` alone."""

    def step(self) -> list[float]:
        """Step the optimizers, and begin gradients anew; returns the gradients' norm where `clip` did not."""


def prepare(
    accelerator: Accelerator, module: nn.Module, optimizers: Sequence[Optimizer], section: TrainingSection
) -> Runner:
    """Hand a whole module with its weights to the launcher."""
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        return _Zero(accelerator, module, optimizers, section)
    return _Plain(accelerator, module, optimizers, section)


class _Plain:
    """One process, DDP or FSDP2, all of which leave gradients and steps to plain PyTorch."""

    engine = None

    def __init__(
        self, accelerator: Accelerator, module: nn.Module, optimizers: Sequence[Optimizer], section: TrainingSection
    ) -> None:
        self._accelerator = accelerator
        self._max_norm = section.max_grad_norm
        accelerator.gradient_accumulation_steps = 1  # the recipe's micro batches are summed, not averaged by accelerate
        self.module, *self._optimizers = accelerator.prepare(module, *optimizers)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = nullcontext() if last else self._accelerator.no_sync(self.module)
        return context

    def backward(self, loss: Tensor) -> None:
        self._accelerator.backward(loss)

    def clip(self) -> Tensor:
        norm: Any = self._accelerator.clip_grad_norm_(self.module.parameters(), self._max_norm)
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def step(self) -> list[float]:
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return []


class _Zero:
    """DeepSpeed's engine. It clips and steps by itself, in one go, at the last micro batch of a step."""

    def __init__(
        self, accelerator: Accelerator, module: nn.Module, optimizers: Sequence[Optimizer], section: TrainingSection
    ) -> None:
        if len(optimizers) > 1:
            raise ValueError(
                f"training.optimizer is {section.optimizer!r}, which steps with {len(optimizers)} optimizers, and "
                "DeepSpeed has room for one: set training.optimizer=adamw, or launch without DeepSpeed"
            )
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        share = section.micro_batch_size * accelerator.num_processes
        config["train_micro_batch_size_per_gpu"] = section.micro_batch_size
        config["gradient_accumulation_steps"] = section.batch_size // share
        config["gradient_clipping"] = section.max_grad_norm
        if section.mixed_precision == "bf16":
            # As everywhere else: weights and gradients in fp32, products in bf16.
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        accelerator.gradient_accumulation_steps = config["gradient_accumulation_steps"]
        self.engine, _ = accelerator.prepare(module, *optimizers)
        self.module = self.engine
        self._begun = False

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        if self._begun:
            self.engine.step()  # only counts the micro batch before this one
        self._begun = True
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def clip(self) -> None:
        """Do nothing: `step` clips."""

    def step(self) -> list[float]:
        self.engine.step()
        self._begun = False
        return [float(self.engine.get_global_grad_norm())]


@contextmanager
def whole_parameters(accelerator: Accelerator, module: nn.Module) -> Iterator[None]:
    """Make every parameter of ``module`` whole on every process, so that one process alone may run and copy it.

    To be entered on all processes. Changes made inside are lost to the training. ``module`` is the objective's own,
    not the wrapper.
    """
    if zero_stage(accelerator) == 3:
        import deepspeed

        offload = accelerator.deepspeed_engine_wrapped.engine.optimizer.parameter_offload
        with deepspeed.zero.GatheredParameters(list(module.parameters())):
            _remove_hooks(offload)
            try:
                yield
            finally:
                offload._register_deepspeed_module(offload.module)
    elif accelerator.distributed_type == DistributedType.FSDP:
        from torch.distributed.fsdp import FSDPModule

        sharded = [child for child in module.modules() if isinstance(child, FSDPModule)]
        for child in sharded:
            child.unshard()
        with _kept_whole_by_state_dicts(module):
            try:
                yield
            finally:
                for child in sharded:
                    child.reshard()
    else:
        yield


@contextmanager
def _kept_whole_by_state_dicts(module: nn.Module) -> Iterator[None]:
    """Take away FSDP2's hooks that shard a whole module where the ``state_dict`` of any part of it is asked for.

    Copies of its parts, made in here, lack them too: saving a copy would shard the original.
    """
    taken = []
    for part in module.modules():
        for number, hook in list(part._state_dict_pre_hooks.items()):
            if hook.__module__.startswith("torch.distributed.fsdp."):
                taken.append((part, number, part._state_dict_pre_hooks.pop(number)))
    try:
        yield
    finally:
        for part, number, hook in taken:
            part._state_dict_pre_hooks[number] = hook


def _remove_hooks(offload: Any) -> None:
    """Remove ZeRO-3's hooks, which gather a submodule's parameters for its forward pass with all processes' help."""
    for parameter in offload.module.parameters():
        parameter.ds_active_sub_modules.clear()
    for hooks in (offload.forward_hooks, offload.backward_hooks):
        for hook in hooks:
            hook.remove()
        hooks.clear()


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
