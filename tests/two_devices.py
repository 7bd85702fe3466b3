"""Two devices on a machine that has none: tensors of the CPU that say they lie elsewhere, and refuse to be mixed.

A `Placed` tensor computes on the CPU, but its ``device`` is ``spread:0`` or ``spread:1``, and an operation on tensors
of both is an error, with the liberties that CUDA takes: scalars of the CPU go with everything, and so do its indices.
Works inside `two_devices` alone.
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
    """One operation was given tensors of several devices, where CUDA would have refused."""


class Placed(Tensor):
    """A tensor of the CPU, ``held``, that says it lies on another device."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor, device: torch.device) -> "Placed":
        with torch.inference_mode(False):  # a view of a tensor from outside may not be one from inside
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
    """Numbers of Python's own go round the dispatcher: those of `torch.tensor` are moved afterwards, indices stay."""

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
    """The operation on the CPU, its results on the device of what it was given, or on the one that it names."""
    name = func._schema.name
    named = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device)]
    device = named[0] if named else _common_device(str(func), args, kwargs, name in _INDEXED, name in _COPIES)
    held_args, held_kwargs = tree_map(_as_held, (args, kwargs))
    out = func(*held_args, **held_kwargs)
    first, held = (args[0], held_args[0]) if args else (None, None)
    if out is held and isinstance(first, Tensor):  # in place, or moved to where it is
        if not named or first.device == device:
            return first
        out = out.clone()
    if device is None or device.type == "cpu":
        return out
    return tree_map(lambda value: Placed(value, device) if isinstance(value, Tensor) else value, out)


def _as_held(value: Any) -> Any:
    """What stands for an argument on the CPU."""
    if isinstance(value, Placed):
        return value.held
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _common_device(
    name: str, args: Any, kwargs: dict[str, Any], is_indexed: bool, is_copy: bool
) -> torch.device | None:
    """Where all the tensors lie: `MixedDevicesError` if there is no such place."""
    if is_copy:
        place: torch.device = args[0].device
        return place
    tensors = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
    indices = tensors[1:] if is_indexed else []
    # Scalars of the CPU go with everything, and so do its indices.
    free = [t.device.type == "cpu" and (t.dim() == 0 or any(t is index for index in indices)) for t in tensors]
    found = {t.device for t, is_free in zip(tensors, free, strict=True) if not is_free}
    if len(found) > 1:
        shapes = ", ".join(f"{tuple(t.shape)} on {t.device}" for t in tensors)
        raise MixedDevicesError(f"{name} of tensors that lie apart: {shapes}")
    return next(iter(found), None)


class _NoAccelerator(_DummyPrivateUse1Hook):
    """The devices are there by name alone: nobody who looks for an accelerator in this process is to find one."""

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
    """``spread:0`` and ``spread:1``, for as long as this lasts."""
    _register()
    with _Devices(), _Literals():
        yield torch.device(NAME, 0), torch.device(NAME, 1)


def moved(module: nn.Module, device: torch.device) -> nn.Module:
    """The module with all its weights on a device, as ``module.to(device)``."""
    for child in module.modules():
        for name, parameter in child._parameters.items():
            if parameter is not None:
                child._parameters[name] = nn.Parameter(parameter.detach().to(device), parameter.requires_grad)
        for name, buffer in child._buffers.items():
            if buffer is not None:
                child._buffers[name] = buffer.to(device)
    return module


def spread(model: PreTrainedModel, devices: Sequence[torch.device]) -> PreTrainedModel:
    """The model dispatched by accelerate, as over several GPUs: layers in turns, the last parts on the last device."""
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
    """Count from here on whatever waits."""
    found: Counter[str] = Counter()
    run, tolist = _run, Placed.tolist

    def counted(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        out, name = run(func, args, kwargs), func._schema.name
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        placed = any(isinstance(value, Placed) for value in given)
        leaves = placed and any(not isinstance(value, Placed) for value in tree_leaves(out) if value is not None)
        indices = [index for index in tree_leaves(args[1]) if isinstance(index, Tensor)] if name in _INDEXED else []
        # A mask has as many places as it has ones; an index of the host comes over first.
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
    """True inside of transformers' making of a mask, which looks whether the positions are those of packed texts."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code.co_filename.endswith("transformers/masking_utils.py"):
            return True
    return False
