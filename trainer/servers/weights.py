"""Weights as a server reads them, and their top-1 tokens beside the trained ones' on held-out texts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file
from torch import Tensor

from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads
from decoding.model.lm_head import lm_head_input
from decoding.model.loading import load_model
from decoding.model.parallel import ParallelDraft
from decoding.model.stored import check_whole, read_header, read_object, stored_weights, weights_header
from trainer.files.head_names import config_read_by_vllm, vllm_name
from trainer.servers.finding import TOP_1, Finding, equal, unknown

_LEAST = 0.98
"""Share of equal top-1 tokens below which weights are other weights: rounding to bf16 alone turns over fewer."""
_WEIGHTS = "model.safetensors"
_REMEDY = "export the speculator again"
_VLLM_DEFAULTS = {"hidden_size": 4096, "vocab_size": 32001, "num_heads": 5, "num_hidden_layers": 1}


class ReadHeads(NamedTuple):
    """Heads as vLLM reads them, and in words what it leaves out or makes up."""

    heads: MedusaHeads
    faults: tuple[str, ...]


def read_vllm_heads(folder: Path, target: CausalLM, whole: bool = False) -> ReadHeads:
    """Read heads as vLLM 0.32 does (``models/medusa.py``): unknown names are ignored, missing output layers random.

    Without ``medusa_fc_bias`` the biases are dropped. ``whole``: read them nevertheless, as they were trained. Weights
    that vLLM finds no tensor for are zero here. ValueError for heads that do not fit the target.
    """
    stored = config_read_by_vllm(read_object(folder / "config.json", _REMEDY))
    config = _vllm_sizes(folder, stored)
    config.check_fits(target.hidden_size, target.vocab_size)
    tensors = {name.replace("medusa_heads.", ""): tensor for name, tensor in stored_weights(folder, _REMEDY)}
    shared, biased = stored.get("original_lm_head", False), stored.get("medusa_fc_bias", False)
    read = MedusaHeads(config)
    state, faults, dropped, known = read.state_dict(), [], [], set()
    for name, tensor in state.items():
        wanted = vllm_name(name)
        if shared and wanted.startswith("lm_heads."):  # one for all heads, which has two names
            wanted = "lm_head.weight" if "lm_head.weight" in tensors else "lm_heads.0.weight"
        known.add(wanted)
        if name.endswith(".bias") and not biased:
            if wanted in tensors and not whole:
                dropped.append(wanted)
            found = tensors.get(wanted) if whole else None
        elif (found := tensors.get(wanted)) is None:
            outcome = (
                "the server does not start" if name.endswith((".bias", "linear.weight")) else "it drafts at random"
            )
            faults.append(f"{wanted} is missing, so {outcome}")
        state[name] = torch.zeros_like(tensor) if found is None or found.shape != tensor.shape else found
        if found is not None and found.shape != tensor.shape:
            faults.append(f"{wanted} has the shape {tuple(found.shape)}, not {tuple(tensor.shape)}")
    if dropped:
        faults.append(f"its {len(dropped)} biases ({dropped[0]}, …) are dropped, as medusa_fc_bias is not true")
    faults += [f"{name} has a name that the server ignores" for name in sorted(tensors.keys() - known)]
    read.load_state_dict(state)
    return ReadHeads(read.to(target.device, target.dtype).eval(), tuple(faults))


def _vllm_sizes(folder: Path, stored: Mapping[str, Any]) -> MedusaConfig:
    """Return the sizes that a config claims; ValueError for more heads than the weights could fill."""
    sizes = {key: stored.get(key, default) for key, default in _VLLM_DEFAULTS.items()}
    for key, size in sizes.items():
        check_whole(key, size, least=0)
    heads, layers = sizes["num_heads"], sizes["num_hidden_layers"]
    names = len(weights_header(folder, _REMEDY))
    if max(heads, heads * layers) > 4 * names:  # they are built before they are filled
        raise ValueError(f"{folder} has {names} tensors, too few for {heads} heads of {layers} layers: {_REMEDY}")
    tree = tuple((0,) * depth for depth in range(1, heads + 1))
    return MedusaConfig(sizes["hidden_size"], sizes["vocab_size"], heads, layers, tree=tree)


class ReadDraft(NamedTuple):
    """A draft as a server reads it, None where no server can, and in words what is read in another way."""

    draft: CausalLM | None
    faults: tuple[str, ...]


def read_served_draft(folder: Path, target: CausalLM, trained: Path | None, trusted: bool = False) -> ReadDraft:
    """Read a draft as vLLM and transformers do: with ``tie_word_embeddings`` a stored lm_head is not read."""
    faults = _other_tensors(folder, trained)
    try:
        model = load_model(str(folder), target.dtype, target.device, trusted)
    except ValueError as error:
        return ReadDraft(None, (*faults, str(error)))
    stored = read_object(folder / "config.json", _REMEDY)
    path = folder / _WEIGHTS
    embeddings: Any = model.get_input_embeddings()
    lm_head: Any = model.get_output_embeddings()
    if stored.get("tie_word_embeddings") and path.is_file() and "lm_head.weight" in read_header(path, _REMEDY):
        if not torch.equal(load_file(path)["lm_head.weight"].to(embeddings.weight), embeddings.weight):
            faults.append("its lm_head.weight is not read, as tie_word_embeddings is true")
        lm_head.weight = embeddings.weight
    return ReadDraft(CausalLM(model), tuple(faults))


def _other_tensors(folder: Path, trained: Path | None) -> list[str]:
    """Return the tensors that only one of two folders has, or that have other shapes."""
    paths = [each / _WEIGHTS for each in (folder, trained) if each is not None]
    if len(paths) < 2 or not all(path.is_file() for path in paths):  # sharded weights are compared by their top-1
        return []
    theirs, ours = (read_header(path, _REMEDY) for path in paths)
    missing = [f"{name} is missing" for name in sorted(ours.keys() - theirs.keys())]
    unknown_names = [f"{name} is unknown to the trained draft" for name in sorted(theirs.keys() - ours.keys())]
    other = [
        f"{name} has the shape {theirs[name].shape}, not {ours[name].shape}"
        for name in sorted(ours.keys() & theirs.keys())
        if theirs[name].shape != ours[name].shape
    ]
    return [*missing, *unknown_names, *other]


Weights = MedusaHeads | CausalLM | ParallelDraft


def compare_top_1(
    target: CausalLM, trained: Weights, served: Path, folder: Path | None, texts: Sequence[Sequence[int]], trusted: bool
) -> Finding:
    """Compare the top-1 tokens of the trained weights with those that a server reads, at every position of the texts.

    ``folder``: the trained one, for the names of its tensors.
    """
    if isinstance(trained, MedusaHeads):
        if trained.markov is not None:
            return unknown(TOP_1, "these heads read tokens, which the heads of no server do: export plain Medusa heads")
        return _compare_heads(target, trained, served, texts)
    read = read_served_draft(served, target, folder, trusted)
    if read.draft is None:
        return Finding(TOP_1, True, f"the served draft cannot be read: {'; '.join(read.faults[:3])}", _REMEDY)
    if isinstance(trained, ParallelDraft) and any(trained.parts.config.shapes()):
        return Finding(
            TOP_1,
            True,
            "the trained parallel draft has a bias by the token before or a reader of the target, read by no server",
            "train a parallel draft with draft.parallel.markov_rank=0 and draft.parallel.reads_target=false",
        )
    own = trained.model if isinstance(trained, ParallelDraft) else trained
    pairs = [(_draft_top_1(own, text), _draft_top_1(read.draft, text)) for text in texts]
    return _judged([(torch.cat(side)) for side in zip(*pairs, strict=True)], read.faults)


def _compare_heads(target: CausalLM, trained: MedusaHeads, served: Path, texts: Sequence[Sequence[int]]) -> Finding:
    try:
        read = read_vllm_heads(served, target)
    except ValueError as error:
        return Finding(TOP_1, True, f"the served heads cannot be read: {error}", _REMEDY)
    pairs = [(_heads_top_1(target, trained, text), _heads_top_1(target, read.heads, text)) for text in texts]
    heads = min(trained.config.num_heads, read.heads.config.num_heads)
    sides = [torch.cat([tokens[:heads].flatten() for tokens in side]) for side in zip(*pairs, strict=True)]
    return _judged(sides, read.faults)


def _judged(sides: Sequence[Int[Tensor, " positions"]], faults: Sequence[str]) -> Finding:
    """Return the finding of the top-1 tokens of both sides, and of what the server reads in another way."""
    ours, theirs = sides
    share, count = float((ours == theirs).float().mean()), len(ours)
    told = f"{share:.1%} of {count:,} top-1 tokens are equal"
    figures = {"share": share, "positions": count, "faults": list(faults)}
    if share == 1 or (share >= _LEAST and not faults):  # with a known cause the fewest tokens are no rounding
        note = f" (though {faults[0]})" if faults else ""
        return equal(TOP_1, told + note, **figures)
    cause = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if len(faults) > 3 else "")
    return Finding(
        TOP_1, True, f"{told}: {cause or 'the served weights are other weights'}", _remedy_for(faults), figures
    )


def _remedy_for(faults: Sequence[str]) -> str:
    if any("medusa_fc_bias" in fault for fault in faults):
        return f"set medusa_fc_bias true in the served config.json, or {_REMEDY} ('headstart export' sets it)"
    if any("tie_word_embeddings" in fault for fault in faults):
        return "set tie_word_embeddings false in the served config.json, or export the trained draft again"
    if faults:
        return f"{_REMEDY} with 'headstart export --format vllm' (heads) or draft, whose names servers read"
    return f"{_REMEDY} from the run that was measured, and point the server at the new folder"


@torch.inference_mode()
def _heads_top_1(target: CausalLM, heads: MedusaHeads, text: Sequence[int]) -> Int[Tensor, "heads positions"]:
    tokens = torch.tensor([list(text)], device=target.device)
    hidden: Float[Tensor, "1 positions hidden"] = lm_head_input(target.model, {"input_ids": tokens})
    lm_head: Any = target.model.get_output_embeddings()
    best: Tensor = heads(hidden[0], lm_head).argmax(-1)
    return best


@torch.inference_mode()
def _draft_top_1(draft: CausalLM, text: Sequence[int]) -> Int[Tensor, " positions"]:
    logits: Tensor = draft.model(input_ids=torch.tensor([list(text)], device=draft.device), use_cache=False).logits[0]
    best = logits.argmax(-1)
    return best if draft.output_tokens is None else draft.output_tokens[best]
