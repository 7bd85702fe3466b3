"""The target of the commands that decode, read by the options that they share."""

from typing import Protocol

from decoding.model.causal_lm import CausalLM
from decoding.model.loading import load_model, parse_dtype
from trainer.quickstart import resolve
from trainer.run.train import ensure_built


class Reading(Protocol):
    """Options that say how a target is read."""

    @property
    def dtype(self) -> str: ...

    @property
    def device_map(self) -> str | None: ...

    @property
    def trust_remote_code(self) -> bool: ...


def read_target(name: str, options: Reading) -> CausalLM:
    """Read the target of this name; the embedded default is trained first where it is not there yet."""
    ensure_built(name)
    dtype, trusted = parse_dtype(options.dtype), options.trust_remote_code
    return CausalLM(load_model(resolve(name), dtype, trust_remote_code=trusted, device_map=options.device_map))
