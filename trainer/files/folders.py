"""Folders that appear whole or not at all, shards of a store with checksums that detect damage, and locks of a run.

A shard's seal is a file with a checksum line (`sha256sum -c`), written once the shard is on disk. A run that is killed
leaves a shard without a seal, and the next run writes this shard again. Processes that write different shards do not
wait for each other.
"""

import hashlib
import json
import os
import shutil
import socket
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path

from filelock import BaseFileLock, FileLock, Timeout
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from decoding.errors import UserError

CHECKSUMS = "SHA256SUMS"
"""File in a sealed folder with the checksum of every other file, for `sha256sum -c`."""


def write_folder(destination: Path, write: Callable[[Path], None], sealed: bool = False) -> None:
    """Let ``write`` fill a folder, which replaces ``destination`` once the whole folder is on disk.

    If the disk is full or the process is killed, the old folder is still there, or the next call restores it. If
    several processes write the same folder, the last one wins. A ``sealed`` folder gets checksums for `check_seal`.
    """
    temporary = destination.with_name(f".{destination.name}.{os.getpid()}.partial")
    replaced = destination.with_name(f".{destination.name}.{os.getpid()}.replaced")
    for left, kind in _left_by_dead(destination, ("partial", "replaced")):  # a killed process may have left these
        if kind == "replaced" and not destination.exists():
            left.rename(destination)
        else:
            shutil.rmtree(left, ignore_errors=True)
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


def checksum_line(name: str, checksum: str) -> str:
    """Return a file's checksum line for `sha256sum -c`."""
    return f"{checksum}  {name}\n"


def read_checksums(path: Path) -> dict[str, str]:
    """Read a file of checksum lines; return the checksums by file name."""
    return {name: checksum for checksum, _, name in (line.partition("  ") for line in path.read_text().splitlines())}


def check_seal(folder: Path) -> None:
    """Raise UserError, which names the file, if a sealed folder has changed; raise OSError if the disk fails.

    Every file is read in full, which takes about a second per GB.
    """
    try:
        sums = read_checksums(folder / CHECKSUMS)
    except FileNotFoundError:
        raise UserError(f"{CHECKSUMS} is missing") from None
    if others := {path.name for path in folder.iterdir() if path.name != CHECKSUMS} - sums.keys():
        raise UserError(f"{min(others)} is not listed in {CHECKSUMS}")
    if not sums:
        raise UserError(f"{CHECKSUMS} is empty")
    for name, checksum in sums.items():
        if not (folder / name).is_file():
            raise UserError(f"{name} is missing")
        if sha256_of(folder / name) != checksum:
            raise UserError(f"{name} is damaged: its {(folder / name).stat().st_size:,} bytes have a wrong checksum")


def sha256_of(path: Path) -> str:
    """Return a file's SHA-256 in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def scratch_beside(destination: Path) -> Iterator[Path]:
    """Yield an empty hidden folder next to ``destination``, and remove it afterwards.

    Folders of this kind that killed processes left for the same destination are also removed.
    """
    for left, _ in _left_by_dead(destination, ("scratch",)):
        shutil.rmtree(left, ignore_errors=True)
    folder = destination.with_name(f".{destination.name}.{os.getpid()}.scratch")
    folder.mkdir(parents=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _left_by_dead(destination: Path, kinds: Sequence[str]) -> Iterator[tuple[Path, str]]:
    """Yield the hidden folders next to ``destination`` that no running process needs, each with its kind."""
    for left in sorted(destination.parent.glob(f".{destination.name}.*.*")):
        process, kind = left.name.rsplit(".", 2)[1:]
        if kind in kinds and not (process.isdigit() and _is_running(int(process))):
            yield left, kind


def _is_running(process: int) -> bool:
    if process == os.getpid():  # an earlier call in this process left the folder behind
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
    """Raise UserError if a file is in the way of a folder; ``name`` is the recipe's key for the folder."""
    in_the_way = next((file for file in (path, *path.parents) if file.is_file()), None)
    if in_the_way is not None:
        raise UserError(f"{name} is {path}, but {in_the_way} is a file: use another folder")


def check_links(folder: Path) -> None:
    """Raise UserError for a link that leads out of a folder: the linked file would seem to belong to the folder.

    Links from a snapshot in the Hub's cache to blobs of the same repository are allowed.
    """
    root = folder.resolve()
    within = root.parents[1] if root.parent.name == "snapshots" else root
    for path in sorted(folder.rglob("*")):
        # `Path.resolve` would fail on a loop of links.
        if path.is_symlink() and not Path(os.path.realpath(path)).is_relative_to(within):
            raise UserError(f"{path} links out of its folder: replace the link with the file, or remove the link")


_MADE_FROM = "made_from"
"""Key of the metadata in a safetensors file's header."""


