"""The adapted target beside Medusa-2 heads: merged, a model like any other, or LoRA adapters on the original."""

import filecmp
import shutil
from pathlib import Path
from typing import Literal

import torch

from decoding.dtypes import parse_dtype
from decoding.measure.redact import basename, is_hub_id
from decoding.model.folder import adapted_model
from decoding.model.loading import load_model, load_tokenizer
from decoding.model.stored import check_finite
from trainer.export.companions import read_provenance
from trainer.export.readback import check_stored
from trainer.export.task import MERGED, ExportTask, form_beside
from trainer.files.transformers4 import write_model
from trainer.heads.medusa2 import TARGET_FOLDER, base_of, merged_weights

_COPIED = (".safetensors", ".json", ".jinja", ".txt", ".model")
"""Suffixes of a model's files, code not among them."""


def form_of(source: Path, format: str, merge: bool) -> str | None:
    """Return the form in which the adapted target is exported; None for an artefact without one.

    It stays as trained in our own format unless ``merge``, and is merged for other programs.
    """
    trained = form_beside(source)
    if trained is None and merge:
        raise ValueError(f"{source} holds no target that was adapted with its heads: leave --merge out")
    return MERGED if trained is not None and (merge or format != "headstart") else trained


def write_target(task: ExportTask, form: str) -> str:
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
    where = base if is_hub_id(base) else f"{basename(base)}, a folder of this machine (--merge for a whole target)"
    return f"the adapters of their target beside them: {len(names)} files equal to the bit, on {where}"


def _write_merged(task: ExportTask, source: Path, folder: Path) -> str:
    """Merge adapters into their model, as training itself does with adapters.export=merged."""
    from peft import PeftModel

    stored = read_provenance(task.source)
    trained_in = stored["recipe"].get("dtype") if stored else None
    dtype: torch.dtype | Literal["auto"] = parse_dtype(str(trained_in)) if trained_in is not None else "auto"
    base = load_model(str(adapted_model(source)), dtype, torch.device("cpu"), task.trust_remote_code)
    model = PeftModel.from_pretrained(base, str(source))
    merged = merged_weights(model)
    check_finite(merged, f"the target merged from {source}", "give an earlier checkpoint, or train the heads again")
    write_model(base_of(model), load_tokenizer(str(source), task.trust_remote_code), folder, merged)
    names = {tensor.data_ptr(): name for name, tensor in merged.items()}
    own = {name: tensor for name, tensor in merged.items() if names[tensor.data_ptr()] == name}  # tied ones go once
    check_stored(own, folder)
    return f"the adapted target beside them, merged from its adapters: {len(own)} tensors bit-equal"
