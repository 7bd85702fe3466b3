"""Heads in this project's own format, which `decoding.heads.MedusaHeads` reads: config.json, model.safetensors."""

from pathlib import Path

from safetensors import safe_open

from decoding.heads import WEIGHTS_NAME, MedusaHeads
from trainer.export.card import Artefact
from trainer.export.readback import check_bit_equal


def read_trained_heads(folder: Path) -> MedusaHeads:
    """A training run's heads in the dtype they are stored in. Errors: those of `MedusaHeads.from_pretrained`."""
    heads = MedusaHeads.from_pretrained(folder)
    with safe_open(folder / WEIGHTS_NAME, framework="pt") as stored:
        dtypes = {stored.get_tensor(name).dtype for name in stored.keys()}  # noqa: SIM118  # not a mapping
    if len(dtypes) != 1:
        found = ", ".join(sorted(str(dtype) for dtype in dtypes))
        raise ValueError(f"{folder / WEIGHTS_NAME} mixes dtypes ({found}): save the heads in one")
    # The module was built in fp32, which holds bf16 and fp16 exactly.
    return heads.to(dtypes.pop())


def describe_heads(heads: MedusaHeads, format: str) -> Artefact:
    """What the model card says about heads."""
    config = heads.config
    return Artefact(
        format=format,
        parameters=sum(parameter.numel() for parameter in heads.parameters()),
        dtype=str(next(heads.parameters()).dtype).removeprefix("torch."),
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        heads=config.num_heads,
        layers=config.num_layers,
        tree_nodes=len(config.tree),
        shared_lm_head=config.shared_lm_head,
        sequential=config.sequential,
    )


def write(source: Path, folder: Path) -> tuple[Artefact, str]:
    """Write the heads in ``source`` to ``folder``, read them back, compare.

    Returns what the card says about them, and a sentence on what was compared.
    """
    heads = read_trained_heads(source)
    heads.save_pretrained(folder)
    read = read_trained_heads(folder)
    if read.config != heads.config:
        raise ValueError(f"{folder} reads back with another config than was written: export again")
    check_bit_equal(heads.state_dict(), read.state_dict(), folder)
    return describe_heads(heads, "headstart"), f"{len(heads.state_dict())} tensors and the tree read back bit-equal"
