"""Export of DSpark drafts in DeepSpec's flat format, which training also writes and vLLM and SGLang load."""

from dataclasses import replace
from pathlib import Path

import torch

from decoding.drafters.dspark import DSparkDrafter
from decoding.errors import UserError
from decoding.model.causal_lm import CausalLM
from decoding.model.dspark import DSparkDraft
from decoding.model.dspark_config import DSparkConfig, read_dspark_config
from decoding.model.loading import load_dspark
from decoding.model.stored import stored_weights
from trainer.export.readback import Readers, check_bit_equal
from trainer.export.task import Artefact, ExportTask


def stored_draft(folder: Path) -> DSparkDraft:
    """Load a draft in its stored dtype, with the config that `served_config` returns."""
    stored = stored_weights(folder, "train the draft again")
    dtype = next((tensor.dtype for name, tensor in stored if name == "fc.weight"), torch.float32)
    draft = DSparkDraft.from_pretrained(folder, dtype)
    if (head := draft.config.markov_head_type) != "vanilla":
        raise UserError(
            f"{folder} has a {head} Markov head, which can be decoded here but not exported: serve it as it is"
        )
    draft.config = served_config(draft.config)
    if not draft.config.enable_confidence_head:
        draft.confidence = None
    return draft


def served_config(config: DSparkConfig) -> DSparkConfig:
    """Return a draft's config; drop a confidence head that ignores the Markov bias, which llama.cpp cannot load."""
    wanted = config.enable_confidence_head and config.confidence_head_with_markov
    return replace(config, enable_confidence_head=wanted)


def describe_dspark(draft: DSparkDraft, format: str, dtype: str) -> Artefact:
    """Return the card's description of a draft."""
    config = draft.config
    return Artefact(
        format=format,
        parameters=sum(parameter.numel() for parameter in draft.parameters()),
        dtype=dtype,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        layers=config.num_hidden_layers,
        tree_nodes=len(config.tree),
        markov_rank=config.markov_rank,
        at_once=config.block_size,
    )


def write(task: ExportTask) -> tuple[Artefact, tuple[str, ...]]:
    """Write the draft, with the task's tree if it has one; read it back and compare."""
    draft = stored_draft(task.source)
    draft.config = replace(draft.config, tree=task.tree or draft.config.tree)
    draft.save_pretrained(task.folder)
    if read_dspark_config(task.folder) != draft.config:
        raise UserError(f"the config in {task.folder} differs from what was written: export again")
    trained = draft.state_dict()
    check_bit_equal(trained, stored_draft(task.folder).state_dict().items(), task.folder)
    artefact = describe_dspark(draft, task.format, str(draft.fc.weight.dtype).removeprefix("torch."))
    remarks = [f"{len(trained)} tensors and the config read back bit-equal"]
    if (count := draft.config.draft_vocab_size) is not None:
        remarks.append(
            f"the draft writes {count:,} of {draft.config.vocab_size:,} tokens; llama.cpp loads such drafts, vLLM "
            "should (not tried), SGLang does not"
        )
    return artefact, tuple(remarks)


def readers(task: ExportTask, target: CausalLM) -> Readers:
    """Return readers of the trained draft and the exported one; both draft the exported tree."""
    trained = lambda: DSparkDrafter(load_dspark(task.source, target), tree=task.tree or None)  # noqa: E731
    return [(trained, lambda: DSparkDrafter(load_dspark(task.folder, target)))]
