"""Runners of a training step (one for plain PyTorch, DDP and FSDP2, one for DeepSpeed's ZeRO), and optimizers."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from decoding.dtypes import parse_dtype
from decoding.errors import UserError
from trainer.processes import zero_stage
from trainer.recipe.common import TrainingSection


def check_launch(accelerator: Accelerator, section: TrainingSection) -> None:
    """Raise UserError if a recipe does not fit the way the run was launched. Call this before a model is loaded."""
    processes = accelerator.num_processes
    if section.batch_size % (section.micro_batch_size * processes):
        raise UserError(
            f"training.batch_size ({section.batch_size}) is not a multiple of training.micro_batch_size "
            f"({section.micro_batch_size}) times {processes} processes: change either size"
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED and section.optimizer == "muon":
        raise UserError(
            "training.optimizer=muon needs 2 optimizers, but DeepSpeed accepts only one: set training.optimizer=adamw, "
            "or launch without DeepSpeed"
        )


class Runner:
    """A module and its optimizers, wrapped for one process, DDP or FSDP2; gradients and steps are computed by plain
    PyTorch.
    """

    module: nn.Module
    """The wrapped module, whose gradients are averaged over the processes."""
    engine: Any = None
    """DeepSpeed's engine, or None."""

    def __init__(
        self, accelerator: Accelerator, module: nn.Module, optimizers: Sequence[Optimizer], section: TrainingSection
    ) -> None:
        self._accelerator = accelerator
        self._max_norm = section.max_grad_norm
        accelerator.gradient_accumulation_steps = 1  # because we sum micro batches ourselves
        self.module, *self._optimizers = accelerator.prepare(module, *optimizers)

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        """Return the context for the forward and backward pass of a micro batch; the processes exchange gradients only
        in the last micro batch of a step.
        """
        context: AbstractContextManager[Any] = nullcontext() if last else self._accelerator.no_sync(self.module)
        return context

    def backward(self, loss: Tensor) -> None:
        """Add the loss's gradients."""
        self._accelerator.backward(loss)

    def clip(self) -> Tensor | None:
        """Clip the gradients and return their norm before clipping, as a tensor on its device; None if only `step`
        knows the norm.
        """
        norm: Any = self._accelerator.clip_grad_norm_(self.module.parameters(), self._max_norm)
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def step(self) -> list[float]:
        """Step the optimizers and set the gradients to zero; return the gradients' norm if `clip` did not return it."""
        # The gradients are in DDP's buckets. If the gradients were dropped, the next step would make a second set and
        # copy it into the buckets.
        held = isinstance(self.module, DistributedDataParallel)
        for optimizer in self._optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=not held)
        return []


class _ZeroRunner(Runner):
    """Runner for DeepSpeed, whose engine clips the gradients and steps in one call at the last micro batch."""

    def __init__(
        self, accelerator: Accelerator, module: nn.Module, optimizers: Sequence[Optimizer], section: TrainingSection
    ) -> None:
        config = accelerator.state.deepspeed_plugin.deepspeed_config
        share = section.micro_batch_size * accelerator.num_processes
        config["train_micro_batch_size_per_gpu"] = section.micro_batch_size
        config["gradient_accumulation_steps"] = section.batch_size // share
        config["gradient_clipping"] = section.max_grad_norm
        if section.mixed_precision == "bf16":
            # As in other launches, weights and gradients are fp32 and products are bf16.
            config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
        accelerator.gradient_accumulation_steps = config["gradient_accumulation_steps"]
        self.engine, _ = accelerator.prepare(module, *optimizers)
        self.module = self.engine
        self._begun = False

    def accumulating(self, last: bool) -> AbstractContextManager[Any]:
        if self._begun:
            self.engine.step()  # this call only counts the previous micro batch
        self._begun = True
        return nullcontext()

    def backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def clip(self) -> None:
        """Do nothing, because `step` clips."""

    def step(self) -> list[float]:
        self.engine.step()
        self._begun = False
        return [float(self.engine.get_global_grad_norm())]


def prepare(
    accelerator: Accelerator, module: nn.Module, optimizers: Sequence[Optimizer], section: TrainingSection
) -> Runner:
    zero = accelerator.distributed_type == DistributedType.DEEPSPEED
    return (_ZeroRunner if zero else Runner)(accelerator, module, optimizers, section)


@contextmanager
def whole_parameters(accelerator: Accelerator, module: nn.Module) -> Iterator[None]:
    """Make every parameter of ``module`` whole on every process, so that a single process can run or copy the module.

    All processes must enter this context. Changes made inside the context are lost. ``module`` is the module of the
    objective, not its wrapper.
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
    """Remove FSDP2's hooks, which shard the whole module again when ``state_dict`` is called on any part of it.

    Copies that are made inside the context have no such hooks either; otherwise saving a copy would shard the original.
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
    """Remove ZeRO-3's hooks, which gather a submodule's parameters from all processes in every forward pass."""
    for parameter in offload.module.parameters():
        parameter.ds_active_sub_modules.clear()
    for hooks in (offload.forward_hooks, offload.backward_hooks):
        for hook in hooks:
            hook.remove()
        hooks.clear()


