"""Checks of the machine and the installed packages, without importing transformers."""

import importlib.metadata
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from huggingface_hub import constants, get_token
from packaging.requirements import Requirement

from decoding.dtypes import fast_dtype
from decoding.files.hub import without_login
from decoding.files.stored import cache_root
from decoding.measure.machine import hardware
from decoding.measure.proof.finding import Finding, note, ok, problem

_CGROUP = Path("/sys/fs/cgroup")
_LITTLE_DISK = 10e9
_KEYS = ("HF_TOKEN", "OPENAI_API_KEY", "WANDB_API_KEY")
_DISTRIBUTION = "headstart"


def size(count: float) -> str:
    """Format a number of bytes: ``24.1 GB``, ``310 MB``, ``12.3 kB``."""
    if count < 1e6:
        return f"{count / 1e3:.1f} kB"
    return f"{count / 1e6:,.0f} MB" if count < 1e9 else f"{count / 1e9:,.1f} GB"


def machine_findings(environment: Mapping[str, str]) -> list[Finding]:
    """Check the machine that this process runs on, without using the network."""
    about = hardware()
    cores, threads, gpus = int(about["cores"]), int(about["threads"]), _gpus()
    disks = (("HF_HOME", Path(constants.HF_HUB_CACHE)), ("HEADSTART_CACHE", cache_root()))
    return [
        ok("processor", f"{about['processor']}, {cores} cores for this process; the fast dtype is {fast_dtype()}"),
        check_threads(threads, cores, bool(gpus)),
        check_memory(free_bytes()),
        *(gpus or [check_no_gpu(shutil.which("nvidia-smi") is not None, torch.version.cuda)]),
        *(check_disk(variable, path, _free_beneath(path)) for variable, path in disks),
        check_hub(environment),
    ]


def check_threads(threads: int, cores: int, feeds_gpu: bool) -> Finding:
    """Compare PyTorch's threads with the cores of this process."""
    sentence, figures = f"PyTorch uses {threads} threads on {cores} cores", {"threads": threads, "cores": cores}
    if threads > cores:
        return note("threads", f"{sentence}: threads wait for each other", f"set OMP_NUM_THREADS={cores}", **figures)
    if threads < cores and not feeds_gpu:
        return note("threads", f"{sentence}: some cores are idle", f"set OMP_NUM_THREADS={cores}", **figures)
    return ok("threads", sentence, **figures)


def check_memory(free: int | None) -> Finding:
    """Report the free memory for models."""
    return ok("memory", "this system does not report its memory" if free is None else f"{size(free)} free", free=free)


def _gpus() -> list[Finding]:
    findings = []
    for index in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        free, total = torch.cuda.mem_get_info(index)
        name = f"{torch.cuda.get_device_name(index)}, {size(free)} free of {size(total)}, CUDA {torch.version.cuda}"
        findings.append(ok(f"GPU {index}", name, free=free, total=total))
    return findings


def check_no_gpu(has_driver: bool, cuda: str | None) -> Finding:
    """Explain why PyTorch sees no GPU on a machine with NVIDIA's driver."""
    if not has_driver:
        return ok("GPU", "none; models run on the processor")
    if cuda is None:
        remedy = "install a PyTorch built for CUDA: https://pytorch.org/get-started/locally"
        return note("GPU", "there is an NVIDIA driver, but this PyTorch is built for the CPU only", remedy)
    remedy = f"check CUDA_VISIBLE_DEVICES, and that the driver is new enough for CUDA {cuda}"
    return note("GPU", "there is an NVIDIA driver, but PyTorch sees no GPU", remedy)


def check_disk(variable: str, path: Path, free: int) -> Finding:
    """Report the free space of a folder. ``variable`` is the environment variable that names another folder."""
    sentence = f"{size(free)} free in {path}"
    if free < _LITTLE_DISK:
        return note("disk", sentence, f"make room, or set {variable} to a folder on a larger disk", free=free)
    return ok("disk", sentence, free=free)


def check_hub(environment: Mapping[str, str]) -> Finding:
    """Report the Hub's endpoint and which keys are set; never show a key."""
    keys = [f"{key} {'set' if environment.get(key) else 'not set'}" for key in _KEYS]
    offline = "offline (HF_HUB_OFFLINE)" if constants.HF_HUB_OFFLINE else without_login(constants.ENDPOINT)
    return ok("Hub", f"{offline}, {'no token' if get_token() is None else 'token set'}; {', '.join(keys)}")


def free_bytes() -> int | None:
    """Return the free memory of all GPUs or, without a GPU, of the system or container; None if it is unknown."""
    if torch.cuda.is_available():
        return sum(torch.cuda.mem_get_info(index)[0] for index in range(torch.cuda.device_count()))
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    try:
        limit, used = (int((_CGROUP / name).read_text()) for name in ("memory.max", "memory.current"))
        fields = dict(line.split() for line in (_CGROUP / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # not in a container, or in a container without a limit ("max")
        return free
    return min(free, max(0, limit - used + int(fields.get("inactive_file", 0))))  # caches are freed when needed


def _free_beneath(path: Path) -> int:
    """Return the free bytes on the disk of a folder; the folder may be missing."""
    return shutil.disk_usage(next(folder for folder in (path, *path.absolute().parents) if folder.exists())).free


# --- packages ---------------------------------------------------------------------------------------------------------


def package_findings(requires: Sequence[str] | None, version_of: Callable[[str], str | None]) -> list[Finding]:
    """Compare the installed packages with the requirements of this distribution. ``requires`` is None if the
    distribution itself is not installed.
    """
    if requires is None:
        sentence = f"{_DISTRIBUTION} runs from its folder without being installed, so its requirements are unknown"
        return [note(_DISTRIBUTION, sentence, "pip install -e . in its folder")]
    here, faults, missing = [], [], set[str]()
    for line in map(Requirement, requires):
        _, named, rest = str(line.marker).partition('extra == "')
        extra = rest.partition('"')[0] if named else None
        if line.marker is not None and not line.marker.evaluate({"extra": extra or ""}):
            continue
        version = version_of(line.name)
        if version is None and extra is not None:
            missing.add(extra)
        elif version is None or not line.specifier.contains(version, prereleases=True):
            sentence = f"{line.name} is {version or 'missing'}, and {extra or _DISTRIBUTION} needs {line.specifier}"
            faults.append(problem(line.name, sentence, f"pip install '{line.name}{line.specifier}'"))
        else:
            here.append(f"{line.name} {version}")
    without = f"not installed: {', '.join(sorted(missing))} (pip install '{_DISTRIBUTION}[NAME]')"
    return [ok("packages", ", ".join(here)), *faults, ok("extras", without if missing else "all are installed")]


def installed_packages() -> list[Finding]:
    """Check the packages that this distribution requires."""
    try:
        requires = importlib.metadata.requires(_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return package_findings(None, installed_version)
    return package_findings(requires, installed_version)


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
