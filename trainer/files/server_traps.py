"""Traps of servers that read a folder without an error and then draft badly, for those who export and who diagnose.

vLLM's are those of version 0.32, read in its code and run.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from decoding.model.vocabulary import OUTPUT_TOKENS_KEY
from trainer.files.transformers4 import rope_keys

_TAKES_OVER = ("eagle-", "eagle3", "dflash", "dspark")
"""Parts of a path by which vLLM chooses the method, whatever the config says; capitals do not matter."""
MOST_OTHER_TOKENS = 128
"""The greatest difference of two vocabulary sizes that llama.cpp takes."""
_VERSION_4 = {"rope_theta": 10000.0, "rotary_emb_base": 10000.0, "partial_rotary_factor": 1.0, "rotary_pct": 0.25}
"""The values that transformers 4 takes for missing keys, in nearly all families."""
_BY_FAMILY = {"mixtral": {"rope_theta": 1e6}, "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 10000.0}}


class Trap(NamedTuple):
    """A difference in words, and its remedy."""

    found: str
    remedy: str


def taken_over(path: str) -> list[Trap]:
    """Return the trap of a path, as the server is given it, by which vLLM takes the folder for something else."""
    part = next((part for part in _TAKES_OVER if part in path.lower()), None)
    if part is None:
        return []
    return [
        Trap(
            f"the path of the served folder has {part!r} in it, by which vLLM chooses another method",
            "rename the folder",
        )
    ]


def trimmed(config: Mapping[str, Any]) -> list[Trap]:
    """Return the trap of a draft with a trimmed lm_head, by its config.json."""
    name = config.get(OUTPUT_TOKENS_KEY)
    if name is None:
        return []
    found = (
        f"the draft's lm_head is trimmed by {name}, which no server reads: it writes with the whole lm_head, at the "
        "cost of the whole"
    )
    remedy = "compare with the figures of a draft that is not trimmed, or train one (draft.vocabulary=null)"
    return [Trap(found, remedy)]


def other_size(size: Any, wanted: Any) -> list[Trap]:
    """Return the trap of a draft whose vocabulary has another size than the target's."""
    if size == wanted:
        return []
    found = f"the served draft knows {size} tokens and the target {wanted}"
    remedy = (
        f"in vLLM set use_heterogeneous_vocab true; llama.cpp takes up to {MOST_OTHER_TOKENS} more or fewer; "
        "transformers takes it for another tokenizer; or pad the draft's embeddings to the target's size"
    )
    return [Trap(found, remedy)]


def too_few_positions(config: Mapping[str, Any], longest: int) -> list[Trap]:
    """Return the trap of a draft, by its config.json, that holds fewer positions than texts of ``longest`` tokens."""
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if not isinstance(positions, int) or positions >= longest:
        return []
    found = f"the draft holds {positions} positions, and texts here have up to {longest}: nothing is drafted behind"
    return [Trap(found, "train a draft with as many positions as the texts need, or serve shorter texts")]


def misread(whose: str, stored: Mapping[str, Any]) -> list[Trap]:
    """Return the settings that a reader of transformers 4's keys takes otherwise than transformers 5.

    ``whose``: the model's name in the sentence, such as ``the draft's``.
    """
    text = stored.get("text_config")
    config = {**stored, **text} if isinstance(text, dict) else stored
    defaults = {**_VERSION_4, **_BY_FAMILY.get(str(config.get("model_type")), {})}
    try:
        wanted = rope_keys(config)
    except ValueError as error:
        found = f"{whose} config.json cannot be read by programs with transformers 4: {error}"
        return [Trap(found, "serve it with another")]
    return [
        Trap(
            f"{whose} config.json {_held(config, key)}, so a reader of transformers 4's keys takes "
            f"{'none' if taken is None else taken}, where transformers 5 reads {value} from rope_parameters",
            f"write {key} beside rope_parameters: 'headstart export' does, or serve with a program that reads "
            "rope_parameters",
        )
        for key, value in wanted.items()
        if (taken := config.get(key, defaults.get(key))) != value
    ]


def _held(config: Mapping[str, Any], key: str) -> str:
    return f"has {key} {config[key]}" if key in config else f"lacks {key}"
