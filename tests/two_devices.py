"""Two simulated devices: CPU tensors that claim to be on other devices and cannot be mixed.

A `Placed` tensor computes on the CPU, but its ``device`` is ``spread:0`` or ``spread:1``, and an operation on tensors
of both is an error. As in CUDA, scalars and indices on the CPU can be combined with everything. This works only inside
`two_devices`.
"""

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from accelerate import dispatch_model
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import (
    _DummyBackendModule,
    _DummyPrivateUse1Hook,
    _setup_privateuseone_for_python_backend,
)
from transformers import PreTrainedModel

NAME = "spread"
_COPIES = {"aten::_to_copy", "aten::to", "aten::copy_"}
_INDEXED = {"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"}


class MixedDevicesError(RuntimeError):
    """One operation received tensors of several devices, which CUDA would have rejected."""


class Placed(Tensor):
    """A CPU tensor, ``held``, that claims to be on another device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "Placed":
        with torch.inference_mode(False):  # a view of an outside tensor must not become a view of an inside tensor
            made: Placed = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
                cls, held.size(), held.stride(), held.storage_offset(), dtype=held.dtype, device=device
            )
        made.held = held
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Placed({self.held!r}, {self.device})"

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


class _Literals(TorchFunctionMode):
    """Numbers of Python bypass the dispatcher: results of `torch.tensor` are moved afterwards, and indices stay on the
    CPU.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.tensor and (device := kwargs.pop("device", None)) is not None:
            return func(*args, **kwargs).to(device)
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = tuple(torch.tensor(part) if isinstance(part, list) else part for part in index)
            args = (args[0], index, *args[2:])
        return func(*args, **kwargs)


class _Devices(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _run(func, args, kwargs or {})


def _run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the CPU; its results are on the device of its inputs, or on the device that it names."""
    name = func._schema.name
    named = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device)]
    device = named[0] if named else _common_device(str(func), args, kwargs, name in _INDEXED, name in _COPIES)
    held_args, held_kwargs = tree_map(_as_held, (args, kwargs))
    out = func(*held_args, **held_kwargs)
    first, held = (args[0], held_args[0]) if args else (None, None)
    if out is held and isinstance(first, Tensor):  # in place, or moved to the same device
        if not named or first.device == device:
            return first
        out = out.clone()
    if device is None or device.type == "cpu":
        return out
    return tree_map(lambda value: Placed(value, device) if isinstance(value, Tensor) else value, out)


def _as_held(value: Any) -> Any:
    """Return the CPU tensor that represents an argument."""
    if isinstance(value, Placed):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _common_device(
    name: str, args: Any, kwargs: dict[str, Any], is_indexed: bool, is_copy: bool
) -> torch.device | None:
    """Return the device of all tensors; raise `MixedDevicesError` if they are on several."""
    if is_copy:
        place: torch.device = args[0].device
        return place
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    indices = tensors[1:] if is_indexed else []
    # CPU scalars and CPU indices can be combined with everything.
    free = [t.device.type == "cpu" and (t.dim() == 0 or any(t is index for index in indices)) for t in tensors]
    found = {t.device for t, is_free in zip(tensors, free, strict=True) if not is_free}
    if len(found) > 1:
        shapes = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in tensors)
        raise MixedDevicesError(f"{name} of tensors that lie apart: {shapes}")
    return next(iter(found), None)


class _NoAccelerator(_DummyPrivateUse1Hook):
    """Hides accelerators: the devices exist only by name, and code that looks for an accelerator must not find one."""

    def is_available(self) -> bool:
        return False


class _NoModule(_DummyBackendModule):
    def is_available(self) -> bool:
        return False

    def device_count(self) -> int:
        return 0

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


@cache
def _register() -> None:
    _setup_privateuseone_for_python_backend(NAME, _NoModule(), _NoAccelerator())


@contextmanager
def two_devices() -> Iterator[tuple[torch.device, torch.device]]:
    """Provide ``spread:0`` and ``spread:1`` inside the context."""
    _register()
    with _Devices(), _Literals():
        yield torch.device(NAME, 0), torch.device(NAME, 1)


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """Return the module with all its weights on a device, like ``module.to(device)``."""
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(device)
    return module


def spread(model: PreTrainedModel, devices: Sequence[torch.device]) -> PreTrainedModel:
    """Return the model dispatched by accelerate as over several GPUs: layers in turns, and the last parts on the last
    device.
    """
    base: Any = model.base_model
    prefix = f"{model.base_model_prefix}."
    children = dict(base.named_children())
    (layers,) = (name for name, child in children.items() if isinstance(child, nn.ModuleList))
    before = list(children)[: list(children).index(layers)]
    places = {prefix + name: devices[0 if name in before else -1] for name in children if name != layers}
    places |= {f"{prefix}{layers}.{i}": devices[i % len(devices)] for i in range(len(children[layers]))}
    places |= {name: devices[-1] for name, _ in model.named_children() if f"{name}." != prefix}
    skipped: Any = model._skip_keys_device_placement
    dispatched: PreTrainedModel = dispatch_model(model, places, main_device=devices[0], skip_keys=skipped)
    return dispatched


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Count everything that waits from now on."""
    found: Counter[str] = Counter()
    run, tolist = _run, Placed.tolist

    def counted(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out, name = run(func, args, kwargs), func._schema.name
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        placed = any(isinstance(value, Placed) for value in given)
        leaves = placed and any(not isinstance(value, Placed) for value in tree_leaves(out) if value is not None)
        indices = [index for index in tree_leaves(args[1]) if isinstance(index, Tensor)] if name in _INDEXED else []
        # A mask selects as many places as it has ones; an index on the host is copied first.
        sized = name in {"aten::nonzero", "aten::masked_select"} or any(
            index.dtype == torch.bool or (index.dim() and not isinstance(index, Placed)) for index in indices
        )
        comes = name in _COPIES and isinstance(out, Placed) and not placed
        if leaves or (placed and sized) or (comes and not kwargs.get("non_blocking")):
            found["in transformers' masks" if in_masks() else name] += 1
        return out

    def listed(self: Placed) -> Any:
        found["tolist"] += 1
        return tolist(self)

    with patch.object(sys.modules[__name__], "_run", counted), patch.object(Placed, "tolist", listed):
        yield found


def in_masks() -> bool:
    """Return True inside transformers' creation of a mask, which checks whether the positions are those of packed
    texts.
    """
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename.endswith("transformers/masking_utils.py"):
            return True
    return False
