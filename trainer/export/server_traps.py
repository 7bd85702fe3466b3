"""Traps: exported folders that a server loads without an error, but that make the server draft badly.

The traps of vLLM were found in the code of version 0.32 and by running it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from decoding.errors import UserError
from decoding.files.folder import OUTPUT_TOKENS_KEY
from decoding.model.dspark_config import DSparkConfig
from decoding.model.eagle3_config import Eagle3Config, usual_layers
from trainer.files.transformers4 import rope_keys

_TAKES_OVER = ("eagle-", "eagle3", "dflash", "dspark")
"""Parts of a path by which vLLM chooses the method of speculation, whatever their case and whatever the config says."""
MOST_OTHER_TOKENS = 128
"""The largest difference between vocabulary sizes that llama.cpp accepts."""
_VERSION_4 = {"rope_theta": 10000.0, "rotary_emb_base": 10000.0, "partial_rotary_factor": 1.0, "rotary_pct": 0.25}
"""Defaults of transformers 4 for missing keys, in nearly all families."""
_BY_FAMILY = {"mixtral": {"rope_theta": 1e6}, "gemma3_text": {"rope_theta": 1e6, "rope_local_base_freq": 10000.0}}


class Trap(NamedTuple):
    """A problem in words, and its remedy."""

    found: str
    remedy: str


def taken_over(path: str) -> list[Trap]:
    """Return the trap if vLLM would choose a wrong method because of the folder's path, as passed to the server."""
    part = next((part for part in _TAKES_OVER if part in path.lower()), None)
    if part is None:
        return []
    return [
        Trap(
            f"vLLM chooses another method because the path of the served folder contains {part!r}", "rename the folder"
        )
    ]


def trimmed(config: Mapping[str, Any]) -> list[Trap]:
    """Return the trap if a draft's config.json names a trimmed lm_head."""
    name = config.get(OUTPUT_TOKENS_KEY)
    if name is None:
        return []
    problem = f"servers ignore {name} and run the draft's whole lm_head instead of the trimmed lm_head, at full cost"
    remedy = "compare with the figures of an untrimmed draft, or train such a draft (draft.vocabulary=null)"
    return [Trap(problem, remedy)]


def other_size(size: Any, wanted: Any) -> list[Trap]:
    """Return the trap if the vocabularies of draft and target differ in size."""
    if size == wanted:
        return []
    problem = f"the served draft's vocabulary has {size} tokens, and the target's vocabulary has {wanted}"
    remedy = (
        "pad the draft's embeddings to the target's size, or set use_heterogeneous_vocab true in vLLM; llama.cpp "
        f"accepts a difference of up to {MOST_OTHER_TOKENS}, and transformers accepts none"
    )
    return [Trap(problem, remedy)]


def too_few_positions(config: Mapping[str, Any], longest: int) -> list[Trap]:
    """Return the trap if a draft's config.json allows fewer positions than ``longest`` tokens."""
    positions = config.get("max_position_embeddings", config.get("n_positions"))
    if not isinstance(positions, int) or positions >= longest:
        return []
    problem = f"texts here have up to {longest} tokens, but nothing is drafted after the draft's {positions} positions"
    return [Trap(problem, "train a draft with more positions, or serve shorter texts")]


def misread_keys(whose: str, stored: Mapping[str, Any]) -> list[Trap]:
    """Return a trap for each setting that transformers 5 reads differently from programs that read the keys of
    transformers 4. ``whose`` names the model in the sentence, such as ``the draft's``.
    """
    text = stored.get("text_config")
    config = {**stored, **text} if isinstance(text, dict) else stored
    defaults = {**_VERSION_4, **_BY_FAMILY.get(str(config.get("model_type")), {})}
    try:
        wanted = rope_keys(config)
    except UserError as error:
        problem = f"{whose} config.json cannot be read by programs with transformers 4: {error}"
        return [Trap(problem, "serve it with a program that uses transformers 5")]
    traps = []
    for key, value in wanted.items():
        if (taken := config.get(key, defaults.get(key))) != value:
            held = f"has {key} {config[key]}" if key in config else f"lacks {key}"
            used = f"{'none' if taken is None else taken} instead of {value} from rope_parameters"
            problem = f"{whose} config.json {held}, so programs that read the keys of transformers 4 use {used}"
            remedy = f"write {key} next to rope_parameters, as 'headstart export' does"
            traps.append(Trap(problem, f"{remedy}, or serve with a program that reads rope_parameters"))
    return traps


