"""The machine: processor, threads, load, memory, GPUs, and the disks of the caches."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from huggingface_hub import constants, get_token

from decoding.measure.machine import hardware
from decoding.model.hub import LOG_IN, without_login
from trainer.doctor.finding import Finding, note, ok
from trainer.files.folders import cache_root

_CGROUP = Path("/sys/fs/cgroup")
_WAITING = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
_BUSY = 0.5
"""Share of the cores that other programs may keep busy before timings suffer."""
_LITTLE_DISK = 10e9
_LITTLE_MEMORY = 0.1
_ANSWER_SECONDS = 5.0
_KEYS = ("HF_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY")


@dataclass(frozen=True)
class Gpu:
    """A GPU that PyTorch sees; memory in bytes."""

    name: str
    free: int
    total: int


@dataclass(frozen=True)
class Disk:
    """A folder of cached files and the room on its disk, in bytes."""

    holds: str
    path: str
    free: int


@dataclass(frozen=True)
class Machine:
    """Sizes and names read of a machine; memory and disks in bytes.

    ``quota``: cores' worth of time that the container may use; None without a limit. ``load``: programs that want a
    core, on average over the last minute; None where the system does not tell. ``cuda``: the version that PyTorch was
    built for; None for a build without. ``driver``: version of the NVIDIA driver; None where there is none.
    """

    processor: str
    cores: int
    threads: int
    memory_free: int | None
    memory_total: int | None
    quota: float | None = None
    load: float | None = None
    gpus: tuple[Gpu, ...] = ()
    cuda: str | None = None
    driver: str | None = None
    disks: tuple[Disk, ...] = ()


def read_machine() -> Machine:
    """Read the machine that this process runs on; nothing is asked over the network."""
    told = hardware()
    free, total = _memory()
    gpus = []
    for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        left, whole = torch.cuda.mem_get_info(index)
        gpus.append(Gpu(torch.cuda.get_device_name(index), left, whole))
    places = (("models of the Hub", Path(constants.HF_HUB_CACHE)), ("headstart's own cache", cache_root()))
    return Machine(
        processor=str(told["processor"]),
        cores=int(told["cores"]),
        threads=int(told["threads"]),
        memory_free=free,
        memory_total=total,
        quota=_quota(),
        load=os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        gpus=tuple(gpus),
        cuda=torch.version.cuda,
        driver=_driver(),
        disks=tuple(Disk(holds, str(path), _free_beneath(path)) for holds, path in places),
    )


def machine_findings(machine: Machine, environment: Mapping[str, str]) -> list[Finding]:
    """Return the findings of a machine, in the order in which they are shown."""
    return [
        ok("processor", f"{machine.processor}, {machine.cores} {_plural('core', machine.cores)} for this process"),
        check_threads(machine, environment),
        check_load(machine),
        check_memory(machine),
        *check_gpus(machine),
        *map(check_disk, machine.disks),
        check_hub(environment),
    ]


def check_threads(machine: Machine, environment: Mapping[str, str]) -> Finding:
    """Compare PyTorch's threads with the cores, and tell how its idle threads wait."""
    room = machine.cores if machine.quota is None else min(machine.cores, max(1, round(machine.quota)))
    waiting = "".join(f", {name}={environment[name]}" for name in _WAITING if name in environment)
    found = (
        f"PyTorch computes with {machine.threads} {_plural('thread', machine.threads)} on {room} "
        f"{_plural('core', room)}{waiting}"
    )
    figures = {"threads": machine.threads, "cores": room}
    if machine.threads > room:
        return note("threads", f"{found}: they wait for each other", f"set OMP_NUM_THREADS={room}", **figures)
    if machine.threads < room and not machine.gpus:
        return note(
            "threads", f"{found}: the others are idle", f"set OMP_NUM_THREADS={room}, unless they are shared", **figures
        )
    if environment.get("OMP_WAIT_POLICY", "").upper() == "ACTIVE":
        remedy = "leave OMP_WAIT_POLICY out: headstart lets idle threads sleep soon"
        return note("threads", f"{found}: idle threads keep their cores from other programs", remedy, **figures)
    return ok("threads", found, **figures)


def check_load(machine: Machine) -> Finding:
    """Tell if other programs keep the cores busy, which makes every timing wrong."""
    if machine.load is None:
        return ok("load", "this system does not tell its load")
    found = f"{machine.load:.1f} programs wanted one of {machine.cores} cores over the last minute"
    if machine.load > _BUSY * machine.cores:
        return note(
            "load",
            f"{found}: the machine is busy, and timings vary",
            "measure again when it is idle",
            load=machine.load,
        )
    return ok("load", found, load=machine.load)


def check_memory(machine: Machine) -> Finding:
    """Tell the memory that is free to this process."""
    free, total = machine.memory_free, machine.memory_total
    if free is None or total is None:
        return ok("memory", "this system does not tell its memory")
    found, figures = f"{size(free)} free of {size(total)}", {"free_bytes": free, "total_bytes": total}
    if free < _LITTLE_MEMORY * total:
        return note("memory", found, "end other programs before a model is loaded", **figures)
    return ok("memory", found, **figures)


