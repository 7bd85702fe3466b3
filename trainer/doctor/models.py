"""The checks of a target and its drafters together: what they need, and whether they decode."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from decoding.drafters.spec import DrafterSpec
from decoding.model.dtypes import DTYPES
from trainer import quickstart
from trainer.doctor.drafter import examine, parts_of
from trainer.doctor.finding import Finding, Section, has_problem, note
from trainer.doctor.proof import Loading, prove
from trainer.doctor.reading import Skeleton, read_skeleton
from trainer.doctor.target import check_memory, target_findings

SMALL = 2e9
"""Bytes of all weights in fp32 up to which models are loaded without being asked for."""
_LONGEST = 2048
"""Tokens of the longest text, where neither the user nor the target says."""
_BUILD = "headstart train recipes/quickstart/medusa1.yaml, which builds it first"


@dataclass(frozen=True)
class Request:
    """A target, drafters for it, and the way in which they are to be used.

    ``longest``: tokens of the longest text; None for the default. ``decode``: load the models and decode; None: where
    they are small. ``free``: free bytes of the device; None where the system does not tell.
    """

    target: str
    specs: tuple[DrafterSpec, ...] = ()
    dtype: str = "bf16"
    longest: int | None = None
    decode: bool | None = None
    free: int | None = None
    trusted: bool = False


class Checked(NamedTuple):
    """The sections of a target and of each drafter, and the `Examined.format` of each drafter."""

    sections: list[Section]
    formats: tuple[str | None, ...]


def check_models(request: Request) -> Checked:
    """Check a target and its drafters. ValueError for names that nothing can be read from."""
    name, nowhere = request.target, (None,) * len(request.specs)
    if name == quickstart.NAME and not quickstart.is_built():
        return Checked([Section(f"target {name}", (note("files", "not built yet", _BUILD),))], nowhere)
    findings, target = read_skeleton(quickstart.resolve(name), DTYPES[request.dtype], request.trusted, name)
    if target is None:
        return Checked([Section(f"target {name}", tuple(findings))], nowhere)
    longest = request.longest or min(_LONGEST, target.model.max_positions or _LONGEST)
    examined = [examine(spec, target, longest, request.trusted) for spec in request.specs]
    drafts = [each.draft for each in examined if each.draft is not None]
    parts = parts_of(request.specs, examined)
    findings += [*target_findings(target, longest), check_memory(target, parts, drafts, longest, request.free)]
    of_drafters = [list(each.findings) for each in examined]
    in_fp32 = (target.bytes + sum(count for _, count in parts)) * 4 / target.model.dtype.itemsize
    if is_to_decode(request, target, in_fp32) and not any(map(has_problem, (findings, *of_drafters))):
        own, theirs = prove(loading_of(request, target, in_fp32), request.specs)
        findings.append(own)
        _append(of_drafters, theirs)
    sections = [
        Section(f"target {name}", tuple(findings)),
        *(Section(f"drafter {spec}", tuple(held)) for spec, held in zip(request.specs, of_drafters, strict=True)),
    ]
    return Checked(sections, tuple(each.format for each in examined))


def is_to_decode(request: Request, target: Skeleton, in_fp32: float) -> bool:
    """Tell if models of ``in_fp32`` bytes are loaded: as the user says, else if they are small and here already."""
    if request.decode is not None:
        return request.decode
    here = any(target.folder.glob("*.safetensors"))
    return here and in_fp32 <= min(SMALL, (SMALL if request.free is None else request.free) / 2)


def loading_of(request: Request, target: Skeleton, in_fp32: float) -> Loading:
    """Load in fp32, where texts must be equal, if that fits twice; else in the dtype of later use."""
    fits = in_fp32 <= (SMALL if request.free is None else request.free) / 2
    dtype = torch.float32 if fits else DTYPES[request.dtype]
    return Loading(target.name, dtype, request.trusted)


def _append(of_drafters: Sequence[list[Finding]], proofs: Sequence[Finding]) -> None:
    """Put each drafter's proof behind its findings; none are there where the target itself did not decode."""
    for held, proof in zip(of_drafters, proofs, strict=False):
        held.append(proof)
