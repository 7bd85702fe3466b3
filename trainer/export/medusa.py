"""Heads under the names of FasterDecoding's files, as TensorRT-LLM's engine builder and TGI read them.

Each head has an output layer there: heads that share the target's lm_head get a copy of it each. TGI (Text Generation
Inference) loads the base model that ``config.json`` names, and takes a config with ``architectures`` for another kind
of speculator. FasterDecoding's own code has a default base model, and reads the same tensors from a pickle. The tree is
no part of it.
"""

import json
from dataclasses import replace
from typing import Any

from safetensors import TensorSpec, serialize_file
from torch import Tensor

from decoding.drafters.base import Drafter
from decoding.drafters.medusa import MedusaDrafter
from decoding.measure.redact import published_name
from decoding.model.causal_lm import CausalLM
from decoding.model.heads import CONFIG_NAME, MedusaConfig, MedusaHeads
from decoding.model.hub import hub_name
from decoding.model.loading import load_heads
from trainer.export.artefact import Task, Written
from trainer.export.headstart import describe_heads
from trainer.export.published import MEDUSA_NAME, find_published, read_published
from trainer.export.readback import check_bit_equal
from trainer.files.head_names import medusa_name
from trainer.target.stored_lm_head import read_lm_head


def write(task: Task) -> Written:
    """Write heads in this format, read them back, compare; ValueError for heads that it has no place for."""
    heads = MedusaHeads.from_pretrained(task.source)
    check_plain(heads.config, task)
    if task.target is None:
        raise ValueError(
            f"the heads in {task.source} do not tell their target, which readers of format medusa load by the name in "
            "config.json: give it as target"
        )
    state, config = heads.state_dict(), heads.config
    if config.shared_lm_head:
        config = replace(config, shared_lm_head=False)
        state |= _copies(config, task, next(iter(state.values())) if state else None)
    named = hub_name(task.target)
    base = published_name(task.target) if named is None else named.repo_id
    (task.folder / CONFIG_NAME).write_text(json.dumps(_described(config, base), indent=2) + "\n")
    _save({medusa_name(name, config.num_layers): tensor for name, tensor in state.items()}, task)
    published = find_published(task.folder)
    if published.notes or published.format != "medusa":
        raise ValueError(f"{task.folder} reads back differently: {'; '.join(published.notes)}: export again")
    check_bit_equal(state, read_published(published).state_dict(), task.folder)
    compared = [f"{len(state)} tensors read back bit-equal under the names of FasterDecoding's files"]
    if heads.config.shared_lm_head:
        compared.append(f"each head has a copy of the lm_head of {base}, which the trained heads share")
    if named is None:
        compared.append(
            f"config.json names the base model {base!r}, without its path: put a folder or hub id there that the "
            "reader finds"
        )
    heads.config = config
    return Written(describe_heads(heads, task.format), tuple(compared))


def drafters(task: Task, target: CausalLM) -> tuple[Drafter, Drafter]:
    """Return drafters by the trained heads and by the exported files alone, both of the trained heads' tree."""
    trained = load_heads(task.source, target)
    exported = read_published(find_published(task.folder)).to(target.device, target.dtype)
    tree = task.tree or trained.config.tree
    return MedusaDrafter(trained, tree), MedusaDrafter(exported, tree)


def check_plain(config: MedusaConfig, task: Task) -> None:
    """Raise ValueError for heads that read tokens, for which only our own format has a place."""
    if config.sequential:
        raise ValueError(
            f"the heads in {task.source} read one another's tokens, for which format {task.format} has no place: "
            "give format headstart, or train heads with heads.sequential=false"
        )
    if config.markov_rank:
        raise ValueError(
            f"the heads in {task.source} add a bias of rank {config.markov_rank} by the token before, for which format "
            f"{task.format} has no place: give format headstart, or train heads with heads.markov_rank=0"
        )


def _described(config: MedusaConfig, base: str) -> dict[str, Any]:
    return {
        "base_model_name_or_path": base,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
    }


def _copies(config: MedusaConfig, task: Task, like: Tensor | None) -> dict[str, Tensor]:
    """Return the target's lm_head under the name of each head's output layer: one tensor, not copies of it."""
    assert task.target is not None
    weight = read_lm_head(task.target, task.trust_remote_code)
    config.check_fits(weight.shape[1], weight.shape[0])
    weight = weight if like is None else weight.to(like.dtype)
    return {name: weight for name, _ in config.shapes() if name.endswith("lm_head.weight")}


def _save(tensors: dict[str, Tensor], task: Task) -> None:
    """Write the file from where the tensors lie; safetensors' `save_file` refuses one tensor under several names."""
    held = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    specs = {
        name: TensorSpec(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tensor.shape,
            data_ptr=tensor.data_ptr(),
            data_len=tensor.nbytes,
        )
        for name, tensor in held.items()
    }
    serialize_file(specs, task.folder / MEDUSA_NAME, metadata={"format": "pt"})
