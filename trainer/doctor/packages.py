"""Installed packages, compared with the requirements of the installed distribution: no list is kept by hand."""

import importlib.metadata
from collections.abc import Callable, Sequence
from typing import NamedTuple

from packaging.requirements import Requirement

from trainer.doctor.finding import Finding, note, ok, problem

DISTRIBUTION = "headstart"
PURPOSES = {
    "wandb": "figures of a training run on Weights & Biases",
    "quantise": "int8 weights of target and draft",
    "data": "data sets of the Hub and Parquet prompts",
    "endpoint": "targets on an OpenAI-compatible server",
    "gguf": "drafts for llama.cpp",
    "deepspeed": "training of large models over several GPUs by ZeRO",
    "demo": "the web page of `headstart demo`",
    "docs": "building the documentation site",
    "dev": "tests and checks of headstart itself",
}
"""Purpose of each extra."""
FOR_DEVELOPERS = ("docs", "dev")
"""Extras that work on headstart itself needs, and none of its commands."""


class Wanted(NamedTuple):
    """Requirements of a distribution: of its core, and of each extra."""

    core: tuple[Requirement, ...]
    extras: dict[str, tuple[Requirement, ...]]


def read_wanted(name: str = DISTRIBUTION) -> Wanted | None:
    """Read the requirements of an installed distribution; None if it is not installed."""
    try:
        found = importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError:
        return None
    return wanted_of(found.requires or (), found.metadata.get_all("Provides-Extra") or ())


def wanted_of(requires: Sequence[str], extras: Sequence[str]) -> Wanted:
    """Sort the lines of a distribution's metadata; those whose markers exclude this system are left out."""
    lines = [Requirement(line) for line in requires]

    def of(extra: str) -> tuple[Requirement, ...]:
        return tuple(line for line in lines if line.marker is None or line.marker.evaluate({"extra": extra}))

    core = of("")
    return Wanted(core, {extra: tuple(line for line in of(extra) if line not in core) for extra in extras})


def installed_version(package: str) -> str | None:
    """Return the version of an installed package; None if it is missing."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def package_findings(wanted: Wanted | None, version_of: Callable[[str], str | None]) -> list[Finding]:
    """Return a finding of the core's packages, one for each of its faults, and one for each extra."""
    if wanted is None:
        found = "headstart runs from its folder and is not installed, so its requirements cannot be read"
        return [note("headstart", found, "pip install -e . in its folder")]
    faults = [fault for line in wanted.core if (fault := _fault(line, version_of)) is not None]
    fine = [line for line in wanted.core if _fault(line, version_of) is None]
    told = ", ".join(f"{line.name} {version_of(line.name)}" for line in fine)
    return [ok("core", told), *faults, *(_extra(name, lines, version_of) for name, lines in wanted.extras.items())]


def _fault(line: Requirement, version_of: Callable[[str], str | None]) -> Finding | None:
    """Return the problem of a required package that is missing or of a version that is not taken."""
    version, remedy = version_of(line.name), f"pip install '{line.name}{line.specifier}'"
    if version is None:
        return problem(line.name, f"{line.name} is missing, and headstart needs {line.specifier or 'it'}", remedy)
    if not line.specifier.contains(version, prereleases=True):
        found = f"{line.name} is {version}, and headstart needs {line.specifier}"
        return problem(line.name, found, remedy, version=version)
    return None


def _extra(name: str, lines: Sequence[Requirement], version_of: Callable[[str], str | None]) -> Finding:
    purpose = PURPOSES.get(name, "an extra of another version of headstart")
    check, remedy = f"extra {name}", f"pip install '{DISTRIBUTION}[{name}]'"
    missing = [line.name for line in lines if version_of(line.name) is None]
    if missing and name in FOR_DEVELOPERS:
        return ok(check, f"not installed ({purpose}), and not needed to use it", missing=missing)
    if missing:
        return note(check, f"not installed ({purpose}): {', '.join(missing)} missing", remedy, missing=missing)
    wrong = [line for line in lines if _fault(line, version_of) is not None]
    if wrong:
        told = ", ".join(f"{line.name} is {version_of(line.name)}, needs {line.specifier}" for line in wrong)
        return problem(check, f"{told} ({purpose})", remedy)
    return ok(check, f"{', '.join(f'{line.name} {version_of(line.name)}' for line in lines)}: {purpose}")
