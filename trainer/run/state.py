"""The state of a run, collected as whole (not sharded) tensors by parameter name, and loaded again, under any launcher.

The state consists of the trained parameters, the module's buffers and the optimizers' moments, without a frozen target.
Names, not positions or devices, identify tensors, so a run may resume under another launcher or number of processes.

`torch.distributed.checkpoint.state_dict` does not fit, because it stores tied weights twice, returns whole tensors only
on the first process, and cannot gather on one process, as an evaluation inside `whole_parameters` does. If a state
lacks a parameter, the setter there rejects the state, or makes up a first step for this parameter.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim import Optimizer

from decoding.errors import UserError

Tensors = dict[str, Tensor]


def trained_parameters(module: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name; tied parameters occur once, under their first name."""
    return {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}


def gather_weights(module: nn.Module, engine: Any = None, keep: bool = True) -> Tensors:
    """Return trained parameters and buffers, whole, on the host. Every process must call this.

    ``engine`` is DeepSpeed's engine, if DeepSpeed trains. Without ``keep`` a process only takes part and returns
    nothing.
    """
    read = _whole if engine is None else _zero_weight
    weights = {name: partial(read, parameter) for name, parameter in trained_parameters(module).items()}
    buffers = {name: partial(_whole, buffer) for name, buffer in _buffers(module).items()}
    return _gathered({**weights, **buffers}, keep)


def gather_moments(
    module: nn.Module, optimizers: Sequence[Optimizer], engine: Any = None, keep: bool = True
) -> Tensors:
    """Return the optimizers' state under keys ``{parameter} {name}``; the arguments are as in `gather_weights`."""
    if engine is not None:
        return _gathered(_zero_moments(module, engine), keep)
    names: dict[Tensor, str] = {parameter: name for name, parameter in trained_parameters(module).items()}
    moments = {
        f"{names[parameter]} {key}": partial(_whole, torch.as_tensor(value))
        for optimizer in optimizers
        for parameter, state in optimizer.state.items()
        for key, value in state.items()
    }
    return _gathered(moments, keep)


def _gathered(reads: Mapping[str, Callable[[], Tensor]], keep: bool) -> Tensors:
    """Gather the tensors one after the other, in the same order on every process."""
    gathered = {}
    for name, read in reads.items():
        whole = read()
        if keep:
            gathered[name] = whole.detach().to("cpu", copy=True).contiguous()  # later steps must not change the copy
    return gathered


def load_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy gathered weights into a module that is not sharded yet; raise UserError if the names differ."""
    tensors = {**trained_parameters(module), **_buffers(module)}
    if differing := sorted(set(tensors) ^ set(weights)):
        raise UserError(
            f"the checkpoint belongs to another model: {len(differing)} tensors differ, such as {differing[0]}. "
            "Set another output folder in the recipe, or delete this folder to start over"
        )
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(weights[name])


def load_moments(
    module: nn.Module, optimizers: Sequence[Optimizer], moments: Mapping[str, Tensor], engine: Any = None
) -> None:
    """Load gathered moments into the optimizers of a wrapped module; if there are no moments, do nothing."""
    if not moments:
        return
    by_parameter: dict[str, Tensors] = {}
    for key, tensor in moments.items():
        name, _, what = key.rpartition(" ")
        by_parameter.setdefault(name, {})[what] = tensor
    if engine is not None:
        _load_zero_moments(module, engine, by_parameter)
        return
    names: dict[Tensor, str] = {parameter: name for name, parameter in trained_parameters(module).items()}
    for optimizer in optimizers:
        parameters = enumerate(parameter for group in optimizer.param_groups for parameter in group["params"])
        state = {
            index: {what: _sharded(tensor, parameter) for what, tensor in by_parameter[names[parameter]].items()}
            for index, parameter in parameters
            if names[parameter] in by_parameter  # parameters without moments never had a gradient
        }
        # torch knows the device of each moment; the kernel of a fused AdamW needs its step count on the GPU.
        optimizer.load_state_dict({**optimizer.state_dict(), "state": state})


def _buffers(module: nn.Module) -> Tensors:
    """Return the persistent buffers without ``state_dict``, whose FSDP hooks would shard whole parameters again."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, part in module.named_modules(remove_duplicate=False)
        for name, buffer in part.named_buffers(recurse=False)
        if name not in part._non_persistent_buffers_set
    }


