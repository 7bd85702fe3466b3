"""Model folders that transformers 4 and 5 read as the same model.

transformers 5 writes only ``rope_parameters``. Version 4, and servers that read configs in the same way, look for
``rope_theta`` and ``rope_scaling``; if these keys are missing, these programs silently use the base 10000 and no
scaling. Folders written here have the keys of both versions, named as in transformers 4.57.
"""

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from decoding.errors import UserError
from decoding.files.folder import UNREADABLE
from decoding.files.stored import SHARD_BYTES, read_object

_REMEDY = "write the model again"
_LOGGER = logging.getLogger(__name__)
_RENAMED = {"torch_dtype": "dtype", "num_experts": "num_local_experts"}
"""Maps keys of transformers 4 to keys of transformers 5."""
_NAMES = {"gpt_neox": ("rotary_emb_base", "rotary_pct")}
"""Maps model types to the names that they use for rope_theta and partial_rotary_factor."""
_LOCAL = ("gemma3_text", "gemma3n_text")
"""Model types whose sliding layers have a ``rope_local_base_freq``."""
_TYPE_ALONE = {"phi3": ("short_factor", "long_factor"), "olmo2": ("factor",)}
"""Model types whose ``rope_scaling`` may contain only ``type`` and these keys."""


def write_model(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    folder: Path,
    state_dict: dict[str, Tensor] | None = None,
) -> None:
    """Write a model and its tokenizer as a transformers folder; ``state_dict`` replaces the model's weights.

    Warns if transformers 4 would read a model that differs from the model that version 5 reads.
    """
    disable_progress_bar()  # writing is too fast for a progress bar
    model.save_pretrained(folder, state_dict=state_dict, max_shard_size=SHARD_BYTES)
    tokenizer.save_pretrained(folder)
    path = folder / "config.json"
    stored = read_object(path, _REMEDY)
    try:
        both = config_for_both(type(model.config), stored)
    except UNREADABLE as error:
        _LOGGER.warning("programs with transformers 4 will misread %s: %s", folder, error)
    else:
        path.write_text(json.dumps(both, indent=2, sort_keys=True) + "\n")
    _write_tokenizer_class(folder / "tokenizer_config.json")


def config_for_both(kind: type[PreTrainedConfig], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Add the keys of transformers 4 to a config.json of transformers 5, and return the result.

    Raises UserError if version 4 has no key for a setting, or if the new keys change what version 5 reads.
    """
    both = _with_older_keys(stored)
    before, after = _as_read(kind, stored), _as_read(kind, both)
    if differing := [key for key, value in before.items() if after.get(key) != value]:
        raise UserError(f"with the keys of version 4, version 5 reads {differing[0]} as {after.get(differing[0])!r}")
    return both


def _with_older_keys(stored: Mapping[str, Any]) -> dict[str, Any]:
    renamed = {old: stored[new] for old, new in _RENAMED.items() if new in stored}
    text = stored.get("text_config")
    inner = {"text_config": _with_older_keys(text)} if isinstance(text, dict) else {}
    return {**stored, **rope_keys(stored), **renamed, **inner}


def rope_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys of transformers 4 for a config's ``rope_parameters``; empty if the config has none."""
    rope, family = config.get("rope_parameters"), config.get("model_type")
    if not isinstance(rope, dict) or not rope:
        return {}
    keys: dict[str, Any] = {}
    if all(isinstance(value, dict | None) for value in rope.values()):  # one set of parameters for each type of layer
        if family not in _LOCAL:
            raise UserError(f"version 4 supports only one rotary embedding for all layers of a {family}")
        local, rope = rope.get("sliding_attention") or {}, rope.get("full_attention") or {}
        if local.get("rope_type", "default") != "default":
            raise UserError(f"version 4 does not support the rope_type {local['rope_type']!r} in sliding layers")
        keys["rope_local_base_freq"] = local.get("rope_theta")
    theta, share = _NAMES.get(str(family), ("rope_theta", "partial_rotary_factor"))
    keys[theta] = rope.get("rope_theta")
    keys[share] = rope.get("partial_rotary_factor")
    if rope.get("rope_type", "default") != "default":
        keys |= _scaling(rope, str(family), config)
    return {key: value for key, value in keys.items() if value is not None}


def _scaling(rope: Mapping[str, Any], family: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``rope_scaling``. For longrope, also return the context length of pretraining, under the key that
    transformers 4 reads.
    """
    if family in _TYPE_ALONE:
        scaling = {"type": rope["rope_type"], **{key: rope.get(key) for key in _TYPE_ALONE[family]}}
    else:
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
    original = rope.get("original_max_position_embeddings")
    if rope["rope_type"] == "longrope" and original is not None and original != config.get("max_position_embeddings"):
        return {"rope_scaling": scaling, "original_max_position_embeddings": original}
    return {"rope_scaling": scaling}


def _as_read(kind: type[PreTrainedConfig], stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config as transformers 5 reads it, without ``type``, the old name of ``rope_type``."""
    read: dict[str, Any] = kind.from_dict(json.loads(json.dumps(stored))).to_dict()
    if isinstance(rope := read.get("rope_parameters"), dict):
        read["rope_parameters"] = {key: value for key, value in rope.items() if key != "type"}
    return read


def _write_tokenizer_class(path: Path) -> None:
    """Rewrite the tokenizer class and extra special tokens in a form that both versions read."""
    if not path.is_file():
        return
    stored = read_object(path, _REMEDY)
    if stored.get("tokenizer_class") == "TokenizersBackend":
        stored["tokenizer_class"] = "PreTrainedTokenizerFast"
    if isinstance(stored.get("extra_special_tokens"), list):
        stored["additional_special_tokens"] = stored.pop("extra_special_tokens")
    path.write_text(json.dumps(stored, indent=2, sort_keys=True, ensure_ascii=False) + "\n", encoding="utf-8")
