"""Folders that appear whole or not at all, with a checksum of each file by which damage is found."""

import hashlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

CHECKSUMS = "SHA256SUMS"
"""The name of the file in a sealed folder that lists every other file's checksum, as `sha256sum -c` reads it."""


def cache_root() -> Path:
    """Return the folder of all that can be made again: HEADSTART_CACHE, by default in the user's cache folder."""
    if named := os.environ.get("HEADSTART_CACHE"):
        return Path(named)
    import platformdirs  # the GPU suite reads folders where few packages are installed

    return Path(platformdirs.user_cache_dir("headstart"))


def write_folder(destination: Path, write: Callable[[Path], None], sealed: bool = False) -> None:
    """Fill a folder through ``write``; it takes its name, and an earlier folder's place, once it is on the disk.

    After a full disk or a kill the earlier folder at ``destination`` is still there, or is put back by the next call.
    Several processes may write the same folder: the last one wins. A ``sealed`` folder gets a checksum of each file, by
    which `check_seal` finds damage.
    """
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    replaced = destination.with_name(f".{destination.name}.{os.getpid()}.replaced")
    _clear_what_a_kill_left(destination)
    try:
        temporary.mkdir(parents=True)
        try:
            write(temporary)
            if sealed:
                _seal(temporary)
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


def _seal(folder: Path) -> None:
    files = sorted(path for path in folder.iterdir() if path.is_file())
    (folder / CHECKSUMS).write_text("".join(checksum_line(path.name, sha256_of(path)) for path in files))


def checksum_line(name: str, digest: str) -> str:
    """Return a file's line of checksums, as `sha256sum -c` reads it."""
    return f"{digest}  {name}\n"


def read_checksums(path: Path) -> dict[str, str]:
    """Return the digests in a file of such lines, by the names of their files."""
    return {name: digest for digest, _, name in (line.partition("  ") for line in path.read_text().splitlines())}


def check_seal(folder: Path) -> None:
    """Raise ValueError, naming the file, where a sealed folder was changed since; OSError where the disk fails.

    Reads every file to its end: about a second a GB.
    """
    try:
        sums = read_checksums(folder / CHECKSUMS)
    except FileNotFoundError:
        raise ValueError(f"{CHECKSUMS} is missing") from None
    if others := {path.name for path in folder.iterdir() if path.name != CHECKSUMS} - sums.keys():
        raise ValueError(f"{CHECKSUMS} knows no {min(others)}, which is there")
    if not sums:
        raise ValueError(f"{CHECKSUMS} is empty")
    for name, digest in sums.items():
        if not (folder / name).is_file():
            raise ValueError(f"{name} is missing")
        if sha256_of(folder / name) != digest:
            raise ValueError(f"{name} is damaged: its {(folder / name).stat().st_size:,} bytes have another checksum")


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a file, as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def scratch_beside(destination: Path) -> Iterator[Path]:
    """Yield an empty hidden folder beside ``destination``, on the same disk, and remove it in the end.

    Those that killed processes left for the same destination are removed too.
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
    """Put back folders that dead processes were replacing, and remove the halves that they left."""
    for left, kind in _left_by_dead(destination, ("partial", "replaced")):
        if kind == "replaced" and not destination.exists():
            left.rename(destination)
        else:
            shutil.rmtree(left, ignore_errors=True)


def _left_by_dead(destination: Path, kinds: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Yield the hidden folders beside ``destination`` that no running process still needs, with their kinds."""
    for left in sorted(destination.parent.glob(f".{destination.name}.*.*")):
        process, kind = left.name.rsplit(".", 2)[1:]
        if kind in kinds and not (process.isdigit() and _is_running(int(process))):
            yield left, kind


def _is_running(process: int) -> bool:
    if process == os.getpid():  # this process is in this call, so an older call of it left the folder
        return False
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except (PermissionError, OverflowError):
        return True
    return True


def flush_to_disk(path: Path) -> None:
    """Wait until the disk holds a file or a folder (fsync)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_can_be_folder(path: Path, name: str) -> None:
    """Raise ValueError where a file stands in the way of a folder; ``name`` is the recipe's key for it."""
    in_the_way = next((place for place in (path, *path.parents) if place.is_file()), None)
    if in_the_way is not None:
        raise ValueError(f"{name} is {path}, but {in_the_way} is a file: give another folder")


def check_links(folder: Path) -> None:
    """Raise ValueError for a link in a folder that leads out of it: the file behind it would pass for the folder's own.

    In the Hub's cache a snapshot's links lead to the blobs of its repository, and pass.
    """
    root = folder.resolve()
    within = root.parents[1] if root.parent.name == "snapshots" else root
    for path in sorted(folder.rglob("*")):
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(within):  # resolve fails for a circle
            raise ValueError(f"{path} is a link out of its folder: put the file itself there, or remove the link")
