"""Commands to run next, with the names of the case filled in. Imports transformers for trained drafters alone."""

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
_FORMATS = {"heads": "vllm", "draft": "draft", "parallel draft": "headstart"}
"""Kind of weights -> the format that most can load; a parallel draft with parts of its own has only this project's."""


class Advice(NamedTuple):
    """A command, and the reason for it."""

    reason: str
    command: str


def next_steps(
    target: str | None, specs: "Sequence[DrafterSpec]", target_fits: bool = True, drafters_fit: bool = True
) -> list[Advice]:
    """Return what to run next. ``specs`` are the drafters given; one that does not fit can be trained again."""
    if target is None:
        return _without_target()
    again = Advice("after the problems above are solved", _said("doctor", target, *_drafters(specs)))
    if not target_fits:
        return [again]
    if not drafters_fit:
        return [again, *_training(target)]
    trained = [spec for spec in specs if spec.path is not None]
    return _with_weights(target, specs, trained) if trained else _without_weights(target)


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
        return [Advice(reason, _train(f"quickstart/{kind}")) for kind, reason in _KINDS.items()]
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


def _with_weights(target: str, specs: "Sequence[DrafterSpec]", trained: "Sequence[DrafterSpec]") -> list[Advice]:
    from decoding.drafters.registry import weights_of

    given, first = _drafters(specs), str(trained[0])
    held = ("--prompts", HELD_OUT)
    steps = [
        Advice("see it decode", _said("generate", target, "--drafter", first, "--prompt", _question(target))),
        Advice("measure it beside plain decoding and a lookup", _evaluate(target, [str(spec) for spec in specs])),
        Advice(
            "choose depth and tree by the costs of this machine",
            _said("plan", target, *given, *held, "--output", "runs/plan"),
        ),
        Advice("prove that no text changes", _said("verify", target, *given, *held)),
    ]
    return steps + [
        Advice(f"write {spec.path} for others to load", _export(spec, target, f"exported/{place}", format))
        for place, spec in enumerate(trained, start=1)
        if (format := _FORMATS.get(str(weights_of(spec)))) is not None
    ]


def _export(spec: "DrafterSpec", target: str, folder: str, format: str) -> str:
    return shlex.join(["headstart", "export", str(spec.path), folder, "--format", format, "--target", target])


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
    return _said("evaluate", target, *given, "--prompts", HELD_OUT, "--output", "runs/measured")
