"""Heads as vLLM up to 0.32 loads them (its ``MedusaModel``, dropped in 0.33): a top-1 chain, one token per head.

Two habits of vLLM decide the config. It drops biases in silence unless ``medusa_fc_bias`` is true, and renames every
config key that holds both "num" and "heads" to ``num_heads``, so the config never has a ``num_attention_heads``.

Heads that share the target's lm_head carry a copy of it (``original_lm_head``): vLLM does not take the target's own.
"""

import json
import re
import reprlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding.drafters.base import Drafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaConfig, MedusaHeads, loaded
from decoding.model.loading import load_heads, load_model
from decoding.model.stored import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    check_tensors,
    check_whole,
    read_object,
    read_weights,
    stored_weights,
    weights_header,
    write_weights,
)
from decoding.rules.tree import MOST_NODES
from trainer.export.headstart import describe_heads
from trainer.export.readback import Readers, check_stored
from trainer.export.task import Artefact, ExportTask

SHARED_LM_HEAD = "lm_heads.0.weight"
"""Name of the one output layer of heads that share it."""
_REMEDY = "export the heads again"
_LAYER = re.compile(r"heads\.(\d+)\.blocks\.(\d+)\.linear\.(weight|bias)")
_OUTPUT = re.compile(r"heads\.(\d+)\.lm_head\.weight")


def vllm_name(name: str) -> str:
    """Translate our name of a tensor into that of vLLM's ``MedusaModel``, which ignores every other name in silence."""
    if layer := _LAYER.fullmatch(name):
        return "blocks.{}.layers.{}.{}".format(*layer.groups())
    output = _OUTPUT.fullmatch(name)
    assert output is not None, f"{name} is of heads that vLLM has no place for"
    return f"lm_heads.{output[1]}.weight"


def vllm_config(config: MedusaConfig) -> dict[str, Any]:
    """Return all of ``config.json``. It holds sizes only: the target's own architecture must not appear."""
    return {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "hidden_size": config.hidden_size,
        "vocab_size": config.vocab_size,
        "truncated_vocab_size": config.vocab_size,
        "num_heads": config.num_heads,
        "num_hidden_layers": config.num_layers,
        "medusa_fc_bias": True,
        "original_lm_head": config.shared_lm_head,
    }


def write(task: ExportTask) -> tuple[Artefact, tuple[str, ...]]:
    """Write heads for vLLM, read them back, compare; ValueError for heads that vLLM has no place for."""
    heads, folder = MedusaHeads.from_pretrained(task.source), task.folder
    if heads.config.markov_rank:
        raise ValueError(
            f"the heads in {task.source} add a bias of rank {heads.config.markov_rank} by the token before, for which "
            "format vllm has no place: give format headstart, or train heads with heads.markov_rank=0"
        )
    state = {vllm_name(name): tensor for name, tensor in heads.state_dict().items()}
    if heads.config.shared_lm_head:
        state[SHARED_LM_HEAD] = _lm_head_of_target(task, heads.config)
    (folder / CONFIG_NAME).write_text(json.dumps(vllm_config(heads.config), indent=2) + "\n")
    write_weights(folder, state)
    _read_config(folder)
    check_stored(state, folder)
    compared = f"{len(state)} tensors read back bit-equal under vLLM's names, biases included"
    return describe_heads(heads, task.format), (compared,)


def _lm_head_of_target(task: ExportTask, config: MedusaConfig) -> Tensor:
    """Return the lm_head that heads without their own are for; ValueError if the target is unknown or not here."""
    needed = f"the heads in {task.source} share their target's lm_head, of which format {task.format} holds a copy"
    if task.target is None:
        raise ValueError(f"{needed}, but no provenance.json tells which target: give it as --target")
    try:
        model = load_model(task.target, "auto", torch.device("cpu"), task.trust_remote_code)
    except ValueError as error:
        raise ValueError(f"{needed}: {error} (or give --target, if the target is elsewhere)") from error
    lm_head: Tensor = model.get_output_embeddings().weight.detach()
    if lm_head.shape != (config.vocab_size, config.hidden_size):
        raise ValueError(
            f"{needed}, but that of {task.target} is {tuple(lm_head.shape)} and theirs would be "
            f"{(config.vocab_size, config.hidden_size)}: give the target that they were trained on as --target"
        )
    return lm_head


