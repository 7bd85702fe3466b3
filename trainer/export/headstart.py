"""Heads in this project's own format, which `MedusaHeads` reads: config.json, model.safetensors."""

from dataclasses import replace
from pathlib import Path

from decoding.model.heads import MedusaHeads
from decoding.rules.best_tree import Paths
from trainer.export.card import Artefact
from trainer.export.readback import check_bit_equal


def describe_heads(heads: MedusaHeads, format: str) -> Artefact:
    """Return the card's description of heads."""
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
        markov_rank=config.markov_rank,
    )


def write(source: Path, folder: Path, tree: Paths = ()) -> tuple[Artefact, str]:
    """Write the heads in ``source`` to ``folder``, read them back, compare; ``tree`` replaces theirs unless empty.

    Returns the card's description of them, and a sentence on the comparison.
    """
    heads = MedusaHeads.from_pretrained(source)
    if tree:
        heads.config = replace(heads.config, tree=tree)
    heads.save_pretrained(folder)
    read = MedusaHeads.from_pretrained(folder)
    if read.config != heads.config:
        raise ValueError(f"{folder} reads back with another config than was written: export again")
    check_bit_equal(heads.state_dict(), read.state_dict(), folder)
    return describe_heads(heads, "headstart"), f"{len(heads.state_dict())} tensors and the tree read back bit-equal"