# --- optimizers -------------------------------------------------------------------------------------------------------

_OVER_VOCABULARY = {
    *("embed_tokens", "embed_in", "embed_out", "embedding", "word_embeddings", "wte", "wpe", "lm_head"),
    *("markov", "confidence"),
}
"""Names of embeddings and output layers in transformers, and of a draft's Markov bias and confidence head. The
confidence head has a single row, so there is nothing to orthogonalise."""

PREFIX = "prefix"
"""Key, in a parameter group, of the prefix with which the names of the group's parameters begin."""


def build_optimizers(module: nn.Module, section: TrainingSection, prefixes: Collection[str] = ("",)) -> list[Optimizer]:
    """Build AdamW for all trained parameters, or Muon for inner matrices and AdamW for all other parameters.

    AdamW keeps embeddings and output layers, because each of their rows belongs to a token. Muon's step is scaled to
    the size of AdamW's step, so both use the same learning rate. A parameter joins the group of the longest of
    ``prefixes`` that its name starts with.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    if section.optimizer == "adamw":
        return [_adamw(_groups(trained, prefixes), section)]
    inside = {name for name, p in trained.items() if p.ndim == 2 and _OVER_VOCABULARY.isdisjoint(name.split("."))}
    matrices = {name: parameter for name, parameter in trained.items() if name in inside}
    others = {name: parameter for name, parameter in trained.items() if name not in inside}
    muon = Muon(_groups(matrices, prefixes), section.learning_rate, section.weight_decay)
    return [muon, _adamw(_groups(others, prefixes), section)]


def set_learning_rates(optimizers: Iterable[Optimizer], learning_rate: float, rates: Mapping[str, float]) -> None:
    """Set each group's learning rate: ``learning_rate`` times the group's factor."""
    for group in (group for optimizer in optimizers for group in optimizer.param_groups):
        group["lr"] = learning_rate * rates[group[PREFIX]]


def _groups(parameters: Mapping[str, Tensor], prefixes: Collection[str]) -> list[dict[str, Any]]:
    chosen: dict[str, list[Tensor]] = {prefix: [] for prefix in prefixes}
    for name, parameter in parameters.items():
        fitting = [prefix for prefix in prefixes if name.startswith(prefix)]
        assert fitting, f"no learning rate for {name}: the objective's rates lack an entry ''"
        chosen[max(fitting, key=len)].append(parameter)
    return [{"params": members, PREFIX: prefix} for prefix, members in chosen.items() if members]


def _adamw(groups: list[dict[str, Any]], section: TrainingSection) -> Optimizer:
    return torch.optim.AdamW(
        groups,
        lr=section.learning_rate,
        betas=(0.9, section.adam_beta2),
        weight_decay=section.weight_decay,
        fused=True,  # the fused step takes a fifth of the time on a CPU
    )


# --- Muon -------------------------------------------------------------------------------------------------------------

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of a Newton-Schulz step: small singular values grow fastest, and all end between 0.5 and 1.5."""
_ITERATIONS = 5
_LEAST_NORM = 1e-7


class Muon(Optimizer):
    """Muon (Jordan et al. 2024), which moves matrices along their orthogonalised momentum.

    This optimizer is `torch.optim.Muon` with ``adjust_lr_fn="match_rms_adamw"`` and a choice of dtype, for 2-D
    parameters.

    `torch.optim.Muon` always orthogonalises in bf16. On a processor without bf16 products, this took 15 times as long
    as the rest of a training step. If ``dtype`` is None, Muon uses the device's fast dtype.
    """

    def __init__(
        self, params: Iterable[Any], lr: float, weight_decay: float = 0.0, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        self._dtype = dtype or parse_dtype("fast")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # no closure here
        """Step every parameter that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "momentum_buffer" not in state:
                    state["momentum_buffer"] = torch.zeros_like(parameter.grad)
                momentum = state["momentum_buffer"].lerp_(parameter.grad, 1 - _MOMENTUM)
                update = orthogonal(parameter.grad.lerp(momentum, _MOMENTUM).to(self._dtype))  # Nesterov's momentum
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                size_of_adamw = 0.2 * max(parameter.shape) ** 0.5
                parameter.add_(update, alpha=-group["lr"] * size_of_adamw)


def orthogonal(matrix: Float[Tensor, "rows columns"]) -> Float[Tensor, "rows columns"]:
    """Bring the singular values of a matrix near 1 by Newton-Schulz iterations, in its dtype."""
    a, b, c = _COEFFICIENTS
    tall = matrix.size(0) > matrix.size(1)
    wide = matrix.T if tall else matrix
    wide = wide / wide.norm().clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(wide, torch.addmm(gram, gram, gram, beta=b, alpha=c), wide, beta=a)
    return wide.T if tall else wide
