"""The configs that a server reads, compared with those trained with: rope, windows, positions, vocabularies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from decoding.model.causal_lm import CausalLM
from decoding.model.header import read_object
from decoding.model.loading import UNREADABLE, check_same_tokenizer, load_tokenizer, reason
from decoding.model.vocabulary import OUTPUT_TOKENS_KEY
from trainer.files.transformers4 import rope_keys
from trainer.serving.finding import ROPE, VOCABULARY, Finding, joined, unknown

_REMEDY = "export the speculator again"
_VERSION_4 = {"rope_theta": 10000.0, "rotary_emb_base": 10000.0, "partial_rotary_factor": 1.0, "rotary_pct": 0.25}
"""The values that transformers 4 takes for missing keys, in nearly all families."""
_BY_FAMILY = {"mixtral": {"rope_theta": 1e6}, "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 10000.0}}
_COMPARED = (
    *("rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("max_position_embeddings", "n_positions", "original_max_position_embeddings"),
)
_TAKES_OVER = ("eagle3", "eagle-", "dflash", "dspark")
"""Parts of a path by which vLLM 0.32 chooses the method, whatever the config says."""

Difference = tuple[str, str]
"""A difference in words, and its remedy."""


def is_vllm_heads(folder: Path) -> bool:
    """Return True for a folder of Medusa heads in vLLM's format."""
    config = folder / "config.json"
    return config.is_file() and read_object(config, _REMEDY).get("model_type") == "medusa"


def compare_settings(
    target: CausalLM, target_folder: Path | None, served: Path | None, trained: Path | None, longest: int
) -> Finding:
    """Compare rope, windows and positions in the configs of the target and of the draft.

    ``target_folder`` and the folders of the draft are None where they are no local folders; heads have no such
    settings. ``served``: the folder that the server reads; ``trained``: the one that is decoded with here. ``longest``:
    the longest text of the replay, in tokens.
    """
    differences: list[Difference] = []
    read: list[str] = []
    if target_folder is not None and (target_folder / "config.json").is_file():
        read.append("the target's")
        differences += _misread("the target's", read_object(target_folder / "config.json", _REMEDY))
    if served is not None:
        differences += _taken_over(served)
    if served is not None and not is_vllm_heads(served):
        read.append("the draft's")
        stored = read_object(served / "config.json", _REMEDY)
        differences += _other_settings(served, trained)
        differences += _misread("the draft's", stored)
        differences += _too_few_positions(stored, longest)
    if not read and not differences:
        return unknown(ROPE, "no config of the target or of a draft is in a local folder")
    told = f"{' and '.join(read) or 'no'} config means the same to every reader"
    return joined(ROPE, differences, f"{told}{_beside_target(target, served)}")


def _misread(whose: str, stored: Mapping[str, Any]) -> list[Difference]:
    """Return the settings that a reader of transformers 4's keys takes otherwise than transformers 5."""
    text = stored.get("text_config")
    config = {**stored, **text} if isinstance(text, dict) else stored
    defaults = {**_VERSION_4, **_BY_FAMILY.get(str(config.get("model_type")), {})}
    try:
        wanted = rope_keys(config)
    except ValueError as error:
        return [
            (f"{whose} config.json cannot be read by programs with transformers 4: {error}", "serve it with another")
        ]
    found = []
    for key, value in wanted.items():
        taken = config.get(key, defaults.get(key))
        if taken != value:
            how = "has" if key in config else "lacks"
            became = f"{taken}" if taken is not None else "none"
            found.append(
                (
                    f"{whose} config.json {how} {key}{' ' + str(taken) if key in config else ''}, so a reader of "
                    f"transformers 4's keys takes {became}, where transformers 5 reads {value} from rope_parameters",
                    f"write {key} beside rope_parameters: 'headstart export' does, or serve with a program that reads "
                    "rope_parameters",
                )
            )
    return found


def _other_settings(served: Path, trained: Path | None) -> list[Difference]:
    """Return the settings that the served draft's config has otherwise than the trained one's, as read by version 5."""
    if trained is None or trained == served:
        return []
    theirs, ours = _as_read(served), _as_read(trained)
    if isinstance(theirs, str) or isinstance(ours, str):
        broken = theirs if isinstance(theirs, str) else str(ours)
        return [(f"the draft's config.json cannot be read: {broken}", _REMEDY)]
    return [
        (
            f"the served draft has {key} {_plain(theirs.get(key))} where {_plain(ours.get(key))} was trained with",
            f"{_REMEDY}, and point the server at the new folder",
        )
        for key in _COMPARED
        if _plain(theirs.get(key)) != _plain(ours.get(key))
    ]