def check_gpus(machine: Machine) -> list[Finding]:
    """Tell each GPU; a driver without a GPU that PyTorch sees is worth a note."""
    driver = f"driver {machine.driver}" if machine.driver else "driver unknown"
    if machine.gpus:
        about = f"{driver}, PyTorch for {'CUDA ' + machine.cuda if machine.cuda else 'another platform'}"
        return [
            ok(
                f"GPU {index}",
                f"{gpu.name}, {size(gpu.free)} free of {size(gpu.total)}, {about}",
                free_bytes=gpu.free,
                total_bytes=gpu.total,
            )
            for index, gpu in enumerate(machine.gpus)
        ]
    if machine.driver is None:
        return [ok("GPU", "none; models run on the processor")]
    if machine.cuda is None:
        remedy = "install a PyTorch built for CUDA: https://pytorch.org/get-started/locally"
        return [note("GPU", f"NVIDIA {driver}, but this PyTorch is built for the processor alone", remedy)]
    remedy = f"check CUDA_VISIBLE_DEVICES, and that the driver is new enough for CUDA {machine.cuda}"
    return [note("GPU", f"NVIDIA {driver}, but PyTorch sees no GPU", remedy)]


def check_disk(disk: Disk) -> Finding:
    """Tell the room for downloads and for what headstart keeps."""
    found = f"{disk.holds}, {disk.path}: {size(disk.free)} free"
    if disk.free < _LITTLE_DISK:
        variable = "HF_HOME" if "Hub" in disk.holds else "HEADSTART_CACHE"
        return note("disk", found, f"make room, or set {variable} to a folder on a larger disk", free_bytes=disk.free)
    return ok("disk", found, free_bytes=disk.free)


def check_hub(environment: Mapping[str, str]) -> Finding:
    """Tell how the Hub would be asked. Keys are never shown, only whether they are set."""
    logged_in = get_token() is not None
    keys = [f"{key} {'set' if environment.get(key) else 'not set'}" for key in _KEYS]
    offline = "offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else without_login(constants.ENDPOINT)
    return ok("Hub", f"{offline}, {'a token is there' if logged_in else 'no token'}; {', '.join(keys)}")


def probe_hub() -> Finding:
    """Ask the Hub for anything at all, and tell if it answers."""
    from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]  # whichever client it uses
    from huggingface_hub.utils import get_session  # type: ignore[attr-defined]  # documented, but not in __all__

    address = without_login(constants.ENDPOINT)
    try:
        answer = get_session().head(constants.ENDPOINT, timeout=_ANSWER_SECONDS)
    except (HTTPError, OSError) as error:
        remedy = f"check the connection, HTTPS_PROXY and HF_ENDPOINT; if it needs a login, {LOG_IN}"
        return note("Hub's answer", f"{address} cannot be reached ({type(error).__name__})", remedy)
    return ok("Hub's answer", f"{address} answers ({answer.status_code})")


def size(count: float) -> str:
    """Write a number of bytes: ``24.1 GB``, ``310 MB``, ``12.3 kB``."""
    if count < 1e6:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e6:,.0f} MB" if count < 1e9 else f"{count / 1e9:,.1f} GB"


def free_bytes(machine: Machine) -> int | None:
    """Return the free memory for models: of all GPUs, or the processor's without one."""
    return sum(gpu.free for gpu in machine.gpus) if machine.gpus else machine.memory_free


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


def _memory() -> tuple[int | None, int | None]:
    """Return free and total bytes: the system's, or the container's where it allows less."""
    found = _meminfo()
    free, total = found.get("MemAvailable"), found.get("MemTotal")
    limit, used = _number(_CGROUP / "memory.max"), _number(_CGROUP / "memory.current")
    if limit is not None and used is not None and total is not None and free is not None and limit < total:
        cached = _number_of("inactive_file", _CGROUP / "memory.stat") or 0  # given back when it is needed
        return min(free, max(0, limit - used + cached)), limit
    return free, total


def _meminfo() -> dict[str, int]:
    """Read Linux's table of memory, in bytes; empty on other systems."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    return {name: int(rest.split()[0]) * 1024 for name, _, rest in (line.partition(":") for line in lines)}


def _number(path: Path) -> int | None:
    """Return the number in a file; None where there is no such file, or ``max`` for no limit."""
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None


def _number_of(key: str, path: Path) -> int | None:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return None
    return next((int(value) for name, _, value in (line.partition(" ") for line in lines) if name == key), None)


def _quota() -> float | None:
    """Return the cores' worth of time that a container may use; None without a limit."""
    try:
        quota, period = (_CGROUP / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        return None


def _driver() -> str | None:
    """Return the version of the NVIDIA driver, asked of its own tool; None where there is none."""
    try:
        told = subprocess.run(
            ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=_ANSWER_SECONDS,
            check=True,
        ).stdout.split()
    except (OSError, subprocess.SubprocessError):
        return None
    return told[0] if told else None


def _free_beneath(path: Path) -> int:
    """Return the free bytes of the disk on which a folder is, or would be made."""
    places: Sequence[Path] = (path, *path.absolute().parents)
    return shutil.disk_usage(next(place for place in places if place.exists())).free