def lost_in_servers(config: DSparkConfig, stored: Mapping[str, Any]) -> dict[str, list[str]]:
    """Return, for each server, what it gets wrong in a DSpark or DFlash draft whose config.json is ``stored``.

    These facts follow from the sources of vLLM 0.33, SGLang 0.5.23 and llama.cpp with its converter, as of November
    2026; they were not tried.
    """
    of_speculators, causal = stored.get("speculators_model_type"), [sight.causal for sight in config.sights]
    as_vllm, as_llama = causal, [not of_speculators and bool(config.is_causal)] * len(causal)
    if of_speculators == "dspark":
        as_vllm = [sight.window is not None for sight in config.sights]
    elif of_speculators:  # one flag for all layers
        as_vllm = [not stored.get("sliding_window_non_causal", True)] * len(causal)
    vllm, sglang, llama = list[str](), list[str](), list[str]()
    for served, lost in ((as_vllm, vllm), (as_llama, llama)):
        if served != causal:
            layers = ", ".join(str(i) for i, (a, b) in enumerate(zip(served, causal, strict=True)) if a != b)
            lost.append(f"masks attention in layers {layers} differently from training, so fewer tokens are accepted")
    if config.markov_head_type != "vanilla":
        for lost in (vllm, llama):
            lost.append(f"does not support the {config.markov_head_type} Markov head")
    if of_speculators:
        sglang.append("does not read a nested config.json")
        llama += [] if of_speculators == "dspark" else ["does not read a nested config.json of DFlash"]
    if not (config.markov_rank or config.is_dflash):
        sglang.append("does not run a DSpark draft without a Markov head")
    if config.draft_vocab_size is not None:
        sglang.append("does not read d2t")
    if config.num_target_layers and config.target_layer_ids[-1] == config.num_target_layers - 1:
        sglang.append("does not read states after the last layer")
        llama.append("does not read states after the last layer")
    if (kind := config.rope_scaling.get("rope_type", "default")) not in ("default", "linear", "yarn"):
        llama.append(f"does not scale rotary embeddings by {kind}, so fewer tokens are accepted")
    return {"vLLM": vllm, "SGLang": sglang, "llama.cpp": llama}


def lost_of_eagle3(config: Eagle3Config, stored: Mapping[str, Any], depth: int | None = None) -> dict[str, list[str]]:
    """Return the same as `lost_in_servers` for an EAGLE-3 draft. ``depth``: the number of the target's layers; None if
    it is unknown.
    """
    ids = (stored.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    fewer = "so fewer tokens are accepted"
    vllm, sglang, llama = list[str](), list[str](), list[str]()
    other_count = [] if config.taps == 3 else [f"does not run a draft that reads {config.taps} layers"]
    layer = stored.get("transformer_layer_config") or stored  # of a nested file, vLLM reads only this part and flags
    vllm += other_count if layer.get("num_aux_hidden_states") is None and not config.qk_norm else []
    if "speculators_model_type" in stored:
        sglang.append("does not read a nested config.json")
        if "norm_before_residual" not in stored:  # speculators' default is false
            vllm.append(f"assumes norm_before_residual if config.json lacks it, {fewer}")
    for lost in (sglang, llama):
        lost += [f"ignores the window, {fewer}"] if config.sliding_window else []
        lost += ["does not compute norms of queries and keys"] if config.qk_norm else []
    if config.norm_before_residual:
        sglang.append(f"ignores norm_before_residual, {fewer}")
    if (layers := config.target_layer_ids) and layers != usual_layers(depth or layers[-1] + 4):
        sglang.append(f"reads the states of the default layers, {fewer}")
    if ids:  # ModelOpt numbers layers from 0. vLLM counts the embedding as layer 0, and SGLang adds 1.
        served, name = (vllm, "before") if ids[0] == 1 else (sglang, "after")
        served.append(f"reads the states one layer {name} the layers in eagle_config, {fewer}")
    llama += [f"ignores {flag}, {fewer}" for flag in ("fc_norm", "norm_output") if getattr(config, flag)]
    llama += other_count
    for lost in (sglang, llama) if "draft_vocab_size" not in stored else ():
        lost.append("does not run a draft without draft_vocab_size in config.json")
    return {"vLLM": vllm, "SGLang": sglang, "llama.cpp": llama}
