"""Heads under the names of FasterDecoding's files, as TensorRT-LLM's engine builder and TGI read them.

Each head has an output layer there: heads that share the target's lm_head get a copy of it each. TGI (Text Generation
Inference) loads the base model that ``config.json`` names, and takes a config with ``architectures`` for another kind
of speculator. FasterDecoding's own code has a default base model, and reads the same tensors from a pickle. The tree is
no part of it.
"""

import json
from collections.abc import Iterator
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
from trainer.export.plain_heads import check_plain, lm_head_of_target
from trainer.export.published import MEDUSA_NAME, find_published, read_published, tensors_of
from trainer.export.readback import check_each
from trainer.files.head_names import medusa_name


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
        lm_head = lm_head_of_target(task, config)
        state |= {name: lm_head for name, _ in config.shapes() if name.endswith("lm_head.weight")}
    named = hub_name(task.target)
    base = published_name(task.target) if named is None else named.repo_id
    (task.folder / CONFIG_NAME).write_text(json.dumps(_described(config, base), indent=2) + "\n")
    _save({medusa_name(name, config.num_layers): tensor for name, tensor in state.items()}, task)
    published = find_published(task.folder)
    if published.config != replace(config, tree=published.config.tree):
        raise ValueError(f"{task.folder} reads back with other sizes than were written: export again")
    own = {stored: name for name, stored in published.names.items()}
    check_each(state, ((own[name], tensor) for name, tensor in tensors_of(published, set(own))), task.folder)
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


def drafters(task: Task, target: CausalLM) -> Iterator[Drafter]:
    """Yield the trained heads and the written ones as drafters of the trained tree: see `trainer.export.reread`."""
    trained = load_heads(task.source, target)
    tree = task.tree or trained.config.tree
    yield MedusaDrafter(trained, tree)
    del trained
    yield MedusaDrafter(read_published(find_published(task.folder)).to(target.device, target.dtype), tree)


def _described(config: MedusaConfig, base: str) -> dict[str, Any]:
    return {
        "base_model_name_or_path": base,
        "medusa_num_heads": config.num_heads,
        "medusa_num_layers": config.num_layers,
    }


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
