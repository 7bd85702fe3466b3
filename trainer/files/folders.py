"""Folders that appear whole or not at all, with checksums to detect damage."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from decoding.errors import UserError

CHECKSUMS = "SHA256SUMS"
"""File in a sealed folder with the checksum of every other file, for `sha256sum -c`."""


def write_folder(destination: Path, write: Callable[[Path], None], sealed: bool = False) -> None:
    """Fill a folder by ``write``; it replaces ``destination`` once it is on disk.

    After a full disk or a kill the old folder is still there, or the next call restores it. If several processes write
    one folder, the last wins. A ``sealed`` folder gets checksums for `check_seal`.
    """
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    replaced = destination.with_name(f".{destination.name}.{os.getpid()}.replaced")
    _clear_what_a_kill_left(destination)
    try:
        temporary.mkdir(parents=True)
        try:
            write(temporary)
            if sealed:
                files = sorted(path for path in temporary.iterdir() if path.is_file())
                lines = [checksum_line(path.name, sha256_of(path)) for path in files]
                (temporary / CHECKSUMS).write_text("".join(lines))
        except SafetensorError as error:
            raise OSError(f"{destination} could not be written ({error}): make room and start again") from error
        for path in (*temporary.rglob("*"), temporary):
            flush_to_disk(path)
        if destination.exists():
            destination.rename(replaced)
        try:
            temporary.rename(destination)
        except OSError:
            if replaced.exists():
                replaced.rename(destination)
            raise
        flush_to_disk(destination.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        if destination.exists():
            shutil.rmtree(replaced, ignore_errors=True)


def checksum_line(name: str, digest: str) -> str:
    """Return a file's checksum line for `sha256sum -c`."""
    return f"{digest}  {name}\n"


def read_checksums(path: Path) -> dict[str, str]:
    """Read a file of checksum lines; return digests by file name."""
    return {name: digest for digest, _, name in (line.partition("  ") for line in path.read_text().splitlines())}


def check_seal(folder: Path) -> None:
    """Raise UserError, naming the file, if a sealed folder has changed; OSError if the disk fails.

    Reads every file in full: about a second per GB.
    """
    try:
        sums = read_checksums(folder / CHECKSUMS)
    except FileNotFoundError:
        raise UserError(f"{CHECKSUMS} is missing") from None
    if others := {path.name for path in folder.iterdir() if path.name != CHECKSUMS} - sums.keys():
        raise UserError(f"{min(others)} is not listed in {CHECKSUMS}")
    if not sums:
        raise UserError(f"{CHECKSUMS} is empty")
    for name, digest in sums.items():
        if not (folder / name).is_file():
            raise UserError(f"{name} is missing")
        if sha256_of(folder / name) != digest:
            raise UserError(f"{name} is damaged: its {(folder / name).stat().st_size:,} bytes have another checksum")


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def scratch_beside(destination: Path) -> Iterator[Path]:
    """Yield an empty hidden folder next to ``destination``, and remove it afterwards.

    Also removes those that killed processes left for the same destination.
    """
    for left, _ in _left_by_dead(destination, ("scratch",)):
        shutil.rmtree(left, ignore_errors=True)
    folder = destination.with_name(f".{destination.name}.{os.getpid()}.scratch")
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clear_what_a_kill_left(destination: Path) -> None:
    """Restore folders that killed processes were replacing, and remove their incomplete ones."""
    for left, kind in _left_by_dead(destination, ("partial", "replaced")):
        if kind == "replaced" and not destination.exists():
            left.rename(destination)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _left_by_dead(destination: Path, kinds: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Yield the hidden folders next to ``destination`` that no running process needs, with their kinds."""
    for left in sorted(destination.parent.glob(f".{destination.name}.*.*")):
        process, kind = left.name.rsplit(".", 2)[1:]
        if kind in kinds and not (process.isdigit() and _is_running(int(process))):
            yield left, kind


def _is_running(process: int) -> bool:
    if process == os.getpid():  # an earlier call in this process left the folder
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def flush_to_disk(path: Path) -> None:
    """Flush a file or a folder to the disk (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_can_be_folder(path: Path, name: str) -> None:
    """Raise UserError if a file is in the way of a folder; ``name`` is the recipe's key for it."""
    in_the_way = next((place for place in (path, *path.parents) if place.is_file()), None)
    if in_the_way is not None:
        raise UserError(f"{name} is {path}, but {in_the_way} is a file: give another folder")


def check_links(folder: Path) -> None:
    """Raise UserError for a link that leads out of a folder: its file would seem to belong there.

    Links from a snapshot in the Hub's cache to blobs of the same repository are allowed.
    """
    root = folder.resolve()
    within = root.parents[1] if root.parent.name == "snapshots" else root
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(within):  # resolve fails on a loop
            raise UserError(f"{path} links out of its folder: replace it by the file, or remove it")
