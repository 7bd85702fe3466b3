"""Export of Medusa heads in Headstart's own format."""

from dataclasses import replace

from decoding.drafters.medusa import MedusaDrafter
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import MedusaHeads, read_config
from decoding.model.loading import load_heads
from trainer.export.readback import Readers, check_stored
from trainer.export.task import Artefact, ExportTask


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


def readers(task: ExportTask, target: CausalLM) -> Readers:
    """Return readers of the trained heads and of the exported heads; both draft the exported tree."""
    trained = lambda: MedusaDrafter(load_heads(task.source, target), task.tree or None)  # noqa: E731
    return [(trained, lambda: MedusaDrafter(load_heads(task.folder, target)))]


def write(task: ExportTask) -> tuple[Artefact, tuple[str, ...]]:
    """Write heads in the format that `MedusaHeads` reads, read them back and compare."""
    folder, heads = task.folder, MedusaHeads.from_pretrained(task.source)
    if task.tree:
        heads.config = replace(heads.config, tree=task.tree)
    heads.save_pretrained(folder)
    if read_config(folder) != heads.config:
        raise UserError(f"the config in {folder} differs from what was written: export again")
    state = heads.state_dict()
    check_stored(state, folder)
    return describe_heads(heads, task.format), (f"{len(state)} tensors and the tree read back bit-equal",)
