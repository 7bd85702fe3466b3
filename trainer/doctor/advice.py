"""Commands to run next, with the names of the case filled in. Imports no PyTorch."""

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from trainer import quickstart

if TYPE_CHECKING:
    from decoding.drafters.spec import DrafterSpec

PROMPTS, ANSWERS, HELD_OUT = "prompts.jsonl", "answers.jsonl", "heldout.jsonl"
"""Files of the user's own in the commands: prompts to train on, the target's answers to them, prompts to measure on."""
_QUESTION, _CODE = "Why is the sky blue?", "def read_lines(path):"
_NO_TARGET = "ORG/NAME"
_EMBEDDED_PROMPTS = (f"{quickstart.NAME}/heldout.jsonl", "--context", "64")
"""Whole files of source, of which the beginnings are prompts."""


class Advice(NamedTuple):
    """A command, and the reason for it."""

    reason: str
    command: str


class Case(NamedTuple):
    """Target and drafters, if any are given, each drafter with the format to export it in, or None.

    ``faults``: commands that put missing or old packages right. A drafter that does not fit can be trained again.
    """

    target: str | None
    specs: "tuple[DrafterSpec, ...]" = ()
    formats: tuple[str | None, ...] = ()
    target_fits: bool = True
    drafters_fit: bool = True
    faults: tuple[str, ...] = ()


def next_steps(case: Case) -> list[Advice]:
    """Return what to run next, in order."""
    repairs = [Advice("put the packages right", command) for command in dict.fromkeys(case.faults)]
    if case.target is None:
        return repairs + _without_target()
    again = Advice("after the problems above are solved", _said("doctor", case.target, *_drafters(case.specs)))
    if not case.target_fits:
        return [*repairs, again]
    if not case.drafters_fit:
        return [*repairs, again, *_training(case.target)]
    weights = any(spec.path is not None for spec in case.specs)
    return repairs + (_with_weights(case.target, case) if weights else _without_weights(case.target))


def _without_target() -> list[Advice]:
    name = quickstart.NAME
    return [
        Advice("heads on the embedded target, with nothing to download", _train("quickstart/medusa1")),
        Advice("the same checks for it", _said("doctor", name)),
        Advice("the checks for a target of your own", _said("doctor", _NO_TARGET)),
    ]


_KINDS = {
    "medusa1": "train heads: the cheapest to train and to run",
    "draft": "or a draft model, which accepts more at a higher cost, and any server takes it",
    "parallel": "or a parallel draft, which drafts all its tokens in one pass",
}


def _without_weights(target: str) -> list[Advice]:
    look = ("generate", target, "--drafter", "lookup", "--prompt", _question(target))
    return [Advice("decode at once, with a drafter that needs no training", _said(*look)), *_training(target)]


def _training(target: str) -> list[Advice]:
    """Return how to train drafters for a target, and to measure them."""
    if target == quickstart.NAME:
        trained = [f"{kind}:runs/quickstart/{name}/final" for kind, name in (("heads", "medusa1"), ("draft", "draft"))]
        return [
            *(Advice(reason, _train(f"quickstart/{kind}")) for kind, reason in _KINDS.items()),
            Advice("measure what was trained", _evaluate(target, trained)),
        ]
    own = (f"target={target}", f"data.train={ANSWERS}", f"data.heldout={HELD_OUT}")
    return [
        Advice(
            "let the target write the training answers",
            _said("regenerate", target, "--prompts", PROMPTS, "--output", ANSWERS),
        ),
        *(
            Advice(reason, _train(f"any/{kind}", f"name={kind}", *own, f"output=runs/{kind}"))
            for kind, reason in _KINDS.items()
        ),
        Advice("measure what was trained", _evaluate(target, ("heads:runs/medusa1/final", "draft:runs/draft/final"))),
    ]


def _with_weights(target: str, case: Case) -> list[Advice]:
    given = _drafters(case.specs)
    first = next(str(spec) for spec in case.specs if spec.path is not None)
    return [
        Advice("see it decode", _said("generate", target, "--drafter", first, "--prompt", _question(target))),
        Advice("measure it beside plain decoding and a lookup", _evaluate(target, [str(spec) for spec in case.specs])),
        Advice(
            "choose depth and tree by the costs of this machine",
            _said("plan", target, *given, "--prompts", *_held_out(target), "--output", "runs/plan"),
        ),
        *_exports(target, case),
    ]


def _exports(target: str, case: Case) -> list[Advice]:
    """Return a command for each drafter that can be exported, each into a folder of its own."""
    found: dict[str, Advice] = {}
    for spec, format in zip(case.specs, case.formats, strict=True):
        if format is not None and spec.path is not None and spec.path not in found:
            folder = f"exported/{len(found) + 1}-{format}"
            words = ["headstart", "export", spec.path, folder, "--format", format, "--target", target]
            found[spec.path] = Advice(f"write {spec.path} for others to load", shlex.join(words))
    return list(found.values())


def _held_out(target: str) -> tuple[str, ...]:
    """Return the value of ``--prompts`` for measurements, with the options that it needs."""
    return _EMBEDDED_PROMPTS if target == quickstart.NAME else (HELD_OUT,)


def _question(target: str) -> str:
    """Return a prompt that the target can go on with: the embedded one knows Python alone."""
    return _CODE if target == quickstart.NAME else _QUESTION


def _drafters(specs: "Sequence[DrafterSpec]") -> list[str]:
    return [word for spec in specs for word in ("--drafter", str(spec))]


def _said(command: str, target: str, *options: str) -> str:
    return shlex.join(["headstart", command, "--target", target, *options])


def _train(recipe: str, *overrides: str) -> str:
    return shlex.join(["headstart", "train", f"recipes/{recipe}.yaml", *overrides])


def _evaluate(target: str, drafters: Sequence[str]) -> str:
    given = [word for name in dict.fromkeys((*drafters, "lookup")) for word in ("--drafter", name)]
    return _said("evaluate", target, *given, "--prompts", *_held_out(target), "--output", "runs/measured")
