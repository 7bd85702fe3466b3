"""Choice of how models run their steps: in shapes as they come, or in fixed ones, as CUDA graphs or compiled."""

import torch
from transformers import PreTrainedModel

from decoding.model.architecture import why_not_static
from decoding.model.causal_lm import CausalLM
from decoding.model.static import MODES

CHOICES = ("auto", "off", *MODES)


def check_choice(asked: str, device: torch.device) -> None:
    """Raise ValueError for a choice that is unknown, or that a device has not."""
    if asked not in CHOICES:
        raise ValueError(f"static is {asked!r}: give one of {', '.join(CHOICES)}")
    if asked == "graphs" and device.type != "cuda":
        raise ValueError(
            f"static is graphs, which only a CUDA device records, and the model runs on {device.type}: give auto, "
            "eager or compile"
        )


def static_of(asked: str, model: PreTrainedModel) -> str | None:
    """Return the ``static`` of `CausalLM` for a choice: ``auto`` takes graphs on a CUDA device if the model can.

    ValueError for a choice that `check_choice` refuses; `CausalLM` itself refuses a model that cannot.
    """
    check_choice(asked, model.device)
    if asked == "auto":
        return "graphs" if model.device.type == "cuda" and why_not_static(model) is None else None
    return None if asked == "off" else asked


def following(draft: CausalLM, target: CausalLM) -> CausalLM:
    """Return a draft with its target's way to run steps; as it is if it cannot run so."""
    return draft if why_not_static(draft.model) else draft.with_static(target.static)


def at_its_fastest(model: CausalLM) -> CausalLM:
    """Return a model as ``auto`` would run it; dropping it frees its graphs and its cache."""
    return model.with_static(static_of("auto", model.model))
