"""The heads that other programs have a place for: plain Medusa heads, with the target's lm_head or their own."""

from torch import Tensor

from decoding.model.heads import MedusaConfig
from trainer.export.artefact import Task
from trainer.target.stored_lm_head import read_lm_head


def check_plain(config: MedusaConfig, task: Task) -> None:
    """Raise ValueError for heads with a bias by the token before, for which only our own format has a place."""
    if config.markov_rank:
        raise ValueError(
            f"the heads in {task.source} add a bias of rank {config.markov_rank} by the token before, for which format "
            f"{task.format} has no place: give format headstart, or train heads with heads.markov_rank=0"
        )


def lm_head_of_target(task: Task, config: MedusaConfig) -> Tensor:
    """Return the lm_head that heads without their own are for; ValueError if the target is unknown or not here."""
    needed = f"the heads in {task.source} share their target's lm_head, of which format {task.format} holds a copy"
    if task.target is None:
        raise ValueError(f"{needed}, but no provenance.json tells which target: give it as --target")
    try:
        lm_head = read_lm_head(task.target, task.trust_remote_code)
    except ValueError as error:
        raise ValueError(f"{needed}: {error} (or give --target, if the target is elsewhere)") from error
    if lm_head.shape != (config.vocab_size, config.hidden_size):
        raise ValueError(
            f"{needed}, but that of {task.target} is {tuple(lm_head.shape)} and theirs would be "
            f"{(config.vocab_size, config.hidden_size)}: give the target that they were trained on as --target"
        )
    return lm_head
