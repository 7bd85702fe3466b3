"""The adapted target beside Medusa-2 heads: merged, a model like any other, or LoRA adapters on the original."""

import filecmp
import shutil
from pathlib import Path
from typing import Literal

import torch

from decoding.measure.redact import basename, is_hub_id
from decoding.model.dtypes import parse_dtype
from decoding.model.finite import check_finite
from decoding.model.folder import adapted_model
from decoding.model.loading import load_model, load_tokenizer
from trainer.export.artefact import Task
from trainer.export.origin import read_stored_provenance
from trainer.export.readback import check_stored
from trainer.files.transformers4 import write_model
from trainer.heads.medusa2 import TARGET_FOLDER, base_of, merged_weights

MERGED, ADAPTER = "merged", "adapter"
_COPIED = (".safetensors", ".json", ".jinja", ".txt", ".model")
"""Suffixes of a model's files, code not among them."""


def form_beside(heads: Path) -> str | None:
    """Return `MERGED` or `ADAPTER`, the form of the target in a folder of heads; None if it holds none."""
    target = heads / TARGET_FOLDER
    if not target.is_dir():
        return None
    return MERGED if adapted_model(target) is None else ADAPTER


def form_of(source: Path, format: str, asked: str | None, published: bool = False) -> str | None:
    """Return the form in which the adapted target is exported: as trained, and merged for other programs.

    It is merged as well where it is to be ``published`` and the model below the adapters is a folder of this machine.
    None for an artefact without one. ValueError if ``asked`` is none of the forms, or cannot be had.
    """
    trained = form_beside(source)
    if asked is None:
        local = published and trained == ADAPTER and not is_hub_id(str(adapted_model(source / TARGET_FOLDER)))
        return trained if trained is None or (format == "headstart" and not local) else MERGED
    if asked not in (MERGED, ADAPTER):
        raise ValueError(f"adapters is {asked!r}: give {MERGED} or {ADAPTER}")
    if trained is None:
        raise ValueError(f"{source} holds no target that was adapted with its heads: leave --adapters out")
    if trained == MERGED and asked == ADAPTER:
        raise ValueError(
            f"the adapters of {source} were merged into its target when it was trained: give --adapters {MERGED}, or "
            "train with adapters.export=adapter"
        )
    return asked


def write_target(task: Task, form: str) -> str:
    """Write the adapted target to ``target`` in the task's folder and read it back; return a sentence.

    ValueError for files that read back differently, and for weights that are not finite.
    """
    source, folder = task.source / TARGET_FOLDER, task.folder / TARGET_FOLDER
    if form != form_beside(task.source):
        return _write_merged(task, source, folder)
    folder.mkdir()
    names = sorted(path.name for path in source.iterdir() if path.is_file() and path.suffix in _COPIED)
    for name in names:
        shutil.copyfile(source / name, folder / name)
    _, mismatched, unreadable = filecmp.cmpfiles(source, folder, names, shallow=False)
    if wrong := [*mismatched, *unreadable]:
        raise ValueError(f"{folder / wrong[0]} reads back with other bytes than were written: export again")
    if form == MERGED:
        return f"the adapted target beside them, merged: {len(names)} files equal to the bit"
    base = str(adapted_model(source))
    told = f"the adapters of their target beside them: {len(names)} files equal to the bit"
    if is_hub_id(base):
        return f"{told}, on {base}"
    return f"{told}, on {basename(base)}, a folder of this machine (--adapters {MERGED} for a whole target)"


def _write_merged(task: Task, source: Path, folder: Path) -> str:
    """Merge adapters into their model, as training itself does with adapters.export=merged."""
    from peft import PeftModel

    stored = read_stored_provenance(task.source)
    trained_in = stored["recipe"].get("dtype") if stored else None
    dtype: torch.dtype | Literal["auto"] = parse_dtype(str(trained_in)) if trained_in is not None else "auto"
    base = load_model(str(adapted_model(source)), dtype, torch.device("cpu"), task.trust_remote_code)
    model = PeftModel.from_pretrained(base, str(source))
    merged = merged_weights(model)
    check_finite(merged, f"the target merged from {source}", "give an earlier checkpoint, or train the heads again")
    write_model(base_of(model), load_tokenizer(str(source), task.trust_remote_code), folder, merged, task.shard_bytes)
    names = {tensor.data_ptr(): name for name, tensor in merged.items()}
    tied = {name for name, tensor in merged.items() if names[tensor.data_ptr()] != name}
    check_stored({name: tensor for name, tensor in merged.items() if name not in tied}, folder)
    return f"the adapted target beside them, merged from its adapters: {len(merged) - len(tied)} tensors bit-equal"
