"""Heads and parallel drafts in this project's own format."""

from collections.abc import Iterator
from dataclasses import replace

from decoding.drafters.base import Drafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaHeads, read_config
from decoding.model.loading import load_heads
from trainer.export import draft
from trainer.export.artefact import Artefact, Task, Written
from trainer.export.formats import HEADS, kind_held_in
from trainer.export.readback import check_stored


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
        markov_rank=config.markov_rank,
    )


def drafters(task: Task, target: CausalLM) -> Iterator[Drafter]:
    """Yield the trained weights and the written files as drafters of the written tree: see `trainer.export.reread`."""
    if kind_held_in(task.source) != HEADS:
        yield from draft.drafters(task, target)
        return
    yield MedusaDrafter(load_heads(task.source, target), task.tree or None)
    yield MedusaDrafter(load_heads(task.folder, target))


def write(task: Task) -> Written:
    """Write heads as `MedusaHeads` reads them, or a parallel draft with its parts; read them back, compare."""
    if kind_held_in(task.source) != HEADS:
        return draft.write(task)
    folder, heads = task.folder, MedusaHeads.from_pretrained(task.source)
    if task.tree:
        heads.config = replace(heads.config, tree=task.tree)
    heads.save_pretrained(folder, task.shard_bytes)
    if read_config(folder) != heads.config:
        raise ValueError(f"{folder} reads back with another config than was written: export again")
    state = heads.state_dict()
    check_stored(state, folder)
    compared = f"{len(state)} tensors and the tree read back bit-equal"
    return Written(describe_heads(heads, task.format), (compared,))
