"""Heads as vLLM loads them (its ``MedusaModel``): a top-1 chain, one token per head.

Two of its habits decide what is written. Biases are dropped in silence unless ``medusa_fc_bias`` is true, and every
config key that holds both "num" and "heads" is renamed to ``num_heads``, so there is never a ``num_attention_heads``.
"""

import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from decoding.heads import CONFIG_NAME, WEIGHTS_NAME, MedusaConfig, MedusaHeads
from trainer.export.card import Artefact
from trainer.export.headstart import describe_heads, read_trained_heads
from trainer.export.readback import check_bit_equal


def vllm_config(config: MedusaConfig) -> dict[str, Any]:
    """``config.json``, whole. It holds sizes only: the target's own architecture must not appear."""
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


def vllm_names(config: MedusaConfig) -> dict[str, str]:
    """Our tensor name -> vLLM's; vLLM ignores any other in silence."""
    names = {}
    for head in range(config.num_heads):
        for layer in range(config.num_layers):
            for part in ("weight", "bias"):
                names[f"heads.{head}.blocks.{layer}.linear.{part}"] = f"blocks.{head}.layers.{layer}.{part}"
        names[f"heads.{head}.lm_head.weight"] = f"lm_heads.{head}.weight"
    return names


def write(source: Path, folder: Path) -> tuple[Artefact, str]:
    """Write the heads in ``source`` to ``folder`` for vLLM, read them back, compare.

    Returns what the card says about them, and a sentence on what was compared.
    """
    heads = read_trained_heads(source)
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
    names, state = vllm_names(heads.config), heads.state_dict()
    (folder / CONFIG_NAME).write_text(json.dumps(vllm_config(heads.config), indent=2) + "\n")
    tensors = {names[name]: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    save_file(tensors, folder / WEIGHTS_NAME, metadata={"format": "pt"})
    check_bit_equal(state, read_vllm_heads(folder).state_dict(), folder)
    return describe_heads(
        heads, "vllm"
    ), f"{len(state)} tensors read back bit-equal under vLLM's names, biases included"


def read_vllm_heads(folder: Path) -> MedusaHeads:
    """Heads from a folder in vLLM's format, in their stored dtype, with the chain that vLLM drafts as their tree.

    Stricter than vLLM, which ignores unknown tensors and leaves missing ones random: either is a `ValueError` here.
    """
    config = _read_config(folder)
    names = vllm_names(config)
    try:
        stored = load_file(folder / WEIGHTS_NAME)
    except (OSError, SafetensorError) as error:
        raise ValueError(f"{folder / WEIGHTS_NAME} cannot be read: {error}") from error
    missing, unknown = sorted(set(names.values()) - stored.keys()), sorted(stored.keys() - set(names.values()))
    if missing or unknown:
        what = f"{missing[0]} is missing" if missing else f"{unknown[0]} is unknown"
        raise ValueError(f"{folder / WEIGHTS_NAME} does not fit its config: {what}; export the heads again")
    heads = MedusaHeads(config).to(next(iter(stored.values())).dtype)
    try:
        heads.load_state_dict({ours: stored[theirs] for ours, theirs in names.items()})
    except RuntimeError as error:
        raise ValueError(f"{folder / WEIGHTS_NAME} does not fit its config: {error}") from error
    return heads.eval()


def _read_config(folder: Path) -> MedusaConfig:
    """The sizes in ``config.json``, after a check that vLLM would read all of it as it is meant."""
    path = folder / CONFIG_NAME
    if not path.is_file():
        raise ValueError(f"{folder} holds no heads in vLLM's format: {CONFIG_NAME} is missing")
    stored = json.loads(path.read_text())
    try:
        num_heads = int(stored["num_heads"])
        config = MedusaConfig(
            hidden_size=stored["hidden_size"],
            vocab_size=stored["vocab_size"],
            num_heads=num_heads,
            num_layers=stored["num_hidden_layers"],
            tree=tuple((0,) * depth for depth in range(1, num_heads + 1)),
        )
    except KeyError as error:
        raise ValueError(f"{path} is not vLLM's Medusa config: {error.args[0]} is missing") from error
    expected = vllm_config(config)
    wrong = [key for key in expected if stored.get(key) != expected[key]] + [
        key for key in stored if key not in expected
    ]
    if wrong:
        raise ValueError(
            f"{path} would not load as these heads: {wrong[0]} is {stored.get(wrong[0])!r}; export the heads again"
        )
    return config
