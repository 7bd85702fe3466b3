"""Heads as vLLM loads them (its ``MedusaModel``): a top-1 chain, one token per head.

Two habits of vLLM decide the config. It drops biases in silence unless ``medusa_fc_bias`` is true, and renames every
config key that holds both "num" and "heads" to ``num_heads``, so the config never has a ``num_attention_heads``.
"""

import json
import reprlib
from pathlib import Path
from typing import Any

from decoding.model.header import check_tensors, check_whole, read_object
from decoding.model.heads import CONFIG_NAME, MedusaConfig, MedusaHeads, loaded
from decoding.model.stored import WEIGHTS_NAME, read_weights, weights_header, write_weights
from decoding.rules.tree import MOST_NODES
from trainer.export.artefact import Task, Written
from trainer.export.headstart import describe_heads
from trainer.export.readback import check_stored
from trainer.files.head_names import vllm_name

_REMEDY = "export the heads again"


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
        "original_lm_head": False,
    }


def write(task: Task) -> Written:
    """Write heads for vLLM, read them back, compare; ValueError for heads that vLLM has no place for."""
    source, folder = task.source, task.folder
    heads = MedusaHeads.from_pretrained(source)
    if heads.config.sequential:
        raise ValueError(
            f"the heads in {source} read one another's tokens, which vLLM's Medusa heads do not: "
            "give format headstart, or train heads with heads.sequential=false"
        )
    if heads.config.shared_lm_head:
        raise ValueError(
            f"the heads in {source} share the target's lm_head, a copy of which vLLM wants in their file: "
            "give format headstart, or train heads with heads.shared_lm_head=false"
        )
    if heads.config.markov_rank:
        raise ValueError(
            f"the heads in {source} add a bias of rank {heads.config.markov_rank} by the token before, which vLLM's "
            "Medusa heads do not: give format headstart, or train heads with heads.markov_rank=0"
        )
    state = {vllm_name(name): tensor for name, tensor in heads.state_dict().items()}
    (folder / CONFIG_NAME).write_text(json.dumps(vllm_config(heads.config), indent=2) + "\n")
    write_weights(folder, state, task.shard_bytes)
    _read_config(folder)
    check_stored(state, folder)
    compared = f"{len(state)} tensors read back bit-equal under vLLM's names, biases included"
    return Written(describe_heads(heads, task.format), (compared,))


def read_vllm_heads(folder: Path) -> MedusaHeads:
    """Read heads from a folder in vLLM's format, in their stored dtype; their tree is the chain that vLLM drafts.

    Stricter than vLLM, which ignores unknown tensors and leaves missing ones random: either is a `ValueError` here.
    """
    config = _read_config(folder)
    expected = ((vllm_name(name), shape) for name, shape in config.shapes())
    check_tensors(folder / WEIGHTS_NAME, weights_header(folder, _REMEDY), expected, _REMEDY)
    stored = read_weights(folder, _REMEDY)
    return loaded(config, {name: stored[vllm_name(name)] for name, _ in config.shapes()}, folder)


def _read_config(folder: Path) -> MedusaConfig:
    """Read the sizes in ``config.json``; `ValueError` where vLLM would read other heads from it."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ValueError(f"{folder} holds no heads in vLLM's format: {CONFIG_NAME} is missing")
    stored = read_object(path, _REMEDY)
    sizes = ("hidden_size", "vocab_size", "num_heads", "num_hidden_layers")
    if missing := [key for key in sizes if key not in stored]:
        raise ValueError(f"{path} is not vLLM's Medusa config: {missing[0]} is missing; {_REMEDY}")
    hidden_size, vocab_size, num_heads, num_layers = (stored[key] for key in sizes)
    try:
        check_whole("num_heads", num_heads)
        if num_heads > MOST_NODES:
            raise ValueError(f"num_heads is {num_heads}: give at most {MOST_NODES}")
        chain = tuple((0,) * depth for depth in range(1, num_heads + 1))
        config = MedusaConfig(hidden_size, vocab_size, num_heads, num_layers, chain)
    except ValueError as error:
        raise ValueError(f"{path} is not vLLM's Medusa config: {error}") from error
    expected = vllm_config(config)
    wrong = [key for key in expected if stored.get(key) != expected[key]] + [
        key for key in stored if key not in expected
    ]
    if wrong:
        raise ValueError(
            f"{path} would not load as these heads: {wrong[0]} is {reprlib.repr(stored.get(wrong[0]))}; {_REMEDY}"
        )
    return config
