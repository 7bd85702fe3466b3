"""Folders that appear whole or not at all."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path


def write_folder(destination: Path, write: Callable[[Path], None]) -> None:
    """Fill a folder through ``write``, on the disk before it takes its name; one that was there is replaced.

    Whatever goes wrong, a full disk or a kill, what was at ``destination`` before is there still, or is put back by
    the next call.
    """
    temporary = destination.with_name(f".{destination.name}.partial")
    replaced = destination.with_name(f".{destination.name}.replaced")
    if replaced.exists() and not destination.exists():  # a kill between the two renames below
        replaced.rename(destination)
    shutil.rmtree(temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        write(temporary)
        for path in temporary.rglob("*"):
            _flush_to_disk(path)
        if destination.exists():
            destination.rename(replaced)
        try:
            temporary.rename(destination)
        except OSError:
            if replaced.exists():
                replaced.rename(destination)
            raise
        _flush_to_disk(destination.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if destination.exists():
            shutil.rmtree(replaced, ignore_errors=True)


def _flush_to_disk(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
