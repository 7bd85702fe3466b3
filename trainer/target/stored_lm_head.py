"""The weight of a target's lm_head, read from the target's files: one tensor, whatever the size of the model."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from decoding.model.fingerprint import files_of_tensors
from decoding.model.folder import adapted_model
from decoding.model.loading import UNREADABLE, model_folder, reason

_OTHER_NAMES = ("embed_out.weight",)
"""Names of stored lm_heads that transformers renames when it reads them (GPT-NeoX)."""


def read_lm_head(name: str, trust_remote_code: bool = False) -> Tensor:
    """Read the weight (vocab, hidden) of the lm_head of a model in a folder or under a Hub id, as it is stored.

    Tied embeddings are read from their place. For adapters it is that of the model below them. ValueError for a model
    that is not here, or whose files hold no such weight in floats.
    """
    folder = model_folder(name)
    try:
        if (base := adapted_model(folder)) is not None:  # adapters leave the ends of the model alone
            return read_lm_head(base, trust_remote_code)
        stored = files_of_tensors(folder)
        names = _names(folder, trust_remote_code)
    except UNREADABLE as error:
        raise ValueError(f"the lm_head of {name!r} cannot be read: {reason(error)}") from error
    found = next((each for each in names if each in stored), None)
    if found is None:
        raise ValueError(f"the weights of {name} hold no lm_head ({' or '.join(names)}): give the whole model")
    with safe_open(stored[found], framework="pt", backend="pread") as file:
        weight: Tensor = file.get_tensor(found)
    if not weight.is_floating_point() or weight.itemsize < 2:
        raise ValueError(
            f"{stored[found]} holds {found} in {weight.dtype}: give a target whose lm_head is not quantised"
        )
    return weight


def _names(folder: Path, trust_remote_code: bool) -> list[str]:
    """Return the names that the weight may have in the files, by the model's own code; no weights are made."""
    config = AutoConfig.from_pretrained(str(folder), trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    weight = model.get_output_embeddings().weight
    tied = [each for each, other in model.named_parameters(remove_duplicate=False) if other is weight]
    without_prefix = [each.removeprefix(f"{model.base_model_prefix}.") for each in tied]
    return list(dict.fromkeys((*tied, *without_prefix, *_OTHER_NAMES)))