@dataclass(frozen=True)
class ShardLayout:
    """Assignment of whole examples, in the order of the data, to shards of up to ``shard_rows`` rows.

    An example with more rows has a shard of its own.
    """

    lengths: tuple[int, ...]
    """Number of rows of each example, which may be 0."""
    shard_rows: int

    @cached_property
    def _starts(self) -> list[int]:
        """For each example, the number of rows before it; the last entry is the number of all rows."""
        return list(accumulate(self.lengths, initial=0))

    @cached_property
    def shards(self) -> list[range]:
        """The examples of each shard."""
        firsts = [0]
        for index in range(len(self.lengths)):
            if self._starts[index + 1] - self._starts[firsts[-1]] > self.shard_rows and index > firsts[-1]:
                firsts.append(index)
        return [range(*bounds) for bounds in pairwise([*firsts, len(self.lengths)])]

    def num_rows(self, shard: int) -> int:
        """Count the rows of a shard."""
        examples = self.shards[shard]
        return self._starts[examples.stop] - self._starts[examples.start]

    def find(self, index: int) -> tuple[int, slice]:
        """Return the shard of an example, and its rows in that shard."""
        shard = bisect_right(self.shards, index, key=lambda examples: examples.start) - 1
        first = self._starts[index] - self._starts[self.shards[shard].start]
        return shard, slice(first, first + self.lengths[index])


def shard_name(shard: int) -> str:
    return f"shard-{shard:05d}.safetensors"


def fingerprint_of(content: object) -> str:
    """Return a fingerprint of plain JSON values: their SHA-256."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def fingerprint_of_all(items: Iterable[Sequence[bytes]]) -> str:
    """Return a fingerprint of a sequence of items, each of one or more parts.

    The lengths of the parts are included, so different items with equally many parts never hash the same bytes.
    """
    digest = hashlib.sha256()
    for item in items:
        digest.update(b"".join(len(part).to_bytes(8, "little") for part in item))
        for part in item:
            digest.update(part)
    return digest.hexdigest()


def write_sealed(path: Path, tensors: dict[str, Tensor], made_from: str) -> None:
    """Write a safetensors file that names its origin, and then its seal; raise OSError if the disk is full."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        save_file(tensors, partial, {_MADE_FROM: made_from})
    except SafetensorError as error:
        raise OSError(f"{path} could not be written ({error}): make room and start again to resume") from error
    seal = checksum_line(path.name, sha256_of(partial))
    _settle(partial, path)
    write_text(_seal_of(path), seal)


def write_text(path: Path, text: str) -> None:
    """Write a small file whole or not at all."""
    write_lines(path, [text.encode()])


def write_lines(path: Path, lines: Iterable[bytes]) -> None:
    """Write a file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    with partial.open("wb") as file:
        file.writelines(lines)
    _settle(partial, path)


def is_whole(path: Path, made_from: str, verify: bool) -> bool:
    """Return True for a sealed file of full size with this origin; with ``verify``, its checksum must also match."""
    try:
        checksum = read_checksums(_seal_of(path))[path.name]
        with safe_open(path, framework="pt") as file:  # this raises an error for a file of the wrong size
            if (file.metadata() or {}).get(_MADE_FROM) != made_from:
                return False
        return not verify or checksum == sha256_of(path)
    except (OSError, ValueError, KeyError, SafetensorError):
        return False


def is_begun(path: Path) -> bool:
    """Return True if the file or its seal exists, complete or not."""
    return path.exists() or _seal_of(path).exists()


def _seal_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _settle(partial: Path, path: Path) -> None:
    flush_to_disk(partial)
    partial.rename(path)
    flush_to_disk(path.parent)


LOCK_NAME = "run.lock"
_PATIENCE = 1.0  # seconds before a wait is reported


@contextmanager
def hold(folder: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Lock ``folder`` against other runs while this context lasts; create the folder if it is missing.

    A process may lock a folder repeatedly; if the process is killed, its locks are released. If another run has the
    lock, a UserError names the process and host of that run. With ``on_wait`` this function waits instead, and passes a
    sentence to ``on_wait`` after a second.
    """
    made = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _unwritable(folder, error) from error
    try:
        with _acquired(FileLock(folder / LOCK_NAME, is_singleton=True), folder, on_wait):
            yield
    finally:
        if made:
            with suppress(OSError):  # the folder is not empty
                folder.rmdir()


@contextmanager
def hold_file(path: Path, on_wait: Callable[[str], None] | None = None) -> Iterator[None]:
    """Lock the file ``path`` against other runs, by a lock file next to it; wait or raise UserError as `hold` does."""
    with _acquired(FileLock(path.with_name(f"{path.name}.lock")), path, on_wait):
        yield


@contextmanager
def _acquired(lock: BaseFileLock, held: Path, on_wait: Callable[[str], None] | None) -> Iterator[None]:
    path = Path(lock.lock_file)
    try:
        try:
            lock.acquire(timeout=0.0 if on_wait is None else _PATIENCE)
        except Timeout:
            if on_wait is None:
                message = f"{held} is being written by {_holder(path)}"
                raise UserError(message, "wait until it ends, or use another output") from None
            on_wait(f"waiting for {_holder(path)} to finish writing {held}")
            lock.acquire()
        since = datetime.now(UTC).isoformat(timespec="seconds")
        path.write_text(json.dumps({"process": os.getpid(), "host": socket.gethostname(), "since": since}))
    except OSError as error:
        lock.release()
        raise _unwritable(held, error) from error
    try:
        yield
    finally:
        if lock.lock_counter == 1:
            # Unlinked before the release, so that a process that has opened this file notices and opens it again.
            path.unlink(missing_ok=True)
        lock.release()


def _unwritable(held: Path, error: OSError) -> OSError:
    return OSError(f"{held} cannot be written ({error.strerror or error}): make room or use another output")


def _holder(path: Path) -> str:
    try:
        content = json.loads(path.read_text())
        return f"process {content['process']} on {content['host']} (since {content['since']})"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"
