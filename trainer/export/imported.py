"""Import of published Medusa heads: read from others' formats into ours, with a record of their origin beside them.

Imported heads are evaluated, planned and exported as trained ones are. Their ``provenance.json`` has the key
``imported`` and no recipe, so that nobody takes them for heads that were trained here.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from decoding.measure.machine import commit, versions
from decoding.model.heads import CONFIG_NAME, MedusaHeads
from decoding.model.hub import folder_with, hub_name, revisions
from decoding.model.stored import WEIGHT_FILES
from trainer import quickstart
from trainer.export.artefact import PROVENANCE_NAME
from trainer.export.licences import target_license
from trainer.export.origin import read_stored_provenance
from trainer.export.published import MEDUSA_NAME, PICKLE_NAME, Published, find_published, read_published, tensors_of
from trainer.export.readback import check_stored
from trainer.files.folders import sha256_of, write_folder
from trainer.run.finish import write_provenance
from trainer.target.fingerprints import kept_fingerprint
from trainer.target.stored_lm_head import read_lm_head

IMPORTED = "imported"
"""Key of provenance.json for the origin of heads that were published by others."""
_CARD = "README.md"


@dataclass(frozen=True)
class ImportSummary:
    """The result of an import, for a terminal."""

    folder: Path
    heads: str
    origin: Mapping[str, Any]
    notes: tuple[str, ...]
    compared: str

    def __str__(self) -> str:
        revision = f" at {self.origin['revision']}" if self.origin["revision"] else ""
        read = ", ".join(f"{name} (sha256 {digest[:12]}…)" for name, digest in self.origin["files"].items())
        return "\n".join(
            [
                f"{self.folder}: {self.heads}",
                f"read from {self.origin['source']}{revision}, format {self.origin['format']}: {read}",
                f"published for {self.origin['base_model'] or 'a model that their config does not name'}, "
                f"licence {self.origin['license'] or 'not told'}",
                *(f"note: {note}" for note in self.notes),
                self.compared,
                f"they draft one chain until a plan finds a better tree: headstart plan --drafter heads:{self.folder}",
            ]
        )


def import_heads(
    source: str, destination: Path, target: str | None = None, trust_remote_code: bool = False
) -> ImportSummary:
    """Read published heads from a folder or ORG/NAME[@REVISION] and write them as ours to a new folder.

    The destination appears whole or not at all, and only after it was read back and found equal to the bit. ``target``:
    folder or hub id of the model to use them with, with which their sizes are compared.

    `ValueError`, in one sentence, for anything but whole Medusa heads, for those that do not fit the target, and for a
    destination that is not empty.
    """
    if destination.is_symlink() or destination.is_file() or (destination.is_dir() and any(destination.iterdir())):
        raise ValueError(f"the destination {destination} is not empty: give a new folder")
    folder = folder_with(source, (MEDUSA_NAME, *WEIGHT_FILES), (PICKLE_NAME,))
    folder_with(source, (CONFIG_NAME, _CARD, PROVENANCE_NAME))
    target = None if target is None else quickstart.resolve(target)
    lm_head = None if target is None else read_lm_head(target, trust_remote_code)
    published = find_published(folder, None if lm_head is None else len(lm_head))
    if lm_head is not None:
        published.config.check_fits(lm_head.shape[1], len(lm_head))
    shared = lm_head is not None and _is_the_targets(published, lm_head)
    heads = read_published(published, shared)
    origin = _origin(published, source)

    def write(partial: Path) -> None:
        heads.save_pretrained(partial)
        check_stored(heads.state_dict(), partial)
        write_provenance(partial, _provenance(origin, target, trust_remote_code))

    write_folder(destination, write)
    compared = f"{len(heads.state_dict())} tensors read back equal, to the bit"
    return ImportSummary(destination, _described(heads), origin, _notes(published, target, shared), compared)


def _is_the_targets(published: Published, lm_head: Tensor) -> bool:
    """Return True if the one output layer of vLLM's heads is the target's lm_head, which they then share."""
    name = published.one_lm_head
    if name is None:
        return False
    ((_, weight),) = tensors_of(published, {name})
    return torch.equal(lm_head.to(weight.dtype), weight)


def _origin(published: Published, source: str) -> dict[str, Any]:
    named = hub_name(source)
    files = {path.name: sha256_of(path) for path in published.files}
    return {
        "format": published.format,
        "source": str(Path(source).resolve()) if named is None else named.repo_id,
        "revision": None if named is None else published.folder.name,
        "files": files,
        "base_model": published.base_model,
        "sha256": _digest(files),
        "license": target_license(str(published.folder)),
        "provenance": _earlier(published.folder),
        "commit": commit(),
        "versions": versions(),
    }


def _earlier(folder: Path) -> dict[str, Any] | None:
    """Return the provenance that an earlier training run left beside the heads; None where there is none to be read.

    Nobody vouches for it: it is kept as what their publisher says.
    """
    try:
        stored = read_stored_provenance(folder)
    except ValueError:
        return None
    return stored if stored is not None and stored["recipe"] else None


def _digest(files: Mapping[str, str]) -> str:
    """Return the digest of the only file, or those of all shards with their names."""
    return ", ".join(files.values() if len(files) == 1 else (f"{name} {digest}" for name, digest in files.items()))


def _provenance(origin: Mapping[str, Any], target: str | None, trust_remote_code: bool) -> dict[str, Any]:
    if target is None:
        return {IMPORTED: dict(origin), "target": {"name": origin["base_model"], "fingerprint": None}}
    named = hub_name(target)
    name = str(Path(target).resolve()) if named is None else named.repo_id
    fingerprint = kept_fingerprint(target, trust_remote_code)
    return {
        IMPORTED: dict(origin),
        "target": {"name": name, "fingerprint": fingerprint},
        "revisions": revisions({"target": target}),
    }


def _described(heads: MedusaHeads) -> str:
    config = heads.config
    dtype, plural = str(next(heads.parameters()).dtype).removeprefix("torch."), "" if config.num_layers == 1 else "s"
    return (
        f"{config.num_heads} Medusa heads of {config.num_layers} layer{plural}, {config.hidden_size} wide, "
        f"{config.vocab_size:,} tokens, {dtype}"
    )


def _notes(published: Published, target: str | None, shared: bool) -> tuple[str, ...]:
    notes = list(published.notes)
    if shared:
        notes.append("that output layer is the target's lm_head, which the heads share from here on")
    elif published.one_lm_head is not None:
        remedy = "is not the target's" if target is not None else "may be the target's: give --target to find out"
        notes.append(f"each head has a copy of that output layer, which {remedy}")
    if target is None:
        notes.append("nothing was compared with a target: give --target to check that the heads fit it")
    return tuple(notes)