def _whole(tensor: Tensor) -> Tensor:
    """Gather a tensor that FSDP has sharded (a DTensor); return any other tensor as it is."""
    whole: Tensor = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole


def _sharded(tensor: Tensor, like: Tensor) -> Tensor:
    """Shard a moment like its parameter; step counts stay whole."""
    if tensor.ndim == 0 or not isinstance(like, DTensor):
        return tensor
    return distribute_tensor(tensor.to(like.device), like.device_mesh, like.placements)


# DeepSpeed's ZeRO joins the parameters of a group into one flat fp32 tensor; each process steps one part. DeepSpeed has
# functions to read and write this tensor by parameter. All parameters of a group share one step count.


def _zero_weight(parameter: nn.Parameter) -> Tensor:
    from deepspeed.utils import safe_get_full_fp32_param

    weight: Tensor = safe_get_full_fp32_param(parameter)
    return weight


def _flat_parts(engine: Any) -> list[Tensor]:
    """Return this process's parts of the flat tensors, for which DeepSpeed's inner optimizer keeps state."""
    zero = engine.optimizer
    parts = (
        "fp32_partitioned_groups_flat" if engine.zero_optimization_stage() == 3 else "single_partition_of_fp32_groups"
    )
    flat: list[Tensor] = list(getattr(zero, parts))
    return flat


def _link_moments(engine: Any) -> None:
    """Link the parameters of ZeRO-1 and ZeRO-2 to their moments.

    DeepSpeed makes these links after the step of the first group, and misses all later groups.
    """
    if engine.zero_optimization_stage() < 3:
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()


def _zero_moments(module: nn.Module, engine: Any) -> dict[str, Callable[[], Tensor]]:
    from deepspeed.utils import safe_get_full_optimizer_state

    _link_moments(engine)
    states = [engine.optimizer.optimizer.state[part] for part in _flat_parts(engine)]
    step = states[0]["step"]
    assert all(torch.equal(state["step"], step) for state in states), "ZeRO steps all groups together"
    moments: dict[str, Callable[[], Tensor]] = {}
    for name, parameter in trained_parameters(module).items():
        moments[f"{name} step"] = partial(_whole, step)
        for key in (key for key, value in states[0].items() if value.ndim):
            moments[f"{name} {key}"] = partial(safe_get_full_optimizer_state, parameter, key)
    return moments


def _load_zero_moments(module: nn.Module, engine: Any, moments: Mapping[str, Tensors]) -> None:
    from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

    first = next(iter(moments.values()))
    for part in _flat_parts(engine):
        engine.optimizer.optimizer.state[part] = {
            # The step count is moved to the device of the part as well, because the kernel of a fused AdamW needs it
            # there.
            key: torch.zeros_like(part) if value.ndim else value.to(part.device, copy=True)
            for key, value in first.items()
        }
    _link_moments(engine)
    for name, parameter in trained_parameters(module).items():
        for key, value in moments.get(name, {}).items():
            if not value.ndim:
                continue
            if engine.zero_optimization_stage() == 3:
                safe_set_local_optimizer_state(parameter, _own_part(value, parameter).to(engine.device), key)
            else:
                safe_set_full_optimizer_state(parameter, value.to(engine.device), key)


def _own_part(value: Tensor, parameter: Any) -> Tensor:
    """Return the part of a tensor that ZeRO-3 gives to this process, padded if the parts are uneven.

    If the parts are uneven, DeepSpeed's setter of whole tensors reads past the end of the tensor.
    """
    size = parameter.ds_tensor.numel()
    start = torch.distributed.get_rank() * size
    part = value.flatten()[start : start + size]
    return torch.nn.functional.pad(part, (0, size - len(part)))
