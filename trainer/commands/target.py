"""The target of the commands that decode, read by the options that they share."""

from typing import Protocol

from decoding.model.architecture import check_static, static_of
from decoding.model.causal_lm import CausalLM
from decoding.model.dtypes import default_device, parse_dtype
from decoding.model.loading import load_model
from trainer.run.train import prepare_target


class Reading(Protocol):
    """Options that say how a target is read."""

    @property
    def dtype(self) -> str: ...

    @property
    def static(self) -> str: ...

    @property
    def device_map(self) -> str | None: ...

    @property
    def trust_remote_code(self) -> bool: ...


def read_target(name: str, options: Reading) -> CausalLM:
    """Read the target of this name; the embedded default is trained first where it is not there yet."""
    check_static(options.static, default_device())
    dtype, trusted = parse_dtype(options.dtype), options.trust_remote_code
    model = load_model(prepare_target(name), dtype, trust_remote_code=trusted, device_map=options.device_map)
    return CausalLM(model, static=static_of(options.static, model))
