"""Fingerprints of stored models, kept in the cache: those of large files are computed once on a machine."""

import re
import time
from functools import cache
from importlib import resources
from pathlib import Path

import transformers

from decoding.model.fingerprint import stored_fingerprint
from decoding.model.hub import local_folder
from trainer.files.folders import cache_root
from trainer.files.shards import digest_of, write_text

_SMALL = 1 << 26
"""Bytes that are read again as fast as a file is found."""
_SETTLED = 2.0
"""Seconds after which another change of a file changes its times too, on any file system."""


def kept_fingerprint(name: str | Path, trust_remote_code: bool = False) -> str:
    """Return `decoding.model.fingerprint.stored_fingerprint`, from the cache while no file of the folder changes.

    A file is known by its inode, its size and the times of its last changes, that of its inode (ctime) included, which
    no program sets. Adapters are read each time: their base model lies elsewhere. ValueError as there.
    """
    folder = local_folder(name)
    files = [(path.name, path.stat()) for path in sorted(folder.iterdir()) if path.is_file()]
    newest = max((max(state.st_mtime, state.st_ctime) for _, state in files), default=0.0)
    small = sum(state.st_size for _, state in files) < _SMALL
    if small or (folder / "adapter_config.json").is_file() or time.time() - newest < _SETTLED:
        return stored_fingerprint(folder, trust_remote_code)
    states = [(file, s.st_dev, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for file, s in files]
    decides = [str(folder.resolve()), trust_remote_code, states, transformers.__version__, _digest_of_code()]
    kept = cache_root() / "fingerprints" / digest_of(decides)[:32]
    try:
        found = kept.read_text()
    except (OSError, UnicodeDecodeError):
        found = ""
    if re.fullmatch("[0-9a-f]{16}", found):
        return found
    found = stored_fingerprint(folder, trust_remote_code)
    try:
        kept.parent.mkdir(parents=True, exist_ok=True)
        write_text(kept, found)
    except OSError:  # a full or closed cache costs the next run some seconds
        pass
    return found


@cache
def _digest_of_code() -> str:
    """Return a digest of the code that fingerprints, so that no change of it is forgotten here."""
    names = ("fingerprint", "stored", "loading")
    return digest_of([resources.files("decoding.model").joinpath(f"{name}.py").read_text() for name in names])