def readers(task: ExportTask, target: CausalLM) -> Readers:
    """Return readers of the trained heads and the written ones, which draft vLLM's chain."""

    def trained() -> Drafter:
        heads = load_heads(task.source, target)
        return MedusaDrafter(heads, [(0,) * depth for depth in range(1, heads.config.num_heads + 1)])

    def exported() -> Drafter:
        heads = read_vllm_heads(task.folder)
        heads.config.check_fits(target.hidden_size, target.vocab_size)
        if heads.config.shared_lm_head:
            lm_head: Any = target.model.get_output_embeddings()
            copied = next(tensor for name, tensor in stored_weights(task.folder, _REMEDY) if name == SHARED_LM_HEAD)
            if not torch.equal(copied.to(lm_head.weight), lm_head.weight):
                told = "holds the lm_head of another target than prompts are decoded with"
                raise ValueError(f"{task.folder} {told}: {_REMEDY}")
        return MedusaDrafter(heads.to(target.device, target.dtype))

    return [(trained, exported)]


def read_vllm_heads(folder: Path) -> MedusaHeads:
    """Read heads from a folder in vLLM's format, in their stored dtype; their tree is the chain that vLLM drafts.

    A copy of the target's lm_head is left out: such heads use the target's own. Stricter than vLLM, which ignores
    unknown tensors and output layers that are missing: either is a `ValueError` here.
    """
    config = _read_config(folder)
    header = weights_header(folder, _REMEDY)
    if config.shared_lm_head:  # in the target's dtype, which may be another than that of the heads
        copied = {name: header.pop(name) for name in (SHARED_LM_HEAD,) if name in header}
        shape = (config.vocab_size, config.hidden_size)
        check_tensors(folder / WEIGHTS_NAME, copied, [(SHARED_LM_HEAD, shape)], _REMEDY)
    expected = ((vllm_name(name), shape) for name, shape in config.shapes())
    check_tensors(folder / WEIGHTS_NAME, header, expected, _REMEDY)
    stored = read_weights(folder, _REMEDY)
    return loaded(config, {name: stored[vllm_name(name)] for name, _ in config.shapes()}, folder)


def _read_config(folder: Path) -> MedusaConfig:
    """Read the sizes in ``config.json``; `ValueError` if vLLM would read other heads from it."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ValueError(f"{folder} holds no heads in vLLM's format: {CONFIG_NAME} is missing")
    stored = read_object(path, _REMEDY)
    try:
        hidden_size, vocab_size, num_heads, num_layers = (
            stored[key] for key in ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers")
        )
        check_whole("num_heads", num_heads)
        if num_heads > MOST_NODES:
            raise ValueError(f"num_heads is {num_heads}: give at most {MOST_NODES}")
        chain = tuple((0,) * depth for depth in range(1, num_heads + 1))
        shared = stored.get("original_lm_head") is True
        config = MedusaConfig(hidden_size, vocab_size, num_heads, num_layers, chain, shared_lm_head=shared)
    except (KeyError, ValueError) as error:
        raise ValueError(f"{path} is not vLLM's Medusa config ({error}): {_REMEDY}") from error
    expected = vllm_config(config)
    if wrong := [key for key in stored | expected if stored.get(key) != expected.get(key)]:
        raise ValueError(
            f"{path} would not load as these heads: {wrong[0]} is {reprlib.repr(stored.get(wrong[0]))}; {_REMEDY}"
        )
    return config