def _as_read(folder: Path) -> dict[str, Any] | str:
    """Return a folder's config as transformers reads it, or why it cannot."""
    try:
        config: dict[str, Any] = AutoConfig.from_pretrained(folder).get_text_config(decoder=True).to_dict()
    except UNREADABLE as error:
        return reason(error)
    return config


def _plain(value: Any) -> Any:
    """Return a setting without the older name of ``rope_type``."""
    return {key: held for key, held in value.items() if key != "type"} if isinstance(value, dict) else value


def _too_few_positions(stored: Mapping[str, Any], longest: int) -> list[Difference]:
    positions = stored.get("max_position_embeddings", stored.get("n_positions"))
    if not isinstance(positions, int) or positions >= longest:
        return []
    return [
        (
            f"the draft holds {positions} positions, and texts here have up to {longest}: nothing is drafted behind",
            "train a draft with as many positions as the texts need, or serve shorter texts",
        )
    ]


def _taken_over(served: Path) -> list[Difference]:
    part = next((part for part in _TAKES_OVER if part in str(served)), None)
    if part is None:
        return []
    return [
        (
            f"the path of the served folder has {part!r} in it, by which vLLM chooses another method",
            "rename the folder",
        )
    ]


def _beside_target(target: CausalLM, served: Path | None) -> str:
    """Return a remark on a draft whose rope is not its target's, which is right only if it was trained so."""
    if served is None or is_vllm_heads(served) or isinstance(read := _as_read(served), str):
        return ""
    own: Any = target.model.config.get_text_config(decoder=True).to_dict()
    mine, theirs = ((each.get("rope_parameters") or {}) for each in (read, own))
    thetas = [rope.get("rope_theta") if isinstance(rope, dict) else None for rope in (mine, theirs)]
    if None in thetas or thetas[0] == thetas[1]:
        return ""
    return f"; the draft's rope_theta is {thetas[0]:g} and the target's {thetas[1]:g}, right only if it was trained so"


def compare_vocabularies(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase, served: Path | None, trusted: bool = False
) -> Finding:
    """Compare the vocabulary of the served heads or draft, its tokenizer and a trimmed lm_head with the target's."""
    if served is None:
        return unknown(VOCABULARY, "no folder that a server reads is given: name it with --exported")
    stored = read_object(served / "config.json", _REMEDY)
    size = stored.get("vocab_size", (stored.get("text_config") or {}).get("vocab_size"))
    differences = list(_sizes(size, target.vocab_size, heads=is_vllm_heads(served)))
    if is_vllm_heads(served):
        differences += _truncated(stored, target.vocab_size)
    else:
        differences += _other_tokens(tokenizer, served, trusted)
        differences += _trimmed(stored)
    return joined(VOCABULARY, differences, f"both have {size} tokens", target=target.vocab_size, speculator=size)


def _sizes(size: Any, wanted: int, heads: bool) -> Sequence[Difference]:
    if size == wanted:
        return ()
    if heads:
        return ((f"the served heads predict {size} tokens and the target knows {wanted}", _OWN_TARGET),)
    found = f"the served draft knows {size} tokens and the target {wanted}"
    remedy = (
        "in vLLM set use_heterogeneous_vocab true; llama.cpp takes up to 128 more or fewer; transformers takes it for "
        "another tokenizer; or pad the draft's embeddings to the target's size"
    )
    return ((found, remedy),)


_OWN_TARGET = "serve heads that were trained on this target"


def _truncated(stored: Mapping[str, Any], wanted: int) -> Sequence[Difference]:
    """Return a truncated vocabulary of vLLM heads, which needs a ``token_map`` of its own."""
    size = stored.get("truncated_vocab_size", wanted)
    if size == wanted:
        return ()
    found = f"the served heads write {size} of the {wanted} tokens (truncated_vocab_size)"
    return ((found, f"{_REMEDY} with truncated_vocab_size {wanted}, or put a token_map into its weights"),)


def _other_tokens(tokenizer: PreTrainedTokenizerBase, served: Path, trusted: bool) -> Sequence[Difference]:
    try:
        check_same_tokenizer(tokenizer, load_tokenizer(str(served), trusted))
    except ValueError as error:
        found, _, remedy = str(error).rpartition("; ")
        return ((found or str(error), remedy if found else _REMEDY),)
    return ()


def _trimmed(stored: Mapping[str, Any]) -> Sequence[Difference]:
    name = stored.get(OUTPUT_TOKENS_KEY)
    if name is None:
        return ()
    return (
        (
            f"the draft's lm_head is trimmed by {name}, which no server reads: it writes with the whole lm_head, "
            "at the cost of the whole",
            "compare with the figures of a draft that is not trimmed, or train one (draft.vocabulary=null)",
        ),
    )
