"""Comparison of a server's configs with the training's: rope, windows, positions, vocabularies."""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

from transformers import AutoConfig, PreTrainedTokenizerBase

from decoding.errors import UserError
from decoding.measure.proof.finding import Finding, ok, problem
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark_config import is_dspark_folder, read_dspark_config
from decoding.model.fingerprint import stored_fingerprint
from decoding.model.loading import UNREADABLE, check_same_tokenizer, is_heads_folder, load_tokenizer, reason
from decoding.model.stored import read_object
from trainer.export.companions import trained_for
from trainer.export.server_traps import misread, other_size, taken_over, too_few_positions, trimmed

ROPE = "target, rope and window settings"
VOCABULARY = "vocabulary sizes"
_REMEDY = "export the speculator again, and point the server at the new folder"
_COMPARED = (
    *("rope_parameters", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"),
    *("max_position_embeddings", "n_positions", "original_max_position_embeddings"),
)
Difference = tuple[str, str]
"""A difference in words and its remedy."""


def kind_of(folder: Path) -> Literal["heads", "dspark", "draft"]:
    """Return the kind of speculator in a folder."""
    if is_heads_folder(folder):
        return "heads"
    return "dspark" if is_dspark_folder(folder) else "draft"


def _of(check: str, differences: Sequence[Difference], otherwise: str, **figures: Any) -> Finding:
    """Combine differences and their remedies into one finding. Without differences, it says ``otherwise``."""
    if not differences:
        return ok(check, otherwise, **figures)
    remedies = "; ".join(dict.fromkeys(remedy for _, remedy in differences))
    return problem(check, "; ".join(found for found, _ in differences), remedies, **figures)


def compare_settings(target_folder: Path, served: Path, trained: Path, longest: int) -> Finding:
    """Compare rope, windows and positions in the configs of target and draft; heads lack these settings.

    ``served`` is the folder that the server reads, ``trained`` the folder that is decoded with here. ``longest`` is the
    longest text of the replay, in tokens.
    """
    kind, read = kind_of(served), ["the target's"]
    differences: list[Difference] = [*misread(read[0], read_object(target_folder / "config.json", _REMEDY))]
    if kind_of(trained) != "draft":
        differences += _other_target(target_folder, trained)
    if kind == "draft":  # for other speculators, the serving command names the method
        differences += taken_over(str(served))
    if kind != "heads":
        read.append("the draft's")
        stored = read_object(served / "config.json", _REMEDY)
        if trained != served:
            differences += _other_settings(served, trained)
        differences += [*misread("the draft's", stored), *too_few_positions(stored, longest)]
    return _of(ROPE, differences, f"all readers interpret {' and '.join(read)} config alike")


def _other_target(target_folder: Path, trained: Path) -> list[Difference]:
    """Return a difference if the speculator was trained on another target's states, as far as its folder records it."""
    wanted = trained_for(trained)
    if wanted is None or (found := stored_fingerprint(target_folder)) == wanted:
        return []
    remedy = "pass the target that it was trained on, or train it again on this one"
    return [(f"the speculator was trained on another target ({wanted}; this one is {found})", remedy)]


def _other_settings(served: Path, trained: Path) -> list[Difference]:
    """Return the settings that differ between served and trained config, as their loaders read them.

    Trees of DSpark drafts are ignored because servers draft chains.
    """
    theirs, ours = dict[str, Any](), dict[str, Any]()
    try:
        for folder, found in ((served, theirs), (trained, ours)):
            if is_dspark_folder(trained):
                found |= asdict(replace(read_dspark_config(folder), tree=()))
            else:
                read = AutoConfig.from_pretrained(folder).get_text_config(decoder=True).to_dict()
                found |= {key: _plain(read.get(key)) for key in _COMPARED}
    except UNREADABLE as error:
        return [(f"the draft's config.json cannot be read: {reason(error)}", _REMEDY)]
    return [
        (f"the served draft has {key} {theirs[key]}, but was trained with {ours[key]}", _REMEDY)
        for key in ours
        if theirs[key] != ours[key]
    ]


def _plain(value: Any) -> Any:
    """Return a setting without ``type``, the older name of ``rope_type``."""
    return {key: held for key, held in value.items() if key != "type"} if isinstance(value, dict) else value


def compare_vocabularies(
    target: CausalLM, tokenizer: PreTrainedTokenizerBase, served: Path, trusted: bool = False
) -> Finding:
    """Compare vocabulary size, tokenizer and trimmed lm_head of the served heads or draft with the target."""
    stored, known = read_object(served / "config.json", _REMEDY), target.vocab_size
    size = stored.get("vocab_size", (stored.get("text_config") or {}).get("vocab_size"))
    differences: list[Difference] = []
    if kind_of(served) != "draft":  # these lack a tokenizer
        if size != known:
            found = f"the served weights predict {size} tokens, but the target has {known}"
            differences.append((found, "serve weights that were trained on this target"))
    else:
        differences += other_size(size, known)
        try:
            check_same_tokenizer(tokenizer, load_tokenizer(str(served), trusted))
        except UserError as error:
            differences.append((error.message, error.remedy or _REMEDY))
        differences += trimmed(stored)
    return _of(VOCABULARY, differences, f"both have {size} tokens", target=known, speculator=size)
