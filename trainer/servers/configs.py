"""The configs that a server reads, compared with those trained with: rope, windows, positions, vocabularies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.loading import UNREADABLE, check_same_tokenizer, load_tokenizer, reason
from decoding.model.stored import read_object
from trainer.files.server_traps import misread, other_size, taken_over, too_few_positions, trimmed
from trainer.servers.finding import ROPE, VOCABULARY, Finding, joined, unknown

_REMEDY = "export the speculator again"
_COMPARED = (
    *("rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("max_position_embeddings", "n_positions", "original_max_position_embeddings"),
)
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
        differences += misread("the target's", read_object(target_folder / "config.json", _REMEDY))
    if served is not None:
        differences += taken_over(str(served))
    if served is not None and not is_vllm_heads(served):
        read.append("the draft's")
        stored = read_object(served / "config.json", _REMEDY)
        differences += _other_settings(served, trained)
        differences += misread("the draft's", stored)
        differences += too_few_positions(stored, longest)
    if not read and not differences:
        return unknown(ROPE, "no config of the target or of a draft is in a local folder")
    told = f"{' and '.join(read) or 'no'} config means the same to every reader"
    return joined(ROPE, differences, f"{told}{_beside_target(target, served)}")


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
        differences += trimmed(stored)
    return joined(VOCABULARY, differences, f"both have {size} tokens", target=target.vocab_size, speculator=size)


def _sizes(size: Any, wanted: int, heads: bool) -> Sequence[Difference]:
    if size == wanted:
        return ()
    if heads:
        return ((f"the served heads predict {size} tokens and the target knows {wanted}", _OWN_TARGET),)
    return other_size(size, wanted)


_OWN_TARGET = "serve heads that were trained on this target"


def _truncated(stored: Mapping[str, Any], wanted: int) -> Sequence[Difference]:
    """Return a truncated vocabulary of vLLM heads; vLLM 0.32 refuses the ``token_map`` that it asks for with one."""
    size = stored.get("truncated_vocab_size", wanted)
    if size == wanted:
        return ()
    found = (
        f"the served heads write {size} of the {wanted} tokens (truncated_vocab_size): vLLM does not start with them"
    )
    return ((found, f"{_REMEDY} with truncated_vocab_size {wanted}"),)


def _other_tokens(tokenizer: PreTrainedTokenizerBase, served: Path, trusted: bool) -> Sequence[Difference]:
    try:
        check_same_tokenizer(tokenizer, load_tokenizer(str(served), trusted))
    except UserError as error:
        return ((error.message, error.remedy),)
    except ValueError as error:
        return ((str(error), _REMEDY),)
    return ()
